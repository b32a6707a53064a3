"""F2 to F9: how agents that speak Anthropic's Messages go on with a conversation, each way with its verdict."""

from __future__ import annotations

import pytest
from kit import Story
from kit_agents import BASH, Messages, blocks, runs, text, tool, tool_result, user
from kit_checks import MODES, calls_of, check_trained, one_chain
from kit_template import Reply

SUMMARY = "The user wants a parser; the lexer is done, its tests pass, the parser is missing."
DEMAND = (
    "Write a summary of this conversation now, and do not call any tools: text only. Whoever goes on has nothing but "
    "your summary, so leave nothing out that matters, and keep to the form.\n"
    "1. What was asked for\n2. What was done, file by file\n3. What is open\n4. What comes next"
)


@MODES
def test_f2_cache_marks_move(mode: str) -> None:
    story = Story(mode=mode)
    agent = Messages(story, tools=BASH)
    first = agent.ask(blocks("reminder one", "reminder two", "list it"), reply=runs("ls", thinks="hm", says="I list."))
    second = agent.ask(blocks(tool_result(first, "a.txt")), reply=runs("cat a.txt", thinks="hm hm"))
    agent.ask(blocks(tool_result(second, "A")))
    one_chain(story, 3)


@MODES
def test_f3_a_list_of_one_text_becomes_a_string(mode: str) -> None:
    story = Story(mode=mode)
    agent = Messages(story, tools=BASH)
    agent.ask(blocks("list it"), reply=Reply(text="I will."))
    first = agent.ask(blocks("do it now"), reply=runs("ls"))
    agent.history[2] = user("do it now")
    agent.ask(blocks(tool_result(first, "a.txt")))
    one_chain(story, 3)


@MODES
def test_f4_the_last_user_message_is_extended_after_an_empty_reply(mode: str) -> None:
    story = Story(mode=mode)
    agent = Messages(story, tools=BASH)
    agent.ask(blocks("begin"), reply=Reply(text="I am ready."))
    agent.ask(blocks("list it"), reply=Reply())
    assert agent.history.pop() == {"role": "assistant", "content": []}
    agent.history[-1] = blocks("list it", "Go on, please.")
    third = agent.ask(reply=runs("ls"))
    agent.ask(blocks(tool_result(third, "a.txt")))
    forest = story.grown()
    assert forest.branches == [[0, 2, 3]]
    assert forest.continues == {1: 0, 2: 0, 3: 2}
    assert forest.excluded == {1: "dead"}
    assert forest.links == [("retry", 2, 1)]
    assert forest.lenience["last_user_extended"] == 1
    assert forest.reasons == {2: "retry"}
    (sample,) = story.outcome().samples
    check_trained(story, sample, [0, 2, 3])


@MODES
def test_f5_a_system_message_in_the_middle(mode: str) -> None:
    story = Story(mode=mode)
    agent = Messages(story, tools=BASH)
    first = agent.ask(blocks("list it"), {"role": "system", "content": "Today is a holiday."}, reply=runs("ls"))
    agent.ask(blocks(tool_result(first, "a.txt")))
    one_chain(story, 2)


@MODES
def test_f6_a_broken_stream_is_asked_again_without_a_stream(mode: str) -> None:
    story = Story(mode=mode)
    agent = Messages(story, tools=BASH)
    agent.begin(blocks("list it")).finish(Reply(text="I wi"), status="aborted", why="the agent went away")
    agent.stream = False
    second = agent.ask(reply=runs("ls"))
    agent.stream = True
    agent.ask(blocks(tool_result(second, "a.txt")))
    forest = story.grown()
    assert (forest.branches, forest.continues) == ([[1, 2]], {2: 1})
    assert forest.excluded == {0: "aborted"}
    assert forest.links == [("retry", 1, 0)]
    assert forest.reasons == {1: "retry"}
    (sample,) = story.outcome().samples
    check_trained(story, sample, [1, 2])


