"""Refusals: the status and the words by which agents tell what to do next."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from conformance_table import YES, feature
from gateway_rig import Talk, until

from rollyard.pipeline.kv import Bucket
from rollyard.schemas import subjects

row = partial(feature, group="Errors", completions=YES)


def kind(talk: Talk, chat: str, messages: str) -> str:
    """The type of an error as this protocol names it."""
    return messages if talk.protocol == "messages" else chat


@row("The context is too long (400)")
async def too_long(talk: Talk) -> None:
    talk.model = talk.model.replace("vllm", "short")
    talk.user("hello " * 300)
    for stream in (False, True):
        named, code, message = await talk.refused(400, talk.body(stream=stream))
        assert named == "invalid_request_error"
        if talk.protocol == "messages":
            assert re.fullmatch(r"prompt is too long: \d+ tokens > 150 maximum", message)
        else:
            assert code == "context_length_exceeded" and "maximum context length is 150 tokens" in message


@row("The model server is busy (429)", {"fail_status": 429, "fail_times": 99})
async def busy(talk: Talk) -> None:
    talk.user("go")
    async with talk.post(talk.body()) as response:
        assert (response.status, response.headers["Retry-After"]) == (429, "1")
        named, code, _ = talk.speaker.error(await response.json())
    assert named == "rate_limit_error"
    assert code == ("" if talk.protocol == "messages" else "rate_limit_exceeded")


@row("No model server (503; Messages 529)")
async def no_server(talk: Talk) -> None:
    talk.model = "nowhere"
    talk.user("go")
    async with talk.post(talk.body(stream=True)) as response:
        assert response.status == (529 if talk.protocol == "messages" else 503)
        assert response.headers["Retry-After"] == "1"
        named, _, message = talk.speaker.error(await response.json())
    assert named == kind(talk, "server_error", "overloaded_error")
    assert "no server for model 'nowhere'" in message


@row("The model server fails (502)", {"fail_status": 500, "fail_times": 99})
async def server_fails(talk: Talk) -> None:
    # A server whose calls fail one after the other is left alone for a while.
    other = talk.rig.talk(talk.gateway, talk.protocol, talk.model)
    other.user("go")
    await other.ask()
    talk.user("go")
    named, _, message = await talk.refused(502)
    assert named == kind(talk, "server_error", "api_error")
    assert "answered 500" in message
    [record] = await talk.ended()
    assert record.end and (record.end.status, record.end.http_status) == ("error", 502)


@row("A key that is none (401)")
async def no_key(talk: Talk) -> None:
    talk.user("go")
    for key in ("sk-whatever", talk.key[:-2], ""):
        named, code, _ = await talk.refused(401, key=key)
        assert named == "authentication_error"
        assert code == ("" if talk.protocol == "messages" else "invalid_api_key")


@row("A closed session (410)")
async def closed(talk: Talk) -> None:
    talk.user("go")
    await talk.ask()
    closed = subjects.session_key("run", talk.rollout, 1)
    await Bucket(talk.rig.bus, subjects.SESSIONS, Any).put(closed, {})

    async def known() -> bool:
        return closed in talk.gateway.gateway.closed

    await until(known)
    _, _, message = await talk.refused(410)
    assert "this session is closed" in message


@row("A limit of the session (400)")
async def session_limits(talk: Talk) -> None:
    talk.grant = {"max_calls": 1}
    talk.user("go")
    await talk.ask()
    talk.user("go on")
    named, code, message = await talk.refused(400)
    assert named == "invalid_request_error" and "max_calls=1" in message
    assert code == ("" if talk.protocol == "messages" else "session_limit_exceeded")
    talk.grant = {"expires_ms": 1}
    _, _, message = await talk.refused(400)
    assert "wall time" in message


@row("A body that is too large (413)")
async def too_large(talk: Talk) -> None:
    talk.user("x" * 300_000)
    named, _, message = await talk.refused(413)
    assert named == kind(talk, "request_too_large_error", "request_too_large")
    assert "over 200000 bytes" in message


@row("A field that is wrong is named (400)")
async def wrong_field(talk: Talk) -> None:
    talk.user("go")
    named, _, message = await talk.refused(400, talk.body(**{talk.speaker.limit: "many"}))
    assert named == "invalid_request_error" and talk.speaker.limit in message
    named, _, message = await talk.refused(400, b'{"model": "x", ')
    assert named == "invalid_request_error" and "JSON" in message


@row("A server without token ids, in a run for training (400)")
async def not_trainable(talk: Talk) -> None:
    talk.model = "bare"
    talk.user("go")
    _, _, message = await talk.refused(400)
    assert "cannot be used for training" in message
    talk.grant = {"training": False}
    assert (await talk.ask()).text == "hello 0"
    [record] = await talk.records()
    assert record.end and record.end.untrainable == "the server returned no token ids"
