from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.gateway.history import (
    KNOWN_BY_CALL_IDS,
    ROOT,
    RULES,
    Canonical,
    common_prefix,
    holds_unknown_reply,
    lenience,
    longest,
    settings_digest,
)
from rollyard.pipeline.images import take_out
from rollyard.schemas.packed import TokenIds

texts = st.text(max_size=20)
arguments = st.dictionaries(texts, st.none() | st.integers() | texts | st.lists(st.integers()), max_size=3)


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": draw(texts)}]
    for number in range(draw(st.integers(0, 4))):
        messages.append({"role": "user", "content": draw(texts)})
        reply: dict[str, Any] = {"role": "assistant", "content": draw(texts)}
        messages.append(reply)
        if draw(st.booleans()):
            function = {"name": "bash", "arguments": json.dumps(draw(arguments))}
            reply["tool_calls"] = [{"id": f"call_{number}", "type": "function", "function": function}]
            messages.append({"role": "tool", "tool_call_id": f"call_{number}", "content": draw(texts)})
    return messages


def echoed(message: dict[str, Any], style: int) -> dict[str, Any]:
    """The message as one or another agent sends it back."""
    message = json.loads(json.dumps(message))
    for call in message.get("tool_calls", ()):
        call["id"] = call["id"].replace("_", "")
        spaced = json.loads(call["function"]["arguments"])
        call["function"]["arguments"] = json.dumps(spaced, separators=(",", ":"), sort_keys=True)
    if "tool_call_id" in message:
        message["tool_call_id"] = message["tool_call_id"].replace("_", "")
    if style == 0 and message["content"] == "":
        message["content"] = None
    if style == 1:
        message["content"] = [{"type": "text", "text": message["content"], "cache_control": {"type": "ephemeral"}}]
    if style == 2 and message["role"] == "assistant":
        message |= {"reasoning_content": "hm", "refusal": None, "provider_specific_fields": {"x": 1}}
        message["content"] = f"\n{message['content']} "
    return dict(reversed(message.items()))


@given(conversations(), st.lists(st.integers(0, 2), min_size=20, max_size=20))
def test_an_echo_is_the_same_conversation_however_the_agent_writes_it(
    messages: list[dict[str, Any]], styles: list[int]
) -> None:
    canonical = Canonical()
    echo = [echoed(message, style) for message, style in zip(messages, styles, strict=False)]
    assert canonical.fold(ROOT, echo) == canonical.fold(ROOT, messages)


@given(conversations(), st.data())
def test_other_words_are_another_conversation(messages: list[dict[str, Any]], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(messages) - 1))
    changed = [dict(message) for message in messages]
    changed[place]["content"] += "x"
    before, after = Canonical().fold(ROOT, messages), Canonical().fold(ROOT, changed)
    assert before[:place] == after[:place]
    assert all(a != b for a, b in zip(before[place:], after[place:], strict=True))


@given(conversations(), st.data())
def test_the_longest_known_prefix_is_the_parent(messages: list[dict[str, Any]], data: st.DataObject) -> None:
    chains = Canonical().fold(ROOT, messages)
    known = data.draw(st.sets(st.integers(0, len(chains) - 1)))
    found, shared = longest(chains, {chains[place]: place for place in known})
    assert (found, shared) == ((max(known), max(known) + 1) if known else (None, 0))


@given(conversations())
def test_folding_in_two_steps_is_folding_in_one(messages: list[dict[str, Any]]) -> None:
    canonical = Canonical()
    chains = canonical.fold(ROOT, messages)
    for place in range(1, len(messages)):
        assert canonical.fold(chains[place - 1], messages[place:]) == chains[place:]


IMAGE = {
    "role": "user",
    "content": [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{'AAAA' * 500}", "detail": "low"}}],
}

SAMPLES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "private_keys_dropped": ({"role": "user", "content": "a"}, {"role": "user", "content": "a", "_block": {}}),
    "images_by_content": (IMAGE, take_out([IMAGE])[0][0]),
    "cache_control_dropped": ({"role": "user", "content": "a"}, {"role": "user", "content": "a", "cache_control": {}}),
    "foreign_reply_keys_dropped": (
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "a", "reasoning_content": "b"},
    ),
    "ids_not_compared": (
        {"role": "tool", "content": "a", "tool_call_id": "call_1"},
        {"role": "tool", "content": "a", "tool_call_id": "call1"},
    ),
    "text_parts_joined": (
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
    ),
    "reply_edges_trimmed": ({"role": "assistant", "content": "a"}, {"role": "assistant", "content": "a\n"}),
    "arguments_parsed": (
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a":1}'}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]},
    ),
    "null_equals_absent": ({"role": "user"}, {"role": "user", "content": None}),
}


def test_every_rule_has_a_sample() -> None:
    assert SAMPLES.keys() == RULES.keys()


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_makes_two_forms_equal_and_can_be_switched_off(rule: str) -> None:
    one, other = SAMPLES[rule]
    canonical = Canonical()
    assert canonical.form(one) == canonical.form(other)
    assert canonical.counts[rule] >= 1
    without = Canonical(off=[rule])
    assert without.form(one) != without.form(other)


@pytest.mark.parametrize(
    "odd",
    [
        {"role": "assistant", "tool_calls": "none"},
        {"role": "assistant", "tool_calls": [1, {"function": None}, {"function": {"arguments": "{"}}]},
        {"role": "user", "content": ["a", 1, {"type": "image_url"}]},
        {"role": "user", "content": {"a": 1}},
    ],
)
def test_odd_messages_have_a_form_too(odd: dict[str, Any]) -> None:
    assert Canonical().form(odd)


