"""What the log holds of calls: deltas, contents kept once, snapshots, who asked, and what took how long."""

from __future__ import annotations

from typing import Any

import aiohttp
import msgspec

from rollyard.gateway.planning import SNAPSHOT_WALK
from rollyard.pipeline.log import read_rollout
from rollyard.schemas import subjects
from rollyard.stages.calls import resolve

USER: dict[str, Any] = {"role": "user", "content": "hello"}
LONG_SYSTEM: dict[str, Any] = {"role": "system", "content": "You are careful. " * 400}
TOOLS = [
    {"type": "function", "function": {"name": f"tool{n}", "description": "does it " * 100, "parameters": {}}}
    for n in range(4)
]


async def converse(stage: Any, gateway: Any, turns: int, rollout: str, **body: Any) -> list[dict[str, Any]]:
    """A conversation of so many turns; returns its messages."""
    messages = [LONG_SYSTEM, USER]
    for turn in range(turns):
        status, answer = await stage.ask(gateway, messages, key=stage.key(rollout), **body)
        assert status == 200, answer
        messages += [answer["choices"][0]["message"], {"role": "user", "content": f"go on {turn}"}]
    return messages


async def logged_bytes(stage: Any, rollout: str) -> int:
    read = stage.bus.read(subjects.LOG, subjects.log_subject("run", rollout, "call"))
    return sum([len(stored.data) async for stored in read])


async def test_the_log_grows_with_the_turns_and_not_with_their_square(stage: Any) -> None:
    await stage.model({"content": "hello world, this is a reply"}, max_model_len=100_000)
    gateway = await stage.gateway()
    sizes = {}
    for turns in (10, 50, 200):
        await converse(stage, gateway, turns, f"r{turns}", tools=TOOLS)
        sizes[turns] = await logged_bytes(stage, f"r{turns}")
    first = sizes[10] / 10
    assert sizes[50] < 1.5 * 50 * first, sizes
    # Two snapshots are in the last one: they may double it, and no more.
    assert sizes[200] < 3 * 200 * first, sizes


async def test_a_snapshot_is_a_whole_record_and_changes_nothing_for_who_reads(stage: Any) -> None:
    turns = SNAPSHOT_WALK + 3
    await stage.model({"content": "hello"}, max_model_len=100_000)
    gateway = await stage.gateway()
    messages = await converse(stage, gateway, turns, "r1", tools=TOOLS)
    records = resolve(await read_rollout(stage.bus, "run", "r1", kinds=("call",)))
    whole = [record for record in records if not record.intent.shared_messages]
    assert [records.index(record) for record in whole] == [0, SNAPSHOT_WALK]
    snapshot = whole[1]
    assert snapshot.intent.parent == records[SNAPSHOT_WALK - 1].intent.call_id
    assert snapshot.end is not None and snapshot.end.shared_prompt_ids == 0
    assert snapshot.intent.tools == TOOLS
    said = [(message["role"], message["content"]) for message in messages[:-2]]
    assert [(message["role"], message["content"]) for message in records[-1].messages] == said
    assert [record.prompt_ids.tolist() for record in records] == [entry.prompt_token_ids for entry in stage.journal()]
    assert all(record.tools == TOOLS for record in records)
    cold = await stage.gateway()
    _, answer = await stage.ask(cold, messages, tools=TOOLS)
    assert answer["choices"][0]["message"]["content"] == "hello"
    assert (await stage.intents())[-1].parent == records[-1].intent.call_id


async def test_tools_and_system_prompts_are_kept_once_for_all_sessions(stage: Any, tmp_path: Any) -> None:
    await stage.model({"content": "hello"})
    gateway = await stage.gateway()
    for number in range(3):
        await converse(stage, gateway, 1, f"r{number}", tools=TOOLS)
        [intent] = await stage.intents(f"r{number}")
        assert sorted(intent.contents) == ["0", "tools"]
        assert intent.tools is None and intent.messages == [{"role": "system"}, USER]
        [record] = resolve(await read_rollout(stage.bus, "run", f"r{number}", kinds=("call",)))
        assert (record.tools, record.messages) == (TOOLS, [LONG_SYSTEM, USER])
    assert stage.bus.blobs is not None
    assert len([path for path in stage.bus.blobs.folder.rglob("*") if path.is_file()]) == 2


