"""What users of such services reported, each case by name.

Here: reasoning that template or client drops; policies of thinking models; the end of a turn that the model does not
sample; templates that are not append-only; drift as data; prefixes over more than two turns; ids of equal length that
differ; the same messages with other tools; sampling parameters and the kind of logprobs; logprobs that are no numbers;
ids beyond the vocabulary; ids that a stream lost; versions within a reply. In test_reports_sessions.py: identical
requests; sub-agents that interleave; rollouts of more or fewer samples; no call and no reward; malformed arguments;
nonces in the system prompt; cache marks; shapes of content; rewards paired with calls; late attempts.

Elsewhere: ids that servers or routers lose (tests/gateway/engines, test_collector); groups that are uneven, late or
incomplete (test_aggregate, tests/pipeline); versions that the trainer announces, aborts at the model server, keys of
stale agents (tests/gateway); what becomes of sandboxes and messages (tests/faults).
"""

from __future__ import annotations

from typing import Any

import pytest
from kit import Story, number
from kit_agents import BASH, Chat, result, runs, tool, user
from kit_checks import MODES, trained, whole
from kit_template import END_OF_TURN, NEWLINE, VOCABULARY, Reply, Template
from msgspec import structs

from rollyard.schemas.call import VersionSpan

# --- reasoning, templates, ids ---


def thinking(mode: str, template: Template, *, echoes: bool) -> Story:
    """Two tasks of two turns each; every reply thinks, the client gives the reasoning back or not."""
    story = Story(mode=mode, template=template)
    agent = Chat(story, tools=BASH)
    for task in range(2):
        first = agent.ask(user(f"task {task}"), reply=runs(f"ls {task}", thinks=f"first look {task}"))
        if not echoes:
            del agent.history[-1]["reasoning_content"]
        agent.ask(result(first, f"a {task}"), reply=Reply(text=f"done {task}", thinks=f"so it is {task}"))
        if not echoes:
            del agent.history[-1]["reasoning_content"]
    return story


@pytest.mark.parametrize("echoes", [True, False])
@pytest.mark.parametrize("drops", [True, False])
def test_report_dropped_reasoning_costs_nothing_where_ids_are_kept(echoes: bool, drops: bool) -> None:
    """Rollouts that became eight times as many samples: here they stay one."""
    story = thinking("tokens", Template(drops_reasoning=drops), echoes=echoes)
    forest = story.grown()
    assert (forest.branches, forest.drift) == ([[0, 1, 2, 3]], {})
    assert trained(story.outcome().samples) == whole(*story.calls)


def test_report_a_template_that_drops_reasoning_starts_a_branch_once() -> None:
    """At the next task, not at every turn; turns are trained once, and the class of the break is counted."""
    story = thinking("capture", Template(drops_reasoning=True), echoes=True)
    forest = story.grown()
    assert forest.branches == [[0, 1], [2, 3]]
    assert forest.continues == {1: 0, 2: 1, 3: 2}
    assert story.check_break(forest, 2, "reasoning_stripped", 1).position == len(story.calls[0].prompt)
    outcome = story.outcome()
    assert outcome.drift == {"reasoning_stripped": 1}
    assert trained(outcome.samples) == whole(*story.calls)


def test_report_a_client_that_drops_reasoning_un_trains_nothing() -> None:
    """Each turn is another branch then, since that is what the model saw. None of it is masked away."""
    story = thinking("capture", Template(), echoes=False)
    forest = story.grown()
    assert forest.branches == [[0], [1], [2], [3]]
    assert set(forest.reasons.items()) == {(at, "reasoning_stripped") for at in (1, 2, 3)}
    outcome = story.outcome()
    assert outcome.drift == {"reasoning_stripped": 3}
    assert trained(outcome.samples) == whole(*story.calls)


@MODES
def test_report_both_ways_of_a_thinking_model_give_valid_samples(mode: str) -> None:
    """Whether reasoning is kept or rendered anew: what stands before a trained token is what the model saw."""
    for drops in (True, False):
        story = thinking(mode, Template(drops_reasoning=drops), echoes=True)
        for sample in story.outcome().samples:
            for span in sample.turns:
                call = story.calls[number(span.call_id)]
                assert sample.token_ids.tolist()[: span.end] == call.ids