@MODES
def test_f7_a_title_is_a_side_chain(mode: str) -> None:
    story = Story(mode=mode)
    schema = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}
    form = {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    same = {"x-claude-code-session-id": "s1"}
    Messages(story, system="Give it a name.", headers=same, extra=form).ask(blocks("list it"))
    agent = Messages(story, tools=BASH, headers=same)
    first = agent.ask(blocks("list it"), reply=runs("ls"))
    agent.ask(blocks(tool_result(first, "a.txt")))
    forest = story.grown()
    assert (forest.branches, forest.continues) == ([[0], [1, 2]], {2: 1})
    assert (forest.links, forest.drift, forest.excluded) == ([], {}, {})
    outcome = story.outcome()
    assert calls_of(outcome.samples) == [[1, 2]]
    assert outcome.excluded == {"scenario_title": 1}


@MODES
def test_f8_a_sub_agent_has_a_chain_of_its_own(mode: str) -> None:
    story = Story(mode=mode)
    same = {"x-claude-code-session-id": "s1"}
    main = Messages(story, tools=[*BASH, tool("Agent")], headers=same)
    start = main.ask(blocks("look into it"), reply=runs("read the notes", name="Agent"))
    sub = Messages(story, system="You are quick.", tools=BASH, headers={**same, "x-claude-code-agent-id": "a1"})
    first = sub.ask(blocks("read the notes"), reply=runs("cat notes"))
    sub.ask(blocks(tool_result(first, "they are empty")), reply=Reply(text="Nothing is in them."))
    main.ask(blocks(tool_result(start, text("Nothing is in them."))))
    forest = story.grown()
    assert (forest.branches, forest.continues) == ([[0, 3], [1, 2]], {2: 1, 3: 0})
    assert forest.links == [("sub_agent", 1, 0)]
    assert forest.reasons == {1: "sub_agent"}
    assert forest.excluded == {}
    samples = story.outcome().samples
    assert [(calls, each.scenario) for calls, each in zip(calls_of(samples), samples, strict=True)] == [
        ([0, 3], "main"),
        ([1, 2], "sub_agent"),
    ]
    assert [link.kind for link in samples[1].links] == ["sub_agent"]
    for sample, calls in zip(samples, calls_of(samples), strict=True):
        check_trained(story, sample, calls)


def compacted(story: Story, *, keeps_tail: bool) -> None:
    """Calls 0 and 1, the compaction (2), and a conversation that goes on from its summary (3 and 4)."""
    agent = Messages(story, tools=BASH, headers={"x-claude-code-session-id": "s1"})
    first = agent.ask(blocks("a reminder", "write a parser"), reply=runs("ls"))
    second = agent.ask(blocks(tool_result(first, "a.txt")), reply=runs("cat a.txt", says="I look."))
    tail = [agent.history[-1], blocks(tool_result(second, "A"))]
    agent.ask(blocks(tool_result(second, "A"), DEMAND), reply=Reply(text=SUMMARY))
    agent.history = [blocks("a reminder", f"Here is what went before: {SUMMARY}"), *(tail if keeps_tail else ())]
    third = agent.ask(reply=runs("vi parser.py"))
    agent.ask(blocks(tool_result(third, "done")))


@MODES
@pytest.mark.parametrize("keeps_tail", [False, True])
def test_f9_a_compaction_starts_a_chain_that_is_linked(mode: str, keeps_tail: bool) -> None:
    story = Story(mode=mode)
    compacted(story, keeps_tail=keeps_tail)
    assert [call.request.scenario for call in story.calls] == ["main", "main", "compaction", "main", "main"]
    check_compacted(story)


def check_compacted(story: Story) -> None:
    """Calls 0 and 1, the compaction, and 3 and 4 that go on from it."""
    forest = story.grown()
    assert forest.branches == [[0, 1, 2], [3, 4]]
    assert {at: forest.continues[at] for at in (1, 2, 4)} == {1: 0, 2: 1, 4: 3}
    assert forest.links == [("compaction", 3, 1)], "the conversation that was condensed"
    assert forest.reasons == {3: "compaction"}
    assert forest.excluded == {}
    outcome = story.outcome()
    assert calls_of(outcome.samples) == [[0, 1], [3, 4]]
    assert outcome.excluded == {"scenario_compaction": 1}
    assert outcome.samples[1].links[0].kind == "compaction"
    for sample, calls in zip(outcome.samples, calls_of(outcome.samples), strict=True):
        check_trained(story, sample, calls)
