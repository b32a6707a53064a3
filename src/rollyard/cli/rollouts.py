"""`rollyard rollouts`: where the rollouts of a run stand, and what each stage did with one and said of it."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rollyard.cli.common import (
    Commands,
    check_run,
    command,
    config_of,
    connected,
    json_flag,
    run_async,
    table,
    to_json,
)

if TYPE_CHECKING:
    from rollyard.pipeline.config import Config
    from rollyard.pipeline.lives import Life
    from rollyard.schemas.failure import Failure
    from rollyard.schemas.rollout import AgentResult, RolloutEvent

LS_COLUMNS = ("task", "index", "rollout", "stage", "attempt", "status", "reward", "failure")
STATUSES = ("completed", "truncated", "failed", "cancelled")
_MESSAGE_CHARS = 60


def add(commands: Commands) -> None:
    """The commands of this file."""
    rollouts = command(commands, "rollouts", run_ls, "look at rollouts: where they stand, and why they ended so")
    kinds = rollouts.add_subparsers(title="what", metavar="WHAT", required=True)
    ls = command(kinds, "ls", run_ls, "list those of a run")
    ls.add_argument("--status", choices=STATUSES, help="only those that ended so")
    show = command(kinds, "show", run_show, "show what each stage did with one")
    show.add_argument("rollout", metavar="ID", help="its id, or the start of it, from `rollouts ls`")
    for one in (ls, show):
        one.add_argument("--run", dest="run_name", metavar="RUN", required=True, help="the run")
        json_flag(one)


def run_ls(args: argparse.Namespace) -> int:
    """List them."""
    return run_async(_ls(args, config_of(args)))


async def _ls(args: argparse.Namespace, config: Config) -> int:
    from rollyard.pipeline.lives import summaries

    async with connected(config) as bus:
        await check_run(bus, args.run_name)
        found = [one for one in await summaries(bus, args.run_name) if args.status in (None, one.status)]
    if args.json:
        for one in found:
            print(to_json(one))
        return 0
    rows = [
        (
            one.task_id,
            one.index,
            one.rollout_id,
            one.position,
            one.attempt,
            one.status,
            one.reward,
            _short(one.failure),
        )
        for one in found
    ]
    print(table(LS_COLUMNS, rows) if rows else "There are no such rollouts.")
    return 0


def run_show(args: argparse.Namespace) -> int:
    """Show one."""
    return run_async(_show(args, config_of(args)))


async def _show(args: argparse.Namespace, config: Config) -> int:
    from rollyard.pipeline.lives import life, states
    from rollyard.pipeline.viewer.text import printable
    from rollyard.schemas.errors import ConfigError

    async with connected(config) as bus:
        await check_run(bus, args.run_name)
        found = [state async for state in states(bus, args.run_name, args.rollout)]
        if len(found) != 1:
            problem = f"{len(found)} rollouts of {args.run_name!r} have ids that begin with {args.rollout!r}"
            raise ConfigError(problem, hint=f"`rollyard rollouts ls --run {args.run_name}` lists them; name one")
        told = await life(bus, found[0])
    if args.json:
        print(to_json({"state": told.state, "events": told.events, "commit": told.commit}))
    else:
        for line in _life(told):
            print(printable(line))
    return 0


def _life(told: Life) -> Iterator[str]:
    state = told.state
    yield f"rollout  {state.rollout.rollout_id}"
    yield f"task     {state.rollout.task_id}, rollout {state.rollout.index} of {state.rollout.group_size}"
    at = f" at {state.place}" if state.place and state.position != "ended" else ""
    yield f"stage    {state.position}{at}, attempt {state.attempt}"
    if told.commit is not None:
        yield f"status   {told.commit.status}"
        yield from _failure(told.commit.failure, "")
        yield f"samples  {len(told.commit.samples)}"
    for event in told.events:
        yield ""
        yield from _event(event)


def _event(event: RolloutEvent) -> Iterator[str]:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.at_ms / 1000))
    took = f", took {(event.at_ms - event.started_ms) / 1000:.1f} s" if event.started_ms else ""
    by = f", {event.worker}" if event.worker else ""
    yield f"-- attempt {event.attempt}: {event.kind} {when}{took}{by}"
    yield from _failure(event.failure, "  ")
    if event.result is not None:
        yield from _result(event.result, with_failure=event.failure is None)
    if event.kind == "evaluated":
        yield f"  reward    {'none' if event.reward is None else f'{event.reward:g}'}"
        yield from _pairs("rewards", event.rewards)
    yield from _pairs("metrics", event.metrics)
    yield from _text("verifier", event.log)


def _result(result: AgentResult, *, with_failure: bool) -> Iterator[str]:
    yield f"  exit code {'unknown' if result.exit_code is None else result.exit_code}"
    if with_failure:
        yield from _failure(result.failure, "  ")
    yield from _pairs("metrics", result.metrics)
    if result.artifacts:
        yield "  files     " + ", ".join(f"{one.name} ({one.size_bytes:,} B)" for one in result.artifacts)
    for name, value in result.metadata.items():
        yield f"  {name}: {to_json(value)}"
    yield from _text("answer", result.answer)
    yield from _text("stderr", result.output_tail)


def _failure(failure: Failure | None, indent: str) -> Iterator[str]:
    if failure is not None:
        yield f"{indent}failure  {failure.kind}: {failure.message}"
        if failure.hint:
            yield f"{indent}         {failure.hint}"


def _pairs(name: str, values: Mapping[str, Any]) -> Iterator[str]:
    if values:
        yield f"  {name:<10}" + ", ".join(f"{key} {value:g}" for key, value in values.items())


def _text(name: str, text: str) -> Iterator[str]:
    """What somebody wrote, each line behind a mark, so that it cannot be taken for ours."""
    if text.strip():
        yield f"  {name}:"
        for line in text.rstrip("\n").split("\n"):
            yield f"  | {line}"


def _short(failure: Failure | None) -> str:
    if failure is None:
        return ""
    message = failure.message if len(failure.message) <= _MESSAGE_CHARS else failure.message[:_MESSAGE_CHARS] + "..."
    return f"{failure.kind}: {message}"
