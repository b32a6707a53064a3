"""HTTP to model servers: POST, server-sent events back, foreign errors converted here."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final, TypeVar

import aiohttp
import msgspec

from rollyard.gateway.engines.engine import EngineChunk, merge
from rollyard.gateway.engines.numbers import without_nan
from rollyard.gateway.engines.sse import EventReader
from rollyard.schemas.errors import ModelError, PromptTooLong

T = TypeVar("T")

CONNECT_TIMEOUT_S: Final = 5.0
SILENCE_TIMEOUT_S: Final = 600.0
STALE_CONNECTION_TRIES: Final = 3
MAX_ERROR_BYTES: Final = 64 * 1024
_TOO_LONG: Final = frozenset({"exceed_context_size_error", "context_length_exceeded"})
_TOO_LONG_WORDS: Final = ("maximum context length", "model's context length")
_LIMIT: Final = re.compile(r"context (?:length|size)(?: is| of)? ?\(?(\d+)")
_PROMPT: Final = re.compile(
    r"(\d+) in the messages|(?<!for )\b(\d+) input tokens|(?:input|request|prompt) \((\d+) tokens\)"
)
_EVENTS: Final = "text/event-stream"
_NO_STREAM: Final = frozenset({"application/json", "text/html"})
_STREAM_FIELDS: Final = (b"data:", b"event:", b"id:", b"retry:", b":")
_RETRYABLE: Final = frozenset({408, 429, 500, 502, 503, 504})


@asynccontextmanager
async def http_client() -> AsyncIterator[aiohttp.ClientSession]:
    """The connections to all model servers. There is no limit to them: agents wait inside their calls."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=SILENCE_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, read_bufsize=1 << 18) as client:
        yield client


async def post_stream(
    client: aiohttp.ClientSession, url: str, body: Any, headers: Mapping[str, str]
) -> AsyncGenerator[list[bytes], None]:
    """POST JSON and yield the data of server-sent events as they come together, no `[DONE]`. Raises ModelError."""
    async with _answer(client, url, body, {**headers, "Accept": _EVENTS}) as response:
        if response.content_type in _NO_STREAM:
            raise _no_stream(url, await response.content.read(MAX_ERROR_BYTES))
        async for events in _events(url, response.content):
            yield events


@asynccontextmanager
async def _answer(
    client: aiohttp.ClientSession, url: str, body: Any, headers: Mapping[str, str]
) -> AsyncIterator[aiohttp.ClientResponse]:
    """POST JSON; within the block the answer is read. Raises ModelError for a refusal and a broken connection."""
    data = msgspec.json.encode(body)
    try:
        async with await _begin(client, url, data, {**headers, "Content-Type": "application/json"}) as response:
            if response.status != 200:
                raise _refused(url, response.status, await response.content.read(MAX_ERROR_BYTES))
            yield response
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise _broken(url, error) from error


async def _events(url: str, content: aiohttp.StreamReader) -> AsyncIterator[list[bytes]]:
    reader = EventReader()
    head: bytes | None = b""
    async for block in content.iter_any():
        try:
            found = reader.feed(block)
        except ValueError as error:
            raise ModelError(f"{url}: {error}", hint="is this a model server?") from error
        if found:
            yield found
        if reader.done:
            return
        if head is not None:
            head = None if found else (head + block)[:MAX_ERROR_BYTES]
    if head and not head.lstrip().startswith(_STREAM_FIELDS):
        raise _no_stream(url, head)


async def post_chunks(
    client: aiohttp.ClientSession,
    url: str,
    body: Any,
    headers: Mapping[str, str],
    read: Callable[[bytes], EngineChunk],
) -> AsyncGenerator[EngineChunk, None]:
    """POST and yield what `read` makes of the events, until one has ended the reply. Raises ModelError.

    Where the body asks for no stream, the whole reply is one event.
    """
    ended = False
    sent = post_stream(client, url, body, headers) if body.get("stream") else _whole(client, url, body, headers)
    async with aclosing(sent) as blocks:
        async for events in blocks:
            for chunk in merge([read(event) for event in events]):
                ended = ended or chunk.finish_reason is not None
                yield chunk
    if not ended:
        raise ModelError(f"{url} broke off its reply", retryable=True)


async def _whole(
    client: aiohttp.ClientSession, url: str, body: Any, headers: Mapping[str, str]
) -> AsyncGenerator[list[bytes], None]:
    async with _answer(client, url, body, headers) as response:
        answer = await response.read()
    # Some stream whatever they are asked for.
    yield EventReader().feed(answer + b"\n\n") if answer.startswith(_STREAM_FIELDS) else [answer]


