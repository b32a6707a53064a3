"""Rollouts that wait for a backend that no worker offers: who says so, when, and when not."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.pipeline.alarms import alarms
from rollyard.pipeline.bus import Bus
from rollyard.pipeline.config import Config, NatsConfig
from rollyard.pipeline.controller import Controller
from rollyard.pipeline.doctor import workers
from rollyard.pipeline.embedded import EmbeddedNats
from rollyard.pipeline.kv import Bucket
from rollyard.pipeline.leases import hold_lease
from rollyard.pipeline.pools import Absences, living_pools, not_offered, unserved
from rollyard.pipeline.progress import render_status, run_status
from rollyard.schemas import subjects
from rollyard.schemas.alarm import Alarm
from rollyard.schemas.errors import BusError
from rollyard.schemas.fleet import Cancel, Lease
from rollyard.schemas.rollout import SandboxRef
from rollyard.schemas.sandbox import SandboxSpec
from rollyard.schemas.task import AgentSpec, EvaluationSpec, Task

LEASE_S = 0.5
OWN = "my.sandboxes:Moon"  # no token: subjects hold its hash


@asynccontextmanager
async def controlling(bus: Bus, count: int = 1) -> AsyncIterator[None]:
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(Controller(bus, lease_s=LEASE_S, tick_s=0.05).run(stop))
        try:
            yield
        finally:
            stop.set()


def offering(bus: Bus, pool: str) -> contextlib.AbstractAsyncContextManager[None]:
    return hold_lease(bus, subjects.POOLS, Lease(owner=pool, lease_s=LEASE_S), release=False)


def task(pool: str, size: int = 1, name: str = "t") -> Task:
    return Task(
        prompt="p",
        id=name,
        group_size=size,
        agent=AgentSpec(harness="noop", args={"answer": "yes"}),
        sandbox=SandboxSpec(backend=pool),
        evaluation=EvaluationSpec(rule="exact", args={"answer": "yes"}),
    )


async def raised(bus: Bus) -> list[Alarm]:
    return [alarm async for alarm in alarms(bus)]


async def some(crew: Any) -> list[Alarm]:
    async def found() -> list[Alarm]:
        return await raised(crew.bus)

    result: list[Alarm] = await crew.until(found)
    return result


async def test_rollouts_that_nobody_can_take_raise_one_alarm_that_says_the_fix(crew: Any) -> None:
    for index in range(3):
        await crew.start(task("bubblewrap", 3), index)
    await crew.start(task(OWN, name="u"))
    await crew.start(task("local", name="v"))
    async with offering(crew.bus, "local"), controlling(crew.bus, 2):
        (alarm,) = await some(crew)
        await asyncio.sleep(LEASE_S)
        assert await raised(crew.bus) == [alarm]
    assert (alarm.run, alarm.kind, alarm.rollouts) == ("r", "no_worker", 4)
    assert alarm.message == (
        f"4 rollouts wait for a sandbox backend that no worker has offered for 0.5 s: bubblewrap (3), {OWN} (1)"
    )
    assert f'"bubblewrap", "{OWN}" to `[worker] backends` in rollyard.toml' in alarm.hint
    status = await run_status(crew.bus, "r")
    assert status.alarms == ("no_worker",)


async def test_no_alarm_for_a_backend_that_is_offered_or_for_what_was_cancelled(crew: Any) -> None:
    await crew.start(task("local"))
    await crew.start(task("bubblewrap", name="cancelled"))
    key = subjects.cancel_key("r", "cancelled")
    await Bucket[Cancel](crew.bus, subjects.CANCEL, Cancel).put(key, Cancel(reason="enough"))
    async with offering(crew.bus, "local"), controlling(crew.bus):
        await asyncio.sleep(LEASE_S * 5)
        assert await raised(crew.bus) == []


async def test_rollouts_taken_from_a_dead_place_to_a_backend_that_nobody_offers_are_told_too(crew: Any) -> None:
    ref = SandboxRef(backend="docker", place="gone", handle="x")
    await crew.start(task("docker"), position="run", place="gone", sandbox=ref)
    async with controlling(crew.bus):
        (alarm,) = await some(crew)
    assert alarm.message.endswith("docker (1)")


async def test_time_without_a_bus_counts_against_no_worker(crew: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    await crew.start(task("docker"))
    real, looks = crew.bus.api, 0

    async def api(call: str, body: Any = None) -> Any:
        nonlocal looks
        if call == "INFO":
            looks += 1
            if looks % 4 == 0:
                raise BusError("no answer")
        return await real(call, body)

    monkeypatch.setattr(crew.bus, "api", api)
    async with controlling(crew.bus):
        await asyncio.sleep(LEASE_S * 4)
        assert await raised(crew.bus) == []
        monkeypatch.setattr(crew.bus, "api", real)
        await some(crew)


async def test_a_look_tells_living_pools_from_dead_ones_without_waiting(crew: Any) -> None:
    bus = crew.bus
    async with offering(bus, "local"):
        async with offering(bus, "local"), offering(bus, OWN):
            assert await living_pools(bus) == {"local", subjects.token(OWN)}
        await asyncio.sleep(LEASE_S * 2)  # the two others are gone, without a word
        await bus.publish(subjects.kv_subject(subjects.POOLS, "broken"), b"\x81broken")
        assert await living_pools(bus) == {"local"}
        assert await not_offered(bus, {"local", "docker", OWN}) == ["docker", OWN]
    assert await not_offered(bus, set()) == []


async def test_a_worker_that_comes_within_the_wait_is_seen(crew: Any) -> None:
    looking = asyncio.create_task(not_offered(crew.bus, {"local"}, wait_s=30.0))
    await asyncio.sleep(0.3)
    async with offering(crew.bus, "local"):
        assert await looking == []


async def test_status_and_doctor_say_which_backend_rollouts_wait_for(crew: Any) -> None:
    for index in range(2):
        await crew.start(task(OWN, 2), index)
    await crew.start(task("local", name="v"))
    config = Config(nats=NatsConfig(url=crew.config.nats.url))
    async with offering(crew.bus, "local"):
        status = await run_status(crew.bus, "r")
        assert status.no_worker == await unserved(crew.bus) == {OWN: 2}
        assert f"waiting for a worker with the backend {OWN}: 2" in render_status(status, None, 0.0, None)
        finding = await workers(config)
        assert (finding.status, finding.found) == (
            "warn",
            f"rollouts wait for sandbox backends that no worker offers: {OWN} (2)",
        )
        assert "[worker] backends" in finding.mend
        async with offering(crew.bus, OWN):
            status = await run_status(crew.bus, "r")
            assert (status.no_worker, (await workers(config)).status) == ({}, "ok")
            assert "for a worker" not in render_status(status, None, 0.0, None)


async def test_workers_that_are_too_old_to_tell_are_not_called_missing(crew: Any) -> None:
    await crew.start(task("local"))
    await crew.bus.api("STREAM.DELETE.KV_pools")
    assert (await living_pools(crew.bus), await not_offered(crew.bus, {"local"})) == (None, [])
    assert (await run_status(crew.bus, "r")).no_worker == {}


async def test_init_workers_offer_their_backends_and_other_workers_none(crew: Any) -> None:
    async with crew.at_work("run", "eval"):
        await asyncio.sleep(0.5)
        assert await living_pools(crew.bus) == set()
    async with crew.at_work("init"):

        async def offered() -> bool:
            return await living_pools(crew.bus) == {"local", "none"}

        await crew.until(offered)


async def test_the_shell_warns_and_the_task_goes_on_once_a_worker_offers_its_backend(
    crew: Any, nats: EmbeddedNats, tmp_path: Path
) -> None:
    """Processes: no worker for `none`, then one by the variable that README names, killed by -9 at the end."""
    environment = os.environ | {
        "ROLLYARD__NATS__URL": nats.url,
        "ROLLYARD__STORE__DATA": str(tmp_path),
        "ROLLYARD__STORE__BLOBS": str(tmp_path / "blobs"),
        "ROLLYARD__WORKER__LEASE_S": "2",
    }

    async def start(*arguments: str, **changes: str) -> asyncio.subprocess.Process:
        command = (sys.executable, "-m", "rollyard", *arguments)
        return await asyncio.create_subprocess_exec(
            *command, cwd=tmp_path, stdout=-1, stderr=-1, env=environment | changes
        )

    async def said_by(*arguments: str) -> tuple[int | None, str, str]:
        out, said = await (process := await start(*arguments)).communicate()
        return process.returncode, out.decode(), said.decode()

    async def submit(name: str) -> tuple[int | None, str]:
        line = {
            "id": name,
            "prompt": "p",
            "agent": {"harness": "noop", "args": {"answer": "yes"}},
            "sandbox": {"backend": "none"},
            "evaluation": {"rule": "exact", "args": {"answer": "yes"}},
        }
        (tmp_path / "tasks.jsonl").write_text(json.dumps(line))
        code, _, said = await said_by("submit", "tasks.jsonl", "--run", "r")
        return code, said

    admit = await start("worker", "--stages", "admit,aggregate")
    controller = await start("controller")
    running: Sequence[asyncio.subprocess.Process] = (admit, controller)
    try:
        code, said = await submit("one")
        assert code == 0
        assert said.startswith("warning: no worker offers the sandbox backend none now, so tasks with it wait\n  fix: ")
        (alarm,) = await some(crew)
        assert (alarm.kind, alarm.rollouts) == ("no_worker", 1)
        _, shown, _ = await said_by("status", "--run", "r")
        assert "waiting for a worker with the backend none: 1, ALARM no_worker: see `rollyard alarms`" in shown
        worker = await start("worker", "--stages", "init,run,eval", ROLLYARD__WORKER__BACKENDS="none,local")
        running = (*running, worker)

        async def delivered() -> list[Any]:
            found: list[Any] = await crew.deliveries()
            return found

        (delivery,) = await crew.until(delivered)
        assert delivery.status == "completed"
        assert await submit("two") == (0, "")
        worker.send_signal(signal.SIGKILL)
        await asyncio.sleep(2.5)
        code, said = await submit("three")
        assert said.startswith("warning: no worker offers the sandbox backend none now")
    finally:
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.communicate()


@given(st.lists(st.tuples(st.floats(0, 10), st.booleans(), st.booleans()), max_size=30))
def test_a_pool_is_due_after_an_unbroken_absence_and_not_before(looks: list[tuple[float, bool, bool]]) -> None:
    absences, now_s, absent_s = Absences(5.0), 0.0, None
    for step_s, wanted, alive in looks:
        now_s += step_s
        absent_s = (now_s if absent_s is None else absent_s) if wanted and not alive else None
        due = absences.due(["p"] if wanted else [], lambda _, alive=alive: alive, now_s)  # type: ignore[misc]
        assert due == ({"p"} if absent_s is not None and now_s - absent_s > 5.0 else set())
