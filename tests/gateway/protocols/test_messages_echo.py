"""What Claude Code sends back of a reply continues the call that the reply came from."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.gateway.exchange import Delta, Finished, ModelRequest, Started
from rollyard.gateway.history import ROOT, Canonical
from rollyard.gateway.protocols.messages import MessagesProtocol
from rollyard.schemas.call import Usage

MESSAGES = MessagesProtocol()
MARK = {"cache_control": {"type": "ephemeral"}}
Block = dict[str, Any]


def read_stream(data: bytes) -> list[Block]:
    """A stream as Claude Code reads it: blocks in order of their indices."""
    blocks: dict[int, Block] = {}
    for event in data.decode().split("\n\n"):
        if not event:
            continue
        name, line = event.split("\n")
        told = json.loads(line.removeprefix("data: "))
        assert name == f"event: {told['type']}"
        match told["type"]:
            case "content_block_start":
                assert told["index"] == len(blocks)
                blocks[told["index"]] = told["content_block"]
                if told["content_block"]["type"] == "tool_use":
                    told["content_block"]["input"] = ""
            case "content_block_delta":
                [key] = [key for key in told["delta"] if key != "type"]
                place = "input" if key == "partial_json" else key
                blocks[told["index"]][place] += told["delta"][key]
            case "content_block_stop":
                if blocks[told["index"]]["type"] == "tool_use":
                    blocks[told["index"]]["input"] = read_input(blocks[told["index"]]["input"])
    return list(blocks.values())


def read_input(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=float.fromhex)
    except ValueError:
        return {"__unparsedToolInput": {"raw": text, "len": len(text.encode("utf-16-le")) // 2}}


words = st.text(max_size=30)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | words,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(words, inner, max_size=2),
    max_leaves=4,
)
objects = st.dictionaries(words, values, max_size=3)
arguments = st.one_of(
    st.builds(lambda value, indent: json.dumps(value, indent=indent), objects, st.none() | st.just(1)),
    st.builds(lambda value: json.dumps(value, ensure_ascii=False)[:-1], objects),
)


@st.composite
def replies(draw: st.DrawFn) -> Finished:
    reply: Block = {"role": "assistant", "content": draw(words)}
    if draw(st.booleans()):
        reply["reasoning_content"] = draw(words)
    if calls := draw(st.lists(arguments, max_size=3)):
        reply["content"] = reply["content"] or None
        reply["tool_calls"] = [
            {"id": f"c{number}", "type": "function", "function": {"name": "Bash", "arguments": text}}
            for number, text in enumerate(calls)
        ]
    return Finished("id", 9, reply, "tool_calls" if calls else "stop", Usage())


@st.composite
def streams(draw: st.DrawFn) -> tuple[Finished, list[Delta], bool]:
    """A reply, deltas that hold a prefix of it, and whether all reasoning came before the text."""
    finished = draw(replies())
    left = {"reasoning": finished.reply.get("reasoning_content", ""), "text": finished.reply["content"] or ""}
    in_order = draw(st.booleans())
    kinds = draw(st.lists(st.sampled_from(sorted(left)), max_size=6))
    deltas = []
    for kind in sorted(kinds) if in_order else kinds:
        size = draw(st.integers(0, len(left[kind])))
        if in_order and kind == "text" and left["reasoning"]:
            deltas.append(Delta("id", 9, reasoning=left["reasoning"]))
            left["reasoning"] = ""
        deltas.append(Delta("id", 9, **{kind: left[kind][:size]}))
        left[kind] = left[kind][size:]
    return finished, deltas, in_order


def sent(finished: Finished, deltas: list[Delta]) -> bytes:
    """The stream of a reply; before its end it holds nothing that an agent acts on."""
    stream = MESSAGES.stream(ModelRequest(messages=[]))
    early = stream.events(Started("id", 9)) + b"".join(map(stream.events, deltas))
    assert b"tool_use" not in early
    assert b'stop_reason":"' not in early
    assert b"message_stop" not in early
    return early + stream.events(finished)


def parse(*messages: Block, **body: Any) -> ModelRequest:
    return MESSAGES.parse(json.dumps({"messages": messages, **body}).encode(), {})


def form(message: Block) -> bytes:
    return Canonical().form(message)


@given(streams())
def test_the_echo_of_a_stream_is_the_reply(streamed: tuple[Finished, list[Delta], bool]) -> None:
    finished, deltas, _ = streamed
    [echo] = parse({"role": "assistant", "content": read_stream(sent(finished, deltas))}).messages
    assert form(echo) == form(finished.reply)
    reasoning = finished.reply.get("reasoning_content", "")
    assert echo.get("reasoning_content", "") == (reasoning if reasoning.strip() else "")


@given(streams())
def test_a_stream_and_a_whole_reply_are_the_same(streamed: tuple[Finished, list[Delta], bool]) -> None:
    finished, deltas, in_order = streamed
    whole = json.loads(MESSAGES.reply(ModelRequest(messages=[]), [finished]))["content"]
    if in_order:
        assert read_stream(sent(finished, deltas)) == whole
    [echo] = parse({"role": "assistant", "content": whole}).messages
    assert form(echo) == form(finished.reply)


# Conversations in the shapes that Claude Code 2.1.197 was seen to send.


def text(words: str, *, marked: bool = False) -> Block:
    return {"type": "text", "text": words} | (MARK if marked else {})


def user(*blocks: Block | str) -> Block:
    return {"role": "user", "content": [text(block) if isinstance(block, str) else block for block in blocks]}


def result(name: str, content: Any = "ok", *, marked: bool = False) -> Block:
    return {"tool_use_id": name, "type": "tool_result", "content": content} | (MARK if marked else {})


def said(content: str | None = None, *commands: str, reasoning: str = "hm") -> Finished:
    reply: Block = {"role": "assistant", "content": content, "reasoning_content": reasoning}
    if commands:
        reply["tool_calls"] = [
            {"id": f"c{number}", "type": "function", "function": {"name": "Bash", "arguments": command}}
            for number, command in enumerate(commands)
        ]
    return Finished("id", 9, reply, "stop", Usage())


def echo(finished: Finished) -> Block:
    return {"role": "assistant", "content": read_stream(sent(finished, []))}


def chains(request: ModelRequest, reply: Finished | None = None) -> list[bytes]:
    return Canonical().fold(ROOT, [*request.messages, *([reply.reply] if reply else [])])


def extends(later: ModelRequest, earlier: ModelRequest, reply: Finished) -> bool:
    """Whether the later request continues the earlier one's reply."""
    known = chains(earlier, reply)
    return chains(later)[: len(known)] == known


