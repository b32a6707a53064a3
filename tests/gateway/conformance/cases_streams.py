"""How replies go out: streams, usage, what waits for the log, and calls that are shared or given up."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import aiohttp
import msgspec
from conformance_table import EVERY, NA, YES, Unsupported, feature
from gateway_rig import Talk, events_of, until
from speakers import Sse

row = partial(feature, group="Replies and streams")
LS: dict[str, Any] = {"name": "bash", "arguments": {"command": "ls"}}
SLOW: dict[str, Any] = {"content": "hello " * 8, "chunk_delay_s": 0.03}
EVERYTHING: dict[str, Any] = {"reasoning": "Hm \u00e4.", "content": "I look \U0001f600.", "tool_calls": [LS, LS]}


@row("A stream says what the whole reply says", EVERYTHING, completions=YES, models=EVERY)
async def stream_is_whole(talk: Talk) -> None:
    talk.tools = True
    talk.user("go")
    whole, streamed = await talk.repeat(), await talk.repeat(stream=True)
    assert whole.plain() == streamed.plain()
    assert whole.usage == streamed.usage
    assert talk.protocol == "completions" or len(whole.calls) == 2


@row("Usage is the number of ids, whole and streamed", EVERYTHING, completions=YES, models=EVERY)
async def usage(talk: Talk) -> None:
    talk.user("go")
    for stream in (False, True):
        said = await talk.repeat(stream=stream)
        [entry] = talk.rig.journal(talk.model)[(await talk.records())[-1].intent.call_id]
        assert said.usage == (len(entry.prompt_token_ids), len(entry.token_ids))


@row("Text goes out as it comes in", SLOW, completions=YES)
async def text_flows(talk: Talk) -> None:
    talk.user("go")
    async with talk.post(talk.body(stream=True)) as response:
        sse = Sse()
        while not any(talk.speaker.delta(*event) for event in sse.events):
            sse.feed(await response.content.readany())
        [record] = await talk.records()
        assert record.end is None
        await response.read()
    assert [record.end and record.end.status for record in await talk.records()] == ["ok"]


@row("What an agent acts on waits for the record", EVERYTHING, completions=YES)
async def acts_wait(talk: Talk) -> None:
    talk.tools = True
    talk.user("go")
    ended: list[int] = []
    async with talk.post(talk.body(stream=True)) as response:
        sse, seen = Sse(), 0
        async for block in response.content.iter_any():
            sse.feed(block)
            if any(talk.speaker.acts(*event) for event in sse.events[seen:]):
                ended.append(sum(record.end is not None for record in await talk.records()))
            seen = len(sse.events)
    assert ended and set(ended) == {1}


@row("A stream that is cut at every byte", completions=YES, models=("vllm-capture",))
async def cut_at_every_byte(talk: Talk) -> None:
    talk.model = "odd"
    talk.user("bytes")
    async with talk.post(talk.body(stream=True)) as response:
        data = await response.read()
    sse = Sse()
    for at in range(len(data)):
        sse.feed(data[at : at + 1])
    said = talk.speaker.read_stream(sse.events)
    assert said == talk.speaker.read_stream(events_of(data))
    assert said.text == "seen \u00e4\U0001f600"
    assert said.plain() == (await talk.repeat()).plain()
    assert [record.end and record.end.untrainable for record in await talk.records()] == [None, None]


@row("A sign of life through silence", {"content": "hello", "delay_s": 0.4}, completions=YES)
async def ping(talk: Talk) -> None:
    talk.user("go")
    async with talk.post(talk.body(stream=True)) as response:
        assert response.status == 200
        early = await response.content.readany()
        assert [record.end for record in await talk.records()] == [None]
        data = early + await response.read()
    sse = Sse()
    sse.feed(data)
    pings = sum(name == "ping" for name, _ in sse.events)
    assert (pings if talk.protocol == "messages" else sse.comments) >= 1
    assert talk.speaker.read_stream(sse.events).text == "hello"


@row("A reply that a filter ended", completions=YES, models=("vllm-capture",))
async def filtered(talk: Talk) -> None:
    talk.model = "odd"
    talk.user("filtered")
    for stream in (False, True):
        assert (await talk.repeat(stream=stream)).finish == talk.speaker.words["filter"]


LOGPROBS = "no: in the records only"


@row("Logprobs in the reply", chat=LOGPROBS, responses=LOGPROBS, messages=NA, completions=LOGPROBS)
async def logprobs(talk: Talk) -> None:
    talk.user("go")
    asked: dict[str, Any] = {"logprobs": True, "top_logprobs": 2}
    said = await talk.repeat(**({"logprobs": 2} if talk.protocol == "completions" else asked))
    found = msgspec.json.encode(said.body)
    assert b'"logprob":' not in found and b'"token_logprobs"' not in found
    [record] = await talk.records()
    assert record.end and len(record.end.logprobs) == len(record.end.completion_ids) > 0
    raise Unsupported


@row("A retry joins the call in flight", {"content": "hello", "delay_s": 0.45}, completions=YES)
async def retry_joins(talk: Talk) -> None:
    talk.user("go")
    first = asyncio.create_task(talk.repeat())
    await until(talk.records)
    await asyncio.sleep(0.2)
    second = await talk.repeat(stream=True)
    assert second.plain() == (await first).plain()
    assert len(await talk.records()) == 1


@row("An agent that leaves ends the call at the model server", SLOW, completions=YES)
async def agent_leaves(talk: Talk) -> None:
    talk.user("go")
    async with talk.post(talk.body(stream=True)) as response:
        await response.content.readany()
        response.close()
    [record] = await talk.ended()
    assert record.end and (record.end.status, record.end.error) == ("aborted", "the agent went away")

    async def aborted() -> bool:
        return [e.status for e in talk.rig.journal(talk.model).get(record.intent.call_id, ())] == ["aborted"]

    await until(aborted)


@row(
    "A broken stream ends in an error; asked again, the new call supersedes it",
    {"content": "hello world, hello world", "break_after_tokens": 3},
    completions=YES,
)
async def broken_stream(talk: Talk) -> None:
    talk.user(talk.rollout)  # the server breaks off once for each text
    data, broke = b"", False
    async with talk.post(talk.body(stream=True)) as response:
        assert response.status == 200
        try:
            async for block in response.content.iter_any():
                data += block
        except aiohttp.ClientPayloadError:
            broke = True
    assert broke, "the stream looked complete"
    events = events_of(data)
    assert not any(talk.speaker.acts(*event) for event in events[:-1])
    code, message = talk.speaker.stream_error(events)
    assert "broke" in message or "failed" in message, (code, message)
    await talk.ended()

    async def again() -> bool:
        # The server is looked at before it gets another call.
        async with talk.post(talk.body()) as response:
            return bool(response.status == 200)

    await until(again)
    dead, whole = await talk.records()
    assert dead.end and whole.end and (dead.end.status, whole.end.status) == ("error", "ok")
    assert whole.intent.supersedes == dead.intent.call_id


@row("A call that repeats no other one supersedes none", completions=YES)
async def other_calls(talk: Talk) -> None:
    for text in ("one", "two"):
        talk.history = [talk.speaker.user(f"{talk.opening} {text}")]
        await talk.repeat()
    assert [record.intent.supersedes for record in await talk.records()] == [None, None]


@row("A WebSocket is answered 426", chat=NA, messages=NA)
async def websocket(talk: Talk) -> None:
    headers = {"Authorization": f"Bearer {talk.key}", "Connection": "Upgrade", "Upgrade": "websocket"}
    async with talk.rig.client.get(talk.gateway.url + talk.speaker.path, headers=headers) as response:
        assert response.status == 426
        talk.speaker.error(await response.json())
