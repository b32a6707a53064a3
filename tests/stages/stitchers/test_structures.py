"""How real agents go on with a conversation, each way with its verdict. Structure only: all words are made up.

F1, F1b and F9b are of agents that speak Chat; F14 to F18 may happen in any protocol; F15 is what is no call at all.
F2 to F9 are in test_structures_messages.py, F10 to F13 in test_structures_responses.py. Both modes of a server, where
the verdict is the same.
"""

from __future__ import annotations

from typing import Any

import pytest
from kit import Seen, Story
from kit_agents import BASH, Chat, Messages, Responses, blocks, item, output, result, runs, tool_result, user
from kit_checks import MODES, calls_of, check_trained, one_chain
from kit_template import Reply, Template

from rollyard.gateway.protocols import protocols

# --- F1 and F9b: Chat ---


@MODES
def test_f1_chat_append(mode: str) -> None:
    story = Story(mode=mode)
    agent = Chat(story, tools=BASH)
    first = agent.ask(user("list it"), reply=runs("ls"))
    agent.ask(result(first, "a.txt"), reply=Reply(text="There is a.txt."))
    one_chain(story, 2)


def test_f1_arguments_with_other_white_space() -> None:
    story = Story()
    agent = Chat(story, tools=BASH)
    first = agent.ask(user("list it"), reply=runs("ls", space=" "))
    agent.history[-1]["tool_calls"][0]["function"]["arguments"] = '{"command":"ls"}'
    agent.ask(result(first, "a.txt"))
    one_chain(story, 2)


def test_f1_arguments_with_other_white_space_where_the_server_tokenises() -> None:
    """It is the same conversation, but the model saw other tokens than it had sampled."""
    story = Story(mode="capture")
    agent = Chat(story, tools=BASH)
    first = agent.ask(user("list it"), reply=runs("ls", space=" "))
    agent.history[-1]["tool_calls"][0]["function"]["arguments"] = '{"command":"ls"}'
    agent.ask(result(first, "a.txt"))
    forest = story.grown()
    assert (forest.branches, forest.continues) == ([[0], [1]], {1: 0})
    story.check_break(forest, 1, "arguments_rewritten", 0)
    assert forest.drift[1].position == len(story.calls[0].prompt) + 7  # up to the colon


@MODES
@pytest.mark.parametrize("echo", [{"content": None}, {}])
def test_f1_no_content_or_null(mode: str, echo: dict[str, Any]) -> None:
    story = Story(mode=mode)
    agent = Chat(story, tools=BASH)
    first = agent.ask(user("list it"), reply=runs("ls"))
    del agent.history[-1]["content"]
    agent.history[-1] |= echo
    agent.ask(result(first, "a.txt"))
    one_chain(story, 2)


@MODES
def test_f1_with_reasoning(mode: str) -> None:
    story = Story(mode=mode)
    agent = Chat(story, tools=BASH)
    first = agent.ask(user("list it"), reply=runs("ls", thinks="I list it."))
    assert agent.history[-1]["reasoning_content"] == "I list it."
    agent.ask(result(first, "a.txt"))
    one_chain(story, 2)


def test_f1_without_reasoning() -> None:
    """Nothing is lost where the gateway keeps the ids: the model went on with its reasoning before its eyes."""
    story = Story()
    agent = Chat(story, tools=BASH)
    first = agent.ask(user("list it"), reply=runs("ls", thinks="I list it."))
    del agent.history[-1]["reasoning_content"]
    agent.ask(result(first, "a.txt"))
    one_chain(story, 2)


def test_f1_without_reasoning_where_the_server_tokenises() -> None:
    story = Story(mode="capture")
    agent = Chat(story, tools=BASH)
    first = agent.ask(user("list it"), reply=runs("ls", thinks="I list it."))
    del agent.history[-1]["reasoning_content"]
    agent.ask(result(first, "a.txt"))
    forest = story.grown()
    assert (forest.branches, forest.continues) == ([[0], [1]], {1: 0})
    assert story.check_break(forest, 1, "reasoning_stripped", 0).position == len(story.calls[0].prompt)
    assert [sum(sample.loss_mask) for sample in story.outcome().samples] == [len(c.sampled) for c in story.calls]


