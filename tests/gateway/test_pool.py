from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import pytest

from rollyard.gateway.breaker import FAILURES_TO_OPEN
from rollyard.gateway.engines.engine import EngineChunk, EngineRequest, Probe
from rollyard.gateway.pool import OutOfService, PoolEntry, ServerPool
from rollyard.gateway.refusal import Refusal
from rollyard.pipeline.bus import Bus
from rollyard.pipeline.llm_servers import LlmServers
from rollyard.schemas.errors import ConfigError, Conflict, ModelError
from rollyard.schemas.fleet import LlmServer


class Switches:
    """An engine whose servers are well or not as the test says."""

    modes: ClassVar[frozenset[str]] = frozenset({"capture", "tokens"})

    def __init__(self) -> None:
        self.trouble: dict[str, str] = {}
        self.untrainable: set[str] = set()

    async def probe(self, server: LlmServer) -> Probe:
        if why := self.trouble.get(server.server_id):
            raise ModelError(why)
        trainable = server.server_id not in self.untrainable
        return Probe(trainable=trainable, reason="" if trainable else "it returns no ids")

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineChunk, None]:
        yield EngineChunk()

    async def count(self, server: LlmServer, *_: Any) -> int | None:
        return None


class Yard:
    """A pool that follows its bucket."""

    def __init__(self, bus: Bus) -> None:
        self.engine = Switches()
        self.pool = ServerPool(bus, {"vllm": self.engine})
        self.servers = LlmServers(bus)

    async def add(self, server_id: str, **fields: Any) -> PoolEntry:
        """Register a server; returns when the pool has taken it in, healthy if it is well."""
        server = LlmServer(**{"server_id": server_id, "url": f"http://{server_id}", "engine": "vllm", **fields})
        await self.known(await self.servers.add(server))
        [entry] = [entry for entry in self.pool.entries() if entry.server.server_id == server_id]
        if server_id not in self.engine.trouble:
            await until(lambda: entry.healthy)
        return entry

    async def known(self, revision: int) -> None:
        await until(lambda: self.pool.revision >= revision)

    async def change(self, server_id: str, **fields: Any) -> None:
        _, revision = await self.servers.change(server_id, **fields)
        await self.known(revision)

    def pick(self, session: str = "session", model: str = "default", **more: Any) -> str:
        return self.pool.pick(model, session, **{"training": True, **more}).server.server_id


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - what is waited for happens in the bus
        await asyncio.sleep(0.005)


