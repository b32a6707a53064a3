"""Where other builders of trajectories go wrong, each case by name: a repeated call, twins, a rewritten reply, a stop
string first, no natural stop, a fork, an unrelated prompt that is the start of another one.
"""

from __future__ import annotations

from typing import Any

import pytest
from kit import Story
from kit_agents import BASH, Chat, Messages, blocks, result, runs, tool_result, user
from kit_checks import MODES, trained, whole
from kit_template import END_OF_TURN, NEWLINE, Reply, Template


@MODES
def test_edge_a_repeated_call_loses_neither_its_answer_nor_the_rest(mode: str) -> None:
    """The client gave up on the first answer and asked the same again: that one goes, and everything after it stays."""
    story = Story(mode=mode)
    agent = Chat(story, tools=BASH)
    agent.begin(user("go")).finish(runs("lost"))
    first = agent.ask(reply=runs("ls"))
    second = agent.ask(result(first, "a"), reply=runs("cat a"))
    third = agent.ask(result(second, "A"))
    forest = story.grown()
    assert forest.branches == [[1, 2, 3]]
    assert forest.excluded == {0: "dead"}
    assert forest.links == [("retry", 1, 0)]
    assert trained(story.outcome().samples) == whole(first, second, third)


@MODES
def test_edge_twins_with_one_first_prompt_are_two_chains(mode: str) -> None:
    story = Story(mode=mode)
    one, other = Chat(story, tools=BASH), Chat(story, tools=BASH)
    calls = [one.begin(user("look")), other.begin(user("look"))]
    one.take(calls[0].finish(runs("ls")))
    other.take(calls[1].finish(runs("cat a")))
    calls += [one.begin(result(calls[0], "a")), other.begin(result(calls[1], "A"))]
    calls[3].finish(Reply(text="It is A."))
    calls[2].finish(Reply(text="There is a."))
    forest = story.grown()
    assert forest.branches == [[0, 2], [1, 3]]
    assert forest.continues == {2: 0, 3: 1}
    assert (forest.excluded, forest.drift, forest.links) == ({}, {}, [])
    assert trained(story.outcome().samples) == whole(*calls)


@MODES
def test_edge_twins_that_say_the_same_are_told_apart_by_their_threads(mode: str) -> None:
    """Equal prompts and equal replies: each goes on from its own, and both replies are trained."""
    story = Story(mode=mode)
    agents = [Messages(story, tools=BASH, headers={"x-claude-code-agent-id": name}) for name in ("a1", "a2")]
    calls = [agent.begin(blocks("look")) for agent in agents]
    for agent, call in zip(agents, calls, strict=True):
        agent.take(call.finish(runs("ls")))
    calls += [agent.begin(blocks(tool_result(calls[at], f"result {at}"))) for at, agent in enumerate(agents)]
    for call in calls[2:]:
        call.finish()
    forest = story.grown()
    assert forest.continues == {2: 0, 3: 1}
    assert forest.branches == [[0, 2], [1, 3]]
    assert forest.excluded == {}
    assert trained(story.outcome().samples) == whole(*calls)


def rewritten(template: Template, change: Any) -> tuple[Story, Chat]:
    """Two turns where the reply of the first stands otherwise in the prompt of the second."""
    story = Story(mode="capture", template=template)
    agent = Chat(story, tools=BASH)
    agent.ask(user("go"), reply=Reply(text="I have done what you said.", thinks="It is easy."))
    change(agent.history[-1])
    agent.ask(user("more"), reply=Reply(text="done"))
    return story, agent


