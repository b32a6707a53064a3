"""`rollyard demo`: the main job on this machine, from a task file to training samples, with what happens explained."""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rollyard.cli.client import follow, is_done, snapshots
from rollyard.cli.common import (
    INTERRUPTED,
    Commands,
    base_config,
    command,
    configure_logging,
    json_flag,
    program,
    table,
    to_json,
)
from rollyard.cli.samples import decoder, has_colours
from rollyard.cli.up import model_arguments, model_of

if TYPE_CHECKING:
    from rollyard.pipeline.bus import Bus
    from rollyard.pipeline.config import Config
    from rollyard.pipeline.installation import Installation, Plan
    from rollyard.schemas.sample import Delivery, Sample
    from rollyard.schemas.task import Task

DEFAULT_DATA = ".rollyard/demo"
SLOTS = 8
"""Agents at a time: enough to keep the small model's four slots busy on two cores."""
PARQUET_WAIT_S = 60.0
CANCEL_WAIT_S = 15.0
RUN_PREFIX = "demo-"
QUERY = """\
select task_id, count(*) as samples, round(avg(reward), 2) as mean_reward,
       sum(trained_tokens) as trained_tokens
from samples where run = '{run}' group by task_id order by mean_reward desc"""


EXPLAINED = """
What happened: admit turned {tasks} tasks into {rollouts} rollouts. INIT made a sandbox for each, and RUN started
the agent in it. The agent knew nothing but an address and a key; behind the address the gateway asked the
model, and logged every call with its exact token ids. EVAL judged the work. The aggregator stitched the
logged calls into {samples} samples and delivered them, and the sink wrote them to Parquet. Every step was a
message on NATS; any of these processes could have been killed.
"""


def add(commands: Commands) -> None:
    """The command of this file."""
    demo = command(commands, "demo", run_demo, "run the main job once on this machine, and explain it", DEFAULT_DATA)
    model_arguments(demo)
    demo.add_argument("--tasks", metavar="FILE", type=Path, help="tasks to run instead of those that ship")
    json_flag(demo)


def run_demo(args: argparse.Namespace) -> int:
    """Start an installation, run the tasks, show what came out, stop it."""
    from msgspec import structs

    from rollyard.pipeline.installation import Plan
    from rollyard.pipeline.taskfile import read_task_file
    from rollyard.stages.plugin_check import check_task

    args.data = args.data or Path(DEFAULT_DATA)
    config = base_config(args)
    configure_logging(structs.replace(config.log, level="warning"))
    base = structs.replace(
        config,
        worker=structs.replace(config.worker, slots=SLOTS),
        sink=structs.replace(config.sink, max_wait_s=1.0),
    )
    tasks = read_task_file(args.tasks or demo_tasks(), check_task).tasks
    plan = Plan(data=config.data_dir(), base=base, model=model_of(args))
    return asyncio.run(_interruptible(plan, tasks, as_json=args.json))


def demo_tasks() -> Path:
    """The task file that ships."""
    from rollyard import harnesses

    return Path(harnesses.__path__[0]) / "demo_tasks.jsonl"


async def _interruptible(plan: Plan, tasks: list[Task], *, as_json: bool) -> int:
    from rollyard.pipeline.installation import Installation

    started = time.monotonic()
    rollouts = sum(task.group_size for task in tasks)
    say(f"{len(tasks)} tasks, {rollouts} rollouts. Everything is kept in {plan.data.absolute()}")
    say("\nStarting nats-server, a model server, the gateway, and one process for each role ...")
    try:
        async with Installation.running(plan) as installation:
            try:
                outcome = await _run(installation, tasks)
            except asyncio.CancelledError:
                print("Stopping ... (Ctrl-C once more ends everything at once)", file=sys.stderr, flush=True)
                await _end_runs(installation.bus, wait_s=CANCEL_WAIT_S)
                raise
            say(EXPLAINED.format(tasks=outcome.tasks, rollouts=len(outcome.deliveries), samples=len(outcome.samples)))
            say("Stopping ...")
    except asyncio.CancelledError:
        print("Stopped before the end; `make demo` starts a new run.", file=sys.stderr)
        return INTERRUPTED
    seconds = time.monotonic() - started
    say(f"Done in {seconds:.0f} s.\n{_next_steps(outcome, plan.data)}")
    if as_json:
        print(to_json(outcome.summary(plan.data.absolute(), round(seconds, 1))))
    return 0 if outcome.samples else 1


async def _end_runs(bus: Bus, *, wait_s: float = 0.0) -> None:
    """Cancel the demos that have not ended: their agents end, and the next demo does not wait for them."""
    from rollyard.pipeline.client import Client
    from rollyard.schemas.errors import RollyardError

    deadline = time.monotonic() + wait_s
    # At worst the next demo does it.
    with suppress(RollyardError):
        while True:
            going = [one for one in await snapshots(bus, None) if one.run.startswith(RUN_PREFIX) and not is_done(one)]
            for status in going:
                await Client(bus, status.run).cancel(reason="the demo was stopped")
            if not going or time.monotonic() > deadline:
                return
            await asyncio.sleep(0.5)


def _next_steps(outcome: Outcome, data: Path) -> str:
    me, option = program(), f"--data {data}"
    return f"""
Go on with
  {me} samples ls {option}
  {me} samples sql "select task_id, status, reward, answer from rollouts" {option}
Or start it again with `{me} up {option}` and ask it from another terminal:
  {me} replay --run {outcome.run} {option}"""


