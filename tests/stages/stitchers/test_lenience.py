"""The rules of lenient matching, one by one: with the rule a request goes on from the conversation that it was written
anew from, without it from none, or from another one with the same reply. The rule is counted by the calls that it
matched, and no rule ever changes a token.

Each case is an agent that writes something of its history anew, and, in between, another conversation that ends in the
same reply, or the same question with another reply: without the rule, that is the nearest one. The model samples words
in halves and the server renders whole ones, so that ids never say what belongs together: messages alone do.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Collection
from typing import Any

import pytest
from kit import Call, Story
from kit_agents import BASH, Agent, Chat, Messages, blocks, result, runs, user
from kit_template import Reply, Template
from msgspec import structs

from rollyard.gateway.history import KNOWN_BY_CALL_IDS, RULES
from rollyard.pipeline.images import take_out
from rollyard.schemas.packed import TokenIds
from rollyard.schemas.policy import SamplePolicy
from rollyard.stages.stitchers.lenience import NAMES

Play = Callable[[Collection[str]], Call]
"""Plays a case before a gateway that does not know some rules; gives the call that the last one goes on from."""

BROKEN = Reply(calls=(("bash", '{"command": "ls'),))
WRAPPED = '{"__unparsedToolInput": {"raw": "{\\"command\\": \\"ls", "len": 15}}'
REMINDER = "\n\n<system-reminder>\nKeep it short.\n</system-reminder>"
DONE = Reply(text="Done.")
GO, ON = user("go"), user("on")


def begin(off: Collection[str], **agent: Any) -> Chat:
    return Chat(Story(mode="capture", template=Template(splits=True), off=off), **agent)


def beside(agent: Chat, reply: Reply) -> Call:
    """A call, and at the same time another one that asks the same and is answered otherwise."""
    call, twin = agent.begin(GO), Chat(agent.story, system=agent.system, tools=agent.tools).begin(GO)
    agent.take(call.finish(reply))
    twin.finish(Reply(text="Something else."))
    return call


def elsewhere(agent: Agent, reply: Reply) -> None:
    """Another conversation ends in the same reply."""
    Chat(agent.story, system="Another one.", tools=agent.tools).ask(user("something else"), reply=reply)


def first_message(said: Any, later: Any) -> Play:
    """The first user message is written anew."""

    def play(off: Collection[str]) -> Call:
        agent = begin(off)
        call = agent.ask(user(said), reply=DONE)
        elsewhere(agent, DONE)
        agent.history[0] = user(later)
        agent.ask(ON)
        return call

    return play


def system_prompt(said: str, later: str) -> Play:
    """The system prompt is."""

    def play(off: Collection[str]) -> Call:
        agent = begin(off, system=said)
        call = agent.ask(GO, reply=DONE)
        elsewhere(agent, DONE)
        agent.system = later
        agent.ask(ON)
        return call

    return play


def reply_text(said: str, echoed: Any, thinks: str = "") -> Play:
    """The text of the reply is, and its reasoning dropped."""

    def play(off: Collection[str]) -> Call:
        agent = begin(off)
        reply = Reply(text=said, thinks=thinks)
        call = beside(agent, reply)
        elsewhere(agent, reply)
        agent.history[-1] = {"role": "assistant", "content": echoed}
        agent.ask(ON)
        return call

    return play


def tool_call(reply: Reply, arguments: str | None = None, *, other_id: bool = False, no_content: bool = False) -> Play:
    """The arguments of a call are, or its id, or its empty text."""

    def play(off: Collection[str]) -> Call:
        agent = begin(off, tools=BASH)
        call = beside(agent, reply)
        elsewhere(agent, reply)
        echo = agent.history[-1]
        (called,) = echo["tool_calls"]
        answer = result(call, "a")
        if arguments is not None:
            called["function"]["arguments"] = arguments
        if other_id:
            called["id"] = answer["tool_call_id"] = "other1"
        if no_content:
            del echo["content"]
        agent.ask(answer)
        return call

    return play


def tool_output(said: str, later: str) -> Play:
    """The result of a tool in an earlier turn is: the gateway knows the conversation up to the turn before only."""

    def play(off: Collection[str]) -> Call:
        agent = begin(off, tools=BASH)
        first = agent.ask(GO, reply=runs("ls"))
        call = agent.ask(result(first, said), reply=DONE)
        elsewhere(agent, DONE)
        agent.history[2] = result(first, later)
        agent.ask(ON)
        return call

    return play


def cache_mark(off: Collection[str]) -> Call:
    """On an image: of texts that are joined, another rule leaves it out as well."""
    shown = {"type": "image_url", "image_url": {"url": "http://x/a.png"}}
    return first_message([{**shown, "cache_control": {"type": "ephemeral"}}], [shown])(off)


def private_keys(off: Collection[str]) -> Call:
    """What a part says beyond Chat, which the adapter keeps beside it."""
    agent = Messages(Story(mode="capture", template=Template(splits=True), off=off))
    shown = {"type": "image", "source": {"type": "url", "url": "http://x/a.png"}}
    call = agent.ask(blocks({**shown, "alt": "a cat"}), reply=DONE)
    elsewhere(agent, DONE)
    agent.history[0] = blocks(shown)
    agent.ask(blocks("on"))
    return call


def image(off: Collection[str]) -> Call:
    """A record that holds an image, and a whole one that refers to it."""
    url = "data:image/png;base64," + b64encode(bytes(range(256)) * 8).decode()
    shown = [{"type": "image_url", "image_url": {"url": url}}]
    call = first_message(shown, shown)(off)
    story = call.story
    last = story.calls[-1]
    messages, taken = take_out(last.request.messages)
    assert taken
    assert last.end is not None
    record = structs.replace(last.plan.intent, parent=None, shared_messages=0, messages=messages, lenience=())
    end = structs.replace(last.end, shared_prompt_ids=0, prompt_ids=TokenIds.of(last.prompt))
    story.events[-2:] = [(story.seq - 1, record), (story.seq, end)]
    return call


def floating(off: Collection[str]) -> Call:
    agent = begin(off)
    call = agent.ask(GO, user("[context]"), reply=DONE)
    elsewhere(agent, DONE)
    reply, context = agent.history.pop(), agent.history.pop()
    agent.ask(reply, ON, context)
    return call


CASES: list[tuple[str, Play]] = [
    ("private_keys_dropped", private_keys),
    ("images_by_content", image),
    ("cache_control_dropped", cache_mark),
    ("foreign_reply_keys_dropped", reply_text("I go.", "I go.", thinks="hm")),
    ("ids_not_compared", tool_call(runs("ls"), other_id=True)),
    ("text_parts_joined", reply_text("I go.", [{"type": "text", "text": "I go."}])),
    ("text_parts_joined", first_message("go", [{"type": "text", "text": "go"}])),
    ("reply_edges_trimmed", reply_text("\n\nI go.", "I go.")),
    ("arguments_parsed", tool_call(runs("ls", space=" "), '{"command":"ls"}')),
    ("null_equals_absent", tool_call(runs("ls"), no_content=True)),
    ("floating_user_message", floating),
    ("volatile_system_lines", system_prompt("Today's date: 1 May\nYou help.", "Today's date: 2 May\nYou help.")),
    (
        "volatile_system_lines",
        system_prompt("x-anthropic-billing-header: a\nHi.", "x-anthropic-billing-header: b\nHi."),
    ),
    ("masked_secrets", first_message("log in with hunter2 now", "log in with *** now")),
    ("masked_secrets", tool_output("the key is sk-1f2e", "the key is ***")),
    ("masked_secrets", tool_call(runs("login hunter2"), '{"command":"login ***"}', other_id=True)),
    ("trailing_space", first_message("go  \n", "go")),
    ("trailing_space", tool_output("a.txt\n", "a.txt")),
    ("tool_result_reminders", tool_output("a.txt", "a.txt" + REMINDER)),
    ("tool_result_reminders", tool_output("a.txt" + REMINDER, "a.txt")),
    ("malformed_tool_input", tool_call(BROKEN, WRAPPED, other_id=True)),
]
BY_THE_GATEWAY: list[tuple[str, Play]] = [
    *[(rule, play) for rule, play in CASES if rule in RULES],
    (KNOWN_BY_CALL_IDS, tool_call(runs("cd /w && ls"), '{"command":"ls"}')),
]


def test_every_rule_has_a_case() -> None:
    cases = {rule for rule, _ in CASES + BY_THE_GATEWAY}
    assert cases | {"last_user_extended"} == NAMES


@pytest.mark.parametrize(("rule", "play"), CASES)
def test_a_rule_finds_the_conversation_that_is_gone_on_from(rule: str, play: Play) -> None:
    """Before a gateway that does not know it: the record holds the whole request, and the stitcher has to find out."""
    went_on = play({rule, KNOWN_BY_CALL_IDS})
    story = went_on.story
    last = story.calls[-1].number
    on, off = story.grown(), story.grown(off={rule})
    assert on.continues[last] == went_on.number
    assert on.lenience.get(rule) == 1
    assert off.continues.get(last) != went_on.number
    assert rule not in off.lenience


@pytest.mark.parametrize(("rule", "play"), BY_THE_GATEWAY)
def test_a_rule_by_which_the_gateway_matched_is_counted(rule: str, play: Play) -> None:
    """The record is a delta, which holds no echo; where a rule was needed for the reply, it says so."""
    went_on = play(set())
    story = went_on.story
    last = story.calls[-1]
    assert story.grown().continues[last.number] == went_on.number
    if rule in last.plan.intent.lenience and last.plan.intent.shared_messages:
        assert story.grown().lenience.get(rule) == 1
        assert rule not in story.grown(off={rule}).lenience
    else:
        assert rule in ("cache_control_dropped", "text_parts_joined", "images_by_content", "private_keys_dropped"), (
            "of a message before it"
        )


@pytest.mark.parametrize(("rule", "play"), CASES)
def test_lenience_changes_no_token(rule: str, play: Play) -> None:
    for story in (play(set()).story, play({rule, KNOWN_BY_CALL_IDS}).story):
        tokens = []
        for off in ((), (rule,), tuple(sorted(NAMES))):
            samples = story.outcome(policy=SamplePolicy(lenience_off=off)).samples
            tokens.append(sorted((each.token_ids.tolist(), each.loss_mask.tolist()) for each in samples))
        assert tokens[0] == tokens[1] == tokens[2]
        assert sum(sum(mask) for _, mask in tokens[0]) == sum(len(call.sampled) for call in story.calls)


def extended() -> Story:
    """Claude's way after an empty reply: the same again, with more words in the last user message."""
    agent = Messages(Story(mode="capture", template=Template(splits=True)), tools=BASH)
    agent.ask(blocks("begin"), reply=Reply(text="ready"))
    agent.ask(blocks("go"), reply=Reply())
    del agent.history[-2:]
    agent.ask(blocks("go", "Please go on."))
    return agent.story