@MODES
def test_f1b_a_context_message_floats_and_ids_are_rewritten(mode: str) -> None:
    """The conversation goes on; the tokens behind the first request cannot."""
    story = Story(mode=mode)
    agent = Chat(story, tools=BASH)
    agent.history = [user("list it"), user("[context] nothing new")]
    first = agent.ask(reply=runs("ls"))
    reply = agent.history.pop()
    reply["tool_calls"][0]["id"] = reply["tool_calls"][0]["id"].replace("c", "call_")
    floating = agent.history.pop()
    tool_message = result(first, "a.txt") | {"tool_call_id": reply["tool_calls"][0]["id"]}
    agent.ask(reply, tool_message, floating)
    forest = story.grown()
    assert (forest.branches, forest.continues) == ([[0], [1]], {1: 0})
    assert forest.lenience["floating_user_message"] == 1
    assert (forest.links, forest.excluded) == ([("resume", 1, 0)], {})
    story.check_break(forest, 1, "history_edited", 0)


@MODES
@pytest.mark.parametrize("kept", ["", "I w"])
def test_f9b_the_reply_of_a_broken_stream_stays_in_the_history(mode: str, kept: str) -> None:
    story = Story(mode=mode)
    agent = Chat(story, tools=BASH)
    agent.ask(user("list it"), reply=Reply(text="I w"), status="aborted", why="the stream broke")
    agent.history.append({"role": "assistant", "content": kept})
    second = agent.ask(user("[it was cut off: go on]"), reply=runs("ls"))
    agent.ask(result(second, "a.txt"))
    forest = story.grown()
    assert (forest.branches, forest.continues) == ([[1, 2]], {1: 0, 2: 1})
    assert forest.excluded == {0: "aborted"}
    assert forest.links == [("resume", 1, 0)]
    story.check_break(forest, 1, "dead_reply_kept", 0)
    assert forest.reasons.keys() == {1}
    (sample,) = story.outcome().samples
    check_trained(story, sample, [1, 2])


@MODES
def test_f9b_a_summary_at_the_limit_extends_and_is_the_end(mode: str) -> None:
    story = Story(mode=mode, template=Template(shows_tools=False))
    agent = Chat(story, tools=BASH)
    first = agent.ask(user("list it"), reply=runs("ls"))
    agent.tools, agent.stream = None, False
    limit = "You have reached the maximum of 2 iterations. Give a summary of what was found."
    agent.ask(result(first, "a.txt"), user(limit))
    assert story.calls[1].request.scenario == "summary"
    forest = story.grown()
    assert (forest.branches, forest.continues, forest.drift) == ([[0, 1]], {1: 0}, {})
    outcome = story.outcome()
    assert calls_of(outcome.samples) == [[0]]
    assert outcome.excluded == {"scenario_summary": 1}


def test_f9b_a_summary_at_the_limit_where_the_tools_stood_in_the_prompt() -> None:
    story = Story()
    agent = Chat(story, tools=BASH)
    first = agent.ask(user("list it"), reply=runs("ls"))
    agent.tools, agent.stream = None, False
    agent.ask(result(first, "a.txt"), user("The limit of 2 turns is reached: summarise."))
    forest = story.grown()
    assert (forest.branches, forest.continues) == ([[0], [1]], {1: 0})
    assert story.check_break(forest, 1, "tools_changed", 0).position == 0


# --- F14 to F18: any protocol ---


@MODES
@pytest.mark.parametrize("failures", [1, 4])
def test_f14_failed_calls_that_are_asked_again(mode: str, failures: int) -> None:
    story = Story(mode=mode)
    agent = Chat(story, tools=BASH)
    first = agent.ask(user("list it"), reply=runs("ls"))
    failed = [agent.begin(result(first, "a.txt")).finish(status="error", why="the server failed")]
    failed += [agent.begin().finish(status="error", why="the server failed") for _ in range(failures - 1)]
    good = agent.ask()
    agent.ask(user("thanks"))
    forest = story.grown()
    assert forest.branches == [[0, good.number, good.number + 1]]
    assert forest.excluded == {call.number: "error" for call in failed}
    assert ("retry", good.number, good.number - 1) in forest.links
    assert {kind for kind, _, _ in forest.links} == {"retry"}
    assert forest.reasons[good.number] == "retry"
    assert set(forest.reasons.values()) == {"retry"}
    outcome = story.outcome()
    assert outcome.excluded == {"error": failures}
    check_trained(story, outcome.samples[0], forest.branches[0])