def read_event(decode: Callable[[bytes], T], event: bytes, url: str) -> T:
    """An event decoded, its NaNs as null. Raises ModelError when it cannot be read."""
    try:
        try:
            return decode(event)
        except msgspec.DecodeError:
            return decode(without_nan(event))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ModelError(
            f"{url} sent an event that cannot be read: {error}: {event[:200]!r}",
            hint="does the server speak the protocol that `engine` of its entry says?",
        ) from error


async def _begin(
    client: aiohttp.ClientSession,
    url: str,
    data: bytes,
    headers: Mapping[str, str],
    *,
    silence_s: float = SILENCE_TIMEOUT_S,
) -> aiohttp.ClientResponse:
    """POST and wait for the status. A kept connection that the server was just closing is no reason to fail."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=silence_s)
    for left in reversed(range(STALE_CONNECTION_TRIES)):
        try:
            return await client.post(url, data=data, headers=headers, timeout=timeout, allow_redirects=False)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            if not left or isinstance(error, aiohttp.ClientConnectorError):
                raise
    raise AssertionError("unreachable")


async def post_json(
    client: aiohttp.ClientSession, url: str, body: Any, headers: Mapping[str, str], *, timeout_s: float
) -> Any:
    """POST JSON and return the JSON that comes, or None where there is none. Raises ModelError."""
    data = b"" if body is None else msgspec.json.encode(body)
    headers = {**headers, "Content-Type": "application/json"}
    try:
        async with asyncio.timeout(timeout_s):
            async with await _begin(client, url, data, headers, silence_s=timeout_s) as response:
                answer = await response.read()
                if response.status != 200:
                    raise _refused(url, response.status, answer)
                return msgspec.json.decode(answer) if answer else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise _broken(url, error) from error


async def get_json(client: aiohttp.ClientSession, url: str, headers: Mapping[str, str] | None = None) -> Any:
    """GET a JSON document; None where the server has no such page. Raises ModelError."""
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S * 2), client.get(url, headers=headers) as response:
            body = await response.read()
            if response.status in (404, 405, 501):
                return None
            if response.status != 200:
                raise _refused(url, response.status, body)
            return msgspec.json.decode(body) if body else {}
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise _broken(url, error) from error


def raise_event_error(error: Any, url: str) -> None:
    """Raise the ModelError of an error that came as an event of a stream."""
    if not error:
        return
    if not isinstance(error, dict):
        error = {"message": str(error)}
    status = error.get("code")
    status = status if isinstance(status, int) and 400 <= status < 600 else 500
    raise _refused(url, status, msgspec.json.encode({"error": error}))


def _refused(url: str, status: int, body: bytes) -> ModelError:
    text, kind = body.decode(errors="replace").strip(), ""
    try:
        answer = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        answer = None
    if isinstance(answer, dict):
        error = answer.get("error", answer)
        if isinstance(error, dict):
            text = str(error.get("message", text))
            kind = str(error.get("type") or error.get("code") or "")
    message = f"{url} answered {status}: {text[:1000]}"
    if status == 400 and (kind in _TOO_LONG or any(words in text for words in _TOO_LONG_WORDS)):
        too_long = PromptTooLong(message, status=status, said=text[:1000])
        too_long.limit, too_long.prompt_tokens = too_long_numbers(text)
        return too_long
    return ModelError(message, status=status, retryable=status in _RETRYABLE, said=text[:1000])


def too_long_numbers(text: str) -> tuple[int, int]:
    """Context length and prompt length in the words of vLLM, SGLang or llama.cpp; zeros where they tell less."""
    limit, prompt = _LIMIT.search(text), _PROMPT.search(text)
    if limit is None or prompt is None:
        return 0, 0
    return int(limit[1]), int(next(filter(None, prompt.groups())))


def _no_stream(url: str, body: bytes) -> ModelError:
    return ModelError(
        f"{url} answered with something else than a stream of events: {body.decode(errors='replace')[:1000]}",
        hint="is there a proxy between, or a server that cannot stream?",
    )


def _broken(url: str, error: Exception) -> ModelError:
    what = str(error) or type(error).__name__
    said = "it cannot be reached" if isinstance(error, aiohttp.ClientConnectorError) else "the connection to it broke"
    return ModelError(
        f"the connection to {url} failed: {what}", hint="is the model server up?", retryable=True, said=said
    )
