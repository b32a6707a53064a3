"""A table of cases. Every text is made up: what counts is the shape and a few common words."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from msgspec import structs

from rollyard.gateway.exchange import ModelRequest
from rollyard.gateway.scenario import RULES, Facts, classify
from rollyard.schemas.call import AgentIds, Message
from rollyard.schemas.names import Scenario

TOOLS: list[Message] = [{"type": "function", "function": {"name": "bash", "parameters": {}}}]
PULSE: list[Message] = [*TOOLS, {"type": "function", "function": {"name": "heartbeat_respond"}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": "{}"}}

SYSTEM = {"role": "system", "content": "You are a coding agent. Use the task tool to start a sub-agent when needed."}
DEVELOPER = {"role": "developer", "content": "You are a coding agent."}
ASKED = {"role": "user", "content": "Make the tests pass."}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "3 failed"}
HISTORY = [SYSTEM, ASKED, CALLED, RESULT]

FORM = """Now stop working and write a report for whoever takes over from you.
Do not call any tools: everything that is needed stands above.
The report is a summary of this conversation under these headings:
1. What was wanted
2. What was found, with files and lines
3. What is left to do
Be exact. Leave nothing out that a successor needs, and quote code where words would be longer than it."""
PLAIN_FORM = FORM.replace("1. ", "").replace("2. ", "").replace("3. ", "")
TITLE = {"type": "object", "properties": {"title": {"type": "string"}}}


def user(text: str, *before: str) -> Message:
    if not before:
        return {"role": "user", "content": text}
    return {"role": "user", "content": [{"type": "text", "text": each} for each in (*before, text)]}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def schema(*names: str) -> dict[str, Any]:
    inner = {"type": "object", "properties": {name: {"type": "string"} for name in names}}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": inner}}}


def case(expected: Scenario, name: str, /, *messages: Message, **more: Any) -> Any:
    more.setdefault("tools", TOOLS)
    return pytest.param(expected, ModelRequest(messages=list(messages), **more), id=f"{expected}: {name}")


CASES = [
    # An agent's own work, also where it uses the words of other scenarios.
    case("main", "first turn", SYSTEM, ASKED),
    case("main", "codex", DEVELOPER, ASKED, protocol="responses", ids=AgentIds(kind="turn", thread="t", session="t")),
    case("main", "later turn", *HISTORY),
    case("main", "no tools", ASKED, tools=None),
    case("main", "bare text", tools=None, protocol="completions", prompt="Once upon a time"),
    case("main", "no words at all", user(""), {"role": "user", "content": [{"type": "image_url"}]}, tools=None),
    case("main", "summarise a file", *HISTORY, CALLED, RESULT, user("Summarise this file for me, without tools.")),
    case("main", "summarise a file, long", *HISTORY, user("Summarise this file. " + "It is about context. " * 40)),
    case("main", "summarise what was said", *HISTORY, user("Give me a summary of our conversation so far. No tools.")),
    case("main", "a long task about summaries", *HISTORY, user(PLAIN_FORM)),
    case("main", "a form as the first thing said", SYSTEM, user(FORM)),
    case("main", "a form that was filled in", *HISTORY, user(FORM), {"role": "assistant", "content": "Done"}, ASKED),
    case("main", "a form with tools allowed", *HISTORY, user(FORM.replace("Do not call any tools: ", ""))),
    case("main", "a form about something else", *HISTORY, user(FORM.replace("this conversation", "the log file"))),
    case("main", "a form in a tool's output", *HISTORY[:3], {**RESULT, "content": FORM}),
    case("main", "summarise a dialogue", user("Summarise the following conversation.\nAnn: hi\nBob: hi"), tools=None),
    case("main", "summarise by trade", system("You are a summarization assistant."), user("A text."), tools=None),
    case("main", "title of a paper", system("You write titles for papers. Return the title."), ASKED, tools=None),
    case("main", "a title with tools", system("Write a title for the conversation."), ASKED),
    case("main", "a title after replies", system("Write a title for the chat."), ASKED, CALLED, ASKED, tools=None),
    case("main", "another schema", ASKED, tools=None, extras=schema("title", "author", "year")),
    case("main", "a schema with tools", ASKED, extras=schema("title")),
    case("main", "a schema without a title", ASKED, tools=None, extras=schema("name")),
    case("main", "another response format", ASKED, tools=None, extras={"response_format": {"type": "json_object"}}),
    case("main", "about heartbeats", SYSTEM, user("Rename HEARTBEAT_OK to PULSE_OK in the code.")),
    case("main", "a heartbeat earlier", user("If nothing is due, reply HEARTBEAT_OK."), CALLED, RESULT, ASKED),
    case("main", "a heartbeat tool", SYSTEM, ASKED, tools=PULSE),
    case("main", "talk of sub-agents", system("You are a coding agent. You may start a subagent."), ASKED),
    case("main", "one token", ASKED, tools=None, params={"max_tokens": 1}),
    case("main", "one token with tools", user("?"), protocol="messages", params={"max_tokens": 1}),
    case("main", "a limit while streaming", *HISTORY, user("Sum up: limit of turns."), tools=None, stream=True),
    case("main", "a limit that is no limit", *HISTORY, user("A summary of the log, please."), tools=None),
    case("main", "maximum of what", *HISTORY, user("What is the maximum number of calls?"), tools=None),
    # Sub-agents.
    case("sub_agent", "codex", DEVELOPER, ASKED, ids=AgentIds(sub_agent="collab_spawn", parent_thread="t", thread="u")),
    case("sub_agent", "claude", *HISTORY, protocol="messages", ids=AgentIds(sub_agent="a1", thread="a1", session="s")),
    case("sub_agent", "opencode", *HISTORY, ids=AgentIds(session="b", parent_thread="a")),
    case("sub_agent", "by role", system("You are a focused subagent that works on one task."), ASKED),
    case("sub_agent", "by role, with marks", system("# Context\nYou are a **subagent** of the main one."), ASKED),
    case(
        "sub_agent", "by task", SYSTEM, user("[noon] You are running as a subagent. Task: count files."), CALLED, RESULT
    ),
    # Compactions.
    case("compaction", "codex says so", *HISTORY, user("Go on."), tools=None, ids=AgentIds(kind="compaction")),
    case("compaction", "codex of old", *HISTORY, user("Go on."), tools=None, ids=AgentIds(sub_agent="compact")),
    case("compaction", "claude, last block", *HISTORY, user(FORM, "<note>x</note>"), protocol="messages", stream=True),
    case("compaction", "claude, long", *HISTORY, user(FORM + "\n- x" * 3000), protocol="messages"),
    case("compaction", "of a sub-agent", *HISTORY, user(FORM), ids=AgentIds(sub_agent="a1")),
    case("compaction", "opencode, no tools", *HISTORY, user(PLAIN_FORM), tools=None, stream=True),
    case("compaction", "by role", system("You are a context summarization agent."), user("..."), tools=None),
    case("compaction", "one message", user("You are a summarization agent. Write a checkpoint.\n..."), tools=None),
    case(
        "compaction",
        "by role, parts",
        {**DEVELOPER, "content": user("context compaction", "Task:")["content"]},
        tools=None,
    ),
    # The last reply when a limit is reached.
    case(
        "summary", "hermes", *HISTORY, user("The limit of iterations is reached. Summarise what you did."), tools=None
    ),
    case(
        "summary", "in other words", *HISTORY, user("Maximum turns used up, write a recap without tools."), tools=None
    ),
    # Titles.
    case("title", "claude", ASKED, tools=None, protocol="messages", extras=schema("title")),
    case("title", "with one more field", ASKED, tools=None, extras=schema("isNew", "title")),
    case("title", "opencode", system("Your output is a title for the thread."), ASKED, ASKED, tools=None, stream=True),
    case("title", "hermes", system("Generate a short title for this conversation."), ASKED, tools=None),
    case("title", "of a sub-agent", ASKED, tools=None, extras=schema("title"), ids=AgentIds(sub_agent="a1")),
    # Heartbeats.
    case("heartbeat", "by reply", SYSTEM, user("Look at your list. If nothing is due, reply with HEARTBEAT_OK.")),
    case("heartbeat", "a note behind it", *HISTORY, user("Nothing due? Respond: HEARTBEAT_OK"), user("[time: noon]")),
    case("heartbeat", "by tool", SYSTEM, user("Heartbeat: look at your list."), tools=PULSE),
    # Counts and probes.
    case("count", "count_tokens", *HISTORY, protocol="messages", scenario="count"),
    case("count", "quota", user("quota"), tools=None, protocol="messages", params={"max_tokens": 1}),
]


@pytest.mark.parametrize(("scenario", "request_"), CASES)
def test_cases(scenario: Scenario, request_: ModelRequest) -> None:
    assert classify(request_) == scenario


def test_each_rule_decides_a_case() -> None:
    decided = Counter(
        next((rule.__name__ for _, rule in RULES if rule(Facts(case.values[1]))), "none") for case in CASES
    )
    assert {rule.__name__ for _, rule in RULES} <= set(decided)


@pytest.mark.parametrize(("scenario", "request_"), CASES)
def test_what_lies_between_does_not_matter(scenario: Scenario, request_: ModelRequest) -> None:
    """The middle of a long history is never read: its texts may be anything."""
    *before, last = request_.messages or [ASKED]
    if not any(message["role"] == "assistant" for message in before):
        return
    filler = [CALLED, {**RESULT, "content": FORM + " HEARTBEAT_OK"}] * 100
    longer = structs.replace(request_, messages=[*before[:2], *filler, *before[2:], last])
    assert classify(longer) == scenario


@pytest.mark.parametrize("content", [None, [], [None], [{"type": "text"}], [{"text": 1}], 7, {"a": 1}])
@pytest.mark.parametrize("role", ["system", "user", "assistant", None])
def test_messages_without_text(role: Any, content: Any) -> None:
    odd = {"role": role, "content": content}
    for tools in (None, [{}], [{"function": None}], [{"function": {"name": 1}}]):
        assert classify(ModelRequest(messages=[odd, odd], tools=tools)) == "main"
