"""Archives: what they hold, that they resume, and that any death of their writer is survived."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq
import pytest

from rollyard.pipeline import crash
from rollyard.pipeline.archive.archiving import ArchiveReport, Plan, archive_run, preview
from rollyard.pipeline.archive.folder import RunArchive
from rollyard.pipeline.archive.reader import ArchiveLog
from rollyard.pipeline.archive.schema import EVENTS_SCHEMA
from rollyard.pipeline.archive.writer import ArchiveWriter
from rollyard.pipeline.arrow_schema import describe
from rollyard.pipeline.bus import Bus
from rollyard.pipeline.datasets import query
from rollyard.pipeline.embedded import EmbeddedNats
from rollyard.pipeline.streams import ensure
from rollyard.schemas import subjects
from rollyard.schemas.errors import ArchiveError, BlobError, ConfigError, SetupError
from rollyard.stages.replay import replay_run

ROOT = Path(__file__).resolve().parents[2]
ODD = "a run / of ünusual name, with \"quotes\" and 'more'"


async def archive(bus: Bus, folder: Path, run: str = "r", **plan: Any) -> ArchiveReport:
    return await archive_run(bus, run, folder, Plan(samples=folder.parent / "samples", **plan))


def rows(folder: Path, sql: str) -> list[tuple[Any, ...]]:
    return query(folder.parent / "samples", sql, archive=folder)[1]


def files(folder: Path) -> dict[str, int]:
    """Everything in an archive, with its time."""
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("run", ["r", ODD])
async def test_it_holds_every_event_of_a_run_to_the_letter(bus: Bus, recorded: Any, tmp_path: Path, run: str) -> None:
    folder, one, other = tmp_path / "archive", recorded(run), recorded("other")
    for index in range(3):
        await one.record(1, large=0 if index == 1 else -1)
        await other.record(1)
    report = await archive(bus, folder, run, verify=True)
    logged = await one.logged()
    assert (report.new_events, report.events, report.files) == (27, 27, 1)
    assert report.archived_seq == report.verified_seq == logged[-1].seq
    path = folder / f"run={subjects.token(run)}" / f"events-{logged[0].seq}-{logged[-1].seq}.parquet"
    table = pq.read_table(path, partitioning=None)
    assert table.schema.names == EVENTS_SCHEMA.names
    assert table.column("payload").to_pylist() == [stored.data for stored in logged]
    assert table.column("subject").to_pylist() == [stored.subject for stored in logged]
    assert table.column("time_ms").to_pylist() == [stored.time_ms for stored in logged]
    pointers = [stored.headers["Rollyard-Blob"] for stored in logged if "Rollyard-Blob" in stored.headers]
    assert [blob for blob in table.column("blob").to_pylist() if blob] == pointers
    assert len(pointers) == 1
    assert set(table.column("run").to_pylist()) == {run}
    assert {one.shared, one.own, one.image} == set(RunArchive(folder, run).blobs.names())


async def test_duckdb_reads_the_facts_that_people_filter_by(bus: Bus, recorded: Any, tmp_path: Path) -> None:
    folder = tmp_path / "archive"
    await recorded().record(2)
    await archive(bus, folder)
    assert rows(folder, "SELECT kind, type, count(*) FROM events GROUP BY ALL ORDER BY ALL") == [
        ("call", "end", 4),
        ("call", "intent", 6),
        ("commit", "commit", 2),
        ("life", "evaluated", 2),
        ("life", "failed", 2),
        ("life", "ran", 2),
    ]
    facts = "call_id, parent, status, prompt_tokens, completion_tokens, sampled_tokens, policy_version, finish_reason"
    where = "attempt = 2 AND call_id = 'second1'"
    assert rows(folder, f"SELECT {facts} FROM events WHERE {where} ORDER BY seq") == [
        ("second1", "first1", None, None, None, None, None, None),
        ("second1", None, "ok", 6, 3, 3, 7, "stop"),
    ]
    assert rows(folder, "SELECT DISTINCT failure_kind, error FROM events WHERE type = 'failed'") == [
        ("infra", "the place died")
    ]
    assert rows(folder, "SELECT sum(reward), sum(samples), max(index) FROM events") == [(2.0, 2, 1)]
    texts = "messages->>'$[0].content', messages->>'$[1].content[0].image_url.url'"
    ((system, image),) = rows(folder, f"SELECT {texts} FROM events WHERE call_id = 'first0' AND type = 'intent'")
    assert system.startswith("a system prompt that every run has")
    assert image.startswith("blob:")
    assert rows(folder, "SELECT reply->>'$.content' FROM events WHERE reply IS NOT NULL")[0] == ("fine",)
    # And with nothing of ours between.
    assert duckdb.sql(f"SELECT count(DISTINCT rollout_id) FROM '{folder}/run=*/events-*.parquet'").fetchall() == [(2,)]


async def test_replay_needs_nothing_but_the_archive(bus: Bus, recorded: Any, tmp_path: Path) -> None:
    folder, one = tmp_path / "archive", recorded(ODD)
    commits = await one.record(4, large=2)
    await archive(bus, folder, ODD)
    (tmp_path / "blobs").rename(tmp_path / "gone")
    report = await replay_run(ArchiveLog(folder), ODD)
    assert report.ok
    assert (report.rollouts, report.samples, report.uncommitted) == (4, sum(len(each.samples) for each in commits), 0)
    with pytest.raises(ArchiveError, match="there is no archive of run 'unknown'"):
        await replay_run(ArchiveLog(folder), "unknown")


async def test_a_file_that_is_gone_is_no_shorter_archive(bus: Bus, recorded: Any, tmp_path: Path) -> None:
    """What is left of it would replay as equal."""
    folder, one = tmp_path / "archive", recorded(ODD)
    await one.record(2)
    await archive(bus, folder, ODD)
    (gone,) = folder.glob("run=*/events-*.parquet")
    gone.unlink()
    with pytest.raises(ArchiveError, match=f"lacks {gone.name}, which its manifest names"):
        await replay_run(ArchiveLog(folder), ODD)


async def test_it_goes_on_after_the_last_event(bus: Bus, recorded: Any, tmp_path: Path) -> None:
    folder, one = tmp_path / "archive", recorded()
    await archive(bus, folder)
    assert rows(folder, "SELECT * FROM events") == []
    await one.record(2)
    await archive(bus, folder)
    before = files(folder)
    assert (await archive(bus, folder)).new_events == 0
    assert {name for name in before if "events-" in name} == {name for name in files(folder) if "events-" in name}
    await one.record(1)
    would = await preview(bus, "r", folder, Plan(samples=tmp_path))
    assert (would.new_events, would.events) == (9, 18)
    report = await archive(bus, folder, verify=True)
    assert (report.new_events, report.events, report.files) == (9, 27, 2)
    assert {name: before[name] for name in before if "events-" in name}.items() <= files(folder).items()
    assert rows(folder, "SELECT seq FROM events ORDER BY seq") == [(stored.seq,) for stored in await one.logged()]


async def test_files_are_cut_by_size_and_follow_each_other(bus: Bus, recorded: Any, tmp_path: Path) -> None:
    one, folder = recorded(), tmp_path / "archive"
    await one.record(6)
    target, told = RunArchive(folder, "r"), []
    with target.locked():
        writer = ArchiveWriter(
            bus, target, file_bytes=3000, group_bytes=1000, progress=lambda events, size: told.append(events)
        )
        manifest = await writer.run()
    logged = await one.logged()
    assert len(manifest.files) > 3
    assert manifest.files[0].first == logged[0].seq
    assert sum(file.rows for file in manifest.files) == len(logged)
    assert sorted(told) == told
    assert told[-1] == len(logged)
    assert (await archive(bus, folder, verify=True)).new_events == 0


@pytest.mark.parametrize(
    "step",
    [
        "archive.group_written",
        "archive.file_written",
        "archive.renamed",
        "archive.manifest_written",
        "archive.purged_one",
        "sweep.removed_one",
    ],
)
async def test_a_process_killed_at_any_step_is_taken_up_by_the_next(
    bus: Bus, nats: EmbeddedNats, recorded: Any, tmp_path: Path, step: str
) -> None:
    folder, one, mark = tmp_path / "archive", recorded(), tmp_path / "mark"
    commits = await one.record(3)
    await one.close()
    logged = await one.logged()
    old = 1_000_000_000
    for path in (tmp_path / "blobs").rglob("*"):
        os.utime(path, (old, old))

    async def rollyard() -> int:
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "rollyard", "archive", "--run", "r", "--to", str(folder), "--purge"),
            env=os.environ
            | {
                "ROLLYARD__NATS__URL": nats.url,
                "ROLLYARD__STORE__DATA": str(tmp_path),
                crash.VARIABLE: f"{step}@{mark}",
            },
            stdout=asyncio.subprocess.DEVNULL,
        )
        return await child.wait()

    assert await rollyard() == -9
    assert mark.exists()
    assert await rollyard() == 0
    seqs = [(stored.seq, stored.data) for stored in logged]
    assert rows(folder, "SELECT seq, payload FROM events ORDER BY seq") == seqs
    assert list((folder / "run=r" / "_tmp").iterdir()) == []
    assert await one.logged() == []
    assert [path for path in (tmp_path / "blobs").rglob("*") if path.is_file()] == []
    report = await replay_run(ArchiveLog(folder), "r")
    assert (report.ok, report.samples) == (True, sum(len(commit.samples) for commit in commits))


async def test_two_at_once_and_odd_folders_are_refused(bus: Bus, recorded: Any, tmp_path: Path) -> None:
    folder, one = tmp_path / "archive", recorded()
    await one.record(1)
    with RunArchive(folder, "r").locked(), pytest.raises(SetupError, match="being written by another process"):
        await archive(bus, folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match="cannot write the archive"):
        await archive(bus, tmp_path / "file" / "archive")
    with pytest.raises(ConfigError, match="an id has 1 to 256 characters"):
        await archive(bus, folder, "x" * 300)
    await archive(bus, folder)
    await bus.api("STREAM.DELETE.LOG")
    await ensure(bus)
    with pytest.raises(ArchiveError, match="the one on the bus was made"):
        await archive(bus, folder)


async def test_an_event_whose_parts_are_gone_is_not_archived(bus: Bus, recorded: Any, tmp_path: Path) -> None:
    folder, one = tmp_path / "archive", recorded()
    await one.record(1)
    (tmp_path / "blobs" / one.own[:2] / one.own).unlink()
    with pytest.raises(BlobError, match=f"cannot read blob {one.own}"):
        await archive(bus, folder)
    assert list(folder.glob("run=r/events-*")) == []


async def test_what_cannot_be_decoded_is_kept_all_the_same(bus: Bus, recorded: Any, tmp_path: Path) -> None:
    folder, broken = tmp_path / "archive", b"\xc1 broken"
    await recorded().record(1)
    seq = await bus.publish(subjects.log_subject("r", "r-odd", "call"), broken)
    assert (await archive(bus, folder, verify=True)).verified_seq == seq
    assert rows(folder, f"SELECT payload, type, kind FROM events WHERE seq = {seq}") == [(broken, None, "call")]


def test_the_page_of_archives_holds_the_columns() -> None:
    assert describe(EVENTS_SCHEMA) in (ROOT / "docs/archive.md").read_text()


def test_events_without_an_archive_are_typed_and_empty(tmp_path: Path) -> None:
    names, found = query(tmp_path, "SELECT * FROM events", archive=tmp_path / "none")
    assert (names, found) == (EVENTS_SCHEMA.names, [])