def test_f15_probes_are_no_calls() -> None:
    """What agents ask a server for before they begin. Nothing of it is an endpoint of calls, so nothing is logged."""
    probes = {"/api/v1/models", "/api/tags", "/v1/props", "/props", "/version", "/v1/models", "/"}
    assert not probes & {protocol.path for protocol in protocols()}
    nothing = Story()
    forest = nothing.grown()
    assert forest == Seen([], {}, [], {}, {}, {}, [])
    assert nothing.outcome().samples == ()


@MODES
def test_f16_a_new_process_goes_on_under_another_system_prompt(mode: str) -> None:
    """A new segment: the model had other words before its eyes from the first token on."""
    story = Story(mode=mode)
    agent = Messages(story, system="You help.\nBranch main, 0 files changed.", tools=BASH)
    first = agent.ask(blocks("list it"), reply=runs("ls"))
    agent.ask(blocks(tool_result(first, "a.txt")), reply=Reply(text="There is a.txt."))
    agent.system = "You help.\nBranch main, 2 files changed."
    agent.history[0] = user("list it")
    third = agent.ask(blocks("and now?"), reply=runs("ls"))
    agent.ask(blocks(tool_result(third, "b.txt")))
    forest = story.grown()
    assert (forest.branches, forest.continues) == ([[0, 1], [2, 3]], {1: 0, 2: 1, 3: 2})
    assert forest.links == [("resume", 2, 1)]
    story.check_break(forest, 2, "system_changed", 1)
    assert forest.drift[2].message == 0
    assert forest.reasons.keys() == {2}
    assert calls_of(story.outcome().samples) == [[0, 1], [2, 3]]


@MODES
def test_f17_malformed_tool_input_comes_back_wrapped(mode: str) -> None:
    story = Story(mode=mode)
    agent = Messages(story, tools=BASH)
    first = agent.ask(blocks("list it"), reply=Reply(calls=(("bash", '{"command": "ls'),)))
    (called,) = agent.history[-1]["content"]
    assert called["input"] == {"__unparsedToolInput": {"raw": '{"command": "ls', "len": 15}}
    agent.ask(blocks(tool_result(first, "this is no JSON")))
    one_chain(story, 2)


def test_f17_malformed_tool_input_is_wrapped_in_chat() -> None:
    """The gateway knows the reply by the ids of its calls, and says so."""
    story = Story()
    agent = Chat(story, tools=BASH)
    first = agent.ask(user("list it"), reply=Reply(calls=(("bash", '{"command": "ls'),)))
    wrapped = '{"__unparsedToolInput": {"raw": "{\\"command\\": \\"ls", "len": 15}}'
    agent.history[-1]["tool_calls"][0]["function"]["arguments"] = wrapped
    agent.ask(result(first, "this is no JSON"))
    forest = one_chain(story, 2)
    assert forest.lenience, "it is flagged"


@MODES
def test_f17_malformed_arguments_come_back_as_they_were(mode: str) -> None:
    story = Story(mode=mode)
    agent = Responses(story, tools=BASH)
    first = agent.ask(item("user", "list it", "1"), reply=Reply(calls=(("bash", '{"command": "ls'),)))
    agent.ask(output(first, "this is no JSON"))
    one_chain(story, 2)


@MODES
def test_f18_a_reply_at_its_limit_is_gone_on_from(mode: str) -> None:
    story = Story(mode=mode)
    agent = Messages(story, tools=BASH)
    agent.ask(blocks("tell it all"), reply=Reply(text="Once upon a"), finish_reason="length")
    agent.ask(blocks("go on"), reply=Reply(text="time"))
    assert story.calls[0].sampled[-1] != 1, "its turn was not ended by the model"
    forest = one_chain(story, 2)
    assert forest.lenience == {}
