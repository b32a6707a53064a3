from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rollyard.pipeline.bus import Bus
from rollyard.pipeline.codec import encode
from rollyard.pipeline.datasets import query
from rollyard.pipeline.embedded import EmbeddedNats
from rollyard.pipeline.streams import ensure
from rollyard.schemas import subjects
from rollyard.schemas.errors import DecodeError, SetupError
from rollyard.schemas.failure import Failure
from rollyard.schemas.packed import Logprobs, LossMask, TokenIds, Versions
from rollyard.schemas.sample import Delivery, Group, Sample
from rollyard.stages.sink import Sink

STEPS = ("collected", "written", "marker_written", "marked", "renamed", "cleaned")
CHILD = """
import asyncio, os, sys
from pathlib import Path
from rollyard.pipeline.bus import Bus
from rollyard.stages.sink import Sink

left = int(sys.argv[3])

def checkpoint(step):
    global left
    left -= 1
    if left == 0:
        print(step, file=sys.stderr, flush=True)
        os._exit(9)

async def main():
    stop = asyncio.Event()
    stop.set()
    async with Bus.connect(sys.argv[1], name="sink") as bus:
        await Sink(bus, Path(sys.argv[2]), max_rows=4, checkpoint=checkpoint).run(stop)

asyncio.run(main())
"""


class Died(BaseException):
    """Nothing in the sink may catch this."""


def sample(run: str, index: int, branch: int) -> Sample:
    return Sample(
        sample_id=f"s{index}.{branch}",
        run=run,
        task_id="t",
        group_id="t",
        rollout_id=f"{run}{index}",
        index=index,
        attempt=1,
        branch=branch,
        branches=2,
        scenario="main",
        status="completed",
        token_ids=TokenIds.of([index, 2, 3]),
        loss_mask=LossMask.of([0, 1, 1]),
        logprobs=Logprobs.of([0, -1, -2]),
        policy_versions=Versions.of([-1, 7, 8]),
        reward=1.0,
    )


async def deliver(bus: Bus, index: int, run: str = "r") -> None:
    """Every third rollout failed, the others have two samples."""
    failed = index % 3 == 2
    delivery = Delivery(
        run=run,
        task_id="t",
        group_id="t",
        group_size=4,
        rollout_id=f"{run}{index}",
        index=index,
        attempt=1,
        status="failed" if failed else "completed",
        failure=Failure.of("init", "no room") if failed else None,
        reward=None if failed else 1.0,
        samples=() if failed else (sample(run, index, 0), sample(run, index, 1)),
    )
    await bus.create(subjects.sample_subject(run, "t", index), encode(delivery))
    if index % 4 == 3:
        group = Group(run=run, task_id="t", group_id=f"g{index}", size=4)
        await bus.create(subjects.group_subject(run, f"g{index}"), encode(group))


async def write_all(bus: Bus, folder: Path, **options: Any) -> None:
    stop = asyncio.Event()
    stop.set()
    await Sink(bus, folder, **options).run(stop)


def stands(folder: Path) -> tuple[list[Any], list[Any]]:
    """(rollouts, samples) in the files, by stream order."""
    rollouts = query(folder, "SELECT run, index, status FROM rollouts ORDER BY stream_seq")[1]
    samples = query(folder, "SELECT run, index, branch FROM samples ORDER BY stream_seq, branch")[1]
    return rollouts, samples


def expected(*deliveries: tuple[str, int]) -> tuple[list[Any], list[Any]]:
    rollouts = [(run, index, "failed" if index % 3 == 2 else "completed") for run, index in deliveries]
    samples = [(run, index, branch) for run, index in deliveries if index % 3 != 2 for branch in (0, 1)]
    return rollouts, samples


def check_folder(folder: Path) -> None:
    """Cuts follow each other without hole or overlap, every file belongs to one, and nothing lies about."""

    cuts = sorted((json.loads(path.read_text()) for path in (folder / "_cuts").iterdir()), key=lambda cut: cut["first"])
    assert [cut["first"] for cut in cuts] == [1, *(cut["last"] + 1 for cut in cuts[:-1])]
    owned = [file["final"] for cut in cuts for file in cut["files"]]
    assert sorted(owned) == sorted(str(path.relative_to(folder)) for path in folder.glob("**/part-*.parquet"))
    assert list((folder / "_tmp").iterdir()) == []