def test_parts_of_text_are_joined_as_templates_join_them() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    joined = Canonical().form({"role": "user", "content": "a\nb"})
    assert Canonical().form({"role": "user", "content": parts}) == joined


def test_a_reply_after_the_shared_messages_is_unknown() -> None:
    messages = [{"role": "user"}, {"role": "assistant"}, {"role": "user"}]
    assert holds_unknown_reply(messages, 0)
    assert not holds_unknown_reply(messages, 2)


def test_tools_are_compared_without_cache_marks_and_key_order() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    marked = {"cache_control": {"type": "ephemeral"}, **dict(reversed(tool.items()))}
    assert settings_digest([tool]) == settings_digest([marked])
    assert settings_digest([tool]) != settings_digest([tool, tool])
    assert settings_digest(None) == settings_digest([]) == settings_digest([], {}) == ROOT
    assert settings_digest([tool]) != settings_digest([tool], {"enable_thinking": False})


@given(st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)))
def test_common_prefix(a: list[int], b: list[int]) -> None:
    count = common_prefix(TokenIds.of(a), TokenIds.of(b))
    assert a[:count] == b[:count]
    assert a[: count + 1] != b[: count + 1] or count == len(a) == len(b)


def test_arguments_that_are_nested_without_end_are_text() -> None:
    forms = set()
    for depth in (500, 900, 1000, 5000, 100_000):
        function = {"name": "f", "arguments": "[" * depth + "]" * depth}
        forms.add(Canonical().form({"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}))
    assert len(forms) == 5


def a_reply(arguments: str = '{"a": 1}', number: str = "call_1", **fields: Any) -> dict[str, Any]:
    call = {"id": number, "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call], **fields}


@pytest.mark.parametrize(
    ("sent", "echo", "rules"),
    [
        (a_reply(), dict(reversed(a_reply().items())), ()),
        (a_reply(reasoning_content="hm"), a_reply(), ("foreign_reply_keys_dropped",)),
        (a_reply(), a_reply('{"a":1}'), ("arguments_parsed",)),
        (a_reply(), a_reply(number="call1"), ("ids_not_compared",)),
        (a_reply(), {key: value for key, value in a_reply().items() if key != "content"}, ("null_equals_absent",)),
        (a_reply(), a_reply(content=""), ("null_equals_absent",)),
        (a_reply(), a_reply(content=" \n"), ("reply_edges_trimmed", "null_equals_absent")),
        # What a null says was not dropped, nor what stands in the message anyway.
        (a_reply(reasoning_content="hm"), a_reply(reasoning_content="hm", refusal=None), ("null_equals_absent",)),
        (a_reply(reasoning_content="hm"), a_reply(reasoning_content="hm", _blocks=[1]), ("private_keys_dropped",)),
        (a_reply(), a_reply(provider_specific_fields={"x": 1}), ("foreign_reply_keys_dropped",)),
        (a_reply(), a_reply('{"a": 2}'), (KNOWN_BY_CALL_IDS,)),
        (a_reply(reasoning_content="hm"), a_reply("{}", "call1"), (KNOWN_BY_CALL_IDS, "foreign_reply_keys_dropped")),
        (a_reply(content="x"), a_reply("{}", content="other"), (KNOWN_BY_CALL_IDS,)),
        (a_reply(), a_reply("{}", "another"), ()),
        (
            {"role": "assistant", "content": "a", "reasoning_content": "hm"},
            {"role": "assistant", "content": [{"type": "text", "text": "a ", "cache_control": {"type": "ephemeral"}}]},
            ("foreign_reply_keys_dropped", "text_parts_joined", "reply_edges_trimmed"),
        ),
    ],
)
def test_an_echo_names_the_rules_that_it_needs(
    sent: dict[str, Any], echo: dict[str, Any], rules: tuple[str, ...]
) -> None:
    assert lenience(sent, echo) == rules


def test_a_rule_that_is_switched_off_is_not_named() -> None:
    thought = a_reply(reasoning_content="hm")
    assert lenience(thought, a_reply(), off=["foreign_reply_keys_dropped"]) == (KNOWN_BY_CALL_IDS,)
    assert lenience(thought, a_reply(), off=["foreign_reply_keys_dropped", KNOWN_BY_CALL_IDS]) == ()
    assert lenience(a_reply(), a_reply("{}"), off=[KNOWN_BY_CALL_IDS]) == ()
    assert lenience(a_reply(), a_reply(refusal=None), off=["null_equals_absent"]) == ("foreign_reply_keys_dropped",)


@given(conversations(), st.lists(st.integers(0, 2), min_size=20, max_size=20))
def test_the_rules_that_are_named_are_enough_and_none_is_too_much(
    messages: list[dict[str, Any]], styles: list[int]
) -> None:
    for sent, style in zip(messages, styles, strict=False):
        echo = echoed(sent, style)
        named = lenience(sent, echo)

        def same_under(rules: set[str], sent: dict[str, Any] = sent, echo: dict[str, Any] = echo) -> bool:
            bare = Canonical(off=RULES.keys() - rules)
            return bare.form(sent) == bare.form(echo)

        assert same_under(set(named))
        assert not any(same_under({*named} - {rule}) for rule in named)
        assert bool(named) == (sent != echo)
        assert lenience(sent, json.loads(json.dumps(sent))) == ()


def test_an_image_is_the_same_by_its_bytes_and_no_other_one() -> None:
    canonical = Canonical()
    other = json.loads(json.dumps(IMAGE).replace("AAAA", "AAAB"))
    assert canonical.form(IMAGE) == canonical.form(take_out([IMAGE])[0][0]) != canonical.form(other)
    odd = json.loads(json.dumps(IMAGE).replace("AAAA", "AA*A"))
    assert canonical.form(odd) != canonical.form(IMAGE)
