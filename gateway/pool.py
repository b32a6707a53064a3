"""The model servers that calls go to: who is there, who is healthy, and which one a session is sent to."""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import structlog

from rollyard.gateway.engines.engine import Engine, Probe
from rollyard.gateway.refusal import Refusal, unavailable
from rollyard.pipeline.bus import Bus
from rollyard.pipeline.kv import Bucket
from rollyard.schemas import subjects
from rollyard.schemas.errors import ModelError
from rollyard.schemas.fleet import LlmServer

log = structlog.get_logger(__name__)

LOAD_BOUND: Final = 1.25
PROBE_TIMEOUT_S: Final = 60.0
PROBE_MIN_S: Final = 0.25
PROBE_MAX_S: Final = 10.0


class PoolEntry:
    """A server and what this gateway found out about it."""

    def __init__(self, server: LlmServer) -> None:
        self.server = server
        self.probe: Probe | None = None
        self.healthy = False
        self.outstanding = 0
        self.suspected = asyncio.Event()
        self.trouble = "it was not probed yet"

    @property
    def trainable(self) -> bool:
        """Whether its ids can be trained on."""
        return self.server.trainable and self.probe is not None and self.probe.trainable

    @property
    def max_context(self) -> int:
        """Tokens of prompt and reply together; 0: not known."""
        return self.server.max_context or (self.probe.max_context if self.probe else 0)

    def same_place(self, server: LlmServer) -> bool:
        """Whether a new value of the bucket means the same server, so that the probe still holds."""
        keys = ("url", "engine", "model", "upstream_model", "mode", "tokenizer", "api_key_env")
        return all(getattr(self.server, key) == getattr(server, key) for key in keys)


class ServerPool:
    """Follows the `llm_servers` bucket and probes what it finds there. `run()` must be running."""

    def __init__(self, bus: Bus, engines: Mapping[str, Engine]) -> None:
        self._bucket: Bucket[LlmServer] = Bucket(bus, subjects.LLM_SERVERS, LlmServer)
        self._engines = engines
        self._entries: dict[str, PoolEntry] = {}
        self._watchers: dict[str, asyncio.Task[None]] = {}

    def entries(self) -> list[PoolEntry]:
        """Every server that is registered."""
        return list(self._entries.values())

    async def run(self) -> None:
        """Follow the bucket until cancelled."""
        async with asyncio.TaskGroup() as group:
            async for key, server, _ in self._bucket.watch():
                if key:
                    self._changed(key, server, group)

    def _changed(self, key: str, server: LlmServer | None, group: asyncio.TaskGroup) -> None:
        entry = self._entries.get(key)
        if entry is not None and server is not None and entry.same_place(server):
            entry.server = server
            return
        if key in self._watchers:
            self._watchers.pop(key).cancel()
            del self._entries[key]
        if server is not None:
            entry = self._entries[key] = PoolEntry(server)
            self._watchers[key] = group.create_task(self._keep_probed(entry))

    async def _keep_probed(self, entry: PoolEntry) -> None:
        """Probe until the server is healthy, and again whenever a call could not reach it."""
        pause_s = PROBE_MIN_S
        while True:
            try:
                async with asyncio.timeout(PROBE_TIMEOUT_S):
                    entry.probe = await self._probe(entry.server)
            except Exception as error:  # noqa: BLE001 - whatever a foreign server answers, the pool goes on
                entry.trouble = str(error) or type(error).__name__
                log.info("server_not_healthy", server=entry.server.server_id, error=entry.trouble)
                await asyncio.sleep(pause_s * random.uniform(0.7, 1.3))
                pause_s = min(pause_s * 2, PROBE_MAX_S)
                continue
            pause_s = PROBE_MIN_S
            entry.suspected.clear()
            entry.healthy = True
            if not entry.probe.trainable:
                log.warning("server_not_trainable", server=entry.server.server_id, reason=entry.probe.reason)
            await entry.suspected.wait()

    async def _probe(self, server: LlmServer) -> Probe:
        engine = self._engines[server.engine]
        if server.mode not in engine.modes:
            raise ModelError(
                f"{server.engine} cannot be used in {server.mode} mode", hint=f"use {', '.join(sorted(engine.modes))}"
            )
        if server.mode == "tokens" and not server.tokenizer:
            raise ModelError("tokens mode needs a tokenizer", hint="set `tokenizer` of the server's entry")
        return await engine.probe(server)

    def suspect(self, entry: PoolEntry, why: str) -> None:
        """A call could not reach a server: send nothing there until a probe succeeds."""
        entry.healthy = False
        entry.trouble = why
        entry.suspected.set()

    @contextmanager
    def busy(self, entry: PoolEntry) -> Iterator[None]:
        """Count a call as outstanding at a server."""
        entry.outstanding += 1
        try:
            yield
        finally:
            entry.outstanding -= 1

    def pick(
        self, model: str, session: str, *, training: bool, mode: str | None = None, without: Collection[str] = ()
    ) -> PoolEntry:
        """The server that a session's next call goes to: its own, unless that one is overloaded.

        Raises Refusal: 503 when there is none now, 400 when none could ever be used for training.
        """
        serving = [entry for entry in self._entries.values() if entry.server.model == model]
        if not serving:
            known = ", ".join(sorted({entry.server.model for entry in self._entries.values()})) or "none"
            raise unavailable(f"no server for model {model!r} is registered; known models: {known}", code="no_server")
        healthy = [entry for entry in serving if entry.healthy]
        usable = [entry for entry in healthy if entry.trainable or not training]
        if healthy and not usable:
            entry = healthy[0]
            reason = entry.probe.reason if entry.probe and entry.probe.reason else "its entry says so"
            raise Refusal(
                400,
                "server_not_trainable",
                f"model server {entry.server.server_id} cannot be used for training: {reason}",
                hint="use a vLLM or llama.cpp server, or a run with training = false",
            )
        usable = [
            entry for entry in usable if entry.server.server_id not in without and mode in (None, entry.server.mode)
        ]
        if not usable:
            trouble = "; ".join(f"{entry.server.server_id}: {entry.trouble}" for entry in serving if not entry.healthy)
            raise unavailable(f"no server for model {model!r} is healthy: {trouble}", code="no_server")
        return rendezvous(session, usable)


def rendezvous(session: str, entries: list[PoolEntry]) -> PoolEntry:
    """Rendezvous hashing with bounded load: servers that come and go move few sessions, and none gets too much."""
    bound = math.ceil(LOAD_BOUND * (sum(entry.outstanding for entry in entries) + 1) / len(entries))
    ranked = sorted(entries, key=lambda entry: _weight(session, entry.server.server_id), reverse=True)
    for entry in ranked:
        if entry.outstanding < bound:
            return entry
    return min(ranked, key=lambda entry: entry.outstanding)


def _weight(session: str, server_id: str) -> bytes:
    return hashlib.blake2b(f"{session}\0{server_id}".encode(), digest_size=8).digest()
