"""A reply as the event stream of the Responses protocol.

Text and reasoning flow as deltas. What ends an item waits for `Finished`, for texts too: Codex keeps an item that was
done, and runs a call that was done, even if the stream then breaks. So all `done` events stand at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import msgspec
from msgspec import Struct

from rollyard.gateway.exchange import Delta, Finished, ModelRequest, Started, Update, Waiting
from rollyard.gateway.protocols.openai import PING
from rollyard.gateway.protocols.responses_reply import (
    final_response,
    message_item,
    output_items,
    reasoning_item,
    response,
    stream_error,
    summarised,
    text_item_id,
    text_part,
    texts,
)
from rollyard.gateway.refusal import Refusal


class _Channel(Struct, frozen=True):
    """How the text of a part goes out: names of events, of the part's index, and of the text in the part."""

    part: str
    text: str
    index: str = "content_index"
    key: str = "text"


_CHANNELS: Final = {
    "output_text": _Channel("content_part", "output_text"),
    "refusal": _Channel("content_part", "refusal", key="refusal"),
    "reasoning_text": _Channel("content_part", "reasoning_text"),
    "summary_text": _Channel("reasoning_summary_part", "reasoning_summary_text", "summary_index"),
}
_TEXTS: Final = ("reasoning", "message")
_CALLS: Final = {
    "function_call": ("function_call_arguments", "arguments"),
    "custom_tool_call": ("custom_tool_call_input", "input"),
}


@dataclass(slots=True)
class _Flow:
    """A text on its way out: its delta event, but for the delta, and how much of it is gone."""

    event: str
    fields: dict[str, Any]
    chars: int = 0


class ResponsesStream:
    """See ReplyStream."""

    def __init__(self, request: ModelRequest) -> None:
        self._request = request
        self._call_id = ""
        self._created = 0
        self._sequence = 0
        self._flows: dict[str, _Flow] = {}  # by type of item, in the order in which they began

    def events(self, update: Update) -> bytes:
        """See ReplyStream."""
        began = b"" if self._sequence else self._begin(update)
        match update:
            case Waiting():
                return began or self.ping()
            case Started():
                return began
            case Delta():
                return began + self._delta("reasoning", update.reasoning) + self._delta("message", update.text)
            case Finished():
                return began + self._finish(update)

    def ping(self) -> bytes:
        """See ReplyStream."""
        return PING

    def error(self, refusal: Refusal) -> bytes:
        """See ReplyStream."""
        error = stream_error(refusal)
        failed = response(self._request, self._call_id, self._created, "failed", error=error)
        return self._event("response.failed", response=failed)

    def _begin(self, update: Update) -> bytes:
        self._call_id, self._created = update.call_id, update.created
        begun = response(self._request, update.call_id, update.created, "in_progress")
        encoded = msgspec.Raw(msgspec.json.encode(begun))
        return self._event("response.created", response=encoded) + self._event("response.in_progress", response=encoded)

    def _delta(self, kind: str, text: str) -> bytes:
        if not text:
            return b""
        flow, began = self._flows.get(kind), b""
        if flow is None:
            began, flow = self._begin_flow(kind)
        flow.chars += len(text)
        return began + self._event(flow.event, **flow.fields, delta=text)

    def _begin_flow(self, kind: str) -> tuple[bytes, _Flow]:
        if kind == "message":
            part = text_part("")
        else:
            part = {"type": "summary_text" if summarised(self._request) else "reasoning_text", "text": ""}
        index = len(self._flows)
        flow = self._flows[kind] = _Flow(*self._delta_event(kind, index, 0, part))
        return self._begin_item(kind, index) + self._begin_part(kind, index, 0, part), flow

    def _finish(self, finished: Finished) -> bytes:
        reasoning, text = texts(finished.reply)
        parts = [
            self._delta("reasoning", reasoning[self._chars("reasoning") :]),
            self._delta("message", text[self._chars("message") :]),
        ]
        items = output_items(self._request, finished, tuple(self._flows))
        for index, item in enumerate(items):
            parts.append(self._texts(index, item) if item["type"] in _TEXTS else self._call(index, item))
            parts.append(self._event("response.output_item.done", output_index=index, item=item))
        whole = final_response(self._request, finished, items)
        parts.append(self._event(f"response.{whole['status']}", response=whole))
        return b"".join(parts)

    def _chars(self, kind: str) -> int:
        flow = self._flows.get(kind)
        return flow.chars if flow else 0

    def _texts(self, index: int, item: dict[str, Any]) -> bytes:
        """What is left to say of reasoning or a message before it is done."""
        kind = item["type"]
        begun = kind in self._flows
        events = [] if begun else [self._begin_item(kind, index)]
        for number, part in enumerate(item.get("summary") or item["content"]):
            channel = _CHANNELS[part["type"]]
            text = part[channel.key]
            if not begun or number:
                events.append(self._begin_part(kind, index, number, {**part, channel.key: ""}))
                name, fields = self._delta_event(kind, index, number, part)
                events.append(self._event(name, **fields, delta=text) if text else b"")
            where = self._where(kind, index, number, part)
            more: dict[str, Any] = {"logprobs": []} if channel.text == "output_text" else {}
            events.append(self._event(f"response.{channel.text}.done", **where, **{channel.key: text}, **more))
            events.append(self._event(f"response.{channel.part}.done", **where, part=part))
        return b"".join(events)

    def _call(self, index: int, item: dict[str, Any]) -> bytes:
        """A call before it is done."""
        if item["type"] not in _CALLS:
            return self._added(index, {**item, "status": "in_progress"})
        name, key = _CALLS[item["type"]]
        where = {"item_id": item["id"], "output_index": index}
        return (
            self._added(index, {**item, key: "", "status": "in_progress"})
            + self._event(f"response.{name}.delta", **where, delta=item[key])
            + self._event(f"response.{name}.done", **where, **{key: item[key]})
        )

    def _begin_item(self, kind: str, index: int) -> bytes:
        number = text_item_id(kind, self._call_id, index)
        item = message_item(number, None) if kind == "message" else reasoning_item(self._request, number, None)
        return self._added(index, item)

    def _begin_part(self, kind: str, index: int, number: int, part: dict[str, Any]) -> bytes:
        event = f"response.{_CHANNELS[part['type']].part}.added"
        return self._event(event, **self._where(kind, index, number, part), part=part)

    def _delta_event(self, kind: str, index: int, number: int, part: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Name and fields of a delta of this part, but for the delta."""
        channel = _CHANNELS[part["type"]]
        more: dict[str, Any] = {"logprobs": []} if channel.text == "output_text" else {}
        return f"response.{channel.text}.delta", {**self._where(kind, index, number, part), **more}

    def _where(self, kind: str, index: int, number: int, part: dict[str, Any]) -> dict[str, Any]:
        item = text_item_id(kind, self._call_id, index)
        return {"item_id": item, "output_index": index, _CHANNELS[part["type"]].index: number}

    def _added(self, index: int, item: dict[str, Any]) -> bytes:
        return self._event("response.output_item.added", output_index=index, item=item)

    def _event(self, name: str, **fields: Any) -> bytes:
        body = {"type": name, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(body) + b"\n\n"
