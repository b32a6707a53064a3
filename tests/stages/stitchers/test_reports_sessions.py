"""What users reported of sessions with retries, sub-agents and rewards; see test_reports.py."""

from __future__ import annotations

from typing import Any

import pytest
from kit import Story, number
from kit_agents import BASH, Chat, Messages, blocks, result, runs, text, tool, tool_result, user
from kit_checks import MODES, trained, whole
from kit_template import Reply
from msgspec import structs

from rollyard.schemas.policy import SamplePolicy


@MODES
def test_report_an_identical_request_after_a_timeout_is_no_break(mode: str) -> None:
    """Both came to their end; the one that is gone on from counts, whichever it is."""
    for late in (False, True):
        story = Story(mode=mode)
        agent = Chat(story)
        agent.ask(user("go"))
        calls = [agent.begin(user("on")), agent.begin()]
        for call in reversed(calls) if late else calls:
            call.finish(Reply(text=f"reply {call.number}"))
        agent.take(calls[1])
        last = agent.ask(user("end"))
        forest = story.grown()
        assert forest.branches == [[0, 2, 3]]
        assert forest.excluded == {1: "dead"}
        assert trained(story.outcome().samples) == whole(story.calls[0], calls[1], last)


@MODES
def test_report_sub_agents_that_interleave_do_not_mix(mode: str) -> None:
    """Parent and two sub-agents take turns on one key: three samples, each linear."""
    story = Story(mode=mode)
    main = Messages(story, tools=[*BASH, tool("Agent")])
    start = main.ask(
        blocks("look"),
        reply=Reply(calls=(*runs("part one", name="Agent").calls, *runs("part two", name="Agent").calls)),
    )
    subs = [Messages(story, system="Be quick.", headers={"x-claude-code-agent-id": f"a{at}"}) for at in range(2)]
    for turn in range(3):
        for at, sub in enumerate(subs):
            sub.ask(blocks(f"part {'two' if at else 'one'}" if not turn else f"more {turn}"))
    main.ask(blocks(tool_result(start, "one", 0), tool_result(start, "two", 1)))
    forest = story.grown()
    assert forest.branches == [[0, 7], [1, 3, 5], [2, 4, 6]]
    assert forest.links == [("sub_agent", 1, 0), ("sub_agent", 2, 0)]
    samples = story.outcome().samples
    assert [sample.scenario for sample in samples] == ["main", "sub_agent", "sub_agent"]
    assert trained(samples) == whole(*story.calls)


@pytest.mark.parametrize(
    ("share", "rewards"), [("all", [1.0, 1.0, 1.0]), ("main", [1.0, None, None]), ("split", [1 / 3, 1 / 3, 1 / 3])]
)
def test_report_a_rollout_of_many_samples_can_be_weighed_as_one(share: Any, rewards: list[float | None]) -> None:
    story = Story()
    main = Messages(story, tools=[tool("Agent")])
    main.ask(blocks("look"), reply=runs("one", name="Agent"))
    for at in range(2):
        Messages(story, system="Be quick.", headers={"x-claude-code-agent-id": f"a{at}"}).ask(blocks(f"part {at}"))
    samples = story.outcome(reward=1.0, policy=SamplePolicy(reward=share)).samples
    assert [sample.reward for sample in samples] == rewards
    assert {sample.rollout_reward for sample in samples} == {1.0}
    assert {(sample.rollout_id, sample.group_id) for sample in samples} == {(story.rollout.rollout_id, "task")}
    assert [(sample.branch, sample.branches) for sample in samples] == [(0, 3), (1, 3), (2, 3)]


def test_report_no_call_no_sample_and_no_reward_is_no_zero() -> None:
    nothing = Story().outcome(reward=None)
    assert (nothing.samples, dict(nothing.excluded), dict(nothing.drift)) == ((), {}, {})
    story = Story()
    Chat(story).ask(user("go"))
    assert [(sample.reward, sample.rollout_reward) for sample in story.outcome(reward=None).samples] == [(None, None)]