async def test_each_delivery_stands_once_cut_after_cut_run_by_run(bus: Bus, tmp_path: Path) -> None:
    folder = tmp_path / "samples"
    for index in range(6):
        await deliver(bus, index)
        await deliver(bus, index, "second run!")
    await write_all(bus, folder, max_rows=5)
    order = [(run, index) for index in range(6) for run in ("r", "second run!")]
    assert stands(folder) == expected(*order)
    check_folder(folder)
    assert {path.name for path in folder.glob("run=*")} == {"run=r", "run=" + subjects.token("second run!")}
    before = sorted(folder.rglob("*"))
    await write_all(bus, folder)
    assert sorted(folder.rglob("*")) == before
    await deliver(bus, 6)
    await write_all(bus, folder)
    assert stands(folder) == expected(*order, ("r", 6))
    check_folder(folder)


async def test_a_cut_is_made_when_it_is_full_by_bytes_or_old(bus: Bus, tmp_path: Path) -> None:
    for index in range(4):
        await deliver(bus, index)
    await write_all(bus, tmp_path / "small", max_bytes=1)
    # The group's message stands in a cut with the delivery before it, or is left for the next one.
    assert len(list((tmp_path / "small" / "_cuts").iterdir())) == 4
    stop = asyncio.Event()
    folder = tmp_path / "old"
    async with asyncio.TaskGroup() as group:
        group.create_task(Sink(bus, folder, max_age_s=0.3).run(stop))
        async with asyncio.timeout(30):
            while not list(folder.glob("_cuts/*.json")):  # noqa: ASYNC110 - a file is no event
                await asyncio.sleep(0.05)
        assert stands(folder) == expected(*(("r", index) for index in range(4)))
        await deliver(bus, 4)
        stop.set()
    assert stands(folder) == expected(*(("r", index) for index in range(5)))
    check_folder(folder)


async def test_reading_between_any_two_steps_sees_whole_deliveries_only(bus: Bus, tmp_path: Path) -> None:
    folder = tmp_path / "samples"
    for index in range(12):
        await deliver(bus, index)
    rollouts, samples = expected(*(("r", index) for index in range(12)))
    seen: set[int] = set()

    def look(_: str) -> None:
        found = stands(folder)
        assert found[0] == rollouts[: len(found[0])]
        assert found[1] == samples[: len(found[1])]
        # A rollout that is there has its samples there.
        assert {row[1] for row in samples if row[1] < len(found[0])} <= {row[1] for row in found[1]}
        seen.add(len(found[0]))

    await write_all(bus, folder, max_rows=3, checkpoint=look)
    assert stands(folder) == (rollouts, samples)
    assert seen == {0, 3, 6, 9, 12}


@pytest.mark.parametrize("step", STEPS)
async def test_a_sink_that_dies_at_any_step_is_taken_up(bus: Bus, tmp_path: Path, step: str) -> None:
    for index in range(7):
        await deliver(bus, index)
    for death in range(1, 9):
        left = death

        def checkpoint(name: str) -> None:
            nonlocal left
            left -= name == f"sink.{step}"
            if left == 0:
                raise Died

        folder = tmp_path / str(death)
        died = False
        try:
            await write_all(bus, folder, max_rows=3, checkpoint=checkpoint)
        except Died:
            died = True
        assert died == (left <= 0)
        rollouts, samples = stands(folder)
        assert len(set(rollouts)) == len(rollouts)
        assert len(set(samples)) == len(samples)
        await write_all(bus, folder, max_rows=5)
        assert stands(folder) == expected(*(("r", index) for index in range(7)))
        check_folder(folder)
        if not died:
            return


