"""Rollyard's stitcher: from the bytes of a rollout's events to its samples.

python stitch_rollyard.py SESSIONS BLOBS read|stitch|digest|objects
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stitch_loop import Columns, serve

from rollyard.pipeline.blobs import BlobStore
from rollyard.pipeline.contents import Contents
from rollyard.pipeline.digest import sample_digest
from rollyard.pipeline.jetstream import Stored
from rollyard.pipeline.log import Events, RolloutLog
from rollyard.schemas.sample import Commit, Sample
from rollyard.stages.stitching import samples_of

Prepared = tuple[RolloutLog, Commit]


def prepared(session: dict[str, Any], contents: Contents) -> Prepared:
    """A rollout as it comes from the log, and its commit."""
    commit: Commit = session["commit"]
    subject = f"log.bench.{commit.rollout_id}"
    stored = [Stored("LOG", f"{subject}.{kind}", seq, 0, data) for seq, kind, data in session["events"]]
    return RolloutLog(commit.rollout_id, contents, stored), commit


def decoded(session: dict[str, Any], contents: Contents) -> tuple[Events, Commit]:
    """The same as objects, which is how others begin."""
    log, commit = prepared(session, contents)
    return log.events(), commit


def read(given: Prepared) -> tuple[Sample, ...]:
    """Reading and decoding alone."""
    given[0].events()
    return ()


def stitch(given: Prepared) -> tuple[Sample, ...]:
    """The samples."""
    log, commit = given
    return samples_of(log.events(), commit)


def digest(given: Prepared) -> tuple[Sample, ...]:
    """The samples and the digests that a commit names, as aggregate and replay do."""
    samples = stitch(given)
    for sample in samples:
        sample_digest(sample)
    return samples


def columns(samples: tuple[Sample, ...]) -> Iterator[Columns]:
    """See `serve`."""
    return ((each.token_ids.data, each.loss_mask.data, each.logprobs.data) for each in samples)


def main() -> None:
    """Serve the variant that was asked for."""
    contents, variant = Contents(BlobStore(Path(sys.argv[2]))), sys.argv[3]
    if variant == "objects":
        serve(lambda session: decoded(session, contents), lambda given: samples_of(*given), columns)
    else:
        run = {"read": read, "stitch": stitch, "digest": digest}[variant]
        serve(lambda session: prepared(session, contents), run, columns)


if __name__ == "__main__":
    main()