@pytest.mark.parametrize(
    ("template", "change", "reason", "offset"),
    [
        (Template(drops_reasoning=True), lambda reply: None, "reasoning_stripped", 0),
        (Template(), lambda reply: reply.pop("reasoning_content"), "reasoning_stripped", 0),
        (Template(splits=True), lambda reply: None, "re_tokenised", 1),
        (Template(), lambda reply: reply.update(content="I did it."), "history_edited", None),
    ],
)
def test_edge_a_reply_that_is_rewritten_is_never_merged(
    template: Template, change: Any, reason: str, offset: Any
) -> None:
    """What the model saw at its second turn is what it is trained with there."""
    story, _ = rewritten(template, change)
    forest = story.grown()
    assert (forest.branches, forest.continues) == ([[0], [1]], {1: 0})
    point = story.check_break(forest, 1, reason, 0)
    if offset is not None:
        assert point.position == len(story.calls[0].prompt) + offset
    samples = story.outcome().samples
    assert [sample.token_ids.tolist() for sample in samples] == [call.ids for call in story.calls]
    assert trained(samples) == whole(*story.calls)


def test_edge_arguments_that_are_written_anew_are_never_merged() -> None:
    story = Story(mode="capture")
    agent = Chat(story, tools=BASH)
    first = agent.ask(user("go"), reply=runs("cd /w && ls"))
    agent.history[-1]["tool_calls"][0]["function"]["arguments"] = '{"command":"ls"}'
    agent.ask(result(first, "a"))
    forest = story.grown()
    assert (forest.branches, forest.continues) == ([[0], [1]], {1: 0})
    story.check_break(forest, 1, "arguments_rewritten", 0)
    assert trained(story.outcome().samples) == whole(*story.calls)


@MODES
def test_edge_a_stop_string_first_does_not_end_the_chain(mode: str) -> None:
    """The first reply ends without the end of a turn; which id that is, nobody has to guess."""
    story = Story(mode=mode)
    agent = Chat(story)
    agent.ask(user("go"), reply=Reply(text="step one"), stop_string="\nObservation:")
    agent.ask(user("more"), reply=Reply(text="step two"))
    agent.ask(user("and more"), reply=Reply(text="step three"), stop_string="\nObservation:")
    agent.ask(user("end"))
    assert END_OF_TURN not in story.calls[0].sampled
    forest = story.grown()
    assert (forest.branches, forest.drift) == ([[0, 1, 2, 3]], {})
    samples = story.outcome().samples
    assert trained(samples) == whole(*story.calls)
    end = len(story.calls[0].ids)
    assert samples[0].token_ids.tolist()[end : end + 2] == [END_OF_TURN, NEWLINE]
    assert samples[0].loss_mask.tolist()[end : end + 2] == [0, 0]


@MODES
def test_edge_a_chain_without_any_natural_stop_is_whole(mode: str) -> None:
    story = Story(mode=mode)
    agent = Chat(story)
    for turn in range(4):
        agent.ask(user(f"go {turn}"), reply=Reply(text=f"and so on {turn}"), finish_reason="length")
    assert story.grown().branches == [[0, 1, 2, 3]]
    assert trained(story.outcome().samples) == whole(*story.calls)


@MODES
def test_edge_a_fork_trains_what_is_shared_once(mode: str) -> None:
    story = Story(mode=mode)
    agent = Chat(story)
    agent.ask(user("go"))
    agent.ask(user("on"))
    other = Chat(story, history=list(agent.history))
    calls = [agent.begin(user("left")), other.begin(user("right"))]
    for call in calls:
        call.finish()
    forest = story.grown()
    assert forest.branches == [[0, 1, 2], [0, 1, 3]]
    assert (forest.continues, forest.drift, forest.excluded) == ({1: 0, 2: 1, 3: 1}, {}, {})
    samples = story.outcome().samples
    assert trained(samples) == whole(*story.calls)
    assert [span.trained for span in samples[1].turns] == [False, False, True]
    assert [(sample.branch, sample.branches) for sample in samples] == [(0, 2), (1, 2)]


@MODES
def test_edge_a_prompt_that_is_the_start_of_an_unrelated_one_is_not_merged(mode: str) -> None:
    story = Story(mode=mode)
    story.ask({"prompt": "the cat"}, Reply(text=" sat"), speaks="completions")
    story.ask({"prompt": "the cat ran away"}, Reply(text=" again"), speaks="completions")
    assert story.calls[1].prompt[: len(story.calls[0].prompt)] == story.calls[0].prompt
    forest = story.grown()
    assert (forest.branches, forest.continues, forest.drift) == ([[0], [1]], {}, {})
    assert trained(story.outcome().samples) == whole(*story.calls)


