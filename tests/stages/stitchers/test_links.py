"""What belongs together without being a prefix, beyond the plain cases of test_structures: sub-agents of sub-agents,
several at once, without ids; compactions that fail, that follow each other, that a sub-agent makes; chains of retries.
"""

from __future__ import annotations

from typing import Any

import pytest
from kit import Call, Story
from kit_agents import BASH, Agent, Chat, Messages, Responses, blocks, item, result, runs, tool, tool_result, user
from kit_checks import MODES, calls_of, trained, whole
from kit_template import Reply

from rollyard.schemas.policy import SamplePolicy

DEMAND = (
    "Write a summary of this conversation now, and do not call any tools: text only. Whoever goes on has nothing but "
    "your summary, so leave nothing out that matters, and keep to the form.\n"
    "1. What was asked for\n2. What was done, file by file\n3. What is open\n4. What comes next"
)
AGENT = tool("Agent")


def sub_agent(story: Story, name: str, **given: Any) -> Messages:
    headers = {"x-claude-code-session-id": "s1", "x-claude-code-agent-id": name}
    return Messages(story, system="You are quick.", headers=headers, **given)


def main_agent(story: Story, **given: Any) -> Messages:
    return Messages(story, headers={"x-claude-code-session-id": "s1"}, **given)


def starts(*tasks: str) -> Reply:
    return Reply(calls=tuple(call for task in tasks for call in runs(task, name="Agent").calls))


# --- sub-agents ---


@MODES
def test_a_sub_agent_of_a_sub_agent(mode: str) -> None:
    story = Story(mode=mode)
    main, middle, inner = (
        main_agent(story, tools=[AGENT]),
        sub_agent(story, "a1", tools=[AGENT]),
        sub_agent(story, "a2"),
    )
    start = main.ask(blocks("find it"), reply=starts("look in every folder"))
    deeper = middle.ask(blocks("look in every folder"), reply=starts("look in folder one"))
    inner.ask(blocks("look in folder one"))
    middle.ask(blocks(tool_result(deeper, "nothing")))
    main.ask(blocks(tool_result(start, "nothing at all")))
    forest = story.grown()
    assert forest.branches == [[0, 4], [1, 3], [2]]
    assert forest.links == [("sub_agent", 1, 0), ("sub_agent", 2, 1)]
    assert forest.reasons == {1: "sub_agent", 2: "sub_agent"}


@MODES
def test_sub_agents_are_linked_to_the_call_that_gave_them_their_words(mode: str) -> None:
    """Started by one turn, at work beside the next one, which starts another."""
    story = Story(mode=mode)
    main, one, other = main_agent(story, tools=[AGENT]), sub_agent(story, "a1"), sub_agent(story, "a2")
    first = main.ask(blocks("find it"), reply=starts("look in the first folder"))
    main.ask(blocks(tool_result(first, "it runs")), reply=starts("look in the second folder"))
    other.ask(blocks("look in the second folder"))
    one.ask(blocks("look in the first folder"))
    forest = story.grown()
    assert forest.links == [("sub_agent", 2, 1), ("sub_agent", 3, 0)]


@MODES
def test_a_sub_agent_that_is_asked_again_is_one_chain(mode: str) -> None:
    story = Story(mode=mode)
    main, sub = main_agent(story, tools=[AGENT]), sub_agent(story, "a1")
    start = main.ask(blocks("find it"), reply=starts("look"))
    sub.ask(blocks("look"))
    main.ask(blocks(tool_result(start, "nothing")), reply=starts("look again"))
    sub.ask(blocks("look again"))
    forest = story.grown()
    assert forest.branches == [[0, 2], [1, 3]]
    assert forest.links == [("sub_agent", 1, 0)]


@MODES
def test_a_sub_agent_that_only_its_prompt_names(mode: str) -> None:
    """No header tells it; the system prompt does, and the words of its task stand in the call that started it."""
    story = Story(mode=mode)
    main = Chat(story, tools=[tool("delegate")])
    start = main.ask(user("find it"), reply=runs("look in the cellar", name="delegate"))
    sub = Chat(story, system="You are a focused sub-agent. Do your task.", tools=BASH)
    first = sub.ask(user("look in the cellar"), reply=runs("ls"))
    sub.ask(result(first, "nothing"))
    main.ask(result(start, "nothing"))
    assert [call.request.scenario for call in story.calls] == ["main", "sub_agent", "sub_agent", "main"]
    forest = story.grown()
    assert (forest.branches, forest.links) == ([[0, 3], [1, 2]], [("sub_agent", 1, 0)])
    assert forest.reasons == {1: "sub_agent"}


