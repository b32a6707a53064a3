"""Replies as models of each family write them, by writers made from the families' chat templates, are read again."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollyard.gateway.tokens.parsers import FAMILIES, make_parser
from rollyard.gateway.tokens.parsers.parser import Piece, ReplyParser

Calls = list[tuple[str, dict[str, Any]]]
Writer = Callable[[str, str, Calls], str]

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"  # noqa: RUF001 - the model's own marks
CALL_BEGIN, CALL_END, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"  # noqa: RUF001 - as above


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def thought(reasoning: str, opening: str = "<think>\n", closing: str = "\n</think>\n\n") -> str:
    return opening + reasoning + closing if reasoning else ""


def hermes(reasoning: str, content: str, calls: Calls) -> str:
    written = [f"<tool_call>\n{dumps({'name': name, 'arguments': values})}\n</tool_call>" for name, values in calls]
    return thought(reasoning) + "\n".join([content, *written] if content else written)


def qwen3_coder(reasoning: str, content: str, calls: Calls) -> str:
    written = []
    for name, values in calls:
        arguments = "".join(f"<parameter={key}>\n{text(value)}\n</parameter>\n" for key, value in values.items())
        written.append(f"<tool_call>\n<function={name}>\n{arguments}</function>\n</tool_call>")
    return thought(reasoning) + "\n".join([content, *written] if content else written)


def glm45(reasoning: str, content: str, calls: Calls) -> str:
    written = []
    for name, values in calls:
        pairs = (f"<arg_key>{key}</arg_key>\n<arg_value>{text(value)}</arg_value>\n" for key, value in values.items())
        written.append(f"<tool_call>{name}\n{''.join(pairs)}</tool_call>")
    return thought(reasoning, "\n<think>", "</think>\n") + "\n".join([content, *written] if content else written)


def llama3(_reasoning: str, content: str, calls: Calls) -> str:
    written = "; ".join(dumps({"name": name, "parameters": values}) for name, values in calls)
    return content + ("<|python_tag|>" if content and written else "") + written


def mistral_list(reasoning: str, content: str, calls: Calls) -> str:
    written = dumps(
        [{"name": name, "arguments": values, "id": f"abcdefgh{n}"} for n, (name, values) in enumerate(calls)]
    )
    return thought(reasoning, "[THINK]", "[/THINK]") + content + ("[TOOL_CALLS]" + written if calls else "")


def mistral(reasoning: str, content: str, calls: Calls) -> str:
    written = "".join(f"[TOOL_CALLS]{name}[ARGS]{dumps(values)}" for name, values in calls)
    return thought(reasoning, "[THINK]", "[/THINK]") + content + written


def deepseek(reasoning: str, content: str, calls: Calls) -> str:
    written = [f"{CALL_BEGIN}{name}{SEP}{dumps(values)}{CALL_END}" for name, values in calls]
    return thought(reasoning) + content + (CALLS_BEGIN + "".join(written) + CALLS_END if calls else "")


def deepseek_v3(reasoning: str, content: str, calls: Calls) -> str:
    written = [f"{CALL_BEGIN}function{SEP}{name}\n```json\n{dumps(values)}\n```{CALL_END}" for name, values in calls]
    return thought(reasoning) + content + (CALLS_BEGIN + "\n".join(written) + CALLS_END if calls else "")


def kimi_k2(reasoning: str, content: str, calls: Calls) -> str:
    written = "".join(
        f"<|tool_call_begin|>functions.{name}:{n}<|tool_call_argument_begin|>{dumps(values)}<|tool_call_end|>"
        for n, (name, values) in enumerate(calls)
    )
    section = f"<|tool_calls_section_begin|>{written}<|tool_calls_section_end|>" if calls else ""
    return thought(reasoning, "<think>", "</think>") + content + section


def harmony(reasoning: str, content: str, calls: Calls) -> str:
    messages = [f"<|channel|>analysis<|message|>{reasoning}<|end|>"] if reasoning else []
    if content:
        channel = "commentary" if calls else "final"
        messages.append(f"<|channel|>{channel}<|message|>{content}" + ("<|end|>" if calls else "<|return|>"))
    for name, values in calls:
        header = f" to=functions.{name}<|channel|>commentary <|constrain|>json<|message|>"
        messages.append(header + dumps(values) + "<|call|>")
    return "<|start|>assistant".join(messages)


def plain(reasoning: str, content: str, _calls: Calls) -> str:
    return thought(reasoning) + content


def text(value: Any) -> str:
    """As templates write an argument: text as it is, everything else as JSON."""
    return value if isinstance(value, str) else dumps(value)


WRITERS: dict[str, tuple[str, Writer]] = {
    "hermes": ("hermes", hermes),
    "qwen3_coder": ("qwen3_coder", qwen3_coder),
    "llama3": ("llama3", llama3),
    "mistral_list": ("mistral", mistral_list),
    "mistral": ("mistral", mistral),
    "deepseek": ("deepseek", deepseek),
    "deepseek_v3": ("deepseek", deepseek_v3),
    "glm45": ("glm45", glm45),
    "kimi_k2": ("kimi_k2", kimi_k2),
    "harmony": ("harmony", harmony),
    "plain": ("plain", plain),
}
"""A writer by name, with the family that reads it."""

PARAMETERS = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "ratio": {"type": ["number", "null"]},
        "flag": {"type": "boolean"},
        "rows": {"type": "array", "items": {}},
        "more": {"anyOf": [{"$ref": "#/$defs/more"}, {"type": "null"}]},
    },
    "$defs": {"more": {"type": "object"}},
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("bash", "read-file")]
MARKS = st.sampled_from(
    [
        "<",
        "<tool_call",
        "</think",
        "<thin",
        "[TOOL",
        "<|chan",
        "<|tool_call_b",
        "{",
        "}",
        "\n",
        "\n\n",
        "<function",
        "to=",
    ]
)
words = st.lists(
    st.text(st.characters(codec="utf-8", exclude_characters="<>[]{}|\r"), max_size=8) | MARKS, max_size=6
).map("".join)
sentences = words.map(str.strip).filter(bool)
values: st.SearchStrategy[Any] = st.fixed_dictionaries(
    {},
    optional={
        "text": words,
        "count": st.integers(),
        "ratio": st.floats(allow_nan=False, allow_infinity=False) | st.none(),
        "flag": st.booleans(),
        "rows": st.lists(st.integers() | words, max_size=3),
        "more": st.dictionaries(st.text("abc", min_size=1, max_size=3), st.integers() | words, max_size=2) | st.none(),
    },
)
calls = st.lists(st.tuples(st.sampled_from(["bash", "read-file"]), values), max_size=3)


def read(parser: ReplyParser, portions: Iterable[str]) -> Piece:
    pieces = [*map(parser.push, portions), parser.end()]
    return Piece(
        "".join(piece.reasoning for piece in pieces),
        "".join(piece.text for piece in pieces),
        tuple(call for piece in pieces for call in piece.tool_calls),
    )


def portions_of(text: str, cuts: list[int]) -> list[str]:
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    return [text[start:end] for start, end in itertools.pairwise(places)]


@pytest.mark.parametrize("writer", WRITERS)
@settings(max_examples=40)
@given(reasoning=st.just("") | sentences, content=st.just("") | sentences, asked=calls)
def test_what_a_family_writes_is_read(writer: str, reasoning: str, content: str, asked: Calls) -> None:
    family, write = WRITERS[writer]
    if writer == "llama3":
        reasoning, content = "", content if not content.startswith("{") else "x" + content
    if writer == "plain":
        asked = []

    piece = read(make_parser(family, tools=TOOLS), [write(reasoning, content, asked)])

    assert piece.reasoning == reasoning
    assert piece.text == content
    assert [call.name for call in piece.tool_calls] == [name for name, _ in asked]
    assert [json.loads(call.arguments) for call in piece.tool_calls] == [arguments for _, arguments in asked]


@pytest.mark.parametrize("writer", WRITERS)
@settings(max_examples=40)
@given(parts=st.tuples(words, words, calls), cuts=st.lists(st.integers(0, 200)), size=st.integers(0, 400))
def test_any_portions_of_any_beginning_give_the_same_reply(
    writer: str, parts: tuple[str, str, Calls], cuts: list[int], size: int
) -> None:
    family, write = WRITERS[writer]
    reply = write(*parts)[:size]
    whole = read(make_parser(family, tools=TOOLS), [reply])

    assert read(make_parser(family, tools=TOOLS), reply) == whole
    assert read(make_parser(family, tools=TOOLS), portions_of(reply, cuts)) == whole


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=20)
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="<[{t \n\r\t")))
def test_text_without_marks_comes_through_at_once(family: str, text: str) -> None:
    parser = make_parser(family, tools=TOOLS)
    for character in text:
        assert parser.push(character) == Piece(text=character)
    assert parser.end() == Piece()


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=40)
@given(text=words)
def test_text_without_a_whole_mark_is_content(family: str, text: str) -> None:
    assert read(make_parser(family, tools=TOOLS), text) == Piece(text=text)


@pytest.mark.parametrize("writer", [name for name in WRITERS if name != "harmony"])
@settings(max_examples=20)
@given(content=sentences, asked=calls.filter(bool), size=st.integers(1, 60))
def test_without_tools_calls_are_content_as_written(writer: str, content: str, asked: Calls, size: int) -> None:
    family, write = WRITERS[writer]
    reply = write("", content, asked)[:-size]

    assert read(make_parser(family), reply) == Piece(text=reply)