@MODES
def test_edge_bare_text_that_goes_on_from_a_completion_is_one_chain(mode: str) -> None:
    """Without messages, ids alone say what belongs together."""
    story = Story(mode=mode)
    story.ask({"prompt": "the cat"}, Reply(text=" sat"), speaks="completions", finish_reason="length")
    story.ask({"prompt": "the cat sat down"}, Reply(text=" again"), speaks="completions", finish_reason="length")
    assert story.grown().branches == [[0, 1]]


@MODES
@pytest.mark.parametrize(("other_first", "threads"), [(False, True), (True, True), (False, False)])
def test_edge_a_twin_is_not_taken_for_a_call_that_cannot_be_trained(
    mode: str, other_first: bool, threads: bool
) -> None:
    """One agent's second reply cannot be trained; its twin's has the same ids and was never had, before or after.

    Where they do not say who they are, what comes later at least is not what was gone on from.
    """
    story = Story(mode=mode)
    one, other = (Chat(story, headers={"thread-id": name} if threads else {}) for name in ("t1", "t2"))

    def twin() -> None:
        other.ask(user("go"), reply=Reply(text="I go."))
        other.begin(user("on")).finish(Reply(text="Yes."))
        other.ask(reply=Reply(text="No."))

    if other_first:
        twin()
    first = one.ask(user("go"), reply=Reply(text="I go."))
    untrainable = one.ask(user("on"), reply=Reply(text="Yes."), constrained="a grammar held the model")
    last = one.ask(user("end"))
    if not other_first:
        twin()
    theirs = 0 if other_first else 3
    forest = story.grown()
    assert forest.branches == sorted([[first.number, last.number], [theirs, theirs + 2]])
    assert forest.excluded == {untrainable.number: "untrainable", theirs + 1: "dead"}
    assert forest.continues[last.number] == untrainable.number
    assert (forest.continues[theirs + 1], forest.continues[theirs + 2]) == (theirs, theirs)


@MODES
def test_edge_a_call_without_a_result_marks_the_branch_that_it_continued(mode: str) -> None:
    """The gateway died with it: nobody knows whether the branch is longer."""
    story = Story(mode=mode)
    agent, other = Chat(story, system="One."), Chat(story, system="Two.")
    agent.ask(user("go"))
    other.ask(user("go"))
    agent.begin(user("on"))
    forest = story.grown()
    assert (forest.branches, forest.excluded, forest.incomplete) == ([[0], [1]], {2: "lost"}, [2])
    assert [sample.incomplete for sample in story.outcome().samples] == [True, False]


@MODES
@pytest.mark.parametrize(
    ("lost", "excluded"),
    [
        ("end", {0: "lost", 1: "broken", 2: "broken"}),
        ("intent", {0: "no_intent", 1: "broken", 2: "broken"}),
        ("both", {1: "broken", 2: "broken"}),
    ],
)
def test_edge_records_whose_parent_is_gone_are_broken_and_not_guessed(
    mode: str, lost: str, excluded: dict[int, str]
) -> None:
    story = Story(mode=mode)
    agent = Chat(story)
    for turn in range(3):
        agent.ask(user(f"go {turn}"))
    intent, end, *rest = story.call_events()
    story.events = [*{"end": [intent], "intent": [end], "both": []}[lost], *rest]
    forest = story.grown()
    assert (forest.excluded, forest.branches) == (excluded, [])
    assert forest.incomplete == ([0] if lost == "end" else [])
    assert story.outcome().samples == ()


@MODES
def test_edge_a_record_that_shares_ids_alone_with_what_is_gone_is_broken(mode: str) -> None:
    """No message is the parent's, but the ids of the tools before them are."""
    story = Story(mode=mode)
    agent = Chat(story, tools=BASH)
    agent.ask(user("go"))
    agent.system = "You are done soon."
    agent.ask(user("on"))
    assert story.calls[1].plan.intent.shared_messages == 0
    del story.events[1]
    assert story.grown().excluded == {0: "lost", 1: "broken"}
