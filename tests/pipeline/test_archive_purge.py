"""Verification finds what is wrong in an archive, and only a closed run that was verified leaves the log."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from msgspec import structs

from rollyard.pipeline.archive.archiving import ArchiveReport, Plan, archive_run, preview
from rollyard.pipeline.archive.folder import Manifest, RunArchive, describe
from rollyard.pipeline.archive.reader import ArchiveLog
from rollyard.pipeline.bus import Bus
from rollyard.pipeline.codec import encode
from rollyard.pipeline.kv import Bucket
from rollyard.schemas import subjects
from rollyard.schemas.call import CallEnd
from rollyard.schemas.errors import ArchiveError
from rollyard.schemas.rollout import Rollout, RolloutState
from rollyard.schemas.task import Task
from rollyard.stages.replay import replay_run


async def archive(bus: Bus, folder: Path, run: str = "r", **plan: Any) -> ArchiveReport:
    return await archive_run(bus, run, folder, Plan(samples=folder.parent / "samples", **plan))


def events_file(folder: Path) -> Path:
    (path,) = folder.glob("run=r/events-*.parquet")
    return path


def rewrite(folder: Path, table: pa.Table) -> None:
    """Put another table in the place of the one file, as a writer would have done that went wrong."""
    path, target = events_file(folder), RunArchive(folder, "r")
    pq.write_table(table, path)
    with target.locked():
        manifest = target.manifest()
        assert manifest is not None
        target.write_manifest(structs.replace(manifest, files=(describe(path),), verified_seq=0))


def changed(table: pa.Table, column: str, row: int, value: Any) -> pa.Table:
    values = table.column(column).to_pylist()
    values[row] = value
    index = table.schema.get_field_index(column)
    return table.set_column(index, table.schema.field(index), pa.array(values, table.schema.field(index).type))


def manifest_of(folder: Path) -> Manifest:
    manifest = RunArchive(folder, "r").manifest()
    assert manifest is not None
    return manifest


async def test_one_flipped_byte_is_found_wherever_it_is(bus: Bus, recorded: Any, tmp_path: Path) -> None:
    folder = tmp_path / "archive"
    await recorded().record(1)
    await archive(bus, folder)
    path = events_file(folder)
    whole = path.read_bytes()
    for place in (0, 100, len(whole) // 3, len(whole) // 2, len(whole) - 200, len(whole) - 1):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(ArchiveError, match=r"is not what was written: its digest differs"):
            await archive(bus, folder, verify=True)
        assert manifest_of(folder).verified_seq == 0
    path.write_bytes(whole)
    assert (await archive(bus, folder, verify=True)).verified_seq == manifest_of(folder).files[0].last


async def test_a_damaged_page_is_found_by_a_reader_too(bus: Bus, recorded: Any, tmp_path: Path) -> None:
    folder = tmp_path / "archive"
    await recorded().record(1, large=0)
    await archive(bus, folder)
    path = events_file(folder)
    whole = bytearray(path.read_bytes())
    column = pq.ParquetFile(path).metadata.row_group(0).column(len(pq.read_schema(path).names) - 1)
    # In the middle of what does not compress: nothing but the checksum can tell.
    whole[column.data_page_offset + column.total_compressed_size // 2] ^= 1
    path.write_bytes(whole)
    with pytest.raises(ArchiveError, match=r"events-.*parquet cannot be read"):
        await replay_run(ArchiveLog(folder), "r")


@pytest.mark.parametrize("row", [0, 4, 8])
async def test_one_missing_row_is_found(bus: Bus, recorded: Any, tmp_path: Path, row: int) -> None:
    folder, one = tmp_path / "archive", recorded()
    await one.record(1)
    await archive(bus, folder)
    table = pq.read_table(events_file(folder), partitioning=None)
    rewrite(folder, pa.concat_tables([table[:row], table[row + 1 :]]))
    missing = (await one.logged())[row]
    with pytest.raises(ArchiveError, match=f"event {missing.seq} of the log, {missing.subject}, is not in"):
        await archive(bus, folder, verify=True)


async def test_a_row_that_differs_is_not_logged_or_stands_twice_is_found(
    bus: Bus, recorded: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "archive"
    await recorded().record(1)
    seq = await bus.publish(subjects.log_subject("other", "x", "call"), b"of another run")
    await recorded().record(1)
    await archive(bus, folder)
    table = pq.read_table(events_file(folder), partitioning=None)
    for wrong, says in (
        (changed(table, "payload", 3, b"\x80"), "payload of event 4 differs"),
        (changed(table, "subject", 3, "log.r.x.call"), "subject of event 4 differs"),
        (changed(table, "time_ms", 3, 0), "time_ms of event 4 differs"),
        (
            pa.concat_tables([table[:9], changed(table[8:9], "seq", 0, seq), table[9:]]),
            f"event {seq} is not in the log",
        ),
        (pa.concat_tables([table[:9], table[8:]]), "event 9 stands after 9"),
    ):
        rewrite(folder, wrong)
        with pytest.raises(ArchiveError, match=says):
            await archive(bus, folder, verify=True)
    rewrite(folder, table)
    await archive(bus, folder, verify=True)


async def test_blobs_and_files_that_are_lost_or_damaged_are_found(bus: Bus, recorded: Any, tmp_path: Path) -> None:
    folder, one = tmp_path / "archive", recorded()
    await one.record(1)
    await archive(bus, folder, verify=True)
    for name in (one.own, one.shared, one.image):
        path = folder / "run=r" / "blobs" / name[:2] / name
        whole = path.read_bytes()
        path.unlink()
        with pytest.raises(ArchiveError, match=name):
            await archive(bus, folder, verify=True)
        path.write_bytes(whole[:-1] + b"?")
        with pytest.raises(ArchiveError, match=f"blob {name} .* is damaged"):
            await archive(bus, folder, verify=True)
        path.write_bytes(whole)
    path = events_file(folder)
    path.rename(tmp_path / path.name)
    with pytest.raises(ArchiveError, match=rf"{path.name} is gone \(restore it"):
        await archive(bus, folder)


async def test_an_open_run_is_not_purged(bus: Bus, recorded: Any, tmp_path: Path) -> None:
    folder, one = tmp_path / "archive", recorded()
    commit = await one.rollout(position="aggregate")
    await one.close("fanned_out")
    await bus.publish(subjects.task_subject("r"), encode(Task(prompt="p")))
    await bus.publish(subjects.stage_subject("aggregate", None, "r"), b"due")
    await bus.publish(subjects.stage_subject("run", "here", "r"), b"due")
    before = await one.logged()

    async def refused(says: str) -> None:
        for work in (archive(bus, folder, purge=True), archive(bus, folder, "r", purge=True, verify=True)):
            with pytest.raises(ArchiveError, match=f"run 'r' cannot be purged: {says}"):
                await work
        would = await preview(bus, "r", folder, Plan(samples=tmp_path, purge=True))
        assert re.search(says, would.blocked)
        assert await one.logged() == before

    await refused(
        r"1 tasks are not admitted yet; 1 tasks are open \(task\); 1 rollouts have not ended \(.*\); 2 messages"
    )
    await bus.api("STREAM.PURGE.TASKS")
    await refused("1 tasks are open")
    await one.close()
    await refused(f"1 rollouts have not ended .{commit.rollout_id}.; 2 messages")
    state = RolloutState(rollout=one.rollouts[0], position="ended")
    states: Bucket[RolloutState] = Bucket(bus, subjects.ROLLOUTS, RolloutState)
    await states.put(subjects.rollout_key("r", commit.rollout_id), state)
    await refused("2 messages are on their way")
    await bus.api("STREAM.PURGE.STAGES")
    assert (await archive(bus, folder, purge=True)).purged_events == len(before)


async def test_what_is_not_verified_or_not_complete_is_not_purged(bus: Bus, recorded: Any, tmp_path: Path) -> None:
    folder, one = tmp_path / "archive", recorded()
    await one.record(1)
    await one.close()
    before = await one.logged()
    await archive(bus, folder)
    path = events_file(folder)
    whole = path.read_bytes()
    path.write_bytes(whole[:99] + bytes([whole[99] ^ 1]) + whole[100:])
    with pytest.raises(ArchiveError, match="digest differs"):
        await archive(bus, folder, purge=True)
    path.write_bytes(whole)
    states: Bucket[RolloutState] = Bucket(bus, subjects.ROLLOUTS, RolloutState)
    without = Rollout.of("r", "task", 40, 64)
    await states.put(subjects.rollout_key("r", without.rollout_id), RolloutState(rollout=without, position="ended"))
    with pytest.raises(ArchiveError, match=f"1 rollouts have ended and no commit .*{without.rollout_id}"):
        await archive(bus, folder, purge=True)
    await states.delete(subjects.rollout_key("r", without.rollout_id))
    with pytest.raises(ArchiveError, match="bucket rollouts shows 1 of 2 keys"):
        await archive(bus, folder, purge=True)
    assert await one.logged() == before


async def test_after_a_purge_the_archive_is_what_there_is(bus: Bus, recorded: Any, tmp_path: Path) -> None:
    folder, one, other = tmp_path / "archive", recorded(), recorded("other")
    commits = await one.record(2, large=1)
    await other.record(2)
    await one.close()
    would = await preview(bus, "r", folder, Plan(samples=tmp_path, purge=True, blob_grace_s=-1))
    assert (would.new_events, would.purged_events, would.blocked) == (18, 18, "")
    assert not folder.exists()
    report = await archive(bus, folder, purge=True, blob_grace_s=-1)
    assert (report.purged_events, report.removed_blobs) == (18, 3)
    assert (would.removed_blobs, would.removed_blob_bytes) == (report.removed_blobs, report.removed_blob_bytes)
    assert await one.logged() == []
    assert len(await other.logged()) == 18
    left = {path.name for path in (tmp_path / "blobs").rglob("*") if path.is_file()}
    assert left == {one.shared, other.own, other.image}
    assert one.shared == other.shared

    # A gateway that was cut off brings the end that it owes: it is archived too.
    late = CallEnd(call_id="lost0", run="r", rollout_id=commits[0].rollout_id, attempt=1, at_ms=0, status="aborted")
    seq = await bus.publish(subjects.log_subject("r", commits[0].rollout_id, "call"), encode(late))
    again = await archive(bus, folder, purge=True, blob_grace_s=-1)
    assert (again.new_events, again.events, again.purged_events, again.verified_seq) == (1, 19, 1, seq)
    assert (await archive(bus, folder, purge=True)).purged_events == 0

    replayed = await replay_run(ArchiveLog(folder), "r")
    assert replayed.ok
    assert (replayed.rollouts, replayed.samples) == (2, sum(len(commit.samples) for commit in commits))


async def test_what_comes_after_the_verification_stays_in_the_log(bus: Bus, recorded: Any, tmp_path: Path) -> None:
    folder, one = tmp_path / "archive", recorded()
    await one.record(1)
    await one.close()
    late: list[int] = []

    async with asyncio.TaskGroup() as group:

        async def log_late() -> None:
            late.append(await one.life(one.rollouts[0], 2, kind="ran"))

        def tell(line: str) -> None:
            if line.startswith("verifying"):
                group.create_task(log_late())

        report = await archive_run(bus, "r", folder, Plan(samples=tmp_path, purge=True), tell)
    assert report.purged_events == 9
    assert [stored.seq for stored in await one.logged()] == late


async def test_a_rollout_that_begins_meanwhile_keeps_the_run(bus: Bus, recorded: Any, tmp_path: Path) -> None:
    folder, one = tmp_path / "archive", recorded()
    await one.record(1)
    await one.close()
    begun = RolloutState(rollout=Rollout.of("r", "another", 0, 1))
    states: Bucket[RolloutState] = Bucket(bus, subjects.ROLLOUTS, RolloutState)
    async with asyncio.TaskGroup() as group:

        def tell(line: str) -> None:
            if line.startswith("verifying"):
                group.create_task(states.put(subjects.rollout_key("r", begun.rollout.rollout_id), begun))

        with pytest.raises(ArchiveError, match=f"1 rollouts have not ended .{begun.rollout.rollout_id}"):
            await archive_run(bus, "r", folder, Plan(samples=tmp_path, purge=True), tell)
    assert len(await one.logged()) == 9


async def test_a_manifest_that_was_lost_is_made_anew(bus: Bus, recorded: Any, tmp_path: Path) -> None:
    folder = tmp_path / "archive"
    await recorded().record(1)
    await archive(bus, folder, verify=True)
    before = manifest_of(folder)
    (folder / "run=r" / "manifest.json").unlink()
    assert (await archive(bus, folder, verify=True)).new_events == 0
    assert manifest_of(folder).files == before.files
    (folder / "run=r" / "manifest.json").write_text('{"run": "r"')
    with pytest.raises(ArchiveError, match=r"manifest\.json cannot be read"):
        await archive(bus, folder)
    RunArchive(folder, "r").write_manifest(structs.replace(before, version=99))
    with pytest.raises(ArchiveError, match="has version 99, this release reads 1"):
        await archive(bus, folder)


async def test_a_copy_of_a_part_is_refused(bus: Bus, recorded: Any, tmp_path: Path) -> None:
    folder = tmp_path / "archive"
    await recorded().record(1)
    await archive(bus, folder)
    os.link(events_file(folder), folder / "run=r" / "events-5-6.parquet")
    with pytest.raises(ArchiveError, match="hold the same events"):
        await archive(bus, folder)