@asynccontextmanager
async def following(yard: Yard) -> AsyncIterator[None]:
    task = asyncio.create_task(yard.pool.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


@pytest.fixture
async def yard(bus: Bus) -> AsyncIterator[Yard]:
    yard = Yard(bus)
    async with following(yard):
        yield yard


def call_fails(yard: Yard, entry: PoolEntry, status: int) -> None:
    with pytest.raises(ModelError), yard.pool.busy(entry):
        raise ModelError("it broke", status=status)


async def test_calls_go_where_the_least_tokens_are(yard: Yard) -> None:
    for server in ("a", "b"):
        await yard.add(server)
    entries = {entry.server.server_id: entry for entry in yard.pool.entries()}
    home = yard.pick()
    assert {yard.pick() for _ in range(10)} == {home}
    other = "b" if home == "a" else "a"
    with yard.pool.busy(entries[home], 10_000):
        assert yard.pick(tokens=100) == other
        with yard.pool.busy(entries[other], 50_000):
            assert yard.pick(tokens=100) == home
        assert [(view.server_id, view.calls) for view in yard.pool.view() if view.calls] == [(home, 1)]
    assert yard.pick(tokens=100) == home
    assert [entry.tokens for entry in yard.pool.entries()] == [0, 0]


async def test_a_model_has_aliases(yard: Yard) -> None:
    await yard.add("a", model="qwen", aliases=("policy", "student"))
    await yard.add("b", model="judge")
    assert (yard.pick(model="qwen"), yard.pick(model="student"), yard.pick(model="judge")) == ("a", "a", "b")
    with pytest.raises(Refusal, match="no server for model 'gpt-5' is registered; known models: judge, qwen") as caught:
        yard.pick(model="gpt-5")
    assert (caught.value.status, caught.value.retry_after_s) == (503, 1)


async def test_mode_and_servers_that_were_tried_narrow_the_choice(yard: Yard) -> None:
    await yard.add("a", mode="tokens", tokenizer="t")
    await yard.add("b")
    assert (yard.pick(mode="tokens"), yard.pick(mode="capture"), yard.pick(without={"a"})) == ("a", "b", "b")
    with pytest.raises(Refusal, match="is healthy"):
        yard.pick(without={"a", "b"})


async def test_training_needs_ids(yard: Yard) -> None:
    yard.engine.untrainable.add("a")
    await yard.add("a")
    with pytest.raises(Refusal, match="a cannot be used for training: it returns no ids") as caught:
        yard.pick()
    assert caught.value.status == 400
    assert yard.pick(training=False) == "a"
    yard.engine.trouble["b"] = "it loads"
    await yard.add("b")
    with pytest.raises(Refusal, match="b: it loads") as caught:
        yard.pick()
    assert caught.value.status == 503  # b may be fit for training, once it answers


async def test_a_server_that_cannot_be_reached_comes_back_after_a_probe(yard: Yard) -> None:
    entry = await yard.add("a")
    yard.engine.trouble["a"] = "connection refused"
    yard.pool.suspect(entry, "it broke off")
    with pytest.raises(Refusal, match="a: it broke off"):
        yard.pick()
    await until(lambda: entry.trouble == "connection refused")
    del yard.engine.trouble["a"]
    await until(lambda: entry.healthy)
    assert (entry.trouble, yard.pick()) == ("", "a")


async def test_a_server_that_fails_calls_is_left_alone_and_tried_with_one_call(yard: Yard) -> None:
    entry = await yard.add("a")
    for _ in range(FAILURES_TO_OPEN):
        yard.pick()
        call_fails(yard, entry, 500)
    with pytest.raises(Refusal, match="too many calls in a row failed, the last one so: it broke") as caught:
        yard.pick()
    assert (caught.value.status, caught.value.retry_after_s) == (503, 1)
    assert not isinstance(caught.value, OutOfService)
    assert [view.healthy for view in yard.pool.view()] == [False]

    await until(lambda: entry.breaker.allows(asyncio.get_running_loop().time()))
    with yard.pool.busy(entry):
        with pytest.raises(OutOfService, match="on trial"), yard.pool.busy(entry):
            pytest.fail("a second call went")
        with pytest.raises(Refusal):
            yard.pick()
    assert (yard.pick(), entry.trouble) == ("a", "")


async def test_what_is_not_the_servers_fault_does_not_count(yard: Yard) -> None:
    entry = await yard.add("a")
    for status in (400, 429):
        for _ in range(2 * FAILURES_TO_OPEN):
            call_fails(yard, entry, status)
    for _ in range(2 * FAILURES_TO_OPEN):
        with pytest.raises(asyncio.CancelledError), yard.pool.busy(entry):
            raise asyncio.CancelledError
    assert yard.pick() == "a"


async def test_servers_out_of_service_get_no_calls(yard: Yard) -> None:
    one, two = await yard.add("a"), await yard.add("b")
    await yard.change("a", state="draining", note="update to version 3")
    assert {yard.pick(f"session {number}") for number in range(20)} == {"b"}
    await yard.change("b", state="paused")
    with pytest.raises(OutOfService, match=r"a is draining \(update to version 3\); b is paused") as caught:
        yard.pick()
    assert caught.value.headers() == {"Retry-After": "5"}
    # The probe still holds: nothing about the place has changed.
    assert [entry for entry in yard.pool.entries() if entry.healthy] == [one, two]


async def test_a_call_that_was_sent_to_a_server_just_taken_out_is_turned_back(yard: Yard) -> None:
    entry = await yard.add("a")
    picked = yard.pool.pick("default", "session", training=True)
    await yard.change("a", state="paused")
    with pytest.raises(OutOfService, match="a is paused"), yard.pool.busy(picked):
        pytest.fail("the call went")
    assert entry.calls == 0
    await yard.change("a", state="serving")
    with yard.pool.busy(picked):
        assert [view.calls for view in yard.pool.view()] == [1]
        await yard.servers.remove("a")
        await until(lambda: not yard.pool.entries())
        assert [(view.server_id, view.calls) for view in yard.pool.view()] == [("a", 1)]
    assert yard.pool.view() == ()
    with pytest.raises(OutOfService, match="a is gone"), yard.pool.busy(picked):
        pytest.fail("the call went")


async def test_a_call_waits_for_a_server_that_is_paused(yard: Yard) -> None:
    await yard.add("a")
    await yard.change("a", state="paused")
    waiting = asyncio.create_task(yard.pool.choose("default", "session", training=True, wait_s=60))
    await asyncio.sleep(0)
    await yard.change("a", state="swapping")
    assert not waiting.done()
    await yard.change("a", state="serving", policy_version=4)
    assert (await waiting).server.policy_version == 4


async def test_a_call_that_waited_long_enough_is_refused(yard: Yard) -> None:
    await yard.add("a")
    await yard.change("a", state="draining")
    with pytest.raises(OutOfService, match="a is draining"):
        await yard.pool.choose("default", "session", training=True, wait_s=0.01)
    with pytest.raises(Refusal, match="is registered"):
        await yard.pool.choose("other", "session", training=True, wait_s=60)


async def test_an_entry_is_added_changed_and_removed(bus: Bus) -> None:
    servers = LlmServers(bus)
    server = LlmServer(server_id="host:1", url="http://host", engine="vllm", policy_version=3)
    await servers.add(server)
    await servers.add(LlmServer(server_id="host:1", url="http://host:2", engine="vllm"))
    entry, _ = await servers.get("host:1")
    assert (entry.url, entry.policy_version) == ("http://host:2", 3)
    await servers.pause("host:1")
    assert (await servers.get("host:1"))[0].state == "paused"
    await servers.change("host:1", update="u1", state="swapping", note="loads version 4")
    with pytest.raises(Conflict, match="changed by somebody else"):
        await servers.change("host:1", held_by="u2", state="serving")
    with pytest.raises(ConfigError, match="in the middle of a weight update: loads version 4"):
        await servers.resume("host:1")
    await servers.change("host:1", held_by="u1", state="draining")
    await servers.resume("host:1")
    entry, _ = await servers.get("host:1")
    assert (entry.state, entry.update, entry.note) == ("serving", "", "")
    await servers.remove("host:1")
    assert await servers.all() == []
    for change in (servers.remove("host:1"), servers.pause("host:1"), servers.get("host:1")):
        with pytest.raises(ConfigError, match=r"no server 'host:1' is in the pool \(`rollyard llm ls`"):
            await change
    with pytest.raises(ConfigError, match="1 to 256 characters"):
        await servers.get("")
