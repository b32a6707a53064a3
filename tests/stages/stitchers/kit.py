"""An agent, a gateway and a model in memory: what an agent asks becomes the events that our gateway writes of it.

The gateway's own code reads the request, finds its place, writes the intent as a delta and the end against the parent's
ids. Only the log, the model and its template (kit_template.py) are the kit's. Calls are numbered from 0; `Seen` shows a
forest by these numbers. All texts are made up here.
"""

from __future__ import annotations

from collections.abc import Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from kit_template import VOCABULARY, Reply, Template, words
from msgspec import structs
from prometheus_client import CollectorRegistry

from rollyard.gateway.agent_ids import agent_ids
from rollyard.gateway.collector import Collector
from rollyard.gateway.ending import Ending, make_end
from rollyard.gateway.engines.engine import EngineChunk
from rollyard.gateway.exchange import Finished, ModelRequest
from rollyard.gateway.history import Canonical, without_private
from rollyard.gateway.keys import SessionGrant
from rollyard.gateway.metrics import GatewayMetrics
from rollyard.gateway.planning import Place, Plan, as_delta, find_place, snapshot_due
from rollyard.gateway.pool import PoolEntry
from rollyard.gateway.protocols import protocols
from rollyard.gateway.scenario import classify
from rollyard.gateway.sessions import Session
from rollyard.schemas.call import CallEnd, CallEvent, CallIntent, CallStatus, CallTimings
from rollyard.schemas.fleet import LlmServer
from rollyard.schemas.packed import Logprobs, TokenIds
from rollyard.schemas.rollout import Rollout, RolloutEvent
from rollyard.schemas.sample import Commit, DriftPoint
from rollyard.stages.stitchers.forest import Forest, grow
from rollyard.stages.stitchers.outcome import Outcome
from rollyard.stages.stitching import outcome_of

ROLLOUT = Rollout.of("run", "task", 0, 1)
_SPEAKS = {protocol.name: protocol for protocol in protocols()}
_METRICS = GatewayMetrics(CollectorRegistry())
T = TypeVar("T")


class _OwnLog:
    """A log that nobody but this gateway writes to: there is never more in it than is known."""

    async def last(self, subject: str) -> None:
        return None


