"""A model server that answers at once with canned replies: python stub.py PORT

It stands in for vLLM: chat completions, streamed or not, with ids where they are asked for; completions from ids; one
model, `paced`, sends an event every 100 ms. Plain asyncio protocols, so that it costs little beside what is measured.
"""

from __future__ import annotations

import asyncio
import re
import sys
from functools import cache
from typing import Final, cast

import canned
import uvloop

PACE_S: Final = 0.1
_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_MODEL: Final = re.compile(rb'"model": *"(\w+)"')
_STREAM: Final = re.compile(rb'"stream": *true')
_IDS: Final = re.compile(rb'"return_token_ids": *true')
_PROMPT: Final = re.compile(rb'"prompt": *(\[[^\]]*\])')
_SSE: Final = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
_MODELS: Final = (
    b'{"object":"list","data":['
    + b",".join(
        b'{"id":"%s","object":"model","max_model_len":262144}' % name for name in (b"exact", b"plain", b"paced")
    )
    + b"]}"
)


def _json(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def _chunk(event: bytes) -> bytes:
    return b"%x\r\n" % len(event) + event + b"\r\n"


@cache
def _whole(tokens: int, ids: bool) -> bytes:
    return _json(canned.whole(tokens, ids))


@cache
def _events(tokens: int, ids: bool) -> tuple[bytes, ...]:
    return tuple(map(_chunk, canned.chat_events(tokens, ids)))


@cache
def _completion() -> tuple[bytes, ...]:
    """All but the events that depend on the prompt."""
    return tuple(map(_chunk, canned.completion_events(b"[1]", echo=False)))


class Stub(asyncio.Protocol):
    """One connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._data = bytearray()
        self._wanted = 0

    def data_received(self, data: bytes) -> None:
        self._data += data
        if len(self._data) < self._wanted:
            return
        end = self._data.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self._data[: end + 2])
        length = _LENGTH.search(head)
        self._wanted = end + 4 + (int(length[1]) if length else 0)
        if len(self._data) < self._wanted:
            return
        body = bytes(self._data[end + 4 : self._wanted])
        self._data.clear()
        self._wanted = 0
        self._answer(head.split(b" ", 2)[1], body)

    def _answer(self, path: bytes, body: bytes) -> None:
        match path.removeprefix(b"/v1"):
            case b"/chat/completions":
                self._chat(body)
            case b"/completions":
                self._complete(body)
            case b"/models":
                self._transport.write(_json(_MODELS))
            case b"/tokenize":
                self._transport.write(_json(b'{"count":3,"tokens":[1001,1002,1003]}'))
            case b"/version":
                self._transport.write(_json(b'{"version":"0.32.0"}'))
            case _:
                self._transport.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")

    def _chat(self, body: bytes) -> None:
        model = _MODEL.search(body)
        tokens, ids = canned.tokens_for(len(body)), _IDS.search(body) is not None
        if not _STREAM.search(body):
            self._transport.write(_whole(tokens, ids))
        elif model and model[1] == b"paced":
            self._transport.write(_SSE)
            self._pace(_events(tokens, ids), 0, asyncio.get_running_loop().time())
        else:
            self._stream(_events(tokens, ids))

    def _complete(self, body: bytes) -> None:
        prompt = _PROMPT.search(body)
        ids, echo = prompt[1] if prompt else b"[1]", _IDS.search(body) is not None
        if not _STREAM.search(body):
            self._transport.write(_json(canned.completion(ids, echo=echo)))
            return
        if echo:
            self._stream(tuple(map(_chunk, canned.completion_events(ids, echo=True))))
            return
        usage = _chunk(canned.completion_end(ids))
        self._stream((*_completion()[:-2], usage, _completion()[-1]))

    def _stream(self, events: tuple[bytes, ...]) -> None:
        self._transport.write(_SSE)
        # A write an event, as a server does that samples them one by one; what the kernel joins is joined.
        for event in events:
            self._transport.write(event)
        self._transport.write(b"0\r\n\r\n")

    def _pace(self, events: tuple[bytes, ...], index: int, start_s: float) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(events[index])
        if index + 1 == len(events):
            self._transport.write(b"0\r\n\r\n")
            return
        loop = asyncio.get_running_loop()
        loop.call_at(start_s + (index + 1) * PACE_S, self._pace, events, index + 1, start_s)


async def main() -> None:
    for tokens in map(canned.tokens_for, canned.SIZES.values()):
        for ids in (True, False):
            _whole(tokens, ids), _events(tokens, ids)
    server = await asyncio.get_running_loop().create_server(Stub, "127.0.0.1", int(sys.argv[1]), backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())
