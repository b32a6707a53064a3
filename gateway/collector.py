"""The pieces of one reply put together, and whether its ids can be believed. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np

from rollyard.gateway.engines.engine import EngineChunk
from rollyard.gateway.exchange import Delta
from rollyard.schemas.call import Message, Usage
from rollyard.schemas.packed import Logprobs, TokenIds
from rollyard.schemas.subjects import digest


class Collector:
    """Takes the chunks of one call, created at that Unix second.

    `prompt_ids` are given in tokens mode; in capture mode the server tells them.
    """

    def __init__(self, call_id: str, created: int, *, prompt_ids: TokenIds | None = None, vocab_size: int = 0) -> None:
        self.finish_reason: str | None = None
        self.policy_version: int | None = None
        self._sent_prompt = prompt_ids is not None
        self.prompt_ids = prompt_ids or TokenIds()
        self._call_id = call_id
        self._created = created
        self._vocab_size = vocab_size
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._tool_calls: dict[int, dict[str, Any]] = {}
        self._ids: list[bytes] = []
        self._logprobs: list[bytes] = []
        self._usage: Usage | None = None
        self._fault: str | None = None

    def add(self, chunk: EngineChunk) -> Delta | None:
        """Take a piece; returns what of it may be passed on at once."""
        if chunk.text:
            self._text.append(chunk.text)
        if chunk.reasoning:
            self._reasoning.append(chunk.reasoning)
        for delta in chunk.tool_calls:
            self._add_tool_call(delta)
        if chunk.token_ids is not None:
            self._ids.append(chunk.token_ids.data)
        if chunk.logprobs is not None:
            self._logprobs.append(chunk.logprobs.data)
        if chunk.prompt_ids is not None:
            self._take_prompt(chunk.prompt_ids)
        self.finish_reason = chunk.finish_reason or self.finish_reason
        self._usage = chunk.usage or self._usage
        self._fault = self._fault or chunk.fault
        if chunk.policy_version is not None:
            self.policy_version = chunk.policy_version
        if chunk.text or chunk.reasoning:
            return Delta(self._call_id, self._created, chunk.text, chunk.reasoning)
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
        return TokenIds(b"".join(self._ids))

    @property
    def logprobs(self) -> Logprobs:
        """Of completion_ids."""
        return Logprobs(b"".join(self._logprobs))

    def reply(self) -> Message:
        """The assistant message in OpenAI Chat form."""
        message: Message = {"role": "assistant", "content": "".join(self._text)}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._tool_calls:
            message["tool_calls"] = [self._tool_calls[index] for index in sorted(self._tool_calls)]
            message["content"] = message["content"] or None
        return message

    def usage(self) -> Usage:
        """Token counts: the server's own, else counted from the ids."""
        if self._usage is not None:
            return self._usage
        return Usage(prompt_tokens=len(self.prompt_ids), completion_tokens=len(self.completion_ids))

    def inexact(self) -> str | None:
        """Why the ids are not exactly what was sampled, or None. Nothing may be built on inexact ids."""
        if self._fault is not None:
            return self._fault
        ids, usage = self.completion_ids, self._usage
        if not ids or not self.prompt_ids:
            return "the server returned no token ids"
        if usage is not None and len(ids) != usage.completion_tokens:
            return f"{len(ids)} sampled ids but a usage of {usage.completion_tokens}"
        if usage is not None and len(self.prompt_ids) != usage.prompt_tokens:
            return f"{len(self.prompt_ids)} prompt ids but a usage of {usage.prompt_tokens}"
        if self._vocab_size:
            highest = max(int(np.max(np.asarray(part))) for part in (ids, self.prompt_ids))
            if highest >= self._vocab_size:
                return f"id {highest} is not in the vocabulary of {self._vocab_size}"
        return None

    def untrainable(self) -> str | None:
        """Why this call cannot be trained on, or None. Nothing is ever padded or guessed."""
        reason = self.inexact()
        if reason is not None:
            return reason
        logprobs = self.logprobs
        if len(logprobs) != len(self.completion_ids):
            return f"{len(self.completion_ids)} sampled ids but {len(logprobs)} logprobs"
        if not np.isfinite(np.asarray(logprobs)).all():
            return "a logprob is not a finite number"
        return None