def test_last_user_extended_finds_the_reply_that_was_never_had() -> None:
    story = extended()
    on, off = story.grown(), story.grown(off={"last_user_extended"})
    assert on.lenience.get("last_user_extended") == 1
    assert on.excluded == {1: "dead"}
    assert ("retry", 2, 1) in on.links
    assert "last_user_extended" not in off.lenience
    assert off.excluded == {}
    assert not [link for link in off.links if link[0] == "retry"]


def test_last_user_extended_changes_no_token_of_another_reply() -> None:
    story = extended()
    on = story.outcome().samples
    off = story.outcome(policy=SamplePolicy(lenience_off=("last_user_extended",))).samples
    tokens = [sorted(each.token_ids.tolist() for each in samples) for samples in (on, off)]
    assert tokens[1] == sorted([*tokens[0], story.calls[1].ids])


@pytest.mark.parametrize(
    ("said", "later"),
    [
        ("log in with hunter2 now", "log in with *** now or never"),
        ("log in with hunter2 now", "go in with *** now"),
        ("log in with hunter2 now", "log in with * now"),
        ("log in with my long password now", "log in with *** now"),
    ],
)
def test_a_mask_stands_for_one_word_and_nothing_else(said: str, later: str) -> None:
    story = first_message(said, later)(set()).story
    assert "masked_secrets" not in story.grown().lenience


