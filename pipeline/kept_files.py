"""The files that are kept of rollouts: found in the log, read from the blob store.

RUN keeps logs, outputs and diffs, hooks what they add; each is named by an event of the rollout and lies in a blob.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from rollyard.pipeline.blobs import BlobStore
from rollyard.pipeline.bus import Bus
from rollyard.pipeline.codec import decode
from rollyard.schemas import subjects
from rollyard.schemas.errors import BlobError
from rollyard.schemas.rollout import Artifact, RolloutEvent


@dataclass(frozen=True, slots=True)
class KeptFile:
    """One file of one attempt at a rollout."""

    task_id: str
    rollout_id: str
    attempt: int
    artifact: Artifact

    def path_in(self, folder: Path) -> Path:
        """Where it goes below `folder`. Raises BlobError for a name that leads out of it."""
        name = PurePosixPath(self.artifact.name)
        if name.is_absolute() or ".." in name.parts or "\0" in self.artifact.name or not name.parts:
            raise BlobError(f"the kept file {self.artifact.name!r} has a name that leaves the folder")
        return folder / self.rollout_id / f"attempt-{self.attempt}" / name


async def kept_files(bus: Bus, run: str, prefix: str = "") -> AsyncIterator[KeptFile]:
    """The files of the rollouts of `run` whose id begins with `prefix`, in the order of the log."""
    async for stored in bus.read(subjects.LOG, subjects.log_subject(run, "*", "life")):
        if not stored.subject.split(".")[2].startswith(prefix):
            continue
        event: RolloutEvent = decode(stored.data, RolloutEvent)
        for artifact in event.result.artifacts if event.result is not None else ():
            yield KeptFile(event.rollout.task_id, event.rollout.rollout_id, event.attempt, artifact)


def save(kept: KeptFile, blobs: BlobStore, folder: Path) -> Path:
    """Write one file below `folder`; returns where. Raises BlobError when it is lost, or cannot be written."""
    path = kept.path_in(folder)
    data = blobs.get(kept.artifact.blob)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except OSError as error:
        raise BlobError(f"the kept file {kept.artifact.name!r} cannot be written: {error}", hint="see --out") from error
    return path
