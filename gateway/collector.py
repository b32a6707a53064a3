"""The pieces of one reply put together, and whether its ids can be believed. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import structs

from rollyard.gateway.engines.engine import EngineChunk
from rollyard.gateway.exchange import Delta
from rollyard.gateway.tokens.parsers.parser import Piece
from rollyard.gateway.tokens.reply import ReplyReader
from rollyard.schemas.call import Message, Usage, VersionSpan
from rollyard.schemas.packed import Logprobs, TokenIds
from rollyard.schemas.subjects import digest


class Collector:
    """Takes the chunks of one call, created at that Unix second.

    In tokens mode `prompt_ids` are what was sent and `reader` turns sampled ids into the reply; in capture mode the
    server tells both. A generation that was aborted and continued comes in segments, each of one policy version.
    """

    def __init__(
        self,
        call_id: str,
        created: int,
        *,
        choice: int = 0,
        prompt_ids: TokenIds | None = None,
        reader: ReplyReader | None = None,
        vocab_size: int = 0,
    ) -> None:
        self.finish_reason: str | None = None
        self.prompt_ids = prompt_ids or TokenIds()
        self.spans: list[VersionSpan] = []
        self.told_version: int | None = None
        self._sent_prompt = prompt_ids is not None
        self._reader = reader
        self._call_id = call_id
        self._created = created
        self._choice = choice
        self._vocab_size = vocab_size
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._tool_calls: dict[int, dict[str, Any]] = {}
        self._ids: list[bytes] = []
        self._logprobs: list[bytes] = []
        self._usage: Usage | None = None
        self._unchecked: Usage | None = None
        self._cached_tokens: int | None = None
        self._reasoning_tokens = 0
        self._segment_start = 0
        self._fault: str | None = None
        self._constrained: str | None = None
        self._told_stop_string: str | None = None

    def add(self, chunk: EngineChunk) -> Delta | None:
        """Take a piece; returns what of it may be passed on at once."""
        if chunk.token_ids is not None:
            self._ids.append(chunk.token_ids.data)
        if chunk.logprobs is not None:
            self._logprobs.append(chunk.logprobs.data)
        if chunk.prompt_ids is not None:
            self._take_prompt(chunk.prompt_ids)
        self.finish_reason = chunk.finish_reason or self.finish_reason
        self._usage = chunk.usage or self._usage
        self._unchecked = chunk.usage or self._unchecked
        self._fault = self._fault or chunk.fault
        self._constrained = self._constrained or chunk.constrained
        self._told_stop_string = chunk.stop_string or self._told_stop_string
        if chunk.policy_version is not None:
            self.told_version = chunk.policy_version
        piece = Piece(chunk.reasoning, chunk.text)
        if self._reader is not None:
            piece = self._reader.push(chunk.token_ids or TokenIds(), chunk.text if chunk.fault else None)
        else:
            for delta in chunk.tool_calls:
                self._add_tool_call(delta)
        if piece.reasoning and chunk.token_ids is not None:
            self._reasoning_tokens += len(chunk.token_ids)
        return self._take(piece)

    def end(self) -> Delta | None:
        """The reply is over: what was held back of it."""
        return self._take(self._reader.end()) if self._reader is not None else None

    def end_segment(self, policy_version: int | None) -> None:
        """What was sampled since the last segment came from one version of the weights, the server's own word first."""
        end = len(self.completion_ids)
        version = self.told_version if self.told_version is not None else policy_version
        self._check_usage(end - self._segment_start, self._segment_start)
        if end > self._segment_start:
            self.spans.append(VersionSpan(start=self._segment_start, end=end, policy_version=version))
        self._segment_start, self.told_version = end, None

    def _check_usage(self, sampled: int, continued: int) -> None:
        """Compare what was told with what came. Of a continued generation the prompt holds what was sampled before."""
        usage, self._unchecked = self._unchecked, None
        if usage is None:
            return
        if self._cached_tokens is None:
            self._cached_tokens = usage.cached_tokens
        told, prompt = usage.completion_tokens, usage.prompt_tokens
        if self.completion_ids and sampled != told:
            self._fault = self._fault or f"{sampled} sampled ids but a usage of {told}"
        if self.prompt_ids and len(self.prompt_ids) + continued != prompt:
            self._fault = self._fault or f"{len(self.prompt_ids) + continued} prompt ids but a usage of {prompt}"

    def _take(self, piece: Piece) -> Delta | None:
        if piece.text:
            self._text.append(piece.text)
        if piece.reasoning:
            self._reasoning.append(piece.reasoning)
        for call in piece.tool_calls:
            function = {"name": call.name, "arguments": call.arguments}
            self._add_tool_call({"index": len(self._tool_calls), "function": function})
        if piece.text or piece.reasoning:
            return Delta(self._call_id, self._created, piece.text, piece.reasoning, self._choice)
        return None

    def _take_prompt(self, told: TokenIds) -> None:
        if not self._sent_prompt:
            self.prompt_ids = told
        elif told != self.prompt_ids:
            self._fault = self._fault or "the server used another prompt than the one that was sent"

    def _add_tool_call(self, delta: dict[str, Any]) -> None:
        index = delta.get("index")
        index = index if isinstance(index, int) else len(self._tool_calls)
        if index not in self._tool_calls:
            # Agents rewrite ids with other characters, and some templates take nine characters only.
            number = "c" + digest(self._call_id, str(index), chars=8)
            self._tool_calls[index] = {"id": number, "type": "function", "function": {"name": "", "arguments": ""}}
        function = self._tool_calls[index]["function"]
        for key, value in (delta.get("function") or {}).items():
            if key in function and isinstance(value, str):
                function[key] += value

    @property
    def completion_ids(self) -> TokenIds:
        """What was sampled, as far as it was told."""
        if len(self._ids) > 1:
            self._ids = [b"".join(self._ids)]
        return TokenIds(self._ids[0]) if self._ids else TokenIds()

    @property
    def logprobs(self) -> Logprobs:
        """Of completion_ids."""
        return Logprobs(b"".join(self._logprobs))

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the reply."""
        return self._reader.stop_string if self._reader is not None else self._told_stop_string

    def reply(self) -> Message:
        """The assistant message in OpenAI Chat form."""
        message: Message = {"role": "assistant", "content": "".join(self._text)}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._tool_calls:
            message["tool_calls"] = [self._tool_calls[index] for index in sorted(self._tool_calls)]
            message["content"] = message["content"] or None
        return message

    def finish(self) -> str:
        """Why the reply ended, in OpenAI's words."""
        if self._tool_calls and self.finish_reason in (None, "stop"):
            return "tool_calls"
        if self.stop_string is not None:
            return "stop"
        return self.finish_reason or "stop"

    def usage(self) -> Usage:
        """Token counts: counted from the ids in tokens mode, else the server's own."""
        if self._usage is not None and not self._sent_prompt:
            return structs.replace(self._usage, reasoning_tokens=self._usage.reasoning_tokens or self._reasoning_tokens)
        cached = self._usage.cached_tokens if self._usage is not None else 0
        return Usage(
            prompt_tokens=len(self.prompt_ids),
            completion_tokens=max(len(self.completion_ids), self._usage.completion_tokens if self._usage else 0),
            cached_tokens=self._cached_tokens if self._cached_tokens is not None else cached,
            reasoning_tokens=self._reasoning_tokens,
        )

    def inexact(self) -> str | None:
        """Why the ids are not exactly what was sampled, or None. Nothing may be built on inexact ids."""
        if self._fault is not None:
            return self._fault
        ids = self.completion_ids
        if not ids or not self.prompt_ids:
            return "the server returned no token ids"
        if self._vocab_size:
            highest = max(int(np.max(np.asarray(part))) for part in (ids, self.prompt_ids))
            if highest >= self._vocab_size:
                return f"id {highest} is not in the vocabulary of {self._vocab_size}"
        return None

    def untrainable(self) -> str | None:
        """Why this call cannot be trained on, or None. Nothing is ever padded or guessed."""
        reason = self.inexact() or self._constrained
        if reason is not None:
            return reason
        logprobs = self.logprobs
        if len(logprobs) != len(self.completion_ids):
            return f"{len(self.completion_ids)} sampled ids but {len(logprobs)} logprobs"
        if not np.isfinite(np.asarray(logprobs)).all():
            return "a logprob is not a finite number"
        return None
