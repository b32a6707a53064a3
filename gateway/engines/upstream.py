"""HTTP to model servers: POST, server-sent events back, foreign errors converted here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import aiohttp
import msgspec
import numpy as np

from rollyard.schemas.errors import ModelError, PromptTooLong
from rollyard.schemas.packed import TokenIds

CONNECT_TIMEOUT_S: Final = 5.0
SILENCE_TIMEOUT_S: Final = 600.0
STALE_CONNECTION_TRIES: Final = 3
MAX_ERROR_BYTES: Final = 64 * 1024
_TOO_LONG: Final = frozenset({"exceed_context_size_error", "context_length_exceeded"})
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
) -> AsyncGenerator[bytes, None]:
    """POST JSON and yield the data of each server-sent event, without `[DONE]`. Raises ModelError."""
    data = msgspec.json.encode(body)
    headers = {**headers, "Content-Type": "application/json"}
    try:
        async with await _begin(client, url, data, headers) as response:
            if response.status != 200:
                raise _refused(url, response.status, await response.content.read(MAX_ERROR_BYTES))
            async for event in events(response.content):
                yield event
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise _broken(url, error) from error


async def _begin(
    client: aiohttp.ClientSession, url: str, data: bytes, headers: Mapping[str, str]
) -> aiohttp.ClientResponse:
    """POST and wait for the status. A kept connection that the server was just closing is no reason to fail."""
    for left in reversed(range(STALE_CONNECTION_TRIES)):
        try:
            return await client.post(url, data=data, headers=headers)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            if not left or isinstance(error, aiohttp.ClientConnectorError):
                raise
    raise AssertionError("unreachable")


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
    except msgspec.DecodeError:
        return {}
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise _broken(url, error) from error


async def events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of each event. A line may be megabytes long, which aiohttp's own readline refuses."""
    parts: list[bytes] = []
    async for block in content.iter_any():
        *lines, rest = block.split(b"\n")
        if not lines:
            parts.append(rest)
            continue
        lines[0] = b"".join([*parts, lines[0]])
        parts = [rest]
        for line in lines:
            field, _, data = line.strip().partition(b":")
            data = data.lstrip()
            if data == b"[DONE]":
                return
            if data and field in (b"data", b"error"):
                yield data


def parse_ids(raw: msgspec.Raw) -> TokenIds | None:
    """A JSON list of ids as packed ids, without a Python int for each; None for null.

    Raises ValueError when an id does not fit 32 bits.
    """
    text = bytes(raw).strip()
    if text in (b"", b"null"):
        return None
    if text == b"[]":
        return TokenIds()
    ids = np.fromstring(text[1:-1].decode(), dtype=np.int64, sep=",")
    if ids.min() < 0 or ids.max() > 0xFFFF_FFFF:
        raise ValueError("an id is not between 0 and 2^32")
    return TokenIds(ids.astype("<u4").tobytes())


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
    if status == 400 and (kind in _TOO_LONG or "maximum context length" in text):
        return PromptTooLong(message, status=status)
    return ModelError(message, status=status, retryable=status in _RETRYABLE)


def _broken(url: str, error: Exception) -> ModelError:
    what = str(error) or type(error).__name__
    return ModelError(f"the connection to {url} failed: {what}", hint="is the model server up?", retryable=True)