@MODES
def test_report_the_newline_behind_a_turn_is_context(mode: str) -> None:
    """The engine stops at the end of the turn; the newline behind it is the template's."""
    story = Story(mode=mode)
    agent = Chat(story)
    agent.ask(user("go"), reply=Reply(text="one"))
    agent.ask(user("on"), reply=Reply(text="two"))
    (sample,) = story.outcome().samples
    end = len(story.calls[0].ids)
    assert sample.token_ids.tolist()[end - 1 : end + 1] == [END_OF_TURN, NEWLINE]
    assert sample.loss_mask.tolist()[end - 1 : end + 1] == [1, 0]
    assert sample.logprobs.tolist()[end] == 0.0
    assert sample.policy_versions.tolist()[end - 1 : end + 1] == [1, -1]


@MODES
def test_report_a_template_that_is_not_append_only_gives_a_branch_a_turn(mode: str) -> None:
    story = Story(mode=mode, template=Template(counts=True))
    agent = Chat(story)
    for turn in range(3):
        agent.ask(user(f"go {turn}"))
    forest = story.grown()
    assert (forest.branches, forest.continues) == ([[0], [1], [2]], {1: 0, 2: 1})
    for turn in (1, 2):
        assert story.check_break(forest, turn, "re_templated", turn - 1).position == 0
    assert trained(story.outcome().samples) == whole(*story.calls)


def test_report_drift_is_data() -> None:
    """Whatever an agent makes of its history, stitching it raises nothing and loses no call."""
    story = Story(mode="capture")
    agent = Chat(story, tools=BASH)
    agent.ask(user("go"), reply=runs("ls", thinks="hm"))
    histories: list[list[dict[str, Any]]] = [
        [user("")],
        [{"role": "assistant", "content": "I never said that."}, user("why?")],
        [user("go"), user("go"), user("go")],
        [{"role": "tool", "tool_call_id": "none", "content": "of no call"}, user("*** x-anthropic-billing-header: 1")],
        [user([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}])],
    ]
    for history in histories:
        agent.history = history
        agent.begin().finish()
    forest = story.grown()
    assert sorted(at for branch in forest.branches for at in branch) == list(range(6))
    assert trained(story.outcome().samples) == whole(*story.calls)


@MODES
@pytest.mark.parametrize("turns", [3, 4, 9])
def test_report_pieces_join_to_the_last_prompt_and_reply(mode: str, turns: int) -> None:
    """More than two turns: a prefix that forgets earlier ones shows here."""
    story = Story(mode=mode)
    agent = Chat(story)
    for turn in range(turns):
        agent.ask(user(f"go {turn}"))
    (sample,) = story.outcome().samples
    assert sample.token_ids.tolist() == story.calls[-1].ids
    assert [(span.start, span.end) for span in sample.turns] == [(len(c.prompt), len(c.ids)) for c in story.calls]


def test_report_ids_of_equal_length_are_compared_one_by_one() -> None:
    """Nothing of an earlier call is reused by position: one other id parts the branches there."""
    story = Story(mode="capture")
    agent = Chat(story)
    agent.ask(user("one two three"), reply=Reply(text="four"))
    agent.ask(user("five"), reply=Reply(text="six"))
    seq, end = story.events[-1]
    whole_prompt = [*story.calls[1].prompt]
    whole_prompt[3] += 1
    story.calls[1].prompt = whole_prompt
    story.events[-1] = (
        seq,
        structs.replace(end, shared_prompt_ids=0, prompt_ids=type(end.prompt_ids).of(whole_prompt)),
    )
    forest = story.grown()
    assert forest.branches == [[0], [1]]
    assert story.check_break(forest, 1, "re_templated", 0).position == 3
    first, second = story.outcome().samples
    assert len(first.token_ids) < len(second.token_ids)
    assert second.logprobs.tolist()[: len(whole_prompt)] == [0.0] * len(whole_prompt)
    assert set(second.policy_versions.tolist()[: len(whole_prompt)]) == {-1}


@MODES
def test_report_the_same_messages_with_other_tools_are_another_branch(mode: str) -> None:
    story = Story(mode=mode)
    agent = Chat(story, tools=BASH)
    agent.ask(user("go"))
    agent.tools = [*BASH, tool("search")]
    agent.ask(user("on"))
    agent.ask(user("end"))
    forest = story.grown()
    assert (forest.branches, forest.continues) == ([[0], [1, 2]], {1: 0, 2: 1})
    story.check_break(forest, 1, "tools_changed", 0)
    assert [len(sample.tools or ()) for sample in story.outcome().samples] == [1, 2]


@MODES
def test_report_tools_that_no_prompt_shows_part_nothing(mode: str) -> None:
    """The ids are the judge: a change that no model sees is no break."""
    story = Story(mode=mode, template=Template(shows_tools=False))
    agent = Chat(story, tools=BASH)
    agent.ask(user("go"))
    agent.tools = [*BASH, tool("search")]
    agent.ask(user("on"))
    forest = story.grown()
    assert (forest.branches, forest.drift) == ([[0, 1]], {})