@MODES
def test_a_sub_agent_may_begin_as_a_fork_of_its_parent(mode: str) -> None:
    """It has the whole conversation before its task: its ids go on, and it is linked all the same."""
    story = Story(mode=mode)
    main = main_agent(story, tools=[AGENT])
    start = main.ask(blocks("find it"), reply=starts("look"))
    fork = Messages(story, tools=[AGENT], history=list(main.history), headers=sub_agent(story, "a1").headers)
    fork.ask(blocks(tool_result(start, "you are the one who looks"), "look"))
    main.ask(blocks(tool_result(start, "nothing")))
    forest = story.grown()
    assert (forest.branches, forest.continues) == ([[0, 1], [0, 2]], {1: 0, 2: 0})
    assert (forest.links, forest.drift) == ([("sub_agent", 1, 0)], {})
    assert trained(story.outcome().samples) == whole(*story.calls)


@MODES
def test_a_sub_agent_that_names_its_parent_was_started_by_it(mode: str) -> None:
    """Whoever else gave the same words to somebody, and later."""
    story = Story(mode=mode)
    names = ("t1", "t2", "t3")
    agents = [Responses(story, headers={"thread-id": name}, tools=[tool("spawn_agent")]) for name in names]
    for agent in agents[1:]:
        agent.headers |= {"x-openai-subagent": "collab_spawn", "x-codex-parent-thread-id": "t1"}
    spawn = runs("read the notes", name="spawn_agent")
    agents[0].ask(item("user", "go", "1"), reply=spawn)
    agents[1].ask(item("user", "read the notes", "2"), reply=spawn)
    agents[2].ask(item("user", "read the notes", "3"))
    assert story.grown().links == [("sub_agent", 1, 0), ("sub_agent", 2, 0)]


@MODES
def test_a_sub_agent_is_trained_or_not_as_the_policy_says(mode: str) -> None:
    story = Story(mode=mode)
    main, sub = main_agent(story, tools=[AGENT]), sub_agent(story, "a1")
    start = main.ask(blocks("find it"), reply=starts("look"))
    sub.ask(blocks("look"))
    main.ask(blocks(tool_result(start, "nothing")))
    outcome = story.outcome(policy=SamplePolicy(scenarios=("main",)))
    assert calls_of(outcome.samples) == [[0, 2]]
    assert outcome.excluded == {"scenario_sub_agent": 1}


# --- compactions ---


def works(agent: Agent, turns: int) -> Call:
    """Some turns of work; the last one waits for a result."""
    call = agent.ask(blocks("write a parser"), reply=runs("ls"))
    for turn in range(1, turns):
        call = agent.ask(blocks(tool_result(call, f"result {turn}")), reply=runs(f"cat {turn}"))
    return call


def compacts(agent: Agent, waiting: Call, summary: str, **end: Any) -> Call:
    """The agent demands a summary, and begins anew with it."""
    call = agent.begin(blocks(tool_result(waiting, "the last result"), DEMAND))
    call.finish(Reply(text=summary), **end)
    agent.history = [blocks(f"It went on before: {summary}", "Go on.")]
    return call


@MODES
def test_compactions_that_follow_each_other(mode: str) -> None:
    story = Story(mode=mode)
    agent = main_agent(story, tools=BASH)
    compacts(agent, works(agent, 2), "the lexer is done")
    third = agent.ask(reply=runs("vi parser"))
    compacts(agent, third, "lexer and parser are done")
    agent.ask(reply=Reply(text="All is done."))
    forest = story.grown()
    assert forest.branches == [[0, 1, 2], [3, 4], [5]]
    assert forest.links == [("compaction", 3, 1), ("compaction", 5, 3)]
    assert forest.reasons == {3: "compaction", 5: "compaction"}
    assert calls_of(story.outcome().samples) == [[0, 1], [3], [5]]


@MODES
def test_a_compaction_that_fails_starts_nothing(mode: str) -> None:
    """The model called a tool in place of summing up: the agent goes on as before, and compacts later."""
    story = Story(mode=mode)
    agent = main_agent(story, tools=BASH)
    waiting = works(agent, 2)
    agent.begin(blocks(tool_result(waiting, "the last result"), DEMAND)).finish(runs("ls"))
    agent.history[-1] = blocks(tool_result(waiting, "the last result"))
    call = agent.ask(reply=runs("vi"))
    forest = story.grown()
    assert forest.branches == [[0, 1, 2], [0, 1, 3]]
    assert (forest.links, forest.drift, forest.excluded) == ([], {}, {})
    compacts(agent, call, "all is there")
    agent.ask()
    forest = story.grown()
    assert forest.links == [("compaction", 5, 3)]
    assert forest.reasons == {5: "compaction"}


