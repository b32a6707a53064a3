"""Connect's framing: JSON messages behind five bytes in streams, plain JSON in unary calls."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any, Final

from aiohttp import web

STATUS: Final = {
    "invalid_argument": 400,
    "unauthenticated": 401,
    "not_found": 404,
    "already_exists": 409,
    "internal": 500,
    "unimplemented": 501,
}

_HEAD_BYTES: Final = 5


class ConnectError(Exception):
    """A call failed; `code` is Connect's."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code

    def body(self) -> dict[str, str]:
        """As it goes over the wire."""
        return {"code": self.code, "message": str(self)}


def frame(message: Mapping[str, Any], *, last: bool = False) -> bytes:
    """One message of a stream."""
    data = json.dumps(message).encode()
    return struct.pack(">BI", 2 if last else 0, len(data)) + data


async def one_message(request: web.Request) -> dict[str, Any]:
    """The one message of a server-streaming call."""
    body = await request.read()
    if len(body) < _HEAD_BYTES:
        raise ConnectError("invalid_argument", "no message")
    _, size = struct.unpack(">BI", body[:_HEAD_BYTES])
    message: dict[str, Any] = json.loads(body[_HEAD_BYTES : _HEAD_BYTES + size])
    return message


def timeout_s(request: web.Request) -> float:
    """The client's deadline; 0: none."""
    return int(request.headers.get("Connect-Timeout-Ms") or 0) / 1000


def unary_error(error: ConnectError) -> web.Response:
    """The reply of a unary call that failed."""
    return web.json_response(error.body(), status=STATUS.get(error.code, 500))
