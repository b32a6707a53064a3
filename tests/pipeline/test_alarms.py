"""Alarms: what is counted, when one is raised, that it is raised once, and who sees it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import CapturingLogger

import rollyard
from rollyard.pipeline import alarms as alarms_module
from rollyard.pipeline.alarms import AlarmWatch, Tally, alarms
from rollyard.pipeline.bus import Bus
from rollyard.pipeline.codec import encode
from rollyard.pipeline.config import AlarmsConfig
from rollyard.pipeline.controller import Controller
from rollyard.pipeline.delivery_headers import DeliveryFacts
from rollyard.pipeline.embedded import EmbeddedNats
from rollyard.pipeline.kv import Bucket
from rollyard.pipeline.progress import render_status, run_status
from rollyard.pipeline.streams import ensure
from rollyard.schemas import subjects
from rollyard.schemas.alarm import Alarm
from rollyard.schemas.fleet import Run
from rollyard.schemas.sample import Delivery

LIMITS = AlarmsConfig()
PROBE = DeliveryFacts(status="completed", calls=LIMITS.min_calls, drifted=LIMITS.min_calls, trained_tokens=1)


def facts(calls: int = 10, drifted: int = 0, trained_tokens: int = 5, status: str = "completed") -> DeliveryFacts:
    return DeliveryFacts(status=status, calls=calls, drifted=drifted, trained_tokens=trained_tokens)


async def deliver(bus: Bus, *each: DeliveryFacts | dict[str, str] | None, run: str = "r") -> None:
    """Publish deliveries as aggregators do, one for each of these facts or headers."""
    held = len(await bus.subjects(subjects.SAMPLES, f"sample.{subjects.token(run)}.*.*"))
    for index, one in enumerate(each, held):
        ids: dict[str, Any] = {
            "run": run,
            "task_id": "t",
            "group_id": "t",
            "rollout_id": f"x{index}",
            "index": index,
            "attempt": 1,
        }
        body = encode(Delivery(group_size=len(each), status="completed", **ids))
        headers = one.headers() if isinstance(one, DeliveryFacts) else one
        await bus.create(subjects.sample_subject(run, "t", index), body, headers=headers)


async def begin(bus: Bus, run: str = "r", *, training: bool = True) -> None:
    await Bucket[Run](bus, subjects.RUNS, Run).put(subjects.token(run), Run(run=run, training=training))


async def raised(bus: Bus, run: str | None = None) -> list[Alarm]:
    return [alarm async for alarm in alarms(bus, run)]


async def some(bus: Bus, run: str | None = None) -> list[Alarm]:
    """The alarms as soon as there are any; the test's own timeout ends the wait."""
    while not (found := await raised(bus, run)):  # noqa: ASYNC110 - what is waited for happens elsewhere
        await asyncio.sleep(0.02)
    return found


async def counted(bus: Bus) -> None:
    """Return when the controller has counted everything that was delivered: what comes after it has its effect."""
    name = f"probe{len(await bus.subjects(subjects.ALARMS, '>'))}"
    await deliver(bus, PROBE, run=name)
    await some(bus, name)


@asynccontextmanager
async def controlling(bus: Bus, limits: AlarmsConfig | None = None) -> AsyncIterator[None]:
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(Controller(bus, tick_s=0.05, alarms=limits).run(stop))
        try:
            yield
        finally:
            stop.set()


# --- counting ---


counts = st.integers(0, 40)


@given(st.lists(st.tuples(counts, counts)), st.floats(0, 1), st.integers(1, 100))
def test_drift_is_due_when_its_share_is_over_the_threshold(
    deliveries: list[tuple[int, int]], threshold: float, least: int
) -> None:
    limits = AlarmsConfig(drift_share=threshold, min_calls=least)
    tally = Tally()
    calls = drifted = 0
    for some_calls, some_drift in deliveries:
        tally.add(facts(some_calls, min(some_calls, some_drift)))
        calls, drifted = calls + some_calls, drifted + min(some_calls, some_drift)
        assert ("drift" in tally.due(limits)) == (calls >= least and drifted / calls > threshold)


