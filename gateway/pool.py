"""The model servers that calls go to: who is there, who is healthy, and which one a session is sent to."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Final

import structlog

from rollyard.gateway import rendezvous
from rollyard.gateway.breaker import CircuitBreaker
from rollyard.gateway.engines.engine import Engine, LogprobKind, Probe
from rollyard.gateway.refusal import Refusal, unavailable, without_addresses
from rollyard.pipeline.bus import Bus
from rollyard.pipeline.kv import Bucket
from rollyard.schemas import subjects
from rollyard.schemas.errors import ModelError
from rollyard.schemas.fleet import LlmServer
from rollyard.schemas.weights import ServerView

log = structlog.get_logger(__name__)

Prepare = Callable[[LlmServer], Awaitable[str]]
"""Loads what a server in tokens mode needs, and gives the findings about its template. Raises ConfigError."""

HEALTH_WAIT_S: Final = 2.0
PROBE_TIMEOUT_S: Final = 60.0
PROBE_MIN_S: Final = 0.25
PROBE_MAX_S: Final = 10.0
PAUSE_WAIT_S: Final = 120.0
_RETRY_PAUSED_S: Final = 5


class OutOfService(Refusal):
    """No server takes the call now, but one that is out of service for a while would: 503 with Retry-After."""


class NotHealthy(Refusal):
    """No server is healthy, but they are looked at again and again: 503 with Retry-After."""


class PoolEntry:
    """A server and what this gateway found out about it."""

    def __init__(self, server: LlmServer) -> None:
        self.server = server
        self.probe: Probe | None = None
        self.healthy = False
        self.calls = 0
        self.tokens = 0
        self.breaker = CircuitBreaker()
        self.suspected = asyncio.Event()
        self.trouble = "it was not probed yet"
        self.template = ""

    @property
    def trainable(self) -> bool:
        """Whether its ids can be trained on."""
        return self.server.trainable and self.probe is not None and self.probe.trainable

    @property
    def serving(self) -> bool:
        """Whether its entry lets calls go there; weight updates take it out for a while."""
        return self.server.state == "serving"

    @property
    def max_context(self) -> int:
        """Tokens of prompt and reply together; 0: not known."""
        return self.server.max_context or (self.probe.max_context if self.probe else 0)

    @property
    def logprob_kind(self) -> LogprobKind:
        """What its logprobs mean: its entry's word, else what the probe found."""
        said = self.server.logprob_kind
        return said if said != "unknown" or self.probe is None else self.probe.logprob_kind

    def serves(self, model: str) -> bool:
        """Whether it is asked for under this name."""
        return model == self.server.model or model in self.server.aliases

    def same_place(self, server: LlmServer) -> bool:
        """Whether a new value of the bucket means the same server, so that the probe still holds."""
        keys = ("url", "engine", "model", "upstream_model", "mode", "tokenizer", "parser", "api_key_env")
        return all(getattr(self.server, key) == getattr(server, key) for key in keys)

    def out_of_service(self) -> str:
        """Why it takes no call, though it may be well."""
        return f"{self.server.server_id} is {self.server.state}" + (
            f" ({self.server.note})" if self.server.note else ""
        )


