"""The kit of the tests of stitching (tests/stages/stitchers) writes the records that a real gateway writes."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import msgspec
from kit import Call, Story
from kit_agents import BASH, Chat, result, runs, tool, user
from kit_template import Reply
from msgspec import structs

from rollyard.schemas.call import CallEnd, CallIntent

REPLIES = [
    runs("ls", says="I look.", space=" "),
    Reply(text="There is one."),
    Reply(text="Nothing more."),
    Reply(text="Done."),
]


def reply_to(body: dict[str, Any]) -> Reply:
    """As the scripted server does: by the number of replies in the request."""
    turn = sum(message["role"] == "assistant" for message in body["messages"])
    return REPLIES[min(turn, len(REPLIES) - 1)]


def play() -> tuple[Story, list[dict[str, Any]]]:
    """An agent that appends, asks again, and writes its history anew in several ways; and what it asked."""
    story = Story(mode="capture")
    agent = Chat(story, tools=BASH, stream=False, headers={"thread-id": "t1"})
    bodies: list[dict[str, Any]] = []

    def ask(*said: dict[str, Any]) -> Call:
        call = agent.begin(*said)
        bodies.append(deepcopy(agent.body()))
        call.finish(reply_to(bodies[-1]))
        agent.take(call)
        return call

    first = ask(user("list it"))
    agent.history[-1]["tool_calls"][0]["function"]["arguments"] = '{ "command": "ls" }'
    del agent.history[-1]["tool_calls"][0]["type"]
    ask(result(first, "a.txt"))
    agent.history.pop()
    ask()
    agent.tools = [*BASH, tool("search")]
    ask(user("and now?"))
    agent.history[0] = user("list everything")
    ask(user("again"))
    agent.system = "You are done soon."
    ask(user("end"))
    return story, bodies


def told(intent: CallIntent, end: CallEnd, numbers: dict[str, int]) -> dict[str, Any]:
    """What a record says, calls by their numbers; ids, times and sizes left out."""
    reply = dict(end.reply or {})
    for called in reply.get("tool_calls") or ():
        called.pop("id")
    said = structs.asdict(intent)
    kept = ("scenario", "protocol", "shared_messages", "drift", "lenience", "tools", "template", "extras")
    return {
        **{name: said[name] for name in kept},
        "thread": intent.agent.thread,
        "parent": numbers.get(intent.parent or ""),
        "supersedes": numbers.get(intent.supersedes or ""),
        "messages": [_bare(message) for message in intent.messages],
        "shares_ids": end.shared_prompt_ids > 0,
        "reply": reply,
        "status": (end.status, end.finish_reason, end.untrainable),
    }


def _bare(message: dict[str, Any]) -> dict[str, Any]:
    calls = [{**called, "id": ""} for called in message.get("tool_calls") or ()]
    more = {"tool_calls": calls} if calls else {}
    return {**message, **more, **({"tool_call_id": ""} if "tool_call_id" in message else {})}


def records(events: list[tuple[int, CallIntent | CallEnd]]) -> list[dict[str, Any]]:
    intents = [event for _, event in events if isinstance(event, CallIntent)]
    ends = {event.call_id: event for _, event in events if isinstance(event, CallEnd)}
    numbers = {intent.call_id: at for at, intent in enumerate(intents)}
    return [told(intent, ends[intent.call_id], numbers) for intent in intents]


async def test_the_kit_writes_what_a_gateway_writes(stage: Any) -> None:
    story, bodies = play()
    turns = [
        {
            "content": reply.text,
            "tool_calls": [{"name": name, "arguments": msgspec.json.decode(given)} for name, given in reply.calls],
        }
        for reply in REPLIES
    ]
    await stage.model(*turns, max_model_len=100_000)
    gateway = await stage.gateway()
    headers = {"Authorization": f"Bearer {stage.key()}", "thread-id": "t1"}
    sent: dict[str, str] = {}
    for call, body in zip(story.calls, bodies, strict=True):
        for message in body["messages"]:
            for called in message.get("tool_calls") or ():
                called["id"] = sent[called["id"]]
            if "tool_call_id" in message:
                message["tool_call_id"] = sent[message["tool_call_id"]]
        async with stage.client.post(f"{gateway.url}/v1/chat/completions", json=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            answer = (await response.json())["choices"][0]["message"]
        assert call.end is not None
        ours = (call.end.reply or {}).get("tool_calls") or ()
        sent |= {mine["id"]: its["id"] for mine, its in zip(ours, answer.get("tool_calls") or (), strict=True)}
    contents = stage.bus.contents
    real = records(
        [
            (seq, contents.put_back(event) if isinstance(event, CallIntent) else event)
            for seq, event in await stage.events()
        ]
    )
    kits = records(story.call_events())
    drift = [record["drift"] for record in kits]
    assert drift == [None, None, None, "tools_changed", "history_edited", "system_changed"]
    assert kits[2]["supersedes"] == 1
    assert kits[1]["lenience"] == ("arguments_parsed",)
    for mine, its in zip(kits, real, strict=True):
        assert mine == its