SYSTEM = [text("x-anthropic-billing-header: cc_version=2.1.197.0ab;"), text("Be good.", marked=True)]
LS, PWD = '{"command": "ls"}', '{ "command": "pwd" }'


def test_cache_marks_move() -> None:
    one, two = said("I look.", LS), said(None, PWD)
    first = parse(user("r1", "r2", text("p", marked=True)), system=SYSTEM)
    second = parse(user("r1", "r2", "p"), echo(one), user(result("c0", marked=True)), system=SYSTEM)
    third = parse(
        user("r1", "r2", "p"),
        echo(one),
        user(result("c0")),
        echo(two),
        user(result("c0", [text("a"), text("b")]), text("and", marked=True)),
        system=SYSTEM,
    )
    assert extends(second, first, one)
    assert extends(third, second, two)


def test_a_list_becomes_a_string() -> None:
    one = said("done")
    first = parse(user("r", "p"), echo(said("hi")), user(text("go on", marked=True)))
    second = parse(user("r", "p"), echo(said("hi")), {"role": "user", "content": "go on"}, echo(one), user("more"))
    assert extends(second, first, one)


def test_an_empty_reply_is_asked_for_again_in_the_same_message() -> None:
    first, second = parse(user(text("p", marked=True))), parse(user("p", text("continue", marked=True)))
    assert echo(said(None, reasoning=""))["content"] == []
    assert chains(first) != chains(second)
    first = parse(user("p"), echo(said("a", LS)), user(result("c0")))
    second = parse(user("p"), echo(said("a", LS)), user(result("c0"), "continue"))
    assert chains(second)[:-1] == chains(first)


def test_a_system_message_in_the_middle() -> None:
    one, note = said(None, LS), {"role": "system", "content": "tools are there"}
    first = parse(user("p"), note)
    assert extends(parse(user("p"), note, echo(one), user(result("c0"))), first, one)