@MODES
def test_a_compaction_is_gone_on_from_once(mode: str) -> None:
    """What the same agent begins anew after that is a conversation of its own."""
    story = Story(mode=mode)
    agent = main_agent(story, tools=BASH)
    compacts(agent, works(agent, 2), "the lexer is done")
    agent.ask()
    agent.history = [blocks("something else altogether")]
    agent.ask()
    forest = story.grown()
    assert forest.branches == [[0, 1, 2], [3], [4]]
    assert forest.links == [("compaction", 3, 1)]
    assert forest.reasons == {3: "compaction"}


@MODES
@pytest.mark.parametrize("status", ["error", "aborted"])
def test_a_compaction_that_is_asked_again(mode: str, status: Any) -> None:
    story = Story(mode=mode)
    agent = main_agent(story, tools=BASH)
    waiting = works(agent, 2)
    agent.begin(blocks(tool_result(waiting, "the last result"), DEMAND)).finish(status=status, why="it broke")
    agent.history.pop()
    compacts(agent, waiting, "the lexer is done")
    agent.ask()
    forest = story.grown()
    assert forest.excluded == {2: status}
    assert forest.links == [("compaction", 4, 1), ("retry", 3, 2)]
    assert forest.reasons[4] == "compaction"
    assert calls_of(story.outcome().samples) == [[0, 1], [4]]


@MODES
def test_a_compaction_of_a_sub_agent_is_not_the_main_agents(mode: str) -> None:
    story = Story(mode=mode)
    main, sub = main_agent(story, tools=[AGENT]), sub_agent(story, "a1", tools=BASH)
    start = main.ask(blocks("find it"), reply=starts("write a parser"))
    compacts(sub, works(sub, 2), "the lexer is done")
    sub.ask()
    main.ask(blocks(tool_result(start, "done")))
    forest = story.grown()
    assert [call.request.scenario for call in story.calls] == [
        *("main", "sub_agent", "sub_agent", "compaction", "sub_agent", "main")
    ]
    assert forest.branches == [[0, 5], [1, 2, 3], [4]]
    assert forest.links == [("compaction", 4, 2), ("sub_agent", 1, 0)]
    assert forest.reasons == {1: "sub_agent", 4: "compaction"}


@MODES
def test_a_compaction_may_be_trained(mode: str) -> None:
    """Where the policy says so, it is a turn of the branch that it condenses."""
    story = Story(mode=mode)
    agent = main_agent(story, tools=BASH)
    compacts(agent, works(agent, 2), "the lexer is done")
    agent.ask()
    samples = story.outcome(policy=SamplePolicy(scenarios=("main", "compaction"))).samples
    assert calls_of(samples) == [[0, 1, 2], [3]]
    assert trained(samples) == whole(*story.calls)


# --- retries ---


@MODES
def test_replies_that_were_never_had_are_linked_one_after_the_other(mode: str) -> None:
    story = Story(mode=mode)
    agent = Chat(story)
    agent.begin(user("go")).finish(Reply(text="one"))
    agent.begin().finish(Reply(text="two"))
    agent.begin().finish(status="error", why="the server failed")
    agent.ask(reply=Reply(text="four"))
    agent.ask(user("on"))
    forest = story.grown()
    assert forest.branches == [[3, 4]]
    assert forest.excluded == {0: "dead", 1: "dead", 2: "error"}
    assert forest.links == [("retry", 1, 0), ("retry", 2, 1), ("retry", 3, 2)]
    assert forest.reasons[3] == "retry"


@MODES
def test_the_same_question_later_in_the_conversation_is_no_retry(mode: str) -> None:
    story = Story(mode=mode)
    agent = Chat(story)
    for _ in range(3):
        agent.ask(user("go on"), reply=Reply(text="I go on."))
    forest = story.grown()
    assert (forest.branches, forest.links, forest.drift) == ([[0, 1, 2]], [], {})


@MODES
def test_the_same_question_of_another_agent_is_no_retry(mode: str) -> None:
    """One asks after the other has its answer, and goes on from it only later."""
    story = Story(mode=mode)
    one, other = sub_agent(story, "a1"), sub_agent(story, "a2")
    one.ask(blocks("look"), reply=Reply(text="left"))
    other.ask(blocks("look"), reply=Reply(text="right"))
    forest = story.grown()
    assert (forest.branches, forest.excluded) == ([[0], [1]], {})
    assert not [link for link in forest.links if link[0] == "retry"]