class ServerPool:
    """Follows the `llm_servers` bucket and probes what it finds there. `run()` must be running."""

    def __init__(self, bus: Bus, engines: Mapping[str, Engine], prepare: Prepare | None = None) -> None:
        self._prepare = prepare
        self.revision = 0
        """Newest change of the bucket that is taken into account."""
        self._bucket: Bucket[LlmServer] = Bucket(bus, subjects.LLM_SERVERS, LlmServer)
        self._engines = engines
        self._entries: dict[str, PoolEntry] = {}
        self._watchers: dict[str, asyncio.Task[None]] = {}
        # Beside the entries: a call may outlive the entry that it was sent by.
        self._calls: Counter[str] = Counter()
        self._changed = asyncio.Event()

    def entries(self) -> list[PoolEntry]:
        """Every server that is registered."""
        return list(self._entries.values())

    def view(self) -> tuple[ServerView, ...]:
        """What this gateway sees: every server that is registered, and others that a call still runs at."""
        views = {server_id: ServerView(server_id=server_id, calls=calls) for server_id, calls in self._calls.items()}
        for entry in self._entries.values():
            server_id = entry.server.server_id
            views[server_id] = ServerView(
                server_id=server_id,
                calls=self._calls[server_id],
                healthy=entry.healthy and not entry.breaker.is_open,
                trouble=entry.trouble,
                template=entry.template,
            )
        return tuple(views.values())

    # --- following ---

    async def run(self) -> None:
        """Follow the bucket until cancelled."""
        async with asyncio.TaskGroup() as group:
            async for key, server, revision in self._bucket.watch():
                if key:
                    self._follow(key, server, group)
                    self.revision = revision
                    self._tell()

    def _follow(self, key: str, server: LlmServer | None, group: asyncio.TaskGroup) -> None:
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

    def _tell(self) -> None:
        """Wake those who wait for a server."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _keep_probed(self, entry: PoolEntry) -> None:
        """Probe until the server is healthy, and again whenever a call could not reach it."""
        pause_s = PROBE_MIN_S
        while True:
            try:
                async with asyncio.timeout(PROBE_TIMEOUT_S):
                    entry.probe = await self._probe(entry)
            except Exception as error:  # noqa: BLE001 - whatever a foreign server answers, the pool goes on
                silent = f"a look at it got no answer within {PROBE_TIMEOUT_S:g} s"
                entry.trouble = silent if isinstance(error, TimeoutError) else str(error) or type(error).__name__
                log.info("server_not_healthy", server=entry.server.server_id, error=entry.trouble)
                await asyncio.sleep(pause_s * random.uniform(0.7, 1.3))
                pause_s = min(pause_s * 2, PROBE_MAX_S)
                continue
            pause_s = PROBE_MIN_S
            entry.suspected.clear()
            entry.healthy, entry.trouble = True, ""
            self._tell()
            if not entry.probe.trainable:
                log.warning("server_not_trainable", server=entry.server.server_id, reason=entry.probe.reason)
            await entry.suspected.wait()

    async def _probe(self, entry: PoolEntry) -> Probe:
        server = entry.server
        engine = self._engines.get(server.engine)
        if engine is None:
            raise ModelError(f"this gateway knows no engine {server.engine!r}", hint="update Rollyard there")
        if server.mode not in engine.modes:
            raise ModelError(
                f"{server.engine} cannot be used in {server.mode} mode", hint=f"use {', '.join(sorted(engine.modes))}"
            )
        if server.mode == "tokens" and not server.tokenizer:
            raise ModelError("tokens mode needs a tokenizer", hint="set `tokenizer` of the server's entry")
        if server.mode == "tokens" and self._prepare is not None:
            entry.template = await self._prepare(server)
        return await engine.probe(server)

    # --- calls ---

    def suspect(self, entry: PoolEntry, why: str) -> None:
        """A call could not reach a server: send nothing there until a probe succeeds."""
        entry.healthy = False
        entry.trouble = why
        entry.suspected.set()

    @contextmanager
    def busy(self, entry: PoolEntry, tokens: int = 1) -> Iterator[None]:
        """A call of so many tokens, prompt and expected reply, runs at a server within the block.

        What it raises there is taken as news of the server's health. Raises OutOfService before the block when the
        server takes no call any more, though `pick` gave it: choose again. To ask it here, with nothing awaited in
        between, is what lets a weight update rely on the count of calls.
        """
        self._check_still_there(entry)
        on_trial = entry.breaker.begin()
        server_id = entry.server.server_id
        self._calls[server_id] += 1
        entry.calls += 1
        entry.tokens += tokens
        try:
            yield
        except ModelError as error:
            self._learn(entry, error, on_trial)
            raise
        except BaseException:
            # The agent went away, or the gateway stops: this says nothing about the server.
            if on_trial:
                entry.breaker.gave_up()
            raise
        else:
            entry.breaker.succeeded()
            entry.trouble = "" if entry.healthy else entry.trouble
        finally:
            entry.tokens -= tokens
            entry.calls -= 1
            self._calls[server_id] -= 1
            if not self._calls[server_id]:
                del self._calls[server_id]

    def _check_still_there(self, entry: PoolEntry) -> None:
        if entry not in self._entries.values():
            raise OutOfService(503, "server_out_of_service", f"{entry.server.server_id} is gone", retry_after_s=1)
        if not entry.serving:
            raise OutOfService(503, "server_out_of_service", entry.out_of_service(), retry_after_s=_RETRY_PAUSED_S)
        if not entry.breaker.allows(time.monotonic()):
            raise OutOfService(503, "server_out_of_service", f"{entry.server.server_id} is on trial", retry_after_s=1)

    def _learn(self, entry: PoolEntry, error: ModelError, on_trial: bool) -> None:
        if error.status == 429:
            if on_trial:
                entry.breaker.gave_up()
        elif 0 < error.status < 500:
            entry.breaker.succeeded()
        else:
            entry.breaker.failed(time.monotonic())
            if entry.breaker.is_open:
                entry.trouble = f"too many calls in a row failed, the last one so: {error}"
                log.warning("server_left_alone", server=entry.server.server_id, error=str(error))

    def pick(
        self,
        model: str,
        session: str,
        *,
        training: bool,
        mode: str | None = None,
        without: Collection[str] = (),
        tokens: int = 1,
    ) -> PoolEntry:
        """The server that a session's next call goes to: its own, unless that one has much more to do than the others.

        `model` is a served model or an alias; `tokens` the call's prompt and expected reply. Raises Refusal: 400 when
        none could ever be used for training, OutOfService when the servers left are out of service, else 503.
        """
        known = [entry for entry in self._entries.values() if entry.serves(model)]
        if not known:
            names = ", ".join(sorted({entry.server.model for entry in self._entries.values()})) or "none"
            raise unavailable(f"no server for model {model!r} is registered; known models: {names}", code="no_server")
        if training:
            _check_trainable(known)
        now_s = time.monotonic()
        wanted = [
            entry
            for entry in known
            if (not training or entry.probe is None or entry.trainable)
            and mode in (None, entry.server.mode)
            and entry.server.server_id not in without
        ]
        usable = {
            entry.server.server_id: entry
            for entry in wanted
            if entry.serving and entry.healthy and entry.breaker.allows(now_s)
        }
        if not usable:
            raise _refusal(model, known, wanted, now_s)
        loads = {server_id: entry.tokens for server_id, entry in usable.items()}
        return usable[rendezvous.choose(session, loads, tokens)]

    async def choose(
        self,
        model: str,
        session: str,
        *,
        training: bool,
        mode: str | None = None,
        without: Collection[str] = (),
        tokens: int = 1,
        wait_s: float = PAUSE_WAIT_S,
    ) -> PoolEntry:
        """What `pick` gives, after waiting up to `wait_s` while all servers left are out of service.

        Also after a moment while none is healthy: one whose connection broke is mostly well again at the next look.
        Raises Refusal as `pick` does.
        """
        began_s = time.monotonic()
        while True:
            changed = self._changed
            try:
                return self.pick(model, session, training=training, mode=mode, without=without, tokens=tokens)
            except (OutOfService, NotHealthy) as refusal:
                patience_s = wait_s if isinstance(refusal, OutOfService) else min(wait_s, HEALTH_WAIT_S)
                left_s = began_s + patience_s - time.monotonic()
                if left_s <= 0:
                    raise
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await changed.wait()


def _check_trainable(known: list[PoolEntry]) -> None:
    """Raises Refusal (400) when every server is known to be unfit for training."""
    if any(entry.server.trainable and (entry.probe is None or entry.probe.trainable) for entry in known):
        return
    entry = known[0]
    reason = entry.probe.reason if entry.probe and entry.probe.reason else "its entry says so"
    raise Refusal(
        400,
        "server_not_trainable",
        f"model server {entry.server.server_id} cannot be used for training: {without_addresses(reason)}",
        hint="use a vLLM, SGLang or llama.cpp server, or a run with training = false",
    )


def _refusal(model: str, known: list[PoolEntry], wanted: list[PoolEntry], now_s: float) -> Refusal:
    """Why none of the servers takes a call, and when to come again."""
    if away := [entry.out_of_service() for entry in wanted if not entry.serving]:
        return OutOfService(
            503,
            "server_out_of_service",
            f"no server for model {model!r} takes calls now: {'; '.join(away)}",
            retry_after_s=_RETRY_PAUSED_S,
        )
    troubled = [entry for entry in known if not entry.healthy or entry.breaker.is_open]
    waits_s = [entry.breaker.wait_s(now_s) for entry in troubled if entry.healthy]
    return NotHealthy(
        503,
        "no_server",
        f"no server for model {model!r} is healthy: "
        + "; ".join(f"{entry.server.server_id}: {without_addresses(entry.trouble)}" for entry in troubled),
        retry_after_s=max(1, math.ceil(min(waits_s, default=0))),
    )