# --- logprobs, counts, versions ---


def test_report_sampling_parameters_and_the_kind_of_logprobs_stand_in_the_sample() -> None:
    story = Story()
    agent = Chat(story)
    story.params = {"temperature": 0.6, "top_p": 0.9}
    agent.ask(user("go"))
    story.params = {"temperature": 1.0}
    agent.ask(user("on"))
    (sample,) = story.outcome().samples
    assert sample.logprob_kind == "raw"
    assert sample.params == {"temperature": 1.0}
    assert [span.params for span in sample.turns] == [{"temperature": 0.6, "top_p": 0.9}, None]


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_report_a_logprob_that_is_no_number_excludes_its_call(bad: float) -> None:
    """At the gateway; and in a log that holds one all the same. The rest of the rollout stays."""
    story = Story()
    agent = Chat(story)
    agent.ask(user("go"))
    second = agent.ask(user("on"), reply=Reply(text="no"), logprobs=[bad, -1.0])
    assert second.end is not None
    assert second.end.untrainable == "a logprob is not a finite number"
    third = agent.ask(user("end"))
    assert story.grown().excluded == {1: "untrainable"}
    assert trained(story.outcome().samples) == whole(story.calls[0], third)

    at, (seq, end) = next((at, each) for at, each in enumerate(story.events) if each[1] is second.end)
    numbers = type(end.logprobs).of([bad, -1.0])
    story.events[at] = (seq, structs.replace(end, untrainable=None, logprobs=numbers))
    assert story.grown().excluded == {1: "nonfinite_logprobs"}
    assert trained(story.outcome().samples) == whole(story.calls[0], third)


def test_report_logprobs_of_another_number_exclude_their_call() -> None:
    """The gateway refuses them; a log that holds them all the same is not believed either."""
    story = Story()
    agent = Chat(story)
    agent.ask(user("go"))
    agent.ask(user("on"))
    seq, end = story.events[-1]
    story.events[-1] = (seq, structs.replace(end, logprobs=end.logprobs[:-1]))
    assert story.grown().excluded == {1: "bad_logprobs"}
    assert trained(story.outcome().samples) == whole(story.calls[0])


def test_report_an_untrainable_turn_stays_as_context() -> None:
    """Its ids are exact, its logprobs are not: it is not trained, and what follows it still is, after it."""
    story = Story()
    agent = Chat(story)
    agent.ask(user("go"))
    agent.ask(user("on"), reply=Reply(text="no"), constrained="a grammar held the model")
    agent.ask(user("end"))
    (sample,) = story.outcome().samples
    assert story.grown().branches == [[0, 2]]
    assert sample.token_ids.tolist() == story.calls[2].ids
    assert trained((sample,)) == whole(story.calls[0], story.calls[2])


def test_report_an_id_beyond_the_vocabulary_excludes_its_call() -> None:
    story = Story()
    agent = Chat(story)
    agent.ask(user("go"))
    call = agent.begin(user("on"))
    call.prompt[-1] = VOCABULARY + 13
    agent.take(call.finish())
    agent.ask(user("end"))
    assert story.grown().excluded == {1: "untrainable"}
    assert f"id {VOCABULARY + 13} is not in the vocabulary" in str(call.end)
    assert trained(story.outcome().samples) == whole(story.calls[0], story.calls[2])


def test_report_ids_that_a_stream_lost_exclude_their_call() -> None:
    story = Story(mode="capture")
    agent = Chat(story)
    agent.ask(user("go"))
    agent.ask(user("on"), fault="3 sampled ids but a usage of 5")
    agent.ask(user("end"))
    forest = story.grown()
    assert forest.excluded == {1: "untrainable"}
    assert forest.continues == {1: 0, 2: 1}
    assert forest.drift == {}, "of a call without ids nobody can say whether they are continued"
    assert trained(story.outcome().samples) == whole(story.calls[0], story.calls[2])


def test_report_versions_within_one_reply_are_kept_by_token() -> None:
    story = Story()
    agent = Chat(story)
    agent.ask(user("go"), reply=Reply(text="a b c"))
    seq, end = story.events[-1]
    size = len(end.completion_ids)
    spans = (VersionSpan(start=0, end=2, policy_version=3), VersionSpan(start=2, end=size, policy_version=4))
    story.events[-1] = (seq, structs.replace(end, policy_version=3, policy_version_end=4, version_spans=spans))
    (sample,) = story.outcome().samples
    start = len(story.calls[0].prompt)
    assert sample.policy_versions.tolist() == [-1] * start + [3, 3] + [4] * (size - 2)
