"""`rollyard rollouts`: those of a run as a list, and one with all that its stages said of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rollyard.cli import main
from rollyard.pipeline.bus import Bus
from rollyard.pipeline.codec import encode
from rollyard.pipeline.embedded import EmbeddedNats
from rollyard.pipeline.kv import Bucket
from rollyard.schemas import subjects
from rollyard.schemas.failure import Failure
from rollyard.schemas.fleet import Run
from rollyard.schemas.rollout import AgentResult, Artifact, Rollout, RolloutEvent, RolloutState
from rollyard.schemas.sample import Commit, SampleDigest

Ask = Callable[..., Awaitable[tuple[int, str, str]]]


@pytest.fixture
def ask(nats: EmbeddedNats, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Runs `rollyard rollouts` with these arguments: exit code, output, errors."""
    monkeypatch.setenv("ROLLYARD__NATS__URL", nats.url)

    async def ask(*arguments: str) -> tuple[int, str, str]:
        code = await asyncio.to_thread(main, ["rollouts", *arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return ask


async def life(bus: Bus, rollout: Rollout, attempt: int, kind: Any, **fields: Any) -> int:
    event = RolloutEvent(kind=kind, rollout=rollout, attempt=attempt, at_ms=4_500, started_ms=1_000, **fields)
    return await bus.publish(subjects.log_subject(rollout.run, rollout.rollout_id, "life"), encode(event))


async def three_rollouts(bus: Bus) -> list[Rollout]:
    """One that ended at its second attempt, one that failed, one that still runs."""
    await Bucket[Run](bus, subjects.RUNS, Run).put("r", Run(run="r"))
    done, failed, going = rollouts = [Rollout.of("r", "t", index, 3) for index in range(3)]
    states = Bucket[RolloutState](bus, subjects.ROLLOUTS, RolloutState)

    async def end(rollout: Rollout, attempt: int, status: Any, **fields: Any) -> None:
        state = RolloutState(rollout=rollout, position="ended", attempt=attempt, status=status)
        await states.put(subjects.rollout_key("r", rollout.rollout_id), state)
        commit = Commit(
            **{name: getattr(rollout, name) for name in ("run", "task_id", "group_size", "rollout_id", "index")},
            group_id=rollout.task_id,
            attempt=attempt,
            status=status,
            **fields,
        )
        await bus.publish(subjects.log_subject("r", rollout.rollout_id, "commit"), encode(commit))

    await life(bus, done, 1, "failed", failure=Failure.of("init", "no such image: x", "import it"))
    result = AgentResult(
        exit_code=3,
        answer="All is well.\nReally.",
        output_tail="warning: \x1b[2J\n",
        metrics={"turns": 4},
        artifacts=(Artifact(name="stdout", blob="0" * 64, size_bytes=1234),),
        metadata={"hook_failures": [{"hook": "audit", "error": "it took longer than 0.5 s"}]},
    )
    closed = await life(bus, done, 2, "ran", result=result, status="completed", worker="w-1")
    verdict = {"reward": 0.5, "rewards": {"tests": 1.0, "style": 0.0}, "log": "1 of 2 passed\n"}
    evaluated = await life(bus, done, 2, "evaluated", **verdict)
    sample = SampleDigest(sample_id="s", digest="d")
    await end(done, 2, "completed", closed_seq=closed, evaluated_seq=evaluated, samples=(sample,))
    failure = Failure.of("agent", "it gave up " * 20)
    await life(bus, failed, 1, "failed", failure=failure)
    await end(failed, 1, "failed", failure=failure)
    state = RolloutState(rollout=going, position="run", place="here")
    await states.put(subjects.rollout_key("r", going.rollout_id), state)
    return rollouts


async def test_they_are_listed_with_how_they_ended(bus: Bus, ask: Ask) -> None:
    done, failed, going = await three_rollouts(bus)
    code, said, _ = await ask("ls", "--run", "r")
    rows = [line.split(maxsplit=7) for line in said.splitlines()[2:]]
    assert code == 0
    assert rows[0] == ["t", "0", done.rollout_id, "ended", "2", "completed", "0.5"]
    assert rows[1][2:7] == [failed.rollout_id, "ended", "1", "failed", "-"]
    assert rows[1][7].startswith("agent: it gave up")
    assert rows[1][7].endswith("...")
    assert rows[2] == ["t", "2", going.rollout_id, "run", "1", "-", "-"]
    _, of_status, _ = await ask("ls", "--run", "r", "--status", "failed", "--json")
    assert [json.loads(line)["rollout_id"] for line in of_status.splitlines()] == [failed.rollout_id]
    assert (await ask("ls", "--run", "r", "--status", "cancelled"))[1] == "There are no such rollouts.\n"


async def test_one_is_shown_with_what_its_stages_said(bus: Bus, ask: Ask) -> None:
    done, failed, going = await three_rollouts(bus)
    code, said, _ = await ask("show", done.rollout_id, "--run", "r")
    assert code == 0
    assert "task     t, rollout 0 of 3\nstage    ended, attempt 2\nstatus   completed\nsamples  1\n" in said
    assert "-- attempt 1: failed 1970-" in said
    assert ", took 3.5 s\n  failure  init: no such image: x\n           import it\n" in said
    assert "  exit code 3\n  metrics   turns 4\n  files     stdout (1,234 B)\n" in said
    assert '  hook_failures: [{"hook":"audit","error":"it took longer than 0.5 s"}]\n' in said
    assert "  answer:\n  | All is well.\n  | Really.\n  stderr:\n  | warning: \\x1b[2J\n" in said
    assert "  reward    0.5\n  rewards   tests 1, style 0\n  verifier:\n  | 1 of 2 passed\n" in said
    assert "stage    run at here, attempt 1\n" in (await ask("show", going.rollout_id, "--run", "r"))[1]
    _, as_json, _ = await ask("show", failed.rollout_id, "--run", "r", "--json")
    assert json.loads(as_json)["commit"]["failure"]["kind"] == "agent"


async def test_an_id_that_names_none_or_several_is_refused(bus: Bus, ask: Ask) -> None:
    await three_rollouts(bus)
    for prefix, count in (("nothing", 0), ("r", 3)):
        code, said, error = await ask("show", prefix, "--run", "r")
        assert (code, said) == (2, "")
        assert f"{count} rollouts of 'r' have ids that begin with '{prefix}'" in error
        assert "rollyard rollouts ls --run r" in error
    code, _, error = await ask("ls", "--run", "other")
    assert (code, "there is no run 'other'" in error) == (2, True)
