"""The life of one call: place, prompt, intent, dispatch, end. Contract: docs/architecture.md sections 5.3 and 5.4.

A call runs in a task of its own and hands its updates to whoever talks to the agent. So a slow agent does not hold the
model server, and an agent that goes away ends the call at once with a record that says so.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Final
from uuid import uuid4

import structlog
from msgspec import structs

from rollyard.gateway.audience import Audience
from rollyard.gateway.collector import Collector
from rollyard.gateway.ending import Ending, make_end
from rollyard.gateway.engines.engine import EngineChunk, EngineRequest
from rollyard.gateway.exchange import TEMPLATE_OPTIONS, Delta, Finished, ModelRequest, Started, Waiting
from rollyard.gateway.history import without_private
from rollyard.gateway.keys import SessionGrant
from rollyard.gateway.planning import (
    Place,
    Plan,
    as_delta,
    find_place,
    make_params,
    make_prompt,
    make_reader,
    snapshot_due,
)
from rollyard.gateway.pool import OutOfService, PoolEntry
from rollyard.gateway.references import resolve_references
from rollyard.gateway.refusal import Refusal, internal_error, long_integer, of_model_error, session_closed, unavailable
from rollyard.gateway.sessions import Session
from rollyard.pipeline.crash import checkpoint
from rollyard.schemas.call import CallEnd, CallIntent, CallStatus, Usage
from rollyard.schemas.errors import BlobError, BusError, ConfigError, DecodeError, ModelError

if TYPE_CHECKING:
    from rollyard.gateway.calls import Gateway

log = structlog.get_logger(__name__)

END_MARGIN_S: Final = 60.0
_CHARS_PER_TOKEN: Final = 4
_REPLY_TOKENS: Final = 512


class Call:
    """One call. `run()` never raises; what came of it goes to its audience."""

    def __init__(self, gateway: Gateway, grant: SessionGrant, request: ModelRequest, choice: int = 0) -> None:
        self.task: asyncio.Task[None] | None = None
        self.request = request  # as the agent sent it; `_request` is the same whole
        self.choice = choice
        self.model = gateway.model_of(grant, request)
        self.at = time.time()
        self._gateway = gateway
        self._grant = grant
        self._request = request
        self._call_id = uuid4().hex
        self.audience = Audience(lambda: self.abort("the agent went away"))
        self._queue_s: float | None = None
        self._first_token_s: float | None = None
        self._abort_reason: str | None = None
        self._abort_refusal: Refusal | None = None
        self._settled = False

    def abort(self, reason: str, refusal: Refusal | None = None) -> None:
        """End the call now. Nothing happens once its reply is complete."""
        if self.task is not None and not self._settled and self._abort_reason is None:
            self._abort_reason, self._abort_refusal = reason, refusal
            self.task.cancel()

    @property
    def joinable(self) -> bool:
        """Whether its reply can still be had."""
        return self._abort_reason is None and bool(self.audience)

    async def run(self) -> None:
        """The whole call."""
        gateway, key = self._gateway, self._grant.session()
        session = gateway.sessions.get(self._grant)
        gateway.in_flight[key].add(self)
        gateway.metrics.in_flight.inc()
        try:
            await self._run(session)
        except Refusal as refusal:
            self.audience.say(refusal)
        except OverflowError:  # by msgspec, before anything was logged
            self.audience.say(long_integer())
        except asyncio.CancelledError:
            self.audience.say(self._abort_refusal or unavailable("the gateway is stopping", retry_after_s=1))
        except (BusError, BlobError, DecodeError) as error:
            self.audience.say(unavailable(f"the log cannot be used: {error}", code="log_unavailable"))
        except Exception:  # the agent gets an answer and the process lives on, whatever is broken
            log.exception("call_failed", call_id=self._call_id)
            self.audience.say(internal_error())
        finally:
            gateway.in_flight[key].discard(self)
            if not gateway.in_flight[key]:
                del gateway.in_flight[key]
            gateway.metrics.in_flight.dec()

    async def _run(self, session: Session) -> None:
        if self._grant.session() in self._gateway.closed:
            raise session_closed()
        self._gateway.guard.check()
        self._request = await resolve_references(self.request, session, self._gateway.bus)
        place = await self._place(session)
        tokens_left = session.tokens_left(self._grant)
        session.in_flight += 1
        try:
            plan = await self._plan(session, place, tokens_left)
            await self._dispatch(plan)
        finally:
            session.in_flight -= 1

    async def _place(self, session: Session) -> Place:
        gateway, grant = self._gateway, self._grant
        limited = grant.max_calls is not None or grant.max_tokens is not None
        return await find_place(session, self._request, gateway.bus, gateway.metrics, limited=limited)

    async def _plan(self, session: Session, place: Place, tokens_left: int | None) -> Plan:
        gateway, grant, request = self._gateway, self._grant, self._request
        entry = await self._choose()
        prompt = None
        if entry.server.mode == "capture" and "prompt_ids" in request.context:
            raise Refusal(
                400,
                "unsupported_value",
                f"model server {entry.server.server_id} takes a prompt as text only",
                hint="send text, or use a server in tokens mode",
                param="prompt",
            )
        if entry.server.mode == "tokens":
            prompt = await make_prompt(gateway.renderers, entry, request, place)
        params = make_params(
            request,
            grant,
            choice=self.choice,
            tokens_left=tokens_left,
            max_context=entry.max_context,
            prompt=prompt,
        )
        drift = prompt.drift if prompt is not None else place.drift
        if drift:
            gateway.metrics.drift.labels(drift).inc()
        snapshot = snapshot_due(place.parent)
        intent = as_delta(self._intent(params, drift), request, place, snapshot=snapshot)
        intent = structs.replace(intent, supersedes=session.superseded_by(place.asked))
        return Plan(
            request=request,
            intent=await gateway.bus.contents.take_out(intent),
            session=session,
            place=place,
            entry=entry,
            prompt=prompt,
            reader=make_reader(prompt, entry, request, params.get("stop", ())) if prompt is not None else None,
            vocab_size=await self._vocab_size(entry),
            snapshot=snapshot,
            policy_version=entry.server.policy_version,
        )

    async def _vocab_size(self, entry: PoolEntry) -> int:
        """What ids are checked against; 0: nobody says."""
        told = entry.server.vocab_size or (entry.probe.vocab_size if entry.probe else 0)
        if told or not entry.server.tokenizer:
            return told
        try:
            return (await self._gateway.renderers.get(entry.server.tokenizer)).renderer.tokenizer.vocab_size
        except ConfigError:
            return 0

    def _intent(self, params: dict[str, object], drift: str | None) -> CallIntent:
        grant, request = self._grant, self._request
        margin_s = self._gateway.settings.call_timeout_s + END_MARGIN_S
        return CallIntent(
            call_id=self._call_id,
            run=grant.run,
            rollout_id=grant.rollout_id,
            attempt=grant.attempt,
            gateway=self._gateway.incarnation,
            at_ms=int(self.at * 1000),
            latest_end_ms=int((self.at + margin_s) * 1000),
            protocol=request.protocol,
            scenario=request.scenario,
            agent=request.ids,
            model=self.model,
            asked_model=request.model[:256],
            stream=request.stream,
            prompt=request.prompt,
            extras={name: value for name, value in request.extras.items() if name != TEMPLATE_OPTIONS},
            params=params,
            request_bytes=request.body_bytes,
            drift=drift,
        )

    async def _choose(
        self, mode: str | None = None, without: frozenset[str] = frozenset(), *, wait: bool = True
    ) -> PoolEntry:
        """A server for this call; may wait while weights are being changed. Raises Refusal."""
        return await self._gateway.pool.choose(
            self.model,
            self._grant.session(),
            training=self._grant.training,
            mode=mode,
            without=without,
            wait_s=self._gateway.settings.pause_wait_s if wait else 0.0,
        )

    async def _dispatch(self, plan: Plan) -> None:
        """Intent, model server, end. From the first line on an end is owed, and every way out logs one."""
        checkpoint("gateway.before_intent")
        intended = self._gateway.recorder.intent(plan.intent)
        waiting = asyncio.get_running_loop().call_later(self._gateway.settings.ping_s, self._wait, intended)
        collector = Collector(
            self._call_id,
            int(self.at),
            choice=self.choice,
            prompt_ids=plan.prompt_ids,
            reader=plan.reader,
            vocab_size=plan.vocab_size,
        )
        status: CallStatus = "error"
        refusal: Refusal | None = None
        why: str | None = None
        try:
            async with asyncio.timeout(self._gateway.settings.call_timeout_s):
                await self._relay(plan, collector, intended)
            status = "ok"
        except ModelError as error:
            why = str(error)[:2000]
            refusal = of_model_error(error, plan.entry.server.server_id, plan.entry.max_context, plan.prompt_ids)
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
            refusal = internal_error()
        waiting.cancel()
        why = self._abort_reason or why or (str(refusal)[:2000] if refusal is not None else None)
        await self._finish(plan, collector, status, refusal, why)

    def _wait(self, intended: asyncio.Task[int]) -> None:
        if self._first_token_s is None and intended.done() and not intended.cancelled() and not intended.exception():
            self.audience.say(Waiting(self._call_id, int(self.at), self.choice))

    async def _relay(self, plan: Plan, collector: Collector, intended: asyncio.Task[int]) -> None:
        async with aclosing(self._chunks(plan, collector)) as chunks:
            async for chunk in chunks:
                if self._first_token_s is None:
                    self._first_token_s = time.time() - self.at
                    await asyncio.shield(intended)
                    checkpoint("gateway.intent_logged")
                    self._start(plan)
                self._pass_on(collector.add(chunk))
        self._pass_on(collector.end())
        await asyncio.shield(intended)

    def _start(self, plan: Plan) -> None:
        count = len(plan.prompt_ids) if plan.prompt_ids is not None else 0
        self.audience.say(Started(self._call_id, int(self.at), self.choice, Usage(prompt_tokens=count)))

    def _pass_on(self, delta: Delta | None) -> None:
        if delta is not None:
            self.audience.say(delta)

    async def _chunks(self, plan: Plan, collector: Collector) -> AsyncGenerator[EngineChunk, None]:
        """The model's reply. Before its first piece, one more try at another server; an aborted one is continued."""
        tried: set[str] = set()
        while True:
            entry, began, aborted = plan.entry, False, False
            dispatched = entry.server.policy_version
            plan.policy_version = plan.policy_version if collector.spans else dispatched
            self._queue_s = self._queue_s if self._queue_s is not None else time.time() - self.at
            try:
                with self._gateway.pool.busy(entry, self._tokens(plan)):
                    stream = self._gateway.engines[entry.server.engine].generate(self._engine_request(plan, collector))
                    async with aclosing(stream) as chunks:
                        async for chunk in chunks:
                            began = True
                            aborted = aborted or chunk.finish_reason == "abort"
                            yield structs.replace(chunk, finish_reason=None) if aborted else chunk
            except OutOfService:
                plan.entry = await self._choose(entry.server.mode)
                continue
            except ModelError as error:
                if error.status == 0:
                    self._gateway.pool.suspect(entry, str(error))
                tried.add(entry.server.server_id)
                if began or not error.retryable or len(tried) > 1:
                    raise
                await self._elsewhere(plan, error, tried)
                continue
            collector.end_segment(dispatched)
            if not aborted:
                return
            # Its weights were being changed: the same reply goes on from what was sampled, on the new ones.
            plan.entry = await self._choose("tokens")

    async def _elsewhere(self, plan: Plan, error: ModelError, tried: set[str]) -> None:
        try:
            plan.entry = await self._choose(plan.entry.server.mode, frozenset(tried), wait=False)
        except Refusal:
            raise error from None

    def _tokens(self, plan: Plan) -> int:
        """About how much work the call is for a server: its prompt and an ordinary reply."""
        reply: int = min(plan.intent.params.get("max_tokens", _REPLY_TOKENS), _REPLY_TOKENS)
        if plan.prompt_ids is not None:
            return len(plan.prompt_ids) + reply
        parent = plan.place.parent
        known = parent.usage_tokens if parent is not None else 0
        new = sum(len(str(message.get("content") or "")) for message in plan.intent.messages)
        return known + new // _CHARS_PER_TOKEN + reply

    def _engine_request(self, plan: Plan, collector: Collector) -> EngineRequest:
        params, prompt_ids = plan.intent.params, plan.prompt_ids
        sampled = collector.completion_ids
        if prompt_ids is not None and sampled:
            prompt_ids = prompt_ids + sampled
            if "max_tokens" in params:
                params = params | {"max_tokens": max(1, params["max_tokens"] - len(sampled))}
        return EngineRequest(
            call_id=self._call_id if not sampled else f"{self._call_id}-{len(collector.spans)}",
            server=plan.entry.server,
            params=params,
            messages=without_private(self._request.messages) if prompt_ids is None else [],
            tools=self._request.tools,
            extras=self._request.extras,
            prompt=self._request.prompt,
            prompt_ids=prompt_ids,
            stream=self._request.stream,
            logprob_kind=plan.entry.logprob_kind,
        )

    async def _finish(
        self, plan: Plan, collector: Collector, status: CallStatus, refusal: Refusal | None, why: str | None
    ) -> None:
        """Log the end; then, and only then, let the agent have what it can act on."""
        self._settled = True
        checkpoint("gateway.before_end")
        ending = Ending(
            status=status,
            why=why,
            http_status=refusal.status if refusal is not None else 200,
            streamed=self._request.stream and self._first_token_s is not None,
            at=self.at,
            queue_s=self._queue_s,
            first_token_s=self._first_token_s,
        )
        end = make_end(plan, collector, ending)
        gateway, session, place = self._gateway, plan.session, plan.place
        own = place.digests[plan.intent.shared_messages :]
        logged = gateway.recorder.end(
            end, lambda seq: session.add(plan.intent, end, seq, digests=own, settings=place.settings)
        )
        gateway.metrics.count(end)
        if refusal is not None:
            self.audience.say(refusal)
            return
        try:
            async with asyncio.timeout(gateway.settings.ack_timeout_s):
                await asyncio.shield(logged)
        except TimeoutError:
            self.audience.say(unavailable("the end of the call is not in the log yet", code="log_unavailable"))
        except BusError as error:
            self.audience.say(Refusal(502, "record_too_large", f"the reply cannot be logged: {error}"))
        else:
            checkpoint("gateway.end_logged")
            self.audience.say(self._finished(end))

    def _finished(self, end: CallEnd) -> Finished:
        assert end.reply is not None and end.finish_reason is not None
        return Finished(
            self._call_id, int(self.at), end.reply, end.finish_reason, end.usage, end.stop_string, self.choice
        )