def test_a_repeat_without_a_stream_asks_for_the_same() -> None:
    one = said(None, LS)
    streamed, whole = parse(user("p"), stream=True, system=SYSTEM), parse(user("p"), system=SYSTEM)
    assert chains(streamed) == chains(whole)
    assert (streamed.tools, streamed.params, streamed.extras) == (whole.tools, whole.params, whole.extras)
    body = json.loads(MESSAGES.reply(whole, [one]))
    again = parse(user("p"), {"role": "assistant", "content": body["content"]}, user(result("c0")), system=SYSTEM)
    assert extends(again, whole, one)


def test_a_title_is_another_conversation() -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    title = parse(user("p"), system="Write a title.", tools=[], output_config={"format": form})
    assert title.tools is None
    assert "response_format" in title.extras
    assert not set(chains(title)) & set(chains(parse(user("p"), system=SYSTEM)))


def test_a_sub_agent_is_another_conversation_and_the_main_one_goes_on() -> None:
    start, sub_reply = said(None, '{"prompt": "say hi"}'), said("hi")
    main = parse(user("r", "p"), system=SYSTEM)
    sub = parse(
        user("say hi"), system=[text(SYSTEM[0]["text"] + " cc_is_subagent=true;"), text("You are a sub-agent.")]
    )
    on = parse(user("r", "p"), echo(start), user(result("c0", [text("hi"), text("agentId: a1")])), system=SYSTEM)
    assert "cc_is_subagent=true" in sub.context["billing"][0]
    assert not set(chains(sub, sub_reply)) & set(chains(on))
    assert extends(on, main, start)


def test_a_compaction_continues_and_what_follows_is_new() -> None:
    one = said("a", LS)
    first = parse(user("p"), system=SYSTEM)
    marked = echo(one)
    marked["content"][-1] |= MARK
    compaction = parse(user("p"), marked, user(result("c0"), "Summarise."), system=SYSTEM)
    after = parse(user("reminder", "summary"), echo(one), user(result("c0")), system=SYSTEM)
    assert extends(compaction, first, one)
    assert chains(after)[:1] == chains(first)[:1]
    assert not set(chains(after)[1:]) & set(chains(compaction))


def test_another_state_of_the_repository_is_another_prompt() -> None:
    one = said("a")
    before = parse(user("p"), system=[*SYSTEM, text("git status: clean")])
    resumed = parse(user("p"), echo(one), user("go on"), system=[*SYSTEM, text("git status: dirty")])
    assert not extends(resumed, before, one)
    same = parse(user("p"), echo(one), user("go on"), system=[*SYSTEM, text("git status: clean")])
    assert extends(same, before, one)


@pytest.mark.parametrize("bad", ['{"command": "ls', "ls -la", '{"command": "caf\u00e9 \U0001f600'])
def test_malformed_arguments_come_back_as_they_were(bad: str) -> None:
    one, first = said("a", LS, bad), parse(user("p"))
    error = {**result("c1", "<tool_use_error>no JSON</tool_use_error>"), "is_error": True}
    assert extends(parse(user("p"), echo(one), user(result("c0"), error)), first, one)


def test_a_reply_that_was_cut_is_continued() -> None:
    one = Finished("id", 9, {"role": "assistant", "content": "partial "}, "length", Usage())
    first = parse(user("p"))
    for more in (user(text("continue", marked=True)), {"role": "user", "content": "continue"}):
        assert extends(parse(user("p"), echo(one), more), first, one)


def test_a_billing_line_does_not_part_conversations() -> None:
    one = said("a")
    other = [text("x-anthropic-billing-header: cc_version=2.1.197.fff;"), *SYSTEM[1:]]
    assert extends(parse(user("p"), echo(one), user("q"), system=other), parse(user("p"), system=SYSTEM), one)


def test_a_thought_of_another_signer_is_kept() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": "foreign"}
    [message] = parse({"role": "assistant", "content": [thought, text("a")]}).messages
    assert message["reasoning_content"] == "hm"
    assert message["_blocks"][0]["signature"] == "foreign"
    assert form(message) == form({"role": "assistant", "content": "a"})
