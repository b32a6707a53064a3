"""The events of SGLang's /generate: each holds the whole reply so far or, by a flag of the server, what is new."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import Raw, Struct

from rollyard.gateway.engines.chat_upstream import NULL, aborted, stop_string
from rollyard.gateway.engines.engine import EngineChunk
from rollyard.gateway.engines.numbers import pack_ids, pack_logprobs, parse_ids
from rollyard.gateway.engines.upstream import raise_event_error, read_event
from rollyard.schemas.call import Usage
from rollyard.schemas.packed import Logprobs, TokenIds

_FINISH: Final = {"stop": "stop", "length": "length", "abort": "abort"}


class _FinishReason(Struct, frozen=True):
    type: str = ""
    matched: Any = None
    message: str | None = None
    status_code: int | None = None


class _Meta(Struct, frozen=True):
    finish_reason: _FinishReason | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    weight_version: Any = None
    output_token_logprobs: list[list[Any]] | None = None


class _Event(Struct, frozen=True):
    text: str | None = None
    output_ids: list[Any] | None = None
    prompt_token_ids: Raw = NULL
    meta_info: _Meta = _Meta()
    error: Any = None


_decode: Final = msgspec.json.Decoder(_Event).decode


class GenerateReader:
    """Reads the events of one reply. An abort is a finish_reason where the reply is `resumable`, else an error."""

    def __init__(self, url: str, *, resumable: bool) -> None:
        self._url = url
        self._resumable = resumable
        self._ids = 0
        self._text = ""
        self._whole = True
        self._prompt_tokens = 0
        self._prompt_told = False

    def read(self, event: bytes) -> EngineChunk:
        """What an event adds to those before. Raises ModelError."""
        data = read_event(_decode, event, self._url)
        raise_event_error(data.error, self._url)
        meta, reason = data.meta_info, data.meta_info.finish_reason
        if reason is not None and reason.type == "abort":
            if reason.status_code is not None:
                raise_event_error({"message": reason.message or "aborted", "code": reason.status_code}, self._url)
            if not self._resumable:
                raise aborted(self._url)
        ids, logprobs, fault = self._sampled(data, aborted=reason is not None and reason.type == "abort")
        prompt_ids = None
        try:
            if not self._prompt_told:
                prompt_ids = parse_ids(data.prompt_token_ids)
                self._prompt_told = prompt_ids is not None
        except ValueError as error:
            fault = f"the server returned ids that are none: {error}"
        self._prompt_tokens = meta.prompt_tokens or self._prompt_tokens
        usage = None
        if reason is not None:
            usage = Usage(
                prompt_tokens=self._prompt_tokens,
                completion_tokens=self._ids if meta.completion_tokens is None else meta.completion_tokens,
                cached_tokens=meta.cached_tokens or 0,
            )
        return EngineChunk(
            text=self._new_text(data.text or "", aborted=reason is not None and reason.type == "abort"),
            token_ids=ids,
            logprobs=logprobs,
            prompt_ids=prompt_ids,
            finish_reason=_FINISH.get(reason.type, "stop") if reason is not None else None,
            stop_string=stop_string(reason.matched) if reason is not None else None,
            # A call that was aborted in the queue has counted nothing.
            usage=usage if usage is not None and usage.prompt_tokens else None,
            fault=fault,
            policy_version=_version(meta.weight_version),
        )

    def _sampled(self, data: _Event, *, aborted: bool) -> tuple[TokenIds | None, Logprobs | None, str | None]:
        """The new ids, told apart from those before by the count of all of them."""
        told, total = data.output_ids or [], data.meta_info.completion_tokens
        before = self._ids
        if total is None:
            total = len(told)
        self._whole = len(told) == total
        if self._whole and total >= before:
            new = told[before:]
        elif len(told) == total - before:
            new = told
        elif aborted and len(told) > total - before >= 0:
            # Behind what is new, an abort repeats the last id.
            new = told[: total - before]
        else:
            return None, None, f"SGLang counted {total} sampled ids, after {before} it returned {len(told)}"
        triples = (data.meta_info.output_token_logprobs or [])[-len(new) :] if new else []
        self._ids = total
        try:
            ids = pack_ids(new)
        except ValueError as error:
            return None, None, f"the server returned ids that are none: {error}"
        if [triple[1] if len(triple) > 1 else None for triple in triples] != new[: len(triples)]:
            return ids, None, "SGLang returned logprobs of other ids than it sampled"
        return ids, pack_logprobs(triple[0] for triple in triples), None

    def _new_text(self, text: str, *, aborted: bool) -> str:
        if not self._whole:
            # An abort repeats all text.
            return "" if aborted else text
        new = text[len(self._text) :] if text.startswith(self._text) else ""
        self._text += new
        return new


def _version(told: Any) -> int | None:
    """A policy version, where the server was given one; it calls its first weights `default`."""
    return int(told) if isinstance(told, str) and told.isascii() and told.isdigit() else None