def test_several_masks_stand_for_a_word_each() -> None:
    story = first_message("user root, word hunter2", "user ***, word ***")(set()).story
    assert story.grown().lenience == {"masked_secrets": 1}


def test_reasoning_that_was_dropped_is_told_without_the_rule() -> None:
    """Switched off at both: the reply counts as another one then, and what became of it can still be seen."""
    agent = begin({"foreign_reply_keys_dropped"})
    agent.ask(GO, reply=Reply(text="I go.", thinks="hm"))
    del agent.history[-1]["reasoning_content"]
    agent.ask(ON)
    forest = agent.story.grown(off={"foreign_reply_keys_dropped"})
    assert (forest.continues, forest.lenience) == ({1: 0}, {})
    assert agent.story.check_break(forest, 1, "reasoning_stripped", 0).message == 2


def test_a_user_message_that_is_only_repeated_does_not_float() -> None:
    """It stands at its place and comes again: the agent said it twice."""
    agent = begin(set())
    agent.ask(GO, user("[context]"), reply=DONE)
    agent.ask(user("[context]"))
    forest = agent.story.grown()
    assert (forest.continues, forest.lenience) == ({1: 0}, {})


def test_a_rule_that_does_not_exist_switches_nothing() -> None:
    story = cache_mark(set()).story
    assert story.grown(off={"no_such_rule"}) == story.grown()
