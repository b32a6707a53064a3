"""Tools and reasoning, out and back again."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from cases_conversation import chain
from conformance_table import EVERY, NA, Unsupported, feature
from gateway_rig import Talk
from odd_server import MALFORMED

row = partial(feature, group="Tools and reasoning")
LS: dict[str, Any] = {"name": "bash", "arguments": {"command": "ls"}}
PWD: dict[str, Any] = {"name": "bash", "arguments": {"command": 'pwd \u00e4 "x"'}}
PATCH: dict[str, Any] = {"name": "patch", "arguments": {"input": "*** free \u00e4 text"}}
HELD_TO_NOTHING = "no: the model is not held to it"


@row("Call, result, and the turn after", {"content": "I look.", "tool_calls": [LS]}, {"content": "done"}, models=EVERY)
async def tool_call(talk: Talk) -> None:
    talk.tools = True
    talk.user("go")
    said = await talk.ask()
    [call] = said.calls
    assert (said.text, said.finish) == ("I look.", talk.speaker.words["tools"])
    assert (call.name, json.loads(call.arguments)) == ("bash", {"command": "ls"})
    talk.answer(said.calls, "a.txt")
    assert (await talk.ask(stream=True)).text == "done"
    records = await chain(talk, 2)
    assert records[1].messages[-1]["content"] in ("a.txt", [{"type": "text", "text": "a.txt"}])
    assert records[1].messages[-1]["tool_call_id"] == call.id


@row("Parallel calls", {"content": "", "tool_calls": [LS, PWD]}, {"content": "done"}, models=EVERY)
async def parallel_calls(talk: Talk) -> None:
    talk.tools = True
    talk.user("go")
    said = await talk.ask(stream=True)
    assert [json.loads(call.arguments) for call in said.calls] == [LS["arguments"], PWD["arguments"]]
    assert len({call.id for call in said.calls}) == 2
    talk.answer(said.calls, "a.txt", "/")
    assert (await talk.ask()).text == "done"
    await chain(talk, 2)


@row("`tool_choice`: a call, or one tool", tokens=HELD_TO_NOTHING)
async def tool_choice(talk: Talk) -> None:
    talk.tools = True
    talk.user("go")
    named = {"type": "function", "function": {"name": "bash"}}
    for how, kept in (("required", "required"), ("named", named)):
        await talk.repeat(**talk.speaker.choice(how))
        assert (await talk.records())[-1].intent.extras["tool_choice"] == kept
        if talk.model.endswith("-tokens"):
            assert "tool_choice" not in await talk.asked()
        else:
            assert (await talk.asked())["tool_choice"] == kept
    if talk.model.endswith("-tokens"):
        raise Unsupported


@row("`tool_choice`: none", {"content": "I look.", "tool_calls": [LS]})
async def tool_choice_none(talk: Talk) -> None:
    talk.tools = True
    talk.user("go")
    said = await talk.repeat(**talk.speaker.choice("none"))
    if talk.model.endswith("-tokens"):
        assert said.calls == () and "<tool_call>" in said.text
    else:
        assert (await talk.asked())["tool_choice"] == "none"


@row("`tool_choice`: `allowed_tools`", messages=NA)
async def allowed_tools(talk: Talk) -> None:
    talk.tools = True
    talk.user("go")
    body = talk.body()
    other = {**body["tools"][0], "name": "other"}
    if talk.protocol == "chat":
        other = {"type": "function", "function": {**body["tools"][0]["function"], "name": "other"}}
    named = {"type": "function", "name": "bash"}
    tools = [named] if talk.protocol == "responses" else [{"type": "function", "function": {"name": "bash"}}]
    allowed: dict[str, Any] = {"mode": "auto", "tools": tools}
    allowed = allowed if talk.protocol == "responses" else {"allowed_tools": allowed}
    await talk.repeat(tools=[*body["tools"], other], tool_choice={"type": "allowed_tools", **allowed})
    [record] = await talk.records()
    assert [tool["function"]["name"] for tool in record.tools or ()] == ["bash"]


@row("Tools that take free text", {"tool_calls": [PATCH]}, {"content": "done"}, messages=NA)
async def custom_tools(talk: Talk) -> None:
    talk.user("go")
    spec = {"name": "patch", "description": "Patches."}
    tools = [{"type": "custom", **(spec if talk.protocol == "responses" else {"custom": spec})}]
    said = await talk.ask(tools=tools)
    if talk.protocol == "responses":
        [call] = said.body["output"]
        assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "patch", "*** free \u00e4 text")
        talk.history.append({"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "ok"})
    else:
        [call] = said.echo[0]["tool_calls"]
        assert call["custom"] == {"name": "patch", "input": "*** free \u00e4 text"}
        talk.history.append({"role": "tool", "tool_call_id": call["id"], "content": "ok"})
    assert (await talk.ask(tools=tools)).text == "done"
    await chain(talk, 2)


@row(
    "Namespaces, `local_shell`, `tool_search`",
    {
        "tool_calls": [
            {"name": "local_shell", "arguments": {"command": ["ls"]}},
            {"name": "files__read", "arguments": {"path": "a"}},
        ]
    },
    {"tool_calls": [{"name": "tool_search", "arguments": {"query": "more"}}]},
    {"content": "done"},
    chat=NA,
    messages=NA,
)
async def codex_tools(talk: Talk) -> None:
    talk.user("go")
    read = {"type": "function", "name": "read", "parameters": {"type": "object"}}
    tools = [
        {"type": "local_shell"},
        {"type": "namespace", "name": "files", "description": "Files.", "tools": [read]},
        {"type": "tool_search", "execution": "client"},
    ]
    said = await talk.ask(tools=tools)
    shell, call = said.body["output"]
    assert (shell["type"], shell["action"]["command"]) == ("local_shell_call", ["ls"])
    assert (call["name"], call["namespace"]) == ("read", "files")
    talk.history.append({"type": "local_shell_call_output", "call_id": shell["call_id"], "output": "a"})
    talk.history.append({"type": "function_call_output", "call_id": call["call_id"], "output": "text"})
    [search] = (await talk.ask(tools=tools, stream=True)).body["output"]
    assert (search["type"], search["arguments"]) == ("tool_search_call", {"query": "more"})
    found = {"type": "tool_search_output", "call_id": search["call_id"], "execution": "client", "status": "completed"}
    talk.history.append({**found, "tools": [{**read, "name": "write"}]})
    assert (await talk.ask(tools=tools)).text == "done"
    await chain(talk, 3)


LEFT_OUT = "no: left out"


@row("The vendor's own tools (web search)", chat="no: 400", responses=LEFT_OUT, messages=LEFT_OUT)
async def vendor_tools(talk: Talk) -> None:
    talk.user("go")
    tool = (
        {"type": "web_search_20250305", "name": "web_search"} if talk.protocol == "messages" else {"type": "web_search"}
    )
    if talk.protocol == "chat":
        _, code, message = await talk.refused(400, talk.body(tools=[tool]))
        assert code == "unsupported_value" and "tools[0].type" in message
    else:
        assert (await talk.ask(tools=[tool])).text == "hello 0"
        assert "tools" not in await talk.asked()
    raise Unsupported


@row("`functions`, `function_call` of old", {"tool_calls": [LS]}, {"content": "done"}, responses=NA, messages=NA)
async def old_functions(talk: Talk) -> None:
    talk.user("go")
    functions = [{"name": "bash", "parameters": {"type": "object"}}]
    async with talk.post(talk.body(functions=functions)) as response:
        choice = (await response.json())["choices"][0]
    call = choice["message"]["function_call"]
    assert (call["name"], json.loads(call["arguments"])) == ("bash", {"command": "ls"})
    assert choice["finish_reason"] == "function_call"
    talk.history += [choice["message"], {"role": "function", "name": "bash", "content": "a.txt"}]
    assert (await talk.ask(functions=functions)).text == "done"
    await chain(talk, 2)


@row(
    "Arguments that are no JSON reach the agent as they are",
    {"content": f'<tool_call>\n{{"name": "bash", "arguments": {MALFORMED}}}\n</tool_call>'},
    {"content": "done"},
    tokens="no: such a call stays text",
)
async def malformed_arguments(talk: Talk) -> None:
    talk.tools = True
    if talk.model.endswith("-tokens"):
        talk.user("go")
        said = await talk.ask()
        assert said.calls == () and MALFORMED in said.text
        talk.user("go on")
        await talk.ask()
        await chain(talk, 2)
        raise Unsupported
    talk.model = "odd"
    talk.user("malformed")
    for stream in (False, True):
        said = await talk.repeat(stream=stream)
        [call] = said.calls
        if talk.protocol == "messages":
            assert json.loads(call.arguments) == {"__unparsedToolInput": {"raw": MALFORMED, "len": len(MALFORMED)}}
        else:
            assert call.arguments == MALFORMED
        talk.history += said.echo
        talk.answer(said.calls, "that was no JSON")
        assert (await talk.repeat(stream=stream)).text.startswith("seen")
        del talk.history[1:]
    records = await talk.records()
    assert [record.intent.parent for record in records] == [
        None,
        records[0].intent.call_id,
        None,
        records[2].intent.call_id,
    ]
    assert [record.intent.drift for record in records] == [None] * 4


@row(
    "Reasoning, out and echoed",
    {"reasoning": "Let me see.", "content": "I look.", "tool_calls": [LS]},
    {"reasoning": "So it is \u00e4.", "content": "done"},
    {"content": "bye"},
    models=EVERY,
)
async def reasoning(talk: Talk) -> None:
    talk.tools = True
    talk.user("go")
    said = await talk.ask(stream=True)
    assert (said.reasoning, said.text) == ("Let me see.", "I look.")
    talk.answer(said.calls, "a.txt")
    said = await talk.ask()
    assert (said.reasoning, said.text) == ("So it is \u00e4.", "done")
    if talk.protocol == "messages":
        assert all(block["signature"] for block in said.echo[0]["content"] if block["type"] == "thinking")
    talk.user("go on")
    assert (await talk.ask()).text == "bye"
    records = await chain(talk, 3)
    thought = [message.get("reasoning_content") for message in records[2].messages if message["role"] == "assistant"]
    assert thought == ["Let me see.", "So it is \u00e4."]


@row(
    "Reasoning sealed in `encrypted_content`",
    {"reasoning": "Hm.", "content": "yes"},
    {"content": "bye"},
    chat=NA,
    messages=NA,
)
async def sealed_reasoning(talk: Talk) -> None:
    talk.user("go")
    said = await talk.repeat(include=["reasoning.encrypted_content"])
    sealed = {**said.body["output"][0], "content": None}
    assert sealed["encrypted_content"] and "Hm." not in json.dumps(sealed)
    talk.history += [sealed, said.body["output"][1]]
    talk.user("go on")
    await talk.ask()
    records = await chain(talk, 2)
    assert records[1].messages[1]["reasoning_content"] == "Hm."


@row(
    "Reasoning dropped by the agent still continues the chain",
    {"reasoning": "Hm.", "content": "yes"},
    {"content": "bye"},
    models=EVERY,
)
async def dropped_reasoning(talk: Talk) -> None:
    talk.user("go")
    said = await talk.repeat()
    kept = [item for item in said.echo if item.get("type") != "reasoning"]
    for item in kept:
        item.pop("reasoning_content", None)
        item.pop("reasoning", None)
        if talk.protocol == "messages":
            item["content"] = [block for block in item["content"] if block["type"] == "text"]
    talk.history += kept
    talk.user("go on")
    assert (await talk.ask()).text == "bye"
    await chain(talk, 2)