async def test_a_killed_process_is_taken_up_by_the_next_one(bus: Bus, nats: EmbeddedNats, tmp_path: Path) -> None:
    folder = tmp_path / "samples"
    for index in range(10):
        await deliver(bus, index)
    died: list[str] = []
    for left in (1, 2, 3, 4, 5, 6, 7, 8, 99):
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            CHILD,
            nats.url,
            str(folder),
            str(left),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        _, output = await child.communicate()
        died += output.decode().split()
        assert child.returncode == (9 if output else 0)
        await deliver(bus, 10 + left)
    await write_all(bus, folder)
    rollouts, samples = stands(folder)
    wanted = [("r", index) for index in (*range(10), *(10 + left for left in (1, 2, 3, 4, 5, 6, 7, 8, 99)))]
    assert (rollouts, samples) == expected(*wanted)
    check_folder(folder)
    assert {"sink.collected", "sink.written", "sink.marker_written", "sink.marked"} <= set(died)


async def test_two_sinks_at_once_cannot_own_one_cut(bus: Bus, tmp_path: Path) -> None:
    folder = tmp_path / "samples"
    for index in range(60):
        await deliver(bus, index)

    async def one(max_rows: int) -> None:
        await write_all(bus, folder, max_rows=max_rows)

    async with asyncio.TaskGroup() as group:
        for max_rows in (1, 2, 3):
            group.create_task(one(max_rows))
    assert stands(folder) == expected(*(("r", index) for index in range(60)))
    check_folder(folder)


async def test_the_loser_reads_the_winners_marker_and_goes_on(bus: Bus, tmp_path: Path) -> None:
    folder = tmp_path / "samples"
    for index in range(5):
        await deliver(bus, index)
    entered, winner_done = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def wait_for_the_winner(name: str) -> None:
        if name == "sink.marker_written" and not entered.is_set():
            loop.call_soon_threadsafe(entered.set)
            asyncio.run_coroutine_threadsafe(winner_done.wait(), loop).result()

    async with asyncio.TaskGroup() as group:
        group.create_task(write_all(bus, folder, max_rows=2, checkpoint=wait_for_the_winner))
        await entered.wait()
        await write_all(bus, folder, max_rows=3)
        winner_done.set()
    assert stands(folder) == expected(*(("r", index) for index in range(5)))
    check_folder(folder)


async def test_a_gap_is_an_error_that_tells_the_replay_command(bus: Bus, tmp_path: Path) -> None:
    folder = tmp_path / "samples"
    for index in range(3):
        await deliver(bus, index)
    await write_all(bus, folder)
    for index in range(3, 6):
        await deliver(bus, index)
    # The fourth message of the stream and the group's after it are purged, as an operator could.
    await bus.api("STREAM.PURGE.SAMPLES", {"seq": 6})
    with pytest.raises(SetupError, match=r"does not hold 4 to 5 any more.*rollyard replay --run RUN"):
        await write_all(bus, folder)
    await write_all(bus, folder, skip_gap=True)
    assert stands(folder) == expected(*(("r", index) for index in (0, 1, 2, 4, 5)))
    check_folder(folder)


async def test_a_hole_inside_the_stream_is_found_too(bus: Bus, tmp_path: Path) -> None:
    for index in range(3):
        await deliver(bus, index)
    await bus.api("STREAM.MSG.DELETE.SAMPLES", {"seq": 2})
    with pytest.raises(SetupError, match="does not hold 2 to 2"):
        await write_all(bus, tmp_path / "samples")
    assert stands(tmp_path / "samples") == expected(("r", 0))


async def test_files_of_another_stream_are_not_mixed_in(bus: Bus, tmp_path: Path) -> None:

    folder = tmp_path / "samples"
    await deliver(bus, 0)
    await write_all(bus, folder)
    await bus.api("STREAM.DELETE.SAMPLES")
    await ensure(bus)
    await deliver(bus, 1)
    with pytest.raises(SetupError, match="give the sink another folder"):
        await write_all(bus, folder)


async def test_a_delivery_that_cannot_be_read_stops_the_sink_and_is_named(bus: Bus, tmp_path: Path) -> None:
    await bus.publish("sample.r.t.0", b"\xc1 broken")
    with pytest.raises(DecodeError, match=r"sample\.r\.t\.0 at 1 of SAMPLES"):
        await write_all(bus, tmp_path / "samples")


async def test_a_folder_that_cannot_be_written_is_named(bus: Bus, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(SetupError, match="cannot write samples under"):
        await write_all(bus, blocked / "samples")
