"""Classes of breaks that an agent's way with its history makes: which call goes on, why its ids do not, and where.

Others are shown where they come from: reasoning and tokenisers in test_edges and test_reports, compactions, sub-agents,
retries and kept replies in test_structures.
"""

from __future__ import annotations

import pytest
from kit import Story
from kit_agents import BASH, Chat, Responses, item, result, runs, user
from kit_checks import MODES, trained, whole
from kit_template import Reply, Template


def three_turns(mode: str) -> tuple[Story, Chat]:
    story = Story(mode=mode)
    agent = Chat(story, tools=BASH)
    first = agent.ask(user("list it"), reply=runs("ls"))
    agent.ask(result(first, "a.txt, b.txt"), reply=Reply(text="There are two."))
    return story, agent


@MODES
def test_a_tool_result_in_the_middle_is_edited(mode: str) -> None:
    """As agents do that clear old results from their context. The last reply still stands in the request."""
    story, agent = three_turns(mode)
    agent.history[2] = agent.history[2] | {"content": "[cleared]"}
    agent.ask(user("and now?"))
    forest = story.grown()
    assert forest.continues == {1: 0, 2: 1}
    assert story.check_break(forest, 2, "history_edited", 1).message == 3
    assert forest.links == [("resume", 2, 1)]
    assert trained(story.outcome().samples) == whole(*story.calls)


@MODES
def test_the_oldest_turn_is_left_out(mode: str) -> None:
    """A window that slides over the conversation."""
    story = Story(mode=mode)
    agent = Chat(story)
    for turn in range(3):
        agent.ask(user(f"question {turn}"))
    del agent.history[:2]
    agent.ask(user("question 3"))
    forest = story.grown()
    assert forest.continues == {1: 0, 2: 1, 3: 2}
    assert story.check_break(forest, 3, "history_edited", 2).message == 1
    assert trained(story.outcome().samples) == whole(*story.calls)


@MODES
def test_a_user_message_is_edited(mode: str) -> None:
    story, agent = three_turns(mode)
    agent.history[0] = user("list everything")
    agent.ask(user("and now?"))
    forest = story.grown()
    assert forest.continues == {1: 0, 2: 1}
    assert story.check_break(forest, 2, "history_edited", 1).message == 1
    assert "list" in forest.drift[2].detail


@MODES
def test_an_earlier_reply_is_edited(mode: str) -> None:
    """The last one stands as it was sent: that is the conversation."""
    story = Story(mode=mode)
    agent = Chat(story)
    agent.ask(user("one"))
    agent.ask(user("two"))
    agent.history[1] = {"role": "assistant", "content": "I said something else."}
    agent.ask(user("three"))
    forest = story.grown()
    assert forest.continues == {1: 0, 2: 1}
    assert story.check_break(forest, 2, "history_edited", 1).message == 2


@MODES
def test_the_last_reply_is_edited(mode: str) -> None:
    """Nothing in the request was ever sent but the request before: that is what it goes on from."""
    story = Story(mode=mode)
    agent = Chat(story)
    agent.ask(user("one"))
    agent.history[-1] = {"role": "assistant", "content": "I said something else."}
    agent.ask(user("two"))
    forest = story.grown()
    assert forest.continues == {1: 0}
    assert story.check_break(forest, 1, "history_edited", 0).message == 2


@MODES
def test_the_system_prompt_is_edited(mode: str) -> None:
    story, agent = three_turns(mode)
    agent.system = "You are done soon."
    agent.ask(user("and now?"))
    forest = story.grown()
    assert forest.continues == {1: 0, 2: 1}
    assert story.check_break(forest, 2, "system_changed", 1).message == 0


@MODES
def test_going_back_to_an_earlier_turn_is_no_break(mode: str) -> None:
    story, agent = three_turns(mode)
    del agent.history[2:]
    agent.ask(result(story.calls[0], "only a.txt"))
    forest = story.grown()
    assert (forest.branches, forest.continues) == ([[0, 1], [0, 2]], {1: 0, 2: 0})
    assert (forest.drift, forest.links, forest.excluded) == ({}, [], {})


@MODES
def test_options_of_the_template_are_part_of_the_prompt(mode: str) -> None:
    """Where they change what it renders; the ids decide."""
    story = Story(mode=mode)
    body = {"messages": [{"role": "system", "content": "Hi."}, user("one")], "stream": True}
    first = story.ask({**body, "chat_template_kwargs": {"enable_thinking": True}})
    body["messages"] += [first.echo(), user("two")]
    story.ask({**body, "chat_template_kwargs": {"enable_thinking": False}})
    forest = story.grown()
    assert (forest.branches, forest.continues, forest.drift) == ([[0, 1]], {1: 0}, {})


def test_a_server_that_writes_the_end_of_a_turn_otherwise() -> None:
    """The same messages, whole words: only what stands behind the reply is not what a later prompt has there."""
    story = Story(mode="capture")
    agent = Chat(story)
    call = agent.begin(user("one"))
    call.finish(Reply(text="first"), finish_reason="stop")
    story.template = Template(counts=True)
    agent.take(call)
    agent.ask(user("two"))
    forest = story.grown()
    assert forest.continues == {1: 0}
    assert story.check_break(forest, 1, "re_templated", 0).position == 0


@pytest.mark.parametrize("words", [1, 8])
def test_a_break_shows_at_most_sixteen_ids_of_both_sides(words: int) -> None:
    story = Story(mode="capture", template=Template(splits=True))
    agent = Chat(story)
    agent.ask(user("one"), reply=Reply(text=" ".join(["considerable"] * words)))
    agent.ask(user("two"))
    point = story.check_break(story.grown(), 1, "re_tokenised", 0)
    assert len(point.expected) == min(16, len(story.calls[0].sampled))
    assert len(point.found) <= 16
    assert point.expected != point.found


@MODES
def test_a_window_that_nobody_saw_compacted_is_a_compaction(mode: str) -> None:
    """Some agents compact where no gateway sees it, and say so by counting their windows."""
    story = Story(mode=mode)
    agent = Responses(story, headers={"session-id": "s", "thread-id": "t", "x-codex-window-id": "t:0"})
    agent.ask(item("user", "one", "1"))
    agent.ask(item("user", "two", "2"))
    agent.headers = {**agent.headers, "x-codex-window-id": "t:1"}
    agent.history = [item("user", "one and two are done", "3")]
    agent.ask(item("user", "three", "4"))
    forest = story.grown()
    assert forest.reasons == {2: "compaction"}
    assert forest.links == [("compaction", 2, 1)]
    assert forest.branches == [[0, 1], [2]]
