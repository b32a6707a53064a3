"""Weight updates: real HTTP servers, gateways on connections of their own, and a trainer that asks."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from typing import Any

import pytest

from rollyard.gateway.pool import OutOfService
from rollyard.pipeline.client import Client
from rollyard.schemas.errors import BusError, ConfigError, WaitTimeout
from rollyard.schemas.weights import WeightProgress

PATH = "/checkpoints/5"


@pytest.fixture
def trainer(bus: Any) -> Client:
    return Client(bus, "run")


async def test_servers_are_drained_one_after_the_other_and_their_calls_finish(fleet: Any, trainer: Client) -> None:
    await fleet.server("s1")
    await fleet.server("s2")
    one, two = await fleet.gateway(), await fleet.gateway()
    call = asyncio.create_task(two.call_at(two.entry("s1")))
    await fleet.until(lambda: two.entry("s1").calls)
    steps: list[WeightProgress] = []
    update = asyncio.create_task(trainer.update_weights(5, checkpoint=PATH, told=steps.append))

    await fleet.until(lambda: any(step.calls == 1 and "gateway gw-1: 1 call runs" in step.detail for step in steps))
    assert await fleet.states() == {"s1": ("draining", 0), "s2": ("serving", 0)}
    entry, _ = await fleet.pool.get("s1")
    assert entry.note == "update to version 5"
    assert {one.pool.pick("default", f"{number}", training=True).server.server_id for number in range(20)} == {"s2"}
    assert fleet.servers["s1"].said == []
    fleet.servers["s1"].end_calls()

    assert await call == {"began": "0", "ended": "0", "server": "s1"}
    report = await update
    assert [(done.server_id, done.step, done.policy_version, done.serving) for done in report.servers] == [
        ("s1", "done", 5, True),
        ("s2", "done", 5, True),
    ]
    assert report.failed == ()
    assert await fleet.states() == {"s1": ("serving", 5), "s2": ("serving", 5)}
    assert [server.said for server in fleet.servers.values()] == [[f"load {PATH} 5"]] * 2
    assert {step.step for step in steps} == {"waiting", "loading", "done"}


async def test_abort_cuts_calls_short_and_they_go_on_after_it(fleet: Any, trainer: Client) -> None:
    await fleet.server("s1")
    gateway = await fleet.gateway()
    server = fleet.servers["s1"]
    server.may_load.clear()
    first = asyncio.create_task(gateway.call())
    await fleet.until(lambda: gateway.entry("s1").calls)
    update = asyncio.create_task(trainer.update_weights(5, checkpoint=PATH, how="abort"))
    assert (await first)["ended"] == "0"
    second = asyncio.create_task(gateway.call())
    await server.loads.wait()
    assert (await fleet.states(), second.done()) == ({"s1": ("swapping", 0)}, False)
    server.may_load.set()
    assert (await update).failed == ()
    await fleet.until(lambda: gateway.entry("s1").calls)
    server.end_calls()
    assert (await second)["began"] == "5"
    assert server.said == ["abort", f"load {PATH} 5", "resume"]


async def test_pause_does_not_wait_for_calls_but_the_server_does(fleet: Any, trainer: Client) -> None:
    await fleet.server("s1")
    gateway = await fleet.gateway()
    call = asyncio.create_task(gateway.call())
    await fleet.until(lambda: gateway.entry("s1").calls)
    report = await trainer.update_weights(5, how="pause")
    assert [done.step for done in report.servers] == ["done"]
    assert fleet.servers["s1"].said == ["pause", "mark 5", "resume"]
    fleet.servers["s1"].end_calls()
    assert await call == {"began": "0", "ended": "5", "server": "s1"}


async def test_all_at_once(fleet: Any, trainer: Client) -> None:
    for name in ("s1", "s2"):
        await fleet.server(name)
        fleet.servers[name].may_load.clear()
    gateway = await fleet.gateway()
    update = asyncio.create_task(trainer.update_weights(5, checkpoint=PATH, rolling=False))
    for server in fleet.servers.values():
        await server.loads.wait()
    await fleet.until(lambda: not any(entry.serving for entry in gateway.pool.entries()))
    with pytest.raises(OutOfService, match=r"s1 is swapping \(loads version 5\); s2 is swapping"):
        gateway.pool.pick("default", "session", training=True)
    for server in fleet.servers.values():
        server.may_load.set()
    assert (await update).failed == ()


@pytest.mark.parametrize(("how", "path"), [("drain", "load"), ("abort", "load"), ("pause", "pause")])
async def test_a_server_that_refuses_goes_on_as_it_was(fleet: Any, trainer: Client, how: Any, path: str) -> None:
    for name in ("s1", "s2"):
        await fleet.server(name)
    gateway = await fleet.gateway()
    fleet.servers["s1"].answers[path] = 400
    report = await trainer.update_weights(5, checkpoint=PATH, how=how)
    [failed] = report.failed
    assert (failed.server_id, failed.step, failed.serving, failed.policy_version) == ("s1", "failed", True, 0)
    assert failed.detail == f"{path} answered 400; it goes on with the weights that it had"
    assert await fleet.states() == {"s1": ("serving", 0), "s2": ("serving", 5)}
    await fleet.until(lambda: all(entry.serving for entry in gateway.pool.entries()))
    assert fleet.servers["s1"].said[-1:] == (["resume"] if how != "drain" else [f"load {PATH} 5"])


async def test_a_server_that_cannot_be_resumed_stays_out_until_the_update_is_repeated(
    fleet: Any, trainer: Client
) -> None:
    await fleet.server("s1")
    await fleet.gateway()
    server = fleet.servers["s1"]
    server.answers["resume"] = 400
    [failed] = (await trainer.update_weights(5, how="abort")).failed
    assert failed.detail == "resume answered 400; it has the new weights, and stays out of service"
    assert await fleet.states() == {"s1": ("swapping", 5)}
    assert (await trainer.update_weights(5, how="abort")).failed == ()
    server.answers |= {"pause": 500, "resume": 500}
    [failed] = (await trainer.update_weights(6, how="pause")).failed
    assert "pause answered 500; it could not be resumed either, and stays out of service" in failed.detail
    assert await fleet.states() == {"s1": ("paused", 5)}
    assert (await trainer.update_weights(6, how="pause")).failed == ()
    assert await fleet.states() == {"s1": ("serving", 6)}


async def test_a_server_that_fails_while_it_loads_stays_out_until_the_update_is_repeated(
    fleet: Any, trainer: Client
) -> None:
    for name in ("s1", "s2"):
        await fleet.server(name)
    await fleet.gateway()
    fleet.servers["s1"].answers["load"] = 500
    [failed] = (await trainer.update_weights(5, checkpoint=PATH)).failed
    assert "load answered 500; which weights it has is not known, so it stays out of service" in failed.detail
    assert await fleet.states() == {"s1": ("swapping", None), "s2": ("serving", 5)}
    entry, _ = await fleet.pool.get("s1")
    assert entry.note == "the update to version 5 failed: load answered 500"
    with pytest.raises(ConfigError, match="repeat the update"):
        await trainer.resume_server("s1")

    report = await trainer.update_weights(5, checkpoint=PATH)
    assert [(done.step, done.detail) for done in report.servers] == [
        ("done", ""),
        ("done", "it serves this version already"),
    ]
    assert await fleet.states() == {"s1": ("serving", 5), "s2": ("serving", 5)}
    assert len(fleet.servers["s2"].said) == 1


async def test_a_second_update_takes_over_and_the_first_one_lets_go(fleet: Any, trainer: Client) -> None:
    await fleet.server("s1")
    await fleet.gateway()
    server = fleet.servers["s1"]
    server.may_load.clear()
    first = asyncio.create_task(trainer.update_weights(5, checkpoint=PATH))
    await server.loads.wait()
    second = asyncio.create_task(trainer.update_weights(6, checkpoint=PATH))
    await fleet.until(lambda: len(server.said) == 2)
    server.may_load.set()
    [failed] = (await first).failed
    assert not failed.serving
    assert (await second).failed == ()
    assert await fleet.states() == {"s1": ("serving", 6)}


async def test_a_server_that_bears_another_version_stays_out(fleet: Any, trainer: Client) -> None:
    await fleet.server("s1")
    await fleet.gateway()
    fleet.servers["s1"].bears = "latest"
    [failed] = (await trainer.update_weights(5, checkpoint=PATH)).failed
    assert "server s1 says that it serves version 'latest', not 5" in failed.detail
    assert await fleet.states() == {"s1": ("swapping", None)}


async def test_calls_that_do_not_end_in_time_leave_the_server_as_it_was(fleet: Any, trainer: Client) -> None:
    await fleet.server("s1")
    gateway = await fleet.gateway()
    call = asyncio.create_task(gateway.call())
    await fleet.until(lambda: gateway.entry("s1").calls)
    [failed] = (await trainer.update_weights(5, checkpoint=PATH, timeout_s=0.2)).failed
    assert "server s1, after 0.2 s: gateway gw-0: 1 call runs; it goes on with the weights" in failed.detail
    assert failed.hint == "give it more time"
    assert await fleet.states() == {"s1": ("serving", 0)}
    with pytest.raises(WaitTimeout, match="1 call runs"):
        await trainer.drain_server("s1", timeout_s=0.1)
    assert await fleet.states() == {"s1": ("draining", 0)}
    fleet.servers["s1"].end_calls()
    await trainer.drain_server("s1")
    await call
    await trainer.resume_server("s1")
    assert await fleet.states() == {"s1": ("serving", 0)}


async def test_a_gateway_that_stops_in_the_middle_is_told_and_another_one_mends_it(fleet: Any, trainer: Client) -> None:
    await fleet.server("s1")
    gateway = await fleet.gateway(lease_s=1.0)
    server = fleet.servers["s1"]
    server.may_load.clear()
    update = asyncio.create_task(trainer.update_weights(5, checkpoint=PATH, how="abort"))
    await server.loads.wait()
    await gateway.stop()
    with pytest.raises(BusError, match=r"the gateway at work stopped \(repeat the same update"):
        await update
    assert await fleet.states() == {"s1": ("swapping", 0)}
    [entry] = await trainer.servers()
    assert entry.note == "loads version 5"
    with pytest.raises(BusError, match="no gateway runs"):
        await trainer.update_weights(5)

    server.may_load.set()
    await fleet.gateway()
    steps: list[WeightProgress] = []
    # The lease of the first gateway was not given back: until it has run out, that one might still send calls.
    assert (await trainer.update_weights(5, checkpoint=PATH, how="abort", told=steps.append)).failed == ()
    assert any("gateway gw-0: it does not answer" in step.detail for step in steps)
    assert await fleet.states() == {"s1": ("serving", 5)}


async def test_a_gateway_that_does_not_answer_is_waited_for_as_long_as_its_lease(fleet: Any, trainer: Client) -> None:
    await fleet.server("s1")
    await fleet.gateway()
    await fleet.gateway(silent=True, lease_s=1.5)
    steps: list[WeightProgress] = []
    report = await trainer.update_weights(5, told=steps.append)
    assert report.failed == ()
    assert any("it does not answer" in step.detail for step in steps)


async def test_what_cannot_be_asked_for(fleet: Any, trainer: Client) -> None:
    await fleet.server("s1")
    await fleet.gateway()
    with pytest.raises(BusError, match="no server of model 'judge' is in the pool"):
        await trainer.update_weights(5, model="judge")
    [failed] = (await trainer.update_weights(5, servers=["s9"])).failed
    assert "no server 's9' is in the pool" in failed.detail
    with pytest.raises(ConfigError, match="a policy version is an integer"):
        await trainer.update_weights(-1)
    await trainer.add_server(server_id="ext", url="http://127.0.0.1:1", engine="openai", model="ext")
    [failed] = (await trainer.update_weights(5, model="ext")).failed
    assert failed.detail == "weights of an openai server cannot be updated"
    for wrong in ({}, {"server_id": "x", "colour": "red"}, {"server_id": "x", "url": "u", "engine": "abacus"}):
        with pytest.raises(ConfigError):
            await trainer.add_server(**wrong)


async def test_a_server_is_swapped_for_another_one(fleet: Any, trainer: Client) -> None:
    await fleet.server("old")
    gateway = await fleet.gateway()
    call = asyncio.create_task(gateway.call())
    await fleet.until(lambda: gateway.entry("old").calls)
    new = await fleet.server("new", register=False)
    swap = asyncio.create_task(trainer.swap_server("old", new))
    await fleet.until_state("old", "draining")
    assert (await fleet.states())["new"] == ("serving", 0)
    assert gateway.pool.pick("default", "session", training=True).server.server_id == "new"
    fleet.servers["old"].end_calls()
    await swap
    assert (await call)["server"] == "old"
    assert await fleet.states() == {"new": ("serving", 0)}
    with pytest.raises(ConfigError, match="'new' is in the pool already"):
        await trainer.swap_server("new", new)
    with pytest.raises(ConfigError, match="no server 'old' is in the pool"):
        await trainer.swap_server("old", new)


async def test_a_new_server_that_does_not_answer_replaces_nothing(fleet: Any, trainer: Client) -> None:
    server = await fleet.server("old")
    await fleet.gateway()
    bad = type(server)(server_id="bad", url="http://127.0.0.1:1", engine="vllm")
    with pytest.raises(WaitTimeout, match=r"server bad, after 0\.5 s: gateway gw-0: .*127\.0\.0\.1:1"):
        await trainer.swap_server("old", bad, timeout_s=0.5)
    assert await fleet.states() == {"old": ("serving", 0)}


async def test_from_the_command_line(fleet: Any) -> None:
    for name in ("s1", "s2"):
        await fleet.server(name)
    await fleet.gateway()
    env = os.environ | {"ROLLYARD__NATS__URL": fleet.nats_url}

    async def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "rollyard", "llm", *arguments]
        return await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, env=env, check=False)

    fleet.servers["s1"].answers["load"] = 500
    update = ("update", "--version", "5", "--checkpoint", PATH, "--how", "abort")
    done = await run(*update)
    assert (done.returncode, done.stdout) == (1, "1 of 2 servers serve version 5.\n")
    assert "s1: failed - load answered 500; which weights it has is not known" in done.stderr
    assert "s2: done\n" in done.stderr
    listed = (await run("ls")).stdout
    assert re.search(r"^s1 .* swapping +ok, 0 calls$", listed, re.MULTILINE)
    assert re.search(r"^s2 .* 5 +serving +ok, 0 calls$", listed, re.MULTILINE)
    assert "s1: the update to version 5 failed: load answered 500\n" in listed
    refused = await run("resume", "s1")
    assert (refused.returncode, "repeat the update" in refused.stderr) == (2, True)
    assert (await run(*update, "--at-once", "s1", "s2")).returncode == 0
    new = await fleet.server("s3", register=False)
    added = await run("add", new.url, "--engine", "vllm", "--id", "s3", "--policy-version", "5", "--replaces", "s1")
    assert added.stdout == f"s3 serves 'default' from {new.url} in place of s1.\n"
    assert await fleet.states() == {"s2": ("serving", 5), "s3": ("serving", 5)}
