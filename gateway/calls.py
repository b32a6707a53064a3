"""The life of one call: match, render, intent, dispatch, end. Contract: docs/architecture.md sections 5.3 and 5.4.

A call runs in a task of its own and hands its updates to whoever talks to the agent. So a slow agent does not hold the
model server, and an agent that goes away ends the call at once with a record that says so.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final
from uuid import uuid4

import structlog

from rollyard.gateway.closed import ClosedSessions
from rollyard.gateway.collector import Collector
from rollyard.gateway.engines.engine import Engine, EngineChunk, EngineRequest
from rollyard.gateway.exchange import Finished, ModelRequest, Started, Update
from rollyard.gateway.history import ROOT, Canonical, common_prefix, holds_unknown_reply, tools_digest
from rollyard.gateway.keys import SessionGrant
from rollyard.gateway.logguard import LogGuard
from rollyard.gateway.metrics import GatewayMetrics
from rollyard.gateway.pool import PoolEntry, ServerPool
from rollyard.gateway.recorder import Recorder
from rollyard.gateway.refusal import Refusal, context_length_exceeded, of_model_error, session_closed, unavailable
from rollyard.gateway.renderers import Renderers, next_prompt
from rollyard.gateway.sampling import effective
from rollyard.gateway.sessions import KnownCall, Session, Sessions
from rollyard.gateway.settings import GatewaySettings
from rollyard.pipeline.bus import Bus
from rollyard.pipeline.crash import checkpoint
from rollyard.schemas.call import CallEnd, CallIntent, CallStatus, CallTimings
from rollyard.schemas.errors import BlobError, BusError, ConfigError, DecodeError, ModelError
from rollyard.schemas.packed import Logprobs, TokenIds

log = structlog.get_logger(__name__)

END_MARGIN_S: Final = 60.0


@dataclass(slots=True, kw_only=True)
class Plan:
    """A call that is ready to be dispatched."""

    intent: CallIntent
    session: Session
    parent: KnownCall | None
    entry: PoolEntry
    prompt_ids: TokenIds | None
    vocab_size: int
    policy_version: int | None = None


@dataclass(slots=True, kw_only=True)
class Gateway:
    """What every call of a process shares, and the one thing that it does: calls."""

    bus: Bus
    incarnation: str
    settings: GatewaySettings
    engines: Mapping[str, Engine]
    pool: ServerPool
    sessions: Sessions
    canonical: Canonical
    recorder: Recorder
    renderers: Renderers
    guard: LogGuard
    metrics: GatewayMetrics
    in_flight: dict[str, set[Call]] = field(default_factory=lambda: defaultdict(set))
    closed: ClosedSessions = field(init=False)

    def __post_init__(self) -> None:
        self.closed = ClosedSessions(self.bus, self._session_closed)

    def _session_closed(self, session: str) -> None:
        for call in list(self.in_flight.get(session, ())):
            call.abort("its session was closed", session_closed())
        self.sessions.drop(session)

    async def stop(self) -> None:
        """Abort the calls that are left, and wait until each has handed its end to the recorder."""
        calls = [call for session in self.in_flight.values() for call in session]
        for call in calls:
            call.abort("the gateway stopped")
        tasks = [call.task for call in calls if call.task is not None]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=self.settings.flush_s)
            for task in late:
                task.cancel()

    async def updates(self, grant: SessionGrant, request: ModelRequest) -> AsyncGenerator[Update, None]:
        """Make a call. `Finished` comes last, and only once the call's end is in the log. Raises Refusal.

        Closing the generator before that aborts the call.
        """
        call = Call(self, grant, request)
        task = asyncio.create_task(call.run())
        call.task = task
        try:
            while True:
                update = await call.queue.get()
                if isinstance(update, Refusal):
                    raise update
                yield update
                if isinstance(update, Finished):
                    return
        finally:
            call.abort("the agent went away")


class Call:
    """One call. `run()` never raises; what came of it is put into `queue`."""

    def __init__(self, gateway: Gateway, grant: SessionGrant, request: ModelRequest) -> None:
        self.queue: asyncio.Queue[Update | Refusal] = asyncio.Queue()
        self.task: asyncio.Task[None] | None = None
        self._gateway = gateway
        self._grant = grant
        self._request = request
        self._call_id = uuid4().hex
        self._at = time.time()
        self._first_token_s: float | None = None
        self._abort_reason: str | None = None
        self._abort_refusal: Refusal | None = None
        self._settled = False

    def abort(self, reason: str, refusal: Refusal | None = None) -> None:
        """End the call now. Nothing happens once its reply is complete."""
        if self.task is not None and not self._settled and self._abort_reason is None:
            self._abort_reason, self._abort_refusal = reason, refusal
            self.task.cancel()

    async def run(self) -> None:
        """The whole call."""
        gateway, key = self._gateway, self._grant.session()
        session = gateway.sessions.get(self._grant)
        gateway.in_flight[key].add(self)
        gateway.metrics.in_flight.inc()
        try:
            await self._run(session)
        except Refusal as refusal:
            self.queue.put_nowait(refusal)
        except asyncio.CancelledError:
            self.queue.put_nowait(self._abort_refusal or unavailable("the gateway is stopping", retry_after_s=1))
        except (BusError, BlobError, DecodeError) as error:
            self.queue.put_nowait(unavailable(f"the log cannot be used: {error}", code="log_unavailable"))
        except Exception:  # the agent gets an answer and the process lives on, whatever is broken
            log.exception("call_failed", call_id=self._call_id)
            self.queue.put_nowait(Refusal(500, "internal_error", "the gateway failed", hint="see the gateway's log"))
        finally:
            gateway.in_flight[key].discard(self)
            if not gateway.in_flight[key]:
                del gateway.in_flight[key]
            gateway.metrics.in_flight.dec()

    async def _run(self, session: Session) -> None:
        self._check_open()
        chains = self._gateway.canonical.fold(ROOT, self._request.messages)
        parent, shared = session.match(chains)
        limited = self._grant.max_calls is not None or self._grant.max_tokens is not None
        if limited or holds_unknown_reply(self._request.messages, shared):
            self._gateway.metrics.catch_ups.inc()
            await session.catch_up(self._gateway.bus)
            parent, shared = session.match(chains)
        tokens_left = session.tokens_left(self._grant)
        session.in_flight += 1
        try:
            plan = await self._plan(session, parent, shared, tokens_left)
            await self._dispatch(plan)
        finally:
            session.in_flight -= 1

    def _check_open(self) -> None:
        if self._grant.session() in self._gateway.closed:
            raise session_closed()
        self._gateway.guard.check()

    async def _plan(self, session: Session, parent: KnownCall | None, shared: int, tokens_left: int | None) -> Plan:
        gateway, grant, request = self._gateway, self._grant, self._request
        entry = gateway.pool.pick(grant.model, grant.session(), training=grant.training)
        same_tools = tools_digest(request.tools) == (parent.tools if parent else ROOT)
        prompt_ids: TokenIds | None = None
        drift: str | None = None
        vocab_size = entry.probe.vocab_size if entry.probe else 0
        if entry.server.mode == "tokens":
            try:
                renderer = await gateway.renderers.get(entry.server.tokenizer)
                prompt_ids, drift = await next_prompt(renderer, request, parent, shared, same_tools)
            except ConfigError as error:
                raise unavailable(f"model server {entry.server.server_id}: {error}", code="no_tokenizer") from error
            except ModelError as error:
                raise Refusal(400, "invalid_messages", error.message, hint=error.hint, param="messages") from error
            vocab_size = vocab_size or renderer.tokenizer.vocab_size
        params = effective(request.params, grant, request.messages, tokens_left)
        if prompt_ids is not None and entry.max_context:
            room = entry.max_context - len(prompt_ids)
            if room < 1:
                raise context_length_exceeded(entry.max_context, len(prompt_ids))
            params["max_tokens"] = min(params.get("max_tokens", room), room)
        if drift:
            gateway.metrics.drift.labels(drift).inc()
        margin_s = gateway.settings.call_timeout_s + END_MARGIN_S
        intent = CallIntent(
            call_id=self._call_id,
            run=grant.run,
            rollout_id=grant.rollout_id,
            attempt=grant.attempt,
            gateway=gateway.incarnation,
            at_ms=int(self._at * 1000),
            latest_end_ms=int((self._at + margin_s) * 1000),
            protocol=request.protocol,
            model=grant.model,
            stream=request.stream,
            parent=parent.call_id if parent else None,
            shared_messages=shared,
            messages=request.messages[shared:],
            tools=None if same_tools else request.tools or [],
            params=params,
            drift=drift,
        )
        return Plan(
            intent=intent,
            session=session,
            parent=parent,
            entry=entry,
            prompt_ids=prompt_ids,
            vocab_size=vocab_size,
            policy_version=entry.server.policy_version,
        )

    async def _dispatch(self, plan: Plan) -> None:
        """Intent, model server, end. From the first line on an end is owed, and every way out logs one."""
        checkpoint("gateway.before_intent")
        intended = self._gateway.recorder.intent(plan.intent)
        collector = Collector(self._call_id, int(self._at), prompt_ids=plan.prompt_ids, vocab_size=plan.vocab_size)
        status: CallStatus = "error"
        refusal: Refusal | None = None
        try:
            async with asyncio.timeout(self._gateway.settings.call_timeout_s):
                await self._relay(plan, collector, intended)
            status = "ok"
        except ModelError as error:
            refusal = of_model_error(error, plan.entry.max_context, plan.prompt_ids)
        except TimeoutError:
            limit_s = self._gateway.settings.call_timeout_s
            refusal = Refusal(504, "call_timeout", f"the call took longer than {limit_s:g} s")
        except BusError as error:
            refusal = unavailable(f"the intent of the call is not in the log: {error}", code="log_unavailable")
        except asyncio.CancelledError:
            status = "aborted"
            refusal = self._abort_refusal or unavailable("the call was aborted", code="aborted")
        except Refusal as error:
            refusal = error
        except Exception:
            log.exception("call_failed", call_id=self._call_id)
            refusal = Refusal(500, "internal_error", "the gateway failed", hint="see the gateway's log")
        await self._finish(plan, collector, status, refusal)

    async def _relay(self, plan: Plan, collector: Collector, intended: asyncio.Task[int]) -> None:
        created = int(self._at)
        async with aclosing(self._chunks(plan)) as chunks:
            async for chunk in chunks:
                if self._first_token_s is None:
                    self._first_token_s = time.time() - self._at
                    await asyncio.shield(intended)
                    checkpoint("gateway.intent_logged")
                    self.queue.put_nowait(Started(self._call_id, created))
                delta = collector.add(chunk)
                if delta is not None:
                    self.queue.put_nowait(delta)
        await asyncio.shield(intended)

    async def _chunks(self, plan: Plan) -> AsyncGenerator[EngineChunk, None]:
        """The model's reply; before its first piece, one more try at another server."""
        gateway, grant = self._gateway, self._grant
        tried: set[str] = set()
        while True:
            entry, began = plan.entry, False
            plan.policy_version = entry.server.policy_version
            try:
                with gateway.pool.busy(entry):
                    async with aclosing(
                        gateway.engines[entry.server.engine].generate(self._engine_request(plan))
                    ) as chunks:
                        async for chunk in chunks:
                            began = True
                            yield chunk
                return
            except ModelError as error:
                if error.status == 0:
                    gateway.pool.suspect(entry, str(error))
                tried.add(entry.server.server_id)
                if began or not error.retryable or len(tried) > 1:
                    raise
                try:
                    plan.entry = gateway.pool.pick(
                        grant.model, grant.session(), training=grant.training, mode=entry.server.mode, without=tried
                    )
                except Refusal:
                    raise error from None

    def _engine_request(self, plan: Plan) -> EngineRequest:
        return EngineRequest(
            call_id=self._call_id,
            server=plan.entry.server,
            params=plan.intent.params,
            messages=self._request.messages,
            tools=self._request.tools,
            extras=self._request.extras,
            prompt_ids=plan.prompt_ids,
        )

    async def _finish(self, plan: Plan, collector: Collector, status: CallStatus, refusal: Refusal | None) -> None:
        """Log the end; then, and only then, let the agent have what it can act on."""
        self._settled = True
        checkpoint("gateway.before_end")
        end = self._end(plan, collector, status, refusal)
        gateway, session = self._gateway, plan.session
        logged = gateway.recorder.end(end, lambda seq: session.add(plan.intent, end, seq))
        self._count(end)
        if refusal is not None:
            self.queue.put_nowait(refusal)
            return
        try:
            async with asyncio.timeout(gateway.settings.ack_timeout_s):
                await asyncio.shield(logged)
        except TimeoutError:
            self.queue.put_nowait(unavailable("the end of the call is not in the log yet", code="log_unavailable"))
        except BusError as error:
            self.queue.put_nowait(Refusal(502, "record_too_large", f"the reply cannot be logged: {error}"))
        else:
            checkpoint("gateway.end_logged")
            assert end.reply is not None and end.finish_reason is not None
            self.queue.put_nowait(Finished(self._call_id, int(self._at), end.reply, end.finish_reason, end.usage))

    def _end(self, plan: Plan, collector: Collector, status: CallStatus, refusal: Refusal | None) -> CallEnd:
        inexact = collector.inexact()
        parent_ids = plan.parent.ids() if plan.parent is not None and inexact is None else TokenIds()
        shared = common_prefix(parent_ids, collector.prompt_ids)
        server = plan.entry.server
        newest = collector.policy_version if collector.policy_version is not None else server.policy_version
        untrainable = collector.untrainable() if status == "ok" else None
        sent = self._request.stream and self._first_token_s is not None
        return CallEnd(
            call_id=self._call_id,
            run=self._grant.run,
            rollout_id=self._grant.rollout_id,
            attempt=self._grant.attempt,
            at_ms=int(time.time() * 1000),
            status=status,
            shared_prompt_ids=shared,
            prompt_ids=collector.prompt_ids[shared:],
            completion_ids=collector.completion_ids if inexact is None else TokenIds(),
            logprobs=collector.logprobs if untrainable is None and inexact is None else Logprobs(),
            logprob_kind=server.logprob_kind,
            reply=collector.reply() if status == "ok" or sent else None,
            finish_reason=(collector.finish_reason or "stop") if status == "ok" else None,
            usage=collector.usage(),
            untrainable=untrainable,
            error=self._why(refusal),
            http_status=refusal.status if refusal is not None else 200,
            server=server.server_id,
            engine=plan.entry.probe.engine if plan.entry.probe else server.engine,
            policy_version=plan.policy_version,
            policy_version_end=newest if newest != plan.policy_version else None,
            timings=CallTimings(first_token_s=self._first_token_s, total_s=time.time() - self._at),
        )

    def _why(self, refusal: Refusal | None) -> str | None:
        if self._abort_reason is not None:
            return self._abort_reason
        return str(refusal)[:2000] if refusal is not None else None

    def _count(self, end: CallEnd) -> None:
        metrics = self._gateway.metrics
        metrics.calls.labels(end.status).inc()
        metrics.tokens.labels("prompt").inc(end.usage.prompt_tokens)
        metrics.tokens.labels("completion").inc(end.usage.completion_tokens)
        metrics.duration.observe(end.timings.total_s or 0.0)
        if end.timings.first_token_s is not None:
            metrics.first_token.observe(end.timings.first_token_s)
        if end.untrainable is not None:
            metrics.untrainable.inc()