def test_failed_and_cancelled_rollouts_are_not_judged() -> None:
    tally = Tally()
    for status in ("failed", "cancelled", ""):
        tally.add(facts(100, 50, 0, status))
    assert tally == Tally()
    tally.add(facts(10, 5, 0, "truncated"))
    tally.add(facts(0, 0, 0))
    assert tally == Tally(rollouts=2, calls=10, drifted=5)
    tally.add(facts(10, 0, 0))
    tally.add(facts(10, 0, 1))
    assert tally == Tally(rollouts=4, calls=30, drifted=5, called=2, barren=1)


# --- raising ---


async def test_a_run_over_the_threshold_raises_an_alarm_and_one_at_it_does_not(bus: Bus) -> None:
    await begin(bus)
    async with controlling(bus):
        await deliver(bus, facts(9, 9), *[facts(10, 1)] * 8)  # 17 of 89: too few calls
        await counted(bus)
        await deliver(bus, facts(11, 3))  # 20 of 100: at the threshold
        await counted(bus)
        assert await raised(bus, "r") == []
        await deliver(bus, facts(0, 0), facts(5, 3), facts(100, 100))
        (alarm,) = await some(bus, "r")
        await counted(bus)
        assert await raised(bus, "r") == [alarm]
    passed = await bus.last(subjects.sample_subject("r", "t", 11))
    assert passed is not None
    event = await bus.last("alarm.r.drift")
    assert event is not None
    assert json.loads(event.data)["run"] == "r"
    assert alarm == Alarm(
        run="r",
        kind="drift",
        message="23 of 105 calls leave the tokens that were sampled before them: 21.9%, over the threshold of 20.0%",
        hint="`rollyard samples drift --run r` shows where and why",
        value=23 / 105,
        threshold=0.2,
        rollouts=12,
        calls=105,
        at_ms=passed.time_ms,
    )


async def test_runs_are_counted_apart(bus: Bus) -> None:
    async with controlling(bus):
        for _ in range(3):
            await deliver(bus, facts(30, 20), run="one")
            await deliver(bus, facts(30, 0), run="two")
        await deliver(bus, facts(30, 0), run="one")
        assert [alarm.run for alarm in await some(bus)] == ["one"]
        await counted(bus)
        assert await raised(bus, "two") == []


async def test_a_controller_that_starts_again_counts_what_is_stored(bus: Bus) -> None:
    async with controlling(bus):
        await deliver(bus, *[facts(10, 3)] * 6)
        await counted(bus)
    await deliver(bus, *[facts(10, 3)] * 3)  # while there is none
    async with controlling(bus):
        await counted(bus)
        assert await raised(bus, "r") == []
        await deliver(bus, facts(10, 3))
        (alarm,) = await some(bus, "r")
    assert (alarm.rollouts, alarm.calls, alarm.value) == (10, 100, 0.3)
    async with controlling(bus):
        await deliver(bus, facts(10, 10))
        await counted(bus)
    assert await raised(bus, "r") == [alarm]


