"""Files that are kept of rollouts are found by run and rollout, and saved under names that stay inside."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollyard.pipeline.bus import Bus
from rollyard.pipeline.codec import encode
from rollyard.pipeline.kept_files import KeptFile, kept_files, save
from rollyard.schemas import subjects
from rollyard.schemas.errors import BlobError
from rollyard.schemas.rollout import AgentResult, Artifact, Rollout, RolloutEvent


async def logged(bus: Bus, run: str, index: int, attempt: int, **files: bytes) -> Rollout:
    """An event of RUN that names `files`."""
    assert bus.blobs is not None
    artifacts = tuple(
        Artifact(name=name, blob=bus.blobs.put(data), size_bytes=len(data)) for name, data in files.items()
    )
    rollout = Rollout.of(run, "t", index, 4)
    event = RolloutEvent(
        kind="ran", rollout=rollout, attempt=attempt, at_ms=1, result=AgentResult(exit_code=0, artifacts=artifacts)
    )
    await bus.publish(subjects.log_subject(run, rollout.rollout_id, "life"), encode(event))
    return rollout


async def test_they_are_found_and_saved(bus: Bus, tmp_path: Path) -> None:
    assert bus.blobs is not None
    first = await logged(bus, "r", 0, 1, stdout=b"one")
    await logged(bus, "r", 0, 2, stdout=b"two", **{"out/deep.txt": b"three"})
    second = await logged(bus, "r", 1, 1, stdout=b"four")
    await logged(bus, "other", 0, 1, stdout=b"five")
    await bus.publish(
        subjects.log_subject("r", second.rollout_id, "life"),
        encode(RolloutEvent(kind="evaluated", rollout=second, attempt=1, at_ms=2, reward=1.0)),
    )

    found = [kept async for kept in kept_files(bus, "r")]
    assert [(kept.rollout_id, kept.attempt, kept.artifact.name) for kept in found] == [
        (first.rollout_id, 1, "stdout"),
        (first.rollout_id, 2, "stdout"),
        (first.rollout_id, 2, "out/deep.txt"),
        (second.rollout_id, 1, "stdout"),
    ]
    of_one = [kept async for kept in kept_files(bus, "r", second.rollout_id[:8])]
    assert [kept.rollout_id for kept in of_one] == [second.rollout_id]

    paths = [save(kept, bus.blobs, tmp_path / "saved") for kept in found]
    assert [path.read_bytes() for path in paths] == [b"one", b"two", b"three", b"four"]
    assert paths[2] == tmp_path / "saved" / first.rollout_id / "attempt-2" / "out" / "deep.txt"


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "", "a\0b"])
def test_a_name_that_leaves_the_folder_is_refused(name: str, tmp_path: Path) -> None:
    kept = KeptFile("t", "r1", 1, Artifact(name=name, blob="0" * 64, size_bytes=1))
    with pytest.raises(BlobError, match="leaves the folder"):
        kept.path_in(tmp_path)


async def test_a_lost_blob_is_named(bus: Bus, tmp_path: Path) -> None:
    assert bus.blobs is not None
    with pytest.raises(BlobError, match="0000"):
        save(KeptFile("t", "r1", 1, Artifact(name="x", blob="0" * 64, size_bytes=1)), bus.blobs, tmp_path)
