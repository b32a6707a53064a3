"""What the scripted policy answers: a pure function of the script and the request."""

from __future__ import annotations

import json
import struct
import zlib
from typing import Annotated, Any

from msgspec import Meta, Struct

from rollyard.gateway.scripted import chatml
from rollyard.gateway.scripted.script import Conversation, Script, Turn
from rollyard.gateway.tokens.decoder import IncrementalDecoder, StopStrings
from rollyard.gateway.tokens.renderer import Renderer
from rollyard.gateway.tokens.template import text_of
from rollyard.gateway.tokens.tokenizer import TextTokenizer
from rollyard.schemas.call import Message
from rollyard.schemas.errors import ModelError
from rollyard.schemas.packed import TokenIds

# Of the ids that could be split, about one in so many is.
_SPLIT_ONE_IN = 4


class ChatRequest(Struct, kw_only=True):
    """The fields of a chat completion request that change the answer. Others are ignored."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    model: str = ""
    tools: list[Message] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None


class Reply(Struct, frozen=True, kw_only=True):
    """One answer. `ids`, `logprobs` and `texts` have the same length: a text is what its id adds to the content."""

    prompt_ids: TokenIds
    ids: list[int]
    logprobs: list[float]
    texts: list[str]
    tool_calls: list[dict[str, Any]]
    finish_reason: str
    stop_reason: str | None
    turn: Turn
    number: Annotated[int, Meta(description="of the turn: the assistant messages in the request")]

    @property
    def content(self) -> str:
        """The text without the tool calls."""
        return "".join(self.texts)


class ScriptedPolicy:
    """A script with a tokenizer and a template. Raises nothing by itself; see `answer`."""

    def __init__(self, script: Script, renderer: Renderer) -> None:
        self.script = script
        self.renderer = renderer

    @property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer whose ids are sampled."""
        return self.renderer.tokenizer

    def answer(self, request: ChatRequest) -> Reply:
        """The reply to a request. Raises ModelError with an HTTP status for a request that vLLM would refuse."""
        prompt_ids = self._prompt(request)
        room = self.script.max_model_len - len(prompt_ids)
        if room < 1:
            raise ModelError(
                f"This model's maximum context length is {self.script.max_model_len} tokens. However, your request "
                f"has {len(prompt_ids)} input tokens. Please reduce the length of the input messages.",
                status=400,
            )
        number = sum(message.get("role") == "assistant" for message in request.messages)
        turns = self._conversation(request.messages).turns
        turn = turns[min(number, len(turns) - 1)]
        return self._sample(request, turn, number, prompt_ids, room)

    def _prompt(self, request: ChatRequest) -> TokenIds:
        given = (request.kv_transfer_params or {}).get("prompt_token_ids")
        if given is not None:
            return TokenIds.of(given)
        return self.renderer.prompt(request.messages, request.tools, request.chat_template_kwargs)

    def _conversation(self, messages: list[Message]) -> Conversation:
        first = next((text_of(m.get("content")) or "" for m in messages if m.get("role") == "user"), "")
        for conversation in self.script.conversations:
            if conversation.match in first:
                return conversation
        raise ModelError(
            f"no conversation of the script matches the first user message {first[:80]!r}",
            hint='add a conversation with "match": ""',
            status=400,
        )

    def _sample(self, request: ChatRequest, turn: Turn, number: int, prompt_ids: TokenIds, room: int) -> Reply:
        seed = zlib.crc32(prompt_ids.data)
        content, calls = _filled(turn, request.messages, number)
        ids = self.tokenizer.encode_plain(chatml.reply_text(content, calls)).tolist()
        if self.script.noncanonical:
            ids = self._split_some(ids, seed)
        finish_reason = turn.finish_reason or ("tool_calls" if calls else "stop")
        if finish_reason in ("stop", "tool_calls"):
            ids.append(self._end_of_turn())
        limit = min(request.max_completion_tokens or request.max_tokens or room, room)
        if len(ids) > limit:
            ids, calls, finish_reason = ids[:limit], [], "length"
        texts, stopped_by = self._texts(ids, request.stop or [], len(content))
        if stopped_by is not None:
            ids, calls, finish_reason = ids[: len(texts)], [], "stop"
        return Reply(
            prompt_ids=prompt_ids,
            ids=ids,
            logprobs=[_logprob(position, token, seed) for position, token in enumerate(ids)],
            texts=texts,
            tool_calls=[_tool_call(name, arguments, n, seed) for n, (name, arguments) in enumerate(calls)],
            finish_reason=finish_reason,
            stop_reason=stopped_by,
            turn=turn,
            number=number,
        )

    def _split_some(self, ids: list[int], seed: int) -> list[int]:
        """The same text in ids that the tokenizer would not choose, as models do sample it now and then."""
        chosen: list[int] = []
        for position, token in enumerate(ids):
            number = _noise(position, token, seed)
            splits = self.tokenizer.splits(token) if number % _SPLIT_ONE_IN == 0 else ()
            chosen.extend(splits[number // _SPLIT_ONE_IN % len(splits)] if splits else (token,))
        return chosen

    def _end_of_turn(self) -> int:
        named = self.tokenizer.specials.get(self.tokenizer.eos_token)
        return min(self.tokenizer.eos_ids) if named is None else named

    def _texts(self, ids: list[int], stop: str | list[str], content_chars: int) -> tuple[list[str], str | None]:
        """What each id adds to the content, which ends where the tool calls begin; and the stop string that was met."""
        decoder = IncrementalDecoder(self.tokenizer)
        stops = StopStrings([stop] if isinstance(stop, str) else stop)
        texts: list[str] = []
        left = content_chars
        for position, token in enumerate(ids):
            text = stops.push(decoder.push((token,)))
            if position == len(ids) - 1:
                text += stops.push(decoder.flush()) + stops.flush()
            texts.append(text[:left])
            left -= len(texts[-1])
            if stops.matched is not None:
                break
        return texts, stops.matched


def _filled(turn: Turn, messages: list[Message], number: int) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    user = next((m for m in reversed(messages) if m.get("role") == "user"), {})
    values = {
        "{prompt}": text_of(user.get("content")) or "",
        "{last}": text_of(messages[-1].get("content")) or "",
        "{turn}": str(number),
    }

    def fill(value: Any) -> Any:
        if isinstance(value, str):
            for name, text in values.items():
                value = value.replace(name, text)
            return value
        if isinstance(value, dict):
            return {key: fill(item) for key, item in value.items()}
        return [fill(item) for item in value] if isinstance(value, list) else value

    return fill(turn.content), [(call.name, fill(call.arguments)) for call in turn.tool_calls]


def _tool_call(name: str, arguments: dict[str, Any], index: int, seed: int) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": f"chatcmpl-tool-{seed:08x}{index:04x}", "type": "function", "function": function}


def _noise(position: int, token: int, seed: int) -> int:
    """32 bits that look random and are a function of their arguments."""
    return zlib.crc32(struct.pack("<II", position, token), seed)


def _logprob(position: int, token: int, seed: int) -> float:
    """Between -4 and 0, in 24 bits: float32 holds it exactly."""
    return -(_noise(position, token, seed) >> 8) / (1 << 22)
