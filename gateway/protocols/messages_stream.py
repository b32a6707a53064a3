"""A reply of the Messages API as server-sent events."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from rollyard.gateway.exchange import Delta, Finished, ModelRequest, Started, Update, Waiting
from rollyard.gateway.protocols.messages_blocks import Signature
from rollyard.gateway.protocols.messages_errors import error_of
from rollyard.gateway.protocols.messages_fields import Block
from rollyard.gateway.protocols.messages_reply import message, stop_of, usage_of
from rollyard.gateway.refusal import Refusal
from rollyard.schemas.call import Message, Usage

Kind = Literal["thinking", "text"]
_KEYS: Final[dict[Kind, str]] = {"thinking": "reasoning_content", "text": "content"}
_EMPTY: Final[dict[Kind, Block]] = {
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
    "text": {"type": "text", "text": ""},
}


class MessagesStream:
    """See ReplyStream. Thinking and text go out at once, tool calls and the end of the last block with `Finished`."""

    def __init__(self, request: ModelRequest) -> None:
        self._request = request
        self._begun = False
        self._blocks_ended = False
        self._index = -1
        self._open: Kind | None = None
        self._signature = Signature()
        self._held: dict[Kind, str] = {"thinking": "", "text": ""}
        self._sent: dict[Kind, int] = {"thinking": 0, "text": 0}

    def events(self, update: Update) -> bytes:
        """See ReplyStream."""
        match update:
            case Waiting():
                return self.ping()
            case Started():
                return self._begin(update.call_id, update.usage)
            case Delta():
                return self._begin(update.call_id, Usage()) + self._delta(update)
            case Finished():
                return self._begin(update.call_id, update.usage) + self._end(update)

    def ping(self) -> bytes:
        """See ReplyStream."""
        return _event({"type": "ping"})

    def error(self, refusal: Refusal) -> bytes:
        """See ReplyStream.

        Once a block is whole, Claude Code takes an error for the end of everything, but asks again when the stream
        just breaks. So what may pass is not said then.
        """
        if self._blocks_ended and refusal.status >= 500:
            return b""
        return _event(error_of(refusal))

    def _begin(self, call_id: str, usage: Usage) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        # One token of output is what the vendor says here; the last event has the true number.
        start = message(call_id, self._request.model, usage_of(usage, 1))
        return _event({"type": "message_start", "message": start})

    def _delta(self, delta: Delta) -> bytes:
        events = b""
        # Reasoning that comes after text would part the text in two, which is not how it comes back: it waits.
        if delta.reasoning and self._open != "text":
            events += self._add("thinking", delta.reasoning)
        if delta.text:
            events += self._add("text", delta.text)
        return events

    def _add(self, kind: Kind, piece: str) -> bytes:
        """More of a block, which begins with the first piece that is not blank."""
        events = b""
        if self._open != kind:
            piece = self._held[kind] + piece
            if not piece.strip():
                self._held[kind] = piece
                return b""
            self._held[kind] = ""
            events = self._close() + self._start(_EMPTY[kind])
            self._open = kind
        self._sent[kind] += len(piece)
        if kind == "text":
            return events + self._change({"type": "text_delta", "text": piece})
        self._signature.update(piece)
        return events + self._change({"type": "thinking_delta", "thinking": piece})

    def _end(self, finished: Finished) -> bytes:
        parts = []
        order: tuple[Kind, Kind] = ("text", "thinking") if self._open == "text" else ("thinking", "text")
        for kind in order:
            self._held[kind] = ""
            if rest := (finished.reply.get(_KEYS[kind]) or "")[self._sent[kind] :]:
                parts.append(self._add(kind, rest))
        parts.append(self._close())
        parts += [self._tool_use(call) for call in finished.reply.get("tool_calls") or ()]
        usage = usage_of(finished.usage, finished.usage.completion_tokens)
        parts.append(_event({"type": "message_delta", "delta": stop_of(finished), "usage": usage}))
        parts.append(_event({"type": "message_stop"}))
        return b"".join(parts)

    def _tool_use(self, call: Message) -> bytes:
        function = call["function"]
        start = self._start({"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}})
        # As the model wrote them, whether that is JSON or not: agents read them so.
        change = self._change({"type": "input_json_delta", "partial_json": function["arguments"]})
        return start + change + self._stop()

    def _close(self) -> bytes:
        """End the open block, if there is one."""
        if self._open is None:
            return b""
        signed = b""
        if self._open == "thinking":
            signed = self._change({"type": "signature_delta", "signature": self._signature.value()})
            self._signature = Signature()
        self._open = None
        return signed + self._stop()

    def _start(self, block: Block) -> bytes:
        self._index += 1
        return _event({"type": "content_block_start", "index": self._index, "content_block": block})

    def _change(self, delta: Block) -> bytes:
        return _event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _stop(self) -> bytes:
        self._blocks_ended = True
        return _event({"type": "content_block_stop", "index": self._index})


def _event(value: dict[str, Any]) -> bytes:
    """Claude Code takes a stream without `event:` lines for an empty one."""
    name: str = value["type"]
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(value) + b"\n\n"
