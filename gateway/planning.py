"""From a request to a call that can be dispatched: what it continues, its prompt, its parameters, its intent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from msgspec import structs

from rollyard.gateway.exchange import ModelRequest
from rollyard.gateway.history import ROOT, fold, holds_unknown_reply, settings_digest
from rollyard.gateway.keys import SessionGrant
from rollyard.gateway.metrics import GatewayMetrics
from rollyard.gateway.pool import PoolEntry
from rollyard.gateway.refusal import Refusal, context_length_exceeded, unavailable
from rollyard.gateway.renderers import Prompt, Renderers
from rollyard.gateway.sampling import effective
from rollyard.gateway.sessions import KnownCall, Session, asked_digest
from rollyard.gateway.tokens.reply import ReplyReader
from rollyard.pipeline.bus import Bus
from rollyard.schemas.call import CallIntent
from rollyard.schemas.errors import ConfigError, ModelError
from rollyard.schemas.packed import TokenIds

SNAPSHOT_WALK: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a request stands in its session.

    `parent` is the call that it continues, `shared` how many leading messages both have, `lenience` the rules by which
    the agent's echo of the parent's reply is that reply. `drift` says why the parent's ids cannot be continued, if they
    cannot: the messages or the settings are not the same.
    """

    parent: KnownCall | None
    shared: int
    digests: list[bytes]
    settings: bytes
    asked: bytes
    lenience: tuple[str, ...] = ()
    drift: str | None = None

    @property
    def same_settings(self) -> bool:
        """Whether tools and template options are the parent's."""
        return self.settings == (self.parent.settings if self.parent else ROOT)


@dataclass(slots=True, kw_only=True)
class Plan:
    """A call that is ready to be dispatched."""

    request: ModelRequest
    intent: CallIntent
    session: Session
    place: Place
    entry: PoolEntry
    prompt: Prompt | None
    reader: ReplyReader | None
    vocab_size: int
    snapshot: bool = False
    policy_version: int | None = None

    @property
    def prompt_ids(self) -> TokenIds | None:
        """What is sent in tokens mode."""
        return self.prompt.ids if self.prompt is not None else None


async def find_place(
    session: Session, request: ModelRequest, bus: Bus, metrics: GatewayMetrics, *, limited: bool
) -> Place:
    """Where a request stands. Catches up from the log when it holds a reply that is not known here. Raises BusError."""
    messages = request.messages
    canonical = session.canonical.digests(messages)
    digests = session.digests(messages, canonical)
    chains = fold(ROOT, digests)
    parent, shared = session.match(chains, request.ids)
    if limited or holds_unknown_reply(messages, shared):
        metrics.catch_ups.inc()
        await session.catch_up(bus)
        digests = session.digests(messages, canonical)
        chains = fold(ROOT, digests)
        parent, shared = session.match(chains, request.ids)
    settings = settings_digest(request.tools, request.template_options)
    drift: str | None = None
    until_reply = shared
    if parent is None and holds_unknown_reply(messages, 0):
        parent, shared, until_reply = session.nearest(digests, chains, request.ids)
        if parent is not None:
            drift = "system_changed" if not shared else "history_edited"
    if drift is None and parent is not None and settings != parent.settings:
        drift = "tools_changed"
    tip = chains[-1] if chains else ROOT
    return Place(
        parent=parent,
        shared=shared,
        digests=digests,
        settings=settings,
        asked=asked_digest(tip, settings, request.ids, request.prompt or request.context.get("prompt_ids")),
        lenience=session.lenience(parent, messages[until_reply - 1]) if parent is not None else (),
        drift=drift,
    )


async def make_prompt(renderers: Renderers, entry: PoolEntry, request: ModelRequest, place: Place) -> Prompt:
    """The prompt in tokens mode. Raises Refusal."""
    with rendering(entry):
        renderer = await renderers.get(entry.server.tokenizer)
        return await renderer.next_prompt(request, place.parent, place.shared, place.drift)


@contextmanager
def rendering(entry: PoolEntry) -> Iterator[None]:
    """Raise what goes wrong with the template or tokenizer of a server as a Refusal."""
    try:
        yield
    except ConfigError as error:
        raise unavailable(f"model server {entry.server.server_id}: {error}", code="no_tokenizer") from error
    except ModelError as error:
        raise Refusal(400, "invalid_messages", error.message, hint=error.hint, param="messages") from error


def make_reader(prompt: Prompt, entry: PoolEntry, request: ModelRequest, stops: Sequence[str]) -> ReplyReader:
    """What reads the reply from its ids in tokens mode. Raises Refusal."""
    none = request.extras.get("tool_choice") == "none" or request.prompt is not None
    try:
        return prompt.reader(None if none else request.tools, stops, entry.server.parser)
    except ConfigError as error:
        raise unavailable(f"model server {entry.server.server_id}: {error}", code="no_parser") from error


def make_params(
    request: ModelRequest,
    grant: SessionGrant,
    *,
    choice: int,
    tokens_left: int | None,
    max_context: int,
    prompt: Prompt | None,
) -> dict[str, Any]:
    """The sampling parameters of a call. Raises Refusal when the prompt leaves no room for a reply."""
    params = effective(request.params, grant, request.messages, tokens_left, choice)
    if prompt is not None and max_context:
        room = max_context - len(prompt.ids)
        if room < 1:
            raise context_length_exceeded(max_context, len(prompt.ids))
        params["max_tokens"] = min(params.get("max_tokens", room), room)
    elif max_context and "max_tokens" in params:
        # vLLM ends a reply where the context ends, but refuses to be asked for more than its whole context.
        params["max_tokens"] = min(params["max_tokens"], max_context)
    return params


def snapshot_due(parent: KnownCall | None) -> bool:
    """Whether a record is written whole, so that no reader walks far.

    The distance grows with the conversation: all snapshots together are not larger than the last one twice.
    """
    return parent is not None and parent.walk >= max(SNAPSHOT_WALK, parent.turn // 2)


def as_delta(intent: CallIntent, request: ModelRequest, place: Place, *, snapshot: bool) -> CallIntent:
    """The intent with what the parent's record does not hold."""
    shared = 0 if snapshot else place.shared
    own_tools = snapshot or not place.same_settings
    return structs.replace(
        intent,
        parent=place.parent.call_id if place.parent else None,
        shared_messages=shared,
        lenience=place.lenience,
        messages=request.messages[shared:],
        tools=(request.tools or []) if own_tools else None,
        template=request.template_options if own_tools else {},
    )