@dataclass(frozen=True)
class Outcome:
    """What came out of a demo."""

    run: str
    tasks: int
    deliveries: list[Delivery]
    parquet: str

    @property
    def samples(self) -> list[Sample]:
        """Of all deliveries."""
        return [sample for delivery in self.deliveries for sample in delivery.samples]

    def groups(self) -> dict[str, list[Delivery]]:
        """Deliveries by group, each ordered by index."""
        grouped: dict[str, list[Delivery]] = {}
        for delivery in sorted(self.deliveries, key=lambda one: (one.group_id, one.index)):
            grouped.setdefault(delivery.group_id, []).append(delivery)
        return grouped

    def mixed(self) -> int:
        """Groups whose rewards differ."""
        return sum(len({one.reward for one in group}) > 1 for group in self.groups().values())

    def summary(self, data: Path, seconds: float) -> dict[str, object]:
        """For --json."""
        return {
            "run": self.run,
            "tasks": self.tasks,
            "rollouts": len(self.deliveries),
            "completed": sum(one.status == "completed" for one in self.deliveries),
            "samples": len(self.samples),
            "groups": len(self.groups()),
            "groups_mixed": self.mixed(),
            "parquet": self.parquet,
            "data": str(data),
            "seconds": seconds,
        }


async def _run(installation: Installation, tasks: list[Task]) -> Outcome:
    from rollyard.pipeline.client import Client
    from rollyard.pipeline.tokenmeter import TokenMeter

    run = f"{RUN_PREFIX}{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    bus = installation.bus
    await _end_runs(bus)
    await Client(bus, run).submit(tasks)
    say(f"Published {len(tasks)} tasks to `task.{run}`. Each becomes a group of rollouts: a sandbox is made ready, an")
    say("agent runs in it and talks to the model through the gateway, its work is judged, its calls become samples.\n")
    await follow(bus, run, meter=TokenMeter(bus, run))
    deliveries = await _deliveries(bus, run)
    outcome = Outcome(run, len(tasks), deliveries, f"{installation.config.samples_dir()}/run={run}/part-*.parquet")
    _show_groups(outcome, tasks)
    await _show_parquet(installation.config, outcome)
    _show_trajectory(installation, outcome)
    return outcome


async def _deliveries(bus: Bus, run: str) -> list[Delivery]:
    from rollyard.pipeline.codec import decode
    from rollyard.schemas import subjects
    from rollyard.schemas.sample import Delivery

    found = bus.read(subjects.SAMPLES, f"sample.{subjects.token(run)}.*.*")
    return [decode(stored.data, Delivery) async for stored in found]


def _show_groups(outcome: Outcome, tasks: list[Task]) -> None:
    prompts = {task.id: task.prompt.strip().splitlines()[-1] for task in tasks}
    rows = []
    for task_id, group in outcome.groups().items():
        rewards = [one.reward for one in group]
        known = [reward for reward in rewards if reward is not None]
        mean = sum(known) / len(known) if known else None
        shown = " ".join("-" if reward is None else f"{reward:g}" for reward in rewards)
        rows.append((task_id, prompts.get(task_id, "")[-44:], shown, mean))
    say("\nA group is all rollouts of one task; `-` means that there is no reward:\n")
    say(table(("task", "asks", "rewards", "mean"), rows))
    say(f"\nRewards differ in {outcome.mixed()} of {len(rows)} groups: from those a policy gradient can learn.")


async def _show_parquet(config: Config, outcome: Outcome) -> None:
    from rollyard.pipeline.datasets import query

    folder = config.samples_dir()
    await _until_written(folder, outcome)
    sql = QUERY.format(run=outcome.run)
    say(f"\nThe samples as Parquet: {outcome.parquet}")
    say(f"Asked with DuckDB, as `rollyard samples sql` does:\n\n{_indented(sql)}\n")
    say(table(*query(folder, sql)))


async def _until_written(folder: Path, outcome: Outcome) -> None:
    """Wait for the sink, which writes a moment after the last delivery. Raises SetupError when it does not."""
    from rollyard.pipeline.datasets import query
    from rollyard.schemas.errors import SetupError

    deadline = time.monotonic() + PARQUET_WAIT_S
    wanted = len(outcome.samples)
    while (written := query(folder, f"select count(*) from samples where run = '{outcome.run}'")[1][0][0]) < wanted:
        if time.monotonic() > deadline:
            raise SetupError(
                f"the sink wrote {written} of {wanted} samples in {PARQUET_WAIT_S:g} s",
                hint="see logs/sink.log in the data folder",
            )
        await asyncio.sleep(0.2)


def _show_trajectory(installation: Installation, outcome: Outcome) -> None:
    """The best sample with the most calls."""
    from rollyard.pipeline.viewer.terminal import render

    if not outcome.samples:
        say("\nThere are no samples: see `rollyard status` and the logs.")
        return
    tokenizer = installation.llm.tokenizer
    best = max(outcome.samples, key=lambda sample: (sample.reward or 0.0, len(sample.calls)))
    say("\nOne sample in full. The model is trained on the marked tokens only, which it sampled itself:\n")
    token_bytes = decoder(Path(tokenizer)) if tokenizer else None
    say(_indented(render(best, token_bytes, colour=has_colours())))


def _indented(text: str) -> str:
    return "\n".join("    " + line for line in text.splitlines())


def say(text: str) -> None:
    """Print at once, also into a pipe."""
    print(text, flush=True)