@pytest.mark.parametrize("fate", ["keep", "mask", "drop"])
def test_report_a_failed_rollout_without_a_call_is_no_dummy_row(fate: Any) -> None:
    assert Story().outcome(status="failed", policy=SamplePolicy(failed=fate)).samples == ()


@MODES
def test_report_a_truncated_tool_call_is_trained_and_gone_on_from(mode: str) -> None:
    story = Story(mode=mode)
    agent = Chat(story, tools=BASH)
    first = agent.ask(user("go"), reply=Reply(calls=(("bash", '{"a": 1,'),)), finish_reason="length")
    agent.ask(result(first, "this is no JSON"))
    forest = story.grown()
    assert (forest.branches, forest.drift) == ([[0, 1]], {})
    assert trained(story.outcome().samples) == whole(*story.calls)


@MODES
def test_report_a_nonce_in_the_system_prompt_parts_nothing(mode: str) -> None:
    """The adapter takes the line for the vendor's accounts out of the prompt."""
    story = Story(mode=mode)
    agent = Messages(story)
    for nonce in ("aaa", "bbb", "ccc"):
        line = f"x-anthropic-billing-header: cc_version=1; cch={nonce};"
        agent.extra = {"system": text(line, "You help.")}
        agent.ask(blocks(f"go {nonce}"))
    forest = story.grown()
    assert (forest.branches, forest.drift, forest.links) == ([[0, 1, 2]], {}, [])
    assert trained(story.outcome().samples) == whole(*story.calls)


@MODES
def test_report_cache_marks_that_roll_are_not_compared(mode: str) -> None:
    story = Story(mode=mode)
    agent = Chat(story)
    mark = {"cache_control": {"type": "ephemeral"}}
    for turn in range(3):
        agent.ask(user([{"type": "text", "text": f"go {turn}", **mark}]))
        agent.history[-2] = user([{"type": "text", "text": f"go {turn}"}])
    forest = story.grown()
    assert (forest.branches, forest.drift) == ([[0, 1, 2]], {})


@MODES
def test_report_a_list_of_one_text_is_the_text(mode: str) -> None:
    story = Story(mode=mode)
    agent = Chat(story)
    agent.ask(user([{"type": "text", "text": "go"}]), reply=Reply(text="I go."))
    agent.history = [user("go"), {"role": "assistant", "content": [{"type": "text", "text": "I go."}]}]
    agent.ask(user("on"))
    forest = story.grown()
    assert (forest.branches, forest.drift) == ([[0, 1]], {})


def test_report_rewards_of_turns_are_paired_with_the_calls_of_the_main_agent() -> None:
    """An evaluation that saw fewer turns than the gateway: no call is dropped, and what is over is counted."""
    story = Story()
    main = Messages(story, tools=[tool("Agent")])
    start = main.ask(blocks("look"), reply=runs("one", name="Agent"))
    Messages(story, system="Be quick.", headers={"x-claude-code-agent-id": "a1"}).ask(blocks("one"))
    second = main.ask(blocks(tool_result(start, "one")), reply=runs("two", name="Agent"))
    main.ask(blocks(tool_result(second, "two")))
    outcome = story.outcome(turn_rewards=[0.25, None])
    rewards = {number(span.call_id): span.reward for sample in outcome.samples for span in sample.turns}
    assert rewards == {0: 0.25, 1: None, 2: None, 3: None}
    assert trained(outcome.samples) == whole(*story.calls)
    assert outcome.excluded == {}
    more = story.outcome(turn_rewards=[0.25, None, 0.5, 1.0])
    assert {number(span.call_id): span.reward for span in more.samples[0].turns} == {0: 0.25, 2: None, 3: 0.5}
    assert sum(more.excluded.values()) == 1, "a reward for a turn that nobody saw"


def test_report_calls_of_another_attempt_do_not_count() -> None:
    story = Story()
    agent = Chat(story)
    agent.ask(user("go"))
    late = Story(attempt=2, seq=story.seq)
    Chat(late).ask(user("go"))
    alone = story.outcome().samples
    story.events += [(seq, structs.replace(each, call_id="f" + each.call_id[1:])) for seq, each in late.events]  # type: ignore[call-overload]
    story.seq = late.seq
    assert story.outcome().samples == alone
