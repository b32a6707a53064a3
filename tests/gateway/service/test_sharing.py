"""Several at once: gateways of one session, calls of one session, requests for one call, replies of one request."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from msgspec import structs

from rollyard.schemas.call import CallEnd, CallIntent

USER: dict[str, Any] = {"role": "user", "content": "hello"}


async def test_a_session_that_moves_after_each_call_gives_the_same_records_as_one_gateway(stage: Any) -> None:
    """Over warm caches, each of which misses every second call."""
    await stage.model(*({"content": f"reply {n}"} for n in range(8)))
    gateways = [await stage.gateway(), await stage.gateway()]
    for rollout, served_by in (("one", gateways[:1]), ("two", gateways)):
        messages: list[dict[str, Any]] = [USER]
        for turn in range(8):
            _, body = await stage.ask(served_by[turn % len(served_by)], messages, key=stage.key(rollout))
            messages += [body["choices"][0]["message"], {"role": "user", "content": f"next {turn}"}]

    assert await plain_records(stage, "one") == await plain_records(stage, "two")


async def plain_records(stage: Any, rollout: str) -> list[Any]:
    """The records of a rollout without what must differ: ids of calls, gateways and rollouts, times."""
    events = [event for _, event in await stage.events(rollout)]
    names = {event.call_id: number for number, event in enumerate(e for e in events if isinstance(e, CallIntent))}
    plain = []
    for event in events:
        record = structs.asdict(event)
        for key in ("gateway", "at_ms", "latest_end_ms", "timings", "rollout_id"):
            record.pop(key, None)
        record |= {key: names[record[key]] for key in ("call_id", "parent") if record.get(key)}
        plain.append(record)
    return plain


async def test_an_identical_retry_joins_the_call_that_is_in_flight(stage: Any) -> None:
    await stage.model({"content": "hello", "delay_s": 1.0})
    gateway = await stage.gateway(join_after_s=0.1)
    first = asyncio.create_task(stage.ask(gateway, [USER]))
    await stage.until(stage.intents)
    await asyncio.sleep(0.2)
    streamed = stage.post(gateway, [USER], stream=True)
    async with streamed as response:
        text = (await response.read()).decode()
    status, body = await first
    assert status == 200
    assert body["id"].removeprefix("chatcmpl-") in text
    assert "hello"[-3:] in text
    assert len(stage.journal()) == len(await stage.intents()) == len(await stage.ends()) == 1


async def test_who_joined_keeps_the_call_when_the_first_one_leaves(stage: Any) -> None:
    await stage.model({"content": "hello", "delay_s": 1.0})
    gateway = await stage.gateway(join_after_s=0.1)
    first = asyncio.create_task(stage.ask(gateway, [USER]))
    await stage.until(stage.intents)
    await asyncio.sleep(0.2)
    second = asyncio.create_task(stage.ask(gateway, [USER]))
    await asyncio.sleep(0.2)
    first.cancel()
    status, body = await second
    assert (status, body["choices"][0]["message"]["content"]) == (200, "hello")
    assert [end.status for end in await stage.ends()] == ["ok"]


async def test_equal_requests_that_come_together_are_wanted_each(stage: Any) -> None:
    await stage.model({"content": "hello", "delay_s": 0.3})
    gateway = await stage.gateway()
    async with asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(stage.ask(gateway, [USER]))
    assert len(stage.journal()) == 3


async def test_calls_of_other_threads_and_sessions_are_never_joined(stage: Any) -> None:
    await stage.model({"content": "hello", "delay_s": 0.5})
    gateway = await stage.gateway(join_after_s=0.0)

    async def ask(rollout: str, thread: str) -> int:
        headers = {"Authorization": f"Bearer {stage.key(rollout)}", "thread-id": thread}
        url = f"{gateway.url}/v1/chat/completions"
        async with stage.client.post(url, json={"model": "m", "messages": [USER]}, headers=headers) as response:
            return int(response.status)

    async with asyncio.TaskGroup() as group:
        for rollout, thread in (("r1", "a"), ("r1", "b"), ("r2", "a")):
            group.create_task(ask(rollout, thread))
    assert len(stage.journal()) == 3


async def test_n_replies_are_n_calls(stage: Any) -> None:
    await stage.model({"content": "hello"})
    gateway = await stage.gateway()
    status, body = await stage.ask(gateway, [USER], n=3)
    assert status == 200
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    ends: list[CallEnd] = await stage.ends()
    assert body["usage"]["prompt_tokens"] == ends[0].usage.prompt_tokens
    assert body["usage"]["completion_tokens"] == sum(end.usage.completion_tokens for end in ends)
    assert len({intent.call_id for intent in await stage.intents()}) == 3
    async with stage.post(gateway, [USER], n=2, stream=True) as response:
        lines = [line async for line in response.content if line.startswith(b"data: ")]
    assert [line for line in lines if b"[DONE]" in line] == [lines[-1]]
    chunks = [msgspec.json.decode(line[6:]) for line in lines[:-1]]
    ended = [choice["index"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert sorted(ended) == [0, 1]


async def test_the_choices_of_a_seeded_session_differ_and_can_be_had_again(stage: Any) -> None:
    await stage.model({"content": "hello"})
    gateway = await stage.gateway()
    for _ in range(2):
        await stage.ask(gateway, [USER], key=stage.key(sampling={"seed": 5}), n=2)
    seeds = sorted(intent.params["seed"] for intent in await stage.intents())
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]
