"""What the scripted policy answers: a pure function of the script and the request."""

from __future__ import annotations

import json
import struct
import zlib
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, Struct, structs

from rollyard.gateway.scripted import chatml
from rollyard.gateway.scripted.asked import Asked
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


class Piece(NamedTuple):
    """What one id adds to the text as sampled, and to the parts of it that a parser makes."""

    raw: str = ""
    reasoning: str = ""
    content: str = ""


class Reply(Struct, frozen=True, kw_only=True):
    """One answer. `ids`, `logprobs` and `pieces` have the same length: a piece is what its id adds."""

    prompt_ids: TokenIds
    ids: list[int]
    logprobs: list[float]
    pieces: list[Piece]
    tool_calls: list[dict[str, Any]]
    finish_reason: str
    stop_reason: str | None
    turn: Turn
    number: Annotated[int, Meta(description="of the turn: the assistant messages in the request")]

    def joined(self, start: int = 0, end: int | None = None) -> Piece:
        """What the ids from `start` to `end` add."""
        return Piece(*("".join(texts) for texts in zip(*self.pieces[start:end], strict=True)))

    def cut(self, count: int) -> Reply:
        """The same as far as its first ids, ended by the server's operator."""
        return structs.replace(
            self,
            ids=self.ids[:count],
            logprobs=self.logprobs[:count],
            pieces=self.pieces[:count],
            tool_calls=[],
            finish_reason="abort",
            stop_reason=None,
        )


class Said(NamedTuple):
    """A whole reply of the script, before anything cuts it."""

    turn: Turn
    number: int
    seed: int
    text: chatml.ReplyText
    calls: list[tuple[str, dict[str, Any]]]
    ids: list[int]
    finish_reason: str