def _finish(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("it waits for something")


@dataclass
class Call:
    """One call: what went in, and, once it has ended, what came out."""

    story: Story
    number: int
    request: ModelRequest
    place: Place
    plan: Plan
    prompt: list[int]
    sampled: list[int] = field(default_factory=list)
    logged: list[int] = field(default_factory=list)
    """What the log has of its prompt and sampled ids: not all, if they were not told or are not exact."""
    end: CallEnd | None = None

    @property
    def call_id(self) -> str:
        return self.plan.intent.call_id

    @property
    def ids(self) -> list[int]:
        """Prompt and sampled ids."""
        return self.prompt + self.sampled

    @property
    def good(self) -> bool:
        """Whether its ids can be trained."""
        return self.end is not None and self.end.status == "ok" and self.end.untrainable is None and bool(self.sampled)

    def echo(self) -> Any:
        """The reply as the agent got it: a message, or for Responses a list of items."""
        end = self.end
        assert end is not None
        assert end.reply is not None
        finished = Finished(self.call_id, 0, end.reply, end.finish_reason or "stop", end.usage, end.stop_string)
        body = msgspec.json.decode(_SPEAKS[self.request.protocol].reply(self.request, [finished]))
        if self.request.protocol == "responses":
            return body["output"]
        if self.request.protocol == "messages":
            return {"role": "assistant", "content": body["content"]}
        message = body["choices"][0]["message"]
        return {key: value for key, value in message.items() if key not in ("refusal", "reasoning")}

    def finish(
        self,
        reply: Reply | None = None,
        *,
        status: CallStatus = "ok",
        why: str | None = None,
        finish_reason: str = "stop",
        stop_string: str | None = None,
        logprobs: Sequence[float] | None = None,
        fault: str | None = None,
        constrained: str | None = None,
    ) -> Call:
        """The end of the call is logged. `why`: it broke; what was sampled by then is `reply`, without its end."""
        return self.story.end(
            self,
            reply if reply is not None else Reply(text=f"answer {self.number}"),
            status=status,
            why=why,
            finish_reason=finish_reason,
            stop_string=stop_string,
            logprobs=logprobs,
            fault=fault,
            constrained=constrained,
        )


@dataclass
class Story:
    """One attempt. `mode` is the server's: who tokenises. `off` are rules that the gateway does not know."""

    mode: str = "tokens"
    template: Template = field(default_factory=Template)
    off: Collection[str] = ()
    rollout: Rollout = ROLLOUT
    attempt: int = 1
    version: int | None = 1
    params: dict[str, Any] = field(default_factory=dict)
    events: list[tuple[int, CallEvent | RolloutEvent]] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    seq: int = 0

    def __post_init__(self) -> None:
        grant = SessionGrant(run="run", rollout_id=self.rollout.rollout_id, attempt=self.attempt)
        self.session = Session(grant, Canonical(self.off))

    def log(self, event: CallEvent | RolloutEvent) -> int:
        self.seq += 1
        self.events.append((self.seq, event))
        return self.seq

    # --- a call ---

    def begin(self, body: Mapping[str, Any], speaks: str = "chat", headers: Mapping[str, str] | None = None) -> Call:
        """A request comes: its intent is logged."""
        headers = headers or {}
        asked = _SPEAKS[speaks].parse(msgspec.json.encode(body), headers)
        asked = structs.replace(asked, ids=agent_ids(headers, asked))
        request = structs.replace(asked, scenario=classify(asked))
        place = _finish(find_place(self.session, request, _OwnLog(), _METRICS, limited=False))
        prompt, drift = self._prompt(request, place)
        snapshot = snapshot_due(place.parent)
        intent = as_delta(self._intent(request, drift), request, place, snapshot=snapshot)
        intent = structs.replace(intent, supersedes=self.session.superseded_by(place.asked))
        plan = Plan(
            request=request,
            intent=intent,
            session=self.session,
            place=place,
            entry=PoolEntry(self._server()),
            prompt=None,
            reader=None,
            vocab_size=VOCABULARY,
            snapshot=snapshot,
            policy_version=self.version,
        )
        call = Call(self, len(self.calls), request, place, plan, prompt)
        self.calls.append(call)
        self.log(intent)
        return call

    def ask(
        self,
        body: Mapping[str, Any],
        reply: Reply | None = None,
        *,
        speaks: str = "chat",
        headers: Mapping[str, str] | None = None,
        **end: Any,
    ) -> Call:
        """A request comes, and its call ends before anything else happens."""
        return self.begin(body, speaks, headers).finish(reply, **end)

    def end(self, call: Call, reply: Reply, *, status: CallStatus, why: str | None, **said: Any) -> Call:
        """See Call.finish."""
        logprobs, finish_reason = said["logprobs"], said["finish_reason"]
        ended = why is None and finish_reason != "length" and said["stop_string"] is None
        call.sampled = self.template.sampled(reply, ended=ended) if status != "error" else []
        collector = Collector(
            call.call_id,
            0,
            prompt_ids=TokenIds.of(call.prompt) if self.mode == "tokens" else None,
            vocab_size=VOCABULARY,
        )
        if status != "error":
            chunk = EngineChunk(
                text=reply.text,
                reasoning=reply.thinks,
                tool_calls=[
                    {"index": index, "function": {"name": name, "arguments": arguments}}
                    for index, (name, arguments) in enumerate(reply.calls)
                ],
                token_ids=TokenIds.of(call.sampled),
                logprobs=Logprobs.of(self.logprobs(call) if logprobs is None else logprobs),
                prompt_ids=TokenIds.of(call.prompt),
                finish_reason=finish_reason if why is None else None,
                stop_string=said["stop_string"],
                fault=said["fault"],
                constrained=said["constrained"],
            )
            collector.add(chunk)
        ending = Ending(
            status=status,
            why=why,
            http_status=200 if status == "ok" else 502,
            streamed=call.request.stream and status != "error",
            at=0.0,
            queue_s=None,
            first_token_s=None,
        )
        made = make_end(call.plan, collector, ending)
        call.end = structs.replace(made, at_ms=0, timings=CallTimings())
        call.logged = collector.prompt_ids.tolist() + call.end.completion_ids.tolist()
        own = call.place.digests[call.plan.intent.shared_messages :]
        self.session.add(call.plan.intent, call.end, self.log(call.end), digests=own, settings=call.place.settings)
        return call

    def logprobs(self, call: Call) -> list[float]:
        """Of the sampled ids of a call: another number for each place, so that none can be mistaken for another."""
        return [-(1 + (7 * call.number + at) % 64) / 8 for at in range(len(call.sampled))]

    def _server(self) -> LlmServer:
        return LlmServer(
            server_id="s",
            url="http://s",
            engine="vllm",
            mode=self.mode,  # type: ignore[arg-type]
            policy_version=self.version,
            logprob_kind="raw",
        )

    def _intent(self, request: ModelRequest, drift: str | None) -> CallIntent:
        return CallIntent(
            call_id=f"{len(self.calls):032x}",
            run="run",
            rollout_id=self.rollout.rollout_id,
            attempt=self.attempt,
            gateway="g",
            at_ms=len(self.calls),
            latest_end_ms=10_000,
            protocol=request.protocol,
            scenario=request.scenario,
            agent=request.ids,
            model="m",
            asked_model=request.model,
            stream=request.stream,
            prompt=request.prompt,
            extras=request.extras,
            params={**self.params, **request.params},
            drift=drift,
        )

    def _prompt(self, request: ModelRequest, place: Place) -> tuple[list[int], str | None]:
        """The ids of the prompt, and why they do not continue the parent's. See gateway/renderers.py."""
        if request.prompt is not None:
            return words(request.prompt), None
        parent, drift = place.parent, place.drift
        if self.mode == "tokens" and parent is not None and drift is None:
            if not parent.exact:
                drift = "parent_ids_unknown"
            else:
                sampled = parent.completion_ids.tolist()
                suffix = self.template.suffix(request.messages[place.shared :], sampled)
                if suffix is not None:
                    return parent.ids().tolist() + suffix, None
                drift = "template_not_append_only"
        return self.template.prompt(without_private(request.messages), request.tools), drift

    # --- what comes of it ---

    def close(self, reward: float | None = 1.0, turn_rewards: Sequence[float | None] = (), **changes: Any) -> Commit:
        """The rest of a rollout's life, and a commit by which everything counts, stitched by version 2."""
        same = {"rollout": self.rollout, "attempt": self.attempt}
        self.log(RolloutEvent(kind="initialized", at_ms=5, **same))
        closed = self.log(RolloutEvent(kind="ran", at_ms=20, started_ms=10, status="completed", **same))
        evaluated = self.log(
            RolloutEvent(kind="evaluated", at_ms=30, reward=reward, turn_rewards=tuple(turn_rewards), **same)
        )
        facts: dict[str, Any] = {
            "run": "run",
            "task_id": "task",
            "group_id": "task",
            "group_size": 1,
            "rollout_id": self.rollout.rollout_id,
            "index": 0,
            "attempt": self.attempt,
            "status": "completed",
            "cut_seq": self.seq,
            "closed_seq": closed,
            "evaluated_seq": evaluated,
            "stitcher": "2",
        }
        return Commit(**(facts | changes))

    def outcome(self, **changes: Any) -> Outcome:
        """Samples and counts of this story so far."""
        kept, seq = list(self.events), self.seq
        commit = self.close(**changes)
        outcome = outcome_of(self.events, commit)
        self.events, self.seq = kept, seq
        return outcome

    def grown(self, off: Collection[str] = ()) -> Seen:
        """The forest of this story so far."""
        return seen(grow(self.call_events(), off))

    def check_break(self, forest: Seen, number: int, reason: str, continues: int | None) -> DriftPoint:
        """Call `number` drifts for this reason, and the point shows where its ids leave those of the earlier call."""
        point = forest.drift[number]
        assert point.reason == reason
        assert point.continues == (None if continues is None else self.calls[continues].call_id)
        prompt = self.calls[number].prompt
        earlier = self.calls[continues].logged if continues is not None else []
        at = common(prompt, earlier)
        assert point.position == at
        assert point.expected.tolist() == earlier[at : at + 16]
        assert point.found.tolist() == prompt[at : at + 16]
        return point

    def call_events(self) -> list[tuple[int, CallEvent]]:
        return [(seq, event) for seq, event in self.events if not isinstance(event, RolloutEvent)]


@dataclass(frozen=True)
class Seen:
    """A forest by the numbers of its calls. Branches in the order of their calls."""

    branches: list[list[int]]
    continues: dict[int, int]
    links: list[tuple[str, int, int]]
    drift: dict[int, DriftPoint]
    excluded: dict[int, str]
    lenience: dict[str, int]
    incomplete: list[int]

    @property
    def reasons(self) -> dict[int, str]:
        """Why each call that drifted did."""
        return {number: point.reason for number, point in self.drift.items()}


def seen(forest: Forest) -> Seen:
    """A forest by the numbers of its calls."""
    assert len({point.call_id for point in forest.drift}) == len(forest.drift), "two drift points of one call"
    return Seen(
        branches=sorted([number(each) for each in branch] for branch in forest.branches),
        continues={number(call): number(to) for call, to in forest.continues.items()},
        links=sorted((link.kind, number(link.call_id), number(link.to)) for link in forest.links),
        drift={number(point.call_id): point for point in forest.drift},
        excluded={number(call): reason for call, reason in forest.excluded.items()},
        lenience=dict(forest.lenience),
        incomplete=sorted(number(call) for call in forest.incomplete),
    )


def number(call_id: str) -> int:
    """The number of a call in its story."""
    return int(call_id, 16)


def common(left: Sequence[int], right: Sequence[int]) -> int:
    """How many leading ids are equal."""
    pairs = zip(left, right, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))