async def test_two_controllers_raise_one_alarm(bus: Bus, nats: EmbeddedNats, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = CapturingLogger()
    monkeypatch.setattr(alarms_module, "log", lines)
    created: asyncio.Queue[bool] = asyncio.Queue()

    def spy(connection: Bus) -> Bus:
        real = connection.create

        async def create(subject: str, data: bytes, **rest: Any) -> tuple[int, bool]:
            found = await real(subject, data, **rest)
            if subject == "alarm.r.drift":
                created.put_nowait(found[1])
            return found

        monkeypatch.setattr(connection, "create", create)
        return connection

    async with (
        Bus.connect(nats.url, name="one") as one,
        Bus.connect(nats.url, name="two") as two,
        controlling(spy(one)),
        controlling(spy(two)),
    ):
        await deliver(bus, *[facts(10, 3)] * 30)
        assert {await created.get(), await created.get()} == {True, False}
        await counted(bus)
        assert created.empty()
    assert len(await raised(bus, "r")) == 1
    said = [(call.method_name, call.args[0], call.kwargs["kind"]) for call in lines.calls if call.kwargs["run"] == "r"]
    assert said == [("error", "alarm", "drift")]


async def test_a_run_that_nobody_knows_is_named_by_its_token(bus: Bus) -> None:
    await bus.publish(subjects.kv_subject(subjects.RUNS, "broken"), b"\x81broken")
    async with controlling(bus):
        for run in ("unknown", "broken"):
            await deliver(bus, facts(100, 50), run=run)
            assert [alarm.run for alarm in await some(bus, run)] == [run]
        await bus.create(f"sample.{'x' * 300}.t.0", b"", headers=facts(100, 50).headers())
        await counted(bus)
    assert "x" * subjects.MAX_ID_CHARS in {alarm.run for alarm in await raised(bus)}


async def test_a_name_that_is_no_token_stands_in_the_alarm(bus: Bus) -> None:
    name = "a run; with 'signs'"
    await begin(bus, name)
    async with controlling(bus):
        await deliver(bus, facts(100, 50), run=name)
        (alarm,) = await some(bus, name)
    assert alarm.run == name
    assert alarm.hint.startswith("`rollyard samples drift --run 'a run; with '\"'\"'signs'\"'\"''` ")


async def test_deliveries_without_headers_and_with_nonsense_count_as_none(bus: Bus) -> None:
    nonsense = {"Rollyard-Status": "completed", "Rollyard-Calls": "many", "Rollyard-Drift": "-3"}
    async with controlling(bus):
        await deliver(bus, *[None] * 30, nonsense, facts(100, 20))
        await counted(bus)
        assert await raised(bus, "r") == []
        await deliver(bus, facts(1, 1))
        (alarm,) = await some(bus, "r")
    assert (alarm.rollouts, alarm.calls) == (3, 101)


async def test_rollouts_without_a_token_to_train_on(bus: Bus) -> None:
    barren = [facts(10, trained_tokens=0)]
    await begin(bus)
    await begin(bus, "evaluation", training=False)
    async with controlling(bus):
        for run in ("r", "evaluation"):
            await deliver(bus, *barren * 10, *[facts(10)] * 10, run=run)
        await counted(bus)
        assert await raised(bus, "r") == []
        for run in ("evaluation", "r"):
            await deliver(bus, *barren, run=run)
        (alarm,) = await some(bus, "r")
        assert await raised(bus, "evaluation") == []
        await deliver(bus, facts(100, 100), run="evaluation")
        assert [found.kind for found in await some(bus, "evaluation")] == ["drift"]
    assert (alarm.kind, alarm.value, alarm.threshold, alarm.rollouts) == ("zero_trainable", 11 / 21, 0.5, 21)
    assert alarm.message == (
        "11 of 21 completed rollouts called a model and have no token to train on: 52.4%, over the threshold of 50.0%"
    )


async def test_a_threshold_of_one_is_never_passed_and_of_zero_by_the_first(bus: Bus) -> None:
    off = AlarmsConfig(drift_share=1.0, zero_trainable_share=1.0, min_calls=1, min_rollouts=1)
    watch = AlarmWatch(bus, off)
    watching = asyncio.create_task(watch.run())
    await deliver(bus, *[facts(10, 10, 0)] * 50)
    strict = AlarmsConfig(drift_share=0.0, min_calls=1)
    async with controlling(bus, strict):
        await deliver(bus, facts(0, 0), facts(1000, 0), run="calm")
        await deliver(bus, facts(1000, 1), run="strict")
        await some(bus, "strict")
    assert {alarm.run for alarm in await raised(bus)} == {"r", "strict"}
    assert [alarm.threshold for alarm in await raised(bus, "r")] == [0.0, 0.5]
    assert not watching.done()
    watching.cancel()


async def test_an_alarm_waits_for_the_bus(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = CapturingLogger()
    monkeypatch.setattr(alarms_module, "log", lines)
    monkeypatch.setattr(alarms_module, "RETRY_S", 0.05)
    await bus.api("STREAM.DELETE.ALARMS")
    async with controlling(bus):
        await deliver(bus, facts(100, 50))
        while not lines.calls:  # noqa: ASYNC110 - what is waited for happens elsewhere
            await asyncio.sleep(0.02)
        assert (lines.calls[0].args, lines.calls[0].kwargs["run"]) == (("alarm_waits_for_the_bus",), "r")
        await ensure(bus)
        assert len(await some(bus, "r")) == 1


# --- seeing ---


async def test_the_trainer_sees_alarms_of_its_run(bus: Bus, nats: EmbeddedNats) -> None:
    async with rollyard.connect(nats.url, run="mine") as client:
        assert await client.alarms() == []
        assert (await client.status()).alarms == ()
        async with controlling(bus):
            await deliver(bus, facts(100, 50), run="other")
            await deliver(bus, facts(100, 50), run="mine")
            await some(bus, "mine")
        (alarm,) = await client.alarms()
        assert isinstance(alarm, rollyard.Alarm)
        assert (alarm.run, alarm.kind) == ("mine", "drift")
        assert (await client.status()).alarms == ("drift",)

    def in_a_thread() -> list[Alarm]:
        with rollyard.connect_sync(nats.url, run="mine") as sync:
            return sync.alarms()

    assert await asyncio.to_thread(in_a_thread) == [alarm]


async def test_the_shell_sees_what_a_controller_raised(bus: Bus, nats: EmbeddedNats, tmp_path: Path) -> None:
    async def start(*arguments: str) -> asyncio.subprocess.Process:
        changed = {
            "ROLLYARD__NATS__URL": nats.url,
            "ROLLYARD__ALARMS__MIN_CALLS": "10",
            "ROLLYARD__LOG__FORMAT": "json",
        }
        command = (sys.executable, "-m", "rollyard", *arguments)
        return await asyncio.create_subprocess_exec(
            *command, cwd=tmp_path, stdout=-1, stderr=-1, env=os.environ | changed
        )

    async def command(*arguments: str) -> tuple[int | None, str, str]:
        process = await start(*arguments)
        out, said = await process.communicate()
        return process.returncode, out.decode(), said.decode()

    await begin(bus, "mine")
    assert await command("alarms") == (0, "There are no alarms.\n", "")
    assert await command("alarms", "--run", "mine") == (0, "There are no alarms of run mine.\n", "")
    controller = await start("controller")
    for run in ("other", "mine"):
        await deliver(bus, facts(10, 5), run=run)
        (alarm,) = await some(bus, run)
    controller.terminate()
    _, said = await controller.communicate()
    lines = [json.loads(line) for line in said.splitlines()]
    assert [(line["level"], line["run"]) for line in lines if line["event"] == "alarm"] == [
        ("error", "other"),
        ("error", "mine"),
    ]
    _, shown, _ = await command("alarms")
    first, second, third, fourth = shown.splitlines()
    assert "  other  drift: 5 of 10 calls leave the tokens" in first
    assert f"  mine  drift: {alarm.message}" in third
    assert (second.strip(), fourth.strip()) == ("`rollyard samples drift --run other` shows where and why", alarm.hint)
    _, shown, _ = await command("alarms", "--run", "mine", "--json")
    assert [(found["calls"], found["value"]) for found in map(json.loads, shown.splitlines())] == [(10, 0.5)]
    code, _, wrong = await command("alarms", "--run", "typo")
    assert (code, wrong) == (2, "rollyard: there is no run 'typo' (`rollyard status` lists the runs)\n")
    _, shown, _ = await command("status", "--run", "mine")
    assert "ALARM drift: see `rollyard alarms`" in shown


async def test_the_status_of_an_installation_that_is_too_old_for_alarms(bus: Bus) -> None:
    await bus.api("STREAM.DELETE.ALARMS")
    status = await run_status(bus, "r")
    assert status.alarms == ()
    assert "ALARM" not in render_status(status, None, 0.0, None)
