"""What must be true of a run that has come to its end, whatever was killed on the way."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import world
from yard import Yard

from rollyard.pipeline.codec import decode
from rollyard.pipeline.datasets import query_arrow
from rollyard.schemas import subjects
from rollyard.schemas.packed import Logprobs, LossMask, TokenIds, Versions
from rollyard.schemas.rollout import Rollout
from rollyard.schemas.sample import Delivery, Group, Sample
from rollyard.schemas.task import Task

PACKED = ["token_ids", "loss_mask", "logprobs", "policy_versions"]


@dataclass
class Outcome:
    """What stands in the sample stream for one run, in stream order."""

    deliveries: list[Delivery] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)

    @property
    def samples(self) -> list[Sample]:
        """All samples."""
        return [sample for delivery in self.deliveries for sample in delivery.samples]


async def check(yard: Yard, run: str, tasks: Sequence[Task], *, attempt: int = 1, swept: bool = True) -> Outcome:
    """Wait for the end of a run whose rollouts all complete in `attempt`, and check everything about it.

    `swept`: also that no sandbox is left.
    """
    outcome = await check_ended(yard, run, tasks, swept=swept)
    by_id = {task.id: task for task in tasks}
    ends = {each.rollout_id: (each.status, each.failure, each.attempt) for each in outcome.deliveries}
    assert {rollout: end for rollout, end in ends.items() if end != ("completed", None, attempt)} == {}
    for delivery in outcome.deliveries:
        assert delivery.reward == world.reward_of(by_id[delivery.task_id])
        assert delivery.answer == world.answer_of(by_id[delivery.task_id])
        assert [len(sample.calls) for sample in delivery.samples] == [world.CALLS]
        assert delivery.calls >= world.CALLS
    check_nothing_ran_twice(yard, outcome, attempt)
    return outcome


async def check_ended(yard: Yard, run: str, tasks: Sequence[Task], *, swept: bool = True) -> Outcome:
    """Wait for the end of a run, and check what must be true of any, whatever became of its rollouts."""
    await yard.wait_delivered(run, world.rollouts_of(tasks))
    await check_at_rest(yard, run, tasks)
    if swept:
        await check_no_sandbox_is_left(yard.config.sandboxes_dir(), yard)
    outcome = await read(yard, run)
    check_delivered_once(outcome, run, tasks)
    check_groups_announced_once(outcome, tasks)
    check_ids_are_the_journals(yard, outcome)
    await check_log(yard, run, outcome)
    await check_parquet(yard, run, outcome)
    check_replay(yard, run, outcome)
    return outcome


async def check_at_rest(yard: Yard, run: str, tasks: Sequence[Task]) -> None:
    """Groups closed, queues empty, no dead letter, no process left in a sandbox."""

    async def closed() -> bool:
        groups = await yard.bus.subjects(subjects.SAMPLES, f"group.{subjects.token(run)}.*")
        return len(groups) >= len(tasks)

    async def queues_empty() -> bool:
        infos = [await yard.bus.stream_info(stream) for stream in (subjects.TASKS, subjects.STAGES)]
        return not any(info["state"]["messages"] for info in infos)

    async def processes_gone() -> bool:
        return not yard.agents()

    await yard.until(closed, "the groups to close")
    await yard.until(queues_empty, "empty queues")
    await yard.until(processes_gone, "the end of every agent")
    dead = await yard.bus.subjects(subjects.DEAD, "dead.*.*")
    assert dead == {}


async def check_no_sandbox_is_left(folder: Path, yard: Yard) -> None:
    """Wait until every sandbox is removed, those by the sweeper that an INIT worker made and died."""

    async def gone() -> bool:
        return {path.name for path in folder.iterdir()} <= {"lease", "owners"}

    await yard.until(gone, "the removal of every sandbox")


async def read(yard: Yard, run: str) -> Outcome:
    """Everything of a run in the sample stream."""
    outcome = Outcome()
    async for stored in yard.bus.read(subjects.SAMPLES, f"sample.{subjects.token(run)}.*.*"):
        outcome.deliveries.append(decode(stored.data, Delivery))
    async for stored in yard.bus.read(subjects.SAMPLES, f"group.{subjects.token(run)}.*"):
        outcome.groups.append(decode(stored.data, Group))
    return outcome


def check_delivered_once(outcome: Outcome, run: str, tasks: Sequence[Task]) -> None:
    """One delivery for each rollout that was asked for, none for another."""
    wanted = [
        Rollout.of(run, task.id, index, task.group_size).rollout_id
        for task in tasks
        for index in range(task.group_size)
    ]
    assert Counter(delivery.rollout_id for delivery in outcome.deliveries) == Counter(wanted)


def check_groups_announced_once(outcome: Outcome, tasks: Sequence[Task]) -> None:
    """One announcement for each task."""
    assert Counter((group.task_id, group.size) for group in outcome.groups) == Counter(
        (task.id, task.group_size) for task in tasks
    )


def check_ids_are_the_journals(yard: Yard, outcome: Outcome) -> None:
    """Each sample is what the model server itself says that it was given and has sampled, to the last bit."""
    journal = yard.journal()
    for sample in outcome.samples:
        ids, logprobs = TokenIds(), Logprobs()
        mask, versions = b"", b""
        for call_id in sample.calls:
            entry = journal[call_id]
            assert entry.status == "ok"
            prompt, sampled = TokenIds.of(entry.prompt_token_ids), TokenIds.of(entry.token_ids)
            assert prompt.startswith(ids)
            given = len(prompt) - len(ids)
            mask += bytes(given) + b"\1" * len(sampled)
            versions += Versions.of([-1] * given + [world.POLICY_VERSION] * len(sampled)).data
            logprobs += Logprobs(bytes(4 * given)) + Logprobs.of(entry.logprobs)
            ids = prompt + sampled
        assert sample.token_ids == ids
        assert sample.loss_mask == LossMask(mask)
        assert sample.logprobs == logprobs
        assert sample.policy_versions == Versions(versions)


def check_nothing_ran_twice(yard: Yard, outcome: Outcome, attempt: int) -> None:
    """Each attempt had one agent, and each of its commands ran once, in one sandbox."""
    delivered = {delivery.rollout_id for delivery in outcome.deliveries}
    ran: Counter[tuple[str, int, str]] = Counter()
    sandboxes: dict[str, set[str]] = {}
    for line in yard.ledger.read_text().splitlines():
        home, _, number = line.partition(" ")
        rollout, of_attempt, nonce = home.split("/")[-2].split(".")
        if rollout in delivered:
            ran[rollout, int(of_attempt), number] += 1
            sandboxes.setdefault(f"{rollout}.{of_attempt}", set()).add(nonce)
    expected = {(rollout, attempt, str(n)) for rollout in delivered for n in range(1, world.COMMANDS + 1)}
    assert {key: count for key, count in ran.items() if count > 1} == {}
    assert {key for key in ran if key[1] == attempt} == expected
    assert {key: nonces for key, nonces in sandboxes.items() if len(nonces) > 1} == {}


async def check_log(yard: Yard, run: str, outcome: Outcome) -> None:
    """One commit for each rollout."""
    commits = await yard.bus.subjects(subjects.LOG, subjects.log_subject(run, "*", "commit"))
    wanted = {subjects.log_subject(run, delivery.rollout_id, "commit"): 1 for delivery in outcome.deliveries}
    assert commits == wanted


async def check_parquet(yard: Yard, run: str, outcome: Outcome) -> None:
    """The rows are the samples of the stream, one to one."""
    folder = yard.config.samples_dir()

    async def written() -> bool:
        return query_arrow(folder, f"SELECT 1 FROM rollouts WHERE run = '{run}'").num_rows >= len(outcome.deliveries)

    await yard.until(written, "the sink")
    table = query_arrow(folder, f"SELECT * FROM samples WHERE run = '{run}'")
    rows = {row["sample_id"]: (number, row) for number, row in enumerate(table.drop_columns(PACKED).to_pylist())}
    assert table.num_rows == len(rows) == len(outcome.samples)
    columns = {name: table.column(name).combine_chunks() for name in PACKED}
    for sample in outcome.samples:
        number, row = rows[sample.sample_id]
        for name in PACKED:
            values = columns[name][number].values.to_numpy(zero_copy_only=False)
            assert np.array_equal(values, np.asarray(getattr(sample, name)))
        for name in ("rollout_id", "task_id", "group_id", "index", "attempt", "branch", "status", "reward", "scenario"):
            assert row[name] == getattr(sample, name)
        assert json.loads(row["messages"]) == sample.messages
    delivered = query_arrow(folder, f"SELECT rollout_id FROM rollouts WHERE run = '{run}'").column(0).to_pylist()
    assert Counter(delivered) == Counter(delivery.rollout_id for delivery in outcome.deliveries)


def check_replay(yard: Yard, run: str, outcome: Outcome) -> None:
    """The log alone gives the same samples."""
    replayed = yard.rollyard("replay", "--run", run, "--json")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    report = json.loads(replayed.stdout)
    assert report == {
        "run": run,
        "rollouts": len(outcome.deliveries),
        "uncommitted": 0,
        "samples": len(outcome.samples),
        "equal": len(outcome.samples),
        "mismatches": [],
    }
