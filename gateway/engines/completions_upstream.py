"""`/v1/completions`: ids or a bare text in, and the ids that were sampled out, where the server names them."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import Raw, Struct

from rollyard.gateway.engines.chat_upstream import NULL, STREAMED, UsageBlock, aborted, stop_string, upstream_model
from rollyard.gateway.engines.engine import EngineChunk, EngineRequest
from rollyard.gateway.engines.numbers import ids_json, pack_ids, pack_logprobs, parse_ids
from rollyard.gateway.engines.upstream import raise_event_error, read_event
from rollyard.schemas.packed import Logprobs, TokenIds

_ID_PREFIX: Final = "token_id:"


class _Logprobs(Struct, frozen=True):
    tokens: list[Any] | None = None
    token_logprobs: list[Any] | None = None


class _Choice(Struct, frozen=True):
    text: str | None = None
    logprobs: _Logprobs | None = None
    prompt_token_ids: Raw = NULL
    finish_reason: str | None = None
    stop_reason: Any = None


class _Chunk(Struct, frozen=True):
    choices: list[_Choice] | None = None
    usage: UsageBlock | None = None
    error: Any = None


_decode: Final = msgspec.json.Decoder(_Chunk).decode


def completion_body(request: EngineRequest, params: dict[str, Any]) -> dict[str, Any]:
    """The body of a completion that streams and reports its usage."""
    body: dict[str, Any] = {
        **params,
        "model": upstream_model(request),
        "prompt": request.prompt if request.prompt_ids is None else ids_json(request.prompt_ids),
        # Also where the agent reads no stream: what was sampled before an abort is known, and can be continued.
        **STREAMED,
    }
    if "response_format" in request.extras:
        body["response_format"] = request.extras["response_format"]
    return body


class CompletionReader:
    """Reads the events of one completion from `url`.

    Ids and logprobs are only believed `with_ids`. An abort by the server's operator is a finish_reason where the reply
    is `resumable`, else an error.
    """

    def __init__(self, url: str, *, with_ids: bool, resumable: bool, constrained: str | None = None) -> None:
        self._url = url
        self._with_ids = with_ids
        self._resumable = resumable
        self._constrained = constrained

    def read(self, event: bytes) -> EngineChunk:
        """What an event adds. Raises ModelError."""
        chunk = read_event(_decode, event, self._url)
        raise_event_error(chunk.error, self._url)
        choice = chunk.choices[0] if chunk.choices else _Choice()
        if choice.finish_reason == "abort" and not self._resumable:
            raise aborted(self._url)
        ids = logprobs = prompt_ids = fault = None
        if self._with_ids:
            try:
                prompt_ids = parse_ids(choice.prompt_token_ids)
                ids, logprobs = _sampled(choice.logprobs)
            except ValueError as error:
                fault = f"the server returned ids that are none: {error}"
        return EngineChunk(
            text=choice.text or "",
            token_ids=ids,
            logprobs=logprobs,
            prompt_ids=prompt_ids,
            finish_reason=choice.finish_reason,
            stop_string=stop_string(choice.stop_reason),
            usage=chunk.usage.usage() if chunk.usage is not None else None,
            fault=fault,
            constrained=self._constrained,
        )


def _sampled(logprobs: _Logprobs | None) -> tuple[TokenIds | None, Logprobs | None]:
    if logprobs is None or logprobs.tokens is None:
        return None, None
    ids = pack_ids([_token_id(token) for token in logprobs.tokens])
    return ids, pack_logprobs(logprobs.token_logprobs or ())


def _token_id(token: Any) -> int:
    number = token.removeprefix(_ID_PREFIX) if isinstance(token, str) and token.startswith(_ID_PREFIX) else ""
    if not (number.isascii() and number.isdigit()):
        raise ValueError(f"{str(token)[:80]!r} is not written as {_ID_PREFIX}N")
    return int(number)