async def test_a_rewritten_history_is_logged_with_the_call_it_comes_from_and_the_reason(stage: Any) -> None:
    await stage.model({"content": "one"}, {"content": "two"}, {"content": "three"})
    gateway = await stage.gateway()
    system = {"role": "system", "content": "be brief"}
    _, body = await stage.ask(gateway, [system, USER])
    reply = body["choices"][0]["message"]
    await stage.ask(gateway, [system, {"role": "user", "content": "hello?"}, reply, USER])
    await stage.ask(gateway, [{"role": "system", "content": "be kind"}, USER, reply, USER])
    await stage.ask(gateway, [system, USER, reply, USER], chat_template_kwargs={"enable_thinking": False})
    first, edited, other_system, other_template = await stage.intents()
    assert (first.parent, first.drift) == (None, None)
    assert (edited.parent, edited.drift, edited.shared_messages) == (first.call_id, "history_edited", 1)
    assert (other_system.parent, other_system.drift, other_system.shared_messages) == (
        first.call_id,
        "system_changed",
        0,
    )
    assert (other_template.parent, other_template.drift) == (first.call_id, "tools_changed")
    assert other_template.template == {"enable_thinking": False}


async def test_what_the_agent_says_of_itself_and_how_long_it_took(stage: Any) -> None:
    await stage.model({"content": "hello", "delay_s": 0.05})
    gateway = await stage.gateway()
    headers = {"Authorization": f"Bearer {stage.key()}", "session-id": "s-1", "thread-id": "t-1"}
    async with stage.client.post(
        f"{gateway.url}/v1/chat/completions", json={"model": "gpt-x", "messages": [USER]}, headers=headers
    ) as response:
        assert response.status == 200
    [intent], [end] = await stage.intents(), await stage.ends()
    assert (intent.agent.session, intent.agent.thread) == ("s-1", "t-1")
    assert intent.agent.client.startswith("Python")
    assert intent.request_bytes == len(msgspec.json.encode({"model": "gpt-x", "messages": [USER]})) + 6
    assert (intent.model, intent.asked_model, intent.scenario) == ("default", "gpt-x", "main")
    assert 0 <= end.timings.queue_s <= end.timings.first_token_s <= end.timings.total_s
    assert stage.key() not in str(await stage.events())


async def test_a_retry_after_a_broken_stream_supersedes_the_dead_call(stage: Any) -> None:
    await stage.model({"content": "hello world", "break_after_tokens": 2, "fail_times": 1})
    gateway = await stage.gateway()
    try:
        async with stage.post(gateway, [USER], stream=True) as response:
            while await response.content.readany():
                pass
    except aiohttp.ClientError:
        pass

    async def retried() -> bool:
        # The server is looked at before it gets another call.
        return bool((await stage.ask(gateway, [USER]))[0] == 200)

    await stage.until(retried)
    dead, retry = await stage.intents()
    assert (dead.supersedes, retry.supersedes) == (None, dead.call_id)
    assert [end.status for end in await stage.ends()] == ["error", "ok"]


async def test_an_intent_names_the_rules_by_which_the_agent_echoed_the_last_reply(stage: Any) -> None:
    call = {"name": "bash", "arguments": {"command": "ls", "timeout": 5}}
    await stage.model({"content": "I look.", "reasoning": "hm", "tool_calls": [call]})
    gateway = await stage.gateway()
    _, body = await stage.ask(gateway, [USER], tools=TOOLS)
    reply = body["choices"][0]["message"]
    assert reply["reasoning_content"] == "hm"
    [call] = reply["tool_calls"]
    spaced = msgspec.json.format(call["function"]["arguments"].encode(), indent=2).decode()
    rewritten = {**call, "function": {**call["function"], "arguments": "{}"}}
    wrote = {**call, "function": {**call["function"], "arguments": spaced}}
    bare = {key: value for key, value in reply.items() if not key.startswith("reasoning")}
    echoes = {
        (): reply,
        ("foreign_reply_keys_dropped",): bare,
        ("arguments_parsed",): {**reply, "tool_calls": [wrote]},
        ("ids_not_compared",): {**reply, "tool_calls": [{**call, "id": "another"}]},
        ("foreign_reply_keys_dropped", "ids_not_compared", "reply_edges_trimmed"): {
            **bare,
            "content": "I look.\n",
            "tool_calls": [{**call, "id": "another"}],
        },
        ("reply_known_by_call_ids",): {**reply, "tool_calls": [rewritten]},
    }
    results = {"role": "tool", "content": "a.txt"}
    for echo in echoes.values():
        [number] = [call["id"] for call in echo["tool_calls"]]
        status, _ = await stage.ask(gateway, [USER, echo, {**results, "tool_call_id": number}], tools=TOOLS)
        assert status == 200
    # Of a history that was rewritten, the reply that it still holds; from the log too.
    cold = await stage.gateway()
    status, _ = await stage.ask(cold, [{**USER, "content": "hi"}, bare, {**results, "tool_call_id": call["id"]}])
    assert status == 200
    first, *others, last = await stage.intents()
    assert first.lenience == ()
    assert [intent.lenience for intent in others] == list(echoes)
    assert {intent.parent for intent in others} == {first.call_id}
    # Of several equal replies the latest, which has other ids.
    assert (last.parent, last.drift) == (others[-1].call_id, "system_changed")
    assert last.lenience == ("foreign_reply_keys_dropped", "ids_not_compared")