class ScriptedPolicy:
    """A script with a tokenizer and a template. Raises nothing by itself; see `answer`."""

    def __init__(self, script: Script, renderer: Renderer) -> None:
        self.script = script
        self.renderer = renderer

    @property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer whose ids are sampled."""
        return self.renderer.tokenizer

    def answer(self, asked: Asked) -> Reply:
        """The reply to a request. Raises ModelError with an HTTP status for a request that a server would refuse.

        What ids hold of a reply that was broken off is gone on with.
        """
        prompt_ids, messages, begun_at = self._prompt(asked)
        room = self.script.max_model_len - len(prompt_ids)
        if room < 1:
            raise ModelError(
                f"This model's maximum context length is {self.script.max_model_len} tokens. However, your prompt "
                f"contains {len(prompt_ids)} input tokens, which exceeds this limit even without any output tokens. "
                f"Please reduce the length of the input prompt. (parameter=input_tokens, value={len(prompt_ids)})",
                status=400,
            )
        number = sum(message.get("role") == "assistant" for message in messages)
        turns = self._conversation(messages).turns
        said = self._say(turns[min(number, len(turns) - 1)], messages, number, zlib.crc32(prompt_ids[:begun_at].data))
        return self._sample(asked, said, prompt_ids, begun_at)

    def _prompt(self, asked: Asked) -> tuple[TokenIds, list[Message], int]:
        """Ids of the prompt, the messages in it, and where in it the reply begins."""
        if asked.prompt_ids is not None:
            prompt_ids = TokenIds.of(asked.prompt_ids)
        elif asked.prompt is not None:
            prompt_ids = self.tokenizer.encode_rendered(asked.prompt, "")
        else:
            prompt_ids = self.renderer.prompt(asked.messages, asked.tools, asked.template_options)
        if asked.messages:
            return prompt_ids, asked.messages, len(prompt_ids)
        return prompt_ids, *chatml.transcript(prompt_ids, self.tokenizer)

    def _conversation(self, messages: list[Message]) -> Conversation:
        asked = [text_of(message.get("content")) or "" for message in messages if message.get("role") == "user"] or [""]
        for conversation in self.script.conversations:
            if any(conversation.match in text for text in asked):
                return conversation
        raise ModelError(
            f"no conversation of the script matches a user message; the first is {asked[0][:80]!r}",
            hint='add a conversation with "match": ""',
            status=400,
        )

    def _say(self, turn: Turn, messages: list[Message], number: int, seed: int) -> Said:
        content, calls, reasoning = _filled(turn, messages, number)
        text = chatml.reply_text(content, calls, reasoning)
        ids = self.tokenizer.encode_plain(text.text).tolist()
        if self.script.noncanonical:
            ids = self._split_some(ids, seed)
        finish_reason = turn.finish_reason or ("tool_calls" if calls else "stop")
        if finish_reason in ("stop", "tool_calls"):
            ids.append(self._end_of_turn())
        return Said(turn, number, seed, text, calls, ids, finish_reason)

    def _sample(self, asked: Asked, said: Said, prompt_ids: TokenIds, begun_at: int) -> Reply:
        begun = prompt_ids[begun_at:].tolist()
        begun = begun if said.ids[: len(begun)] == begun else []
        ids, calls, finish_reason = said.ids[len(begun) :], said.calls, said.finish_reason
        if begun and finish_reason == "abort":
            ids, finish_reason = [*ids, self._end_of_turn()], "stop"
        room = self.script.max_model_len - len(prompt_ids)
        limit = room if asked.max_tokens is None else min(asked.max_tokens, room)
        if len(ids) > limit:
            ids, calls, finish_reason = ids[:limit], [], "length"
        pieces, stopped_by = self._pieces(begun, ids, asked.stop, said.text)
        if stopped_by is not None:
            ids, calls, finish_reason = ids[: len(pieces)], [], "stop"
        return Reply(
            prompt_ids=prompt_ids,
            ids=ids,
            logprobs=[_logprob(position, token, said.seed) for position, token in enumerate(ids, len(begun))],
            pieces=pieces,
            tool_calls=[_tool_call(name, arguments, n, said.seed) for n, (name, arguments) in enumerate(calls)],
            finish_reason=finish_reason,
            stop_reason=stopped_by,
            turn=said.turn,
            number=said.number,
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

    def _pieces(
        self, begun: list[int], ids: list[int], stop: list[str], text: chatml.ReplyText
    ) -> tuple[list[Piece], str | None]:
        """What each id adds behind what was begun; and the stop string that was met."""
        decoder = IncrementalDecoder(self.tokenizer)
        stops = StopStrings(stop)
        at = len(stops.push(decoder.push(begun)))
        pieces: list[Piece] = []
        for position, token in enumerate(ids):
            raw = stops.push(decoder.push((token,)))
            if position == len(ids) - 1:
                raw += stops.push(decoder.flush()) + stops.flush()
            pieces.append(Piece(raw, _within(raw, at, text.reasoning), _within(raw, at, text.content)))
            at += len(raw)
            if stops.matched is not None:
                break
        return pieces, stops.matched


def _within(text: str, at: int, span: tuple[int, int]) -> str:
    """The part of a text, which stands at that place, that lies within a span."""
    return text[max(0, span[0] - at) : max(0, span[1] - at)]


def _filled(turn: Turn, messages: list[Message], number: int) -> tuple[str, list[tuple[str, dict[str, Any]]], str]:
    user = next((m for m in reversed(messages) if m.get("role") == "user"), {})
    values = {
        "{prompt}": text_of(user.get("content")) or "",
        "{last}": text_of(messages[-1].get("content")) or "",
        "{turn}": str(number),
    }
    values |= {f"{{last.{key}}}": value for key, value in _texts_in(values["{last}"]).items()}

    def fill(value: Any) -> Any:
        if isinstance(value, str):
            for name, text in values.items():
                value = value.replace(name, text)
            return value
        if isinstance(value, dict):
            return {key: fill(item) for key, item in value.items()}
        return [fill(item) for item in value] if isinstance(value, list) else value

    return fill(turn.content), [(call.name, fill(call.arguments)) for call in turn.tool_calls], fill(turn.reasoning)


def _texts_in(text: str) -> dict[str, str]:
    """The strings of a JSON object, by their keys; of any other text, none."""
    try:
        return {
            key: value for key, value in msgspec.json.decode(text, type=dict[str, Any]).items() if type(value) is str
        }
    except msgspec.DecodeError:
        return {}


def _tool_call(name: str, arguments: dict[str, Any], index: int, seed: int) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": f"chatcmpl-tool-{seed:08x}{index:04x}", "type": "function", "function": function}


def _noise(position: int, token: int, seed: int) -> int:
    """32 bits that look random and are a function of their arguments."""
    return zlib.crc32(struct.pack("<II", position, token), seed)


def _logprob(position: int, token: int, seed: int) -> float:
    """Between -4 and 0, in 24 bits: float32 holds it exactly."""
    return -(_noise(position, token, seed) >> 8) / (1 << 22)