@MODES
def test_a_longer_question_is_no_repetition_of_a_shorter_one(mode: str) -> None:
    """Questions without a history, by the same words up to a point: each was answered, and each answer counts."""
    story = Story(mode=mode)
    Chat(story).ask(user("look at the lexer"))
    Chat(story).ask(user("look at the lexer and the parser"))
    forest = story.grown()
    assert (forest.branches, forest.links, forest.excluded, forest.lenience) == ([[0], [1]], [], {}, {})


@MODES
def test_a_question_with_more_parts_of_another_conversation_is_no_repetition(mode: str) -> None:
    story = Story(mode=mode)
    Messages(story, system="One.").ask(blocks("look"))
    Messages(story, system="Two.").ask(blocks("look", "and tell"))
    forest = story.grown()
    assert (forest.branches, forest.links, forest.excluded, forest.lenience) == ([[0], [1]], [], {}, {})


@MODES
def test_a_question_that_was_answered_and_gone_on_from_is_not_repeated_with_more_parts(mode: str) -> None:
    """The agent goes back to it and asks for more: the first answer was had."""
    story = Story(mode=mode)
    agent = Messages(story)
    agent.ask(blocks("look"))
    agent.ask(blocks("on"))
    agent.history = [blocks("look", "and tell")]
    agent.ask()
    forest = story.grown()
    assert (forest.branches, forest.links, forest.excluded) == ([[0, 1], [2]], [], {})


@MODES
def test_each_call_that_a_rule_matched_is_counted(mode: str) -> None:
    story = Story(mode=mode)
    agent = Messages(story)
    for turn in range(2):
        agent.ask(blocks(f"go {turn}"), reply=Reply())
        agent.history[-2:] = []
        agent.ask(blocks(f"go {turn}", "Go on, please."))
    forest = story.grown()
    assert (forest.branches, forest.excluded) == ([[1, 3]], {0: "dead", 2: "dead"})
    assert forest.lenience == {"last_user_extended": 2}


# --- replies that are no sign ---


@MODES
def test_a_record_that_is_whole_is_not_taken_for_a_rewritten_one(mode: str) -> None:
    """The gateway writes one now and then. That a longer conversation ended in the same words says nothing."""
    story = Story(mode=mode)
    longer, agent = Chat(story, system="One."), Chat(story, system="Two.")
    done = Reply(text="Done.")
    for turn in range(67):
        longer.ask(user(f"step {turn}"), reply=done)
        agent.ask(user(f"task {turn}"), reply=done)
        longer.ask(user(f"step {turn} and a half"), reply=done)
    forest = story.grown()
    assert (forest.links, forest.drift, forest.excluded) == ([], {}, {})
    assert sorted(map(len, forest.branches)) == [67, 134]


@MODES
def test_replies_that_no_model_gave_are_part_of_the_prompt(mode: str) -> None:
    """An agent that begins with examples."""
    story = Story(mode=mode)
    for question in ("two and two", "two and three"):
        shown = [user("one and one"), {"role": "assistant", "content": "2"}]
        agent = Chat(story, history=shown)
        agent.ask(user(question), reply=Reply(text="4" if question.endswith("two") else "5"))
        agent.ask(user("are you sure?"))
    forest = story.grown()
    assert (forest.branches, forest.continues) == ([[0, 1], [2, 3]], {1: 0, 3: 2})
    assert (forest.links, forest.drift, forest.excluded) == ([], {}, {})


@MODES
def test_a_reply_that_came_later_is_not_what_an_example_stands_for(mode: str) -> None:
    story = Story(mode=mode)
    agent = Chat(story, history=[user("one and one"), {"role": "assistant", "content": "2"}])
    agent.ask(user("two and two"), reply=Reply(text="4"))
    Chat(story).ask(user("one and one"), reply=Reply(text="2"))
    forest = story.grown()
    assert (forest.branches, forest.continues, forest.drift) == ([[0], [1]], {}, {})


@MODES
@pytest.mark.parametrize("thread", ["t1", "t2"])
def test_a_reply_that_an_agent_makes_up_is_not_taken_for_one_elsewhere(mode: str, thread: str) -> None:
    """Another conversation ended in those words: a shorter one, or that of somebody else."""
    story = Story(mode=mode)
    other, agent = (Chat(story, system=at, headers={"thread-id": at}) for at in (thread, "t1"))
    for turn in range(3 if thread == "t2" else 1):
        other.ask(user(f"go {turn}"), reply=Reply(text="Done."))
    last = agent.ask(user("look"))
    agent.history += [user("on"), {"role": "assistant", "content": "Done."}]
    call = agent.ask(user("end"))
    forest = story.grown()
    assert forest.continues[call.number] == last.number
    assert (forest.links, forest.drift) == ([], {})
