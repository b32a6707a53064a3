from __future__ import annotations

import json
from typing import Any

import pytest

from rollyard.gateway.tokens.parsers import ends_in_reasoning, family_of, make_parser
from rollyard.gateway.tokens.parsers.parser import Piece, ToolCall
from rollyard.schemas.errors import ConfigError

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"type": "integer"}}}}}]
BAR = "\uff5c"
BEGIN, END, SEP = (f"<{BAR}tool\u2581{name}{BAR}>" for name in ("call\u2581begin", "call\u2581end", "sep"))
SECTION = f"<{BAR}tool\u2581calls\u2581begin{BAR}>"


def read(family: str, text: str, tools: list[dict[str, Any]] | None = TOOLS, **options: bool) -> Piece:
    """The joined pieces, pushed character by character."""
    parser = make_parser(family, tools=tools, **options)
    pieces = [*map(parser.push, text), parser.end()]
    return Piece(
        "".join(piece.reasoning for piece in pieces),
        "".join(piece.text for piece in pieces),
        tuple(call for piece in pieces for call in piece.tool_calls),
    )


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", 'I do.\n<tool_call>\n{"name": "f", "arguments": {"x": 1'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": }}</tool_call> after'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>'),
        ("hermes", "<tool_call>" + "[" * 50_000 + "</tool_call>"),
        ("hermes", '<tool_call>{"name": "f"} and more</tool_call>'),
        ("hermes", "a <think>not at the start</think>"),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n"),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=x>\n1\n</function>\n</tool_call>"),
        ("qwen3_coder", "<tool_call>\nwhat?\n</tool_call>"),
        ("qwen3_coder", "<tool_call><function=f>stray</function></tool_call>"),
        ("qwen3_coder", "write <function=f> then"),
        ("glm45", "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n"),
        ("glm45", "<tool_call>f\n<arg_key>x</arg_key>\n</tool_call>"),
        ("glm45", "<tool_call>\n</tool_call>"),
        ("llama3", '{"name": "Bob", "age": 3}'),
        ("llama3", ' {"name": "f", "parameters": {"x": 1}'),
        ("llama3", '{"name": "f", "parameters": {}} and more'),
        ("llama3", '{"result": 1}'),
        ("llama3", "<|python_tag|>print(1)"),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}'),
        ("mistral", '[TOOL_CALLS][{"arguments": {}}]'),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"x": 1'),
        ("mistral", "[TOOL_CALLS] are written so"),
        ("mistral", "[TOOL_CALLS]"),
        ("kimi_k2", '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"x": 1'),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_end|>"),
        ("kimi_k2", "<|tool_calls_section_begin|>\n<|tool_calls_section_end|>"),
        ("deepseek", f'{SECTION}{BEGIN}function{SEP}f\n```json\n{{"x": 1}}'),
        ("deepseek", f"{SECTION}{BEGIN}f{END} and more"),
        ("harmony", "<|channel|>comm"),
        ("harmony", '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1'),
        ("harmony", "to=be or not"),
        ("plain", '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n\n'),
    ],
)
def test_what_is_no_whole_call_is_content_as_written(family: str, text: str) -> None:
    assert read(family, text) == Piece(text=text)


@pytest.mark.parametrize(
    ("family", "text", "call"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1.0}}', ToolCall("f", '{"x": 1.0}')),
        ("hermes", '<tool_call>{"name":"f","arguments":"{\\"x\\":1}"}</tool_call>', ToolCall("f", '{"x":1}')),
        ("hermes", '<tool_call>{"name":"f","arguments":[1]}</tool_call>', ToolCall("f", "[1]")),
        ("hermes", '<tool_call>{"name":"f","arguments":null}</tool_call>', ToolCall("f", "{}")),
        ("hermes", '<tool_call>{"name":"\\ud83d","parameters":{}}</tool_call>', ToolCall("\ufffd", "{}")),
        ("qwen3_coder", "<function=f>\n<parameter=x>\n1\n</parameter>\n</function>", ToolCall("f", '{"x": 1}')),
        ("qwen3_coder", "<tool_call>\n<function=f>\n</function>\n</tool_call>", ToolCall("f", "{}")),
        (
            "qwen3_coder",
            "<tool_call><function=f><parameter=x>one</parameter></function>",
            ToolCall("f", '{"x": "one"}'),
        ),
        (
            "qwen3_coder",
            "<tool_call>\n<function=f>\n<parameter=y>\n</parameter> is\n\n</parameter>\n</function>\n</tool_call>",
            ToolCall("f", '{"y": "</parameter> is\\n"}'),
        ),
        ("glm45", "<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>", ToolCall("f", '{"x": 1}')),
        ("glm45", "<tool_call>f</tool_call>", ToolCall("f", "{}")),
        ("llama3", '{"type": "function", "name": "f", "parameters": {}}', ToolCall("f", "{}")),
        ("llama3", '<|python_tag|>{"name": "f", "arguments": {"x": 1}}', ToolCall("f", '{"x": 1}')),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"x": 1}', ToolCall("f", '{"x": 1}', "abcdefghi")),
        ("mistral", '[TOOL_CALLS]f{"x": 1}', ToolCall("f", '{"x": 1}')),
        ("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {}}', ToolCall("f", "{}")),
        (
            "kimi_k2",
            "<|tool_call_begin|>functions.a.b:12<|tool_call_argument_begin|>{oops<|tool_call_end|>",
            ToolCall("a.b", "{oops", "functions.a.b:12"),
        ),
        ("deepseek", f"{SECTION}{BEGIN}f{SEP}{{oops{END}", ToolCall("f", "{oops")),
        ("deepseek", f"{SECTION}{BEGIN}function{SEP}f\n```json\n{{oops\n```{END}", ToolCall("f", "{oops")),
        ("harmony", " to=functions.f<|channel|>commentary json<|message|>{oops<|call|>", ToolCall("f", "{oops")),
        ("harmony", '<|channel|>commentary to=functions.f<|message|>{"x": 1}', ToolCall("f", '{"x": 1}')),
        ("harmony", "<|channel|>analysis to=python code<|message|>print(1)<|call|>", ToolCall("python", "print(1)")),
    ],
)
def test_variants_that_models_write(family: str, text: str, call: ToolCall) -> None:
    assert read(family, text) == Piece(tool_calls=(call,))


def test_a_malformed_call_does_not_hide_the_next_one() -> None:
    good = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert read("hermes", "<tool_call>{</tool_call>" + good) == Piece(
        text="<tool_call>{</tool_call>", tool_calls=(ToolCall("f", "{}"),)
    )
    assert read("mistral", "[TOOL_CALLS]f[ARGS]{oops[TOOL_CALLS]f[ARGS]{}").tool_calls == (
        ToolCall("f", "{oops"),
        ToolCall("f", "{}"),
    )


def test_a_call_is_there_as_soon_as_it_is_closed() -> None:
    parser = make_parser("hermes", tools=TOOLS)
    assert parser.push('<tool_call>{"name": "f", "arguments": {}}</tool_call').tool_calls == ()
    assert parser.push(">").tool_calls == (ToolCall("f", "{}"),)


def test_text_around_calls_stays_content() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    piece = read("hermes", f"one\n\n{call}\n{call}\ntwo\n")
    assert (piece.text, len(piece.tool_calls)) == ("one\ntwo", 2)


@pytest.mark.parametrize(
    ("family", "text", "opened", "reasoning", "content"),
    [
        ("hermes", "<think>\nhm\n</think>\n\nyes\n", False, "hm", "yes\n"),
        ("hermes", "hm\n</think>\n\nyes", True, "hm", "yes"),
        ("hermes", "<think>\n\n</think>\n\nyes", False, "", "yes"),
        ("hermes", "<think>cut sh", False, "cut sh", ""),
        ("hermes", "yes</think>", False, "", "yes</think>"),
        ("hermes", "<think>a <tool_call> b</think>c", False, "a <tool_call> b", "c"),
        ("plain", "\n<think>hm</think>yes", False, "hm", "yes"),
        ("mistral", "[THINK]hm[/THINK]yes", False, "hm", "yes"),
        ("mistral", "hm[/THINK]yes", True, "hm", "yes"),
        ("mistral", "<think>hm</think>yes", False, "hm", "yes"),
        ("kimi_k2", "hm<|tool_calls_section_begin|>", True, "hm", "<|tool_calls_section_begin|>"),
        ("harmony", "hm<|end|><|start|>assistant<|channel|>final<|message|>yes<|return|>", True, "hm", "yes"),
        (
            "harmony",
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>"
            "<|start|>assistant<|channel|>commentary<|message|>c<|end|><|start|>assistant<|channel|>final<|message|>d",
            False,
            "a\nb",
            "c\nd",
        ),
        ("harmony", "<|message|>yes<|end|>", False, "", "yes"),
        ("harmony", "<|start|>assistant<|channel|>final<|message|>yes", False, "", "yes"),
    ],
)
def test_reasoning(family: str, text: str, opened: bool, reasoning: str, content: str) -> None:
    assert read(family, text, reasoning_open=opened) == Piece(reasoning, content)


def test_without_tools_a_harmony_call_is_content() -> None:
    call = "<|channel|>commentary to=functions.f<|message|>{}<|call|>"
    assert read("harmony", call, tools=None) == Piece(text=call)


def test_arguments_are_typed_by_the_schema() -> None:
    kinds = {
        "text": {"type": "string"},
        "maybe": {"type": ["string", "null"]},
        "count": {"type": "integer"},
        "flag": {"type": "boolean"},
        "rows": {"$ref": "#/$defs/rows"},
        "level": {"enum": [1, 2]},
        "free": {},
        "loop": {"$ref": "#/properties/loop"},
    }
    parameters = {"type": "object", "properties": kinds, "$defs": {"rows": {"anyOf": [{"type": "array"}]}}}
    tools = [{"type": "function", "function": {"name": "g", "parameters": parameters}}]
    written = {
        **{"text": "5", "maybe": "null", "count": " 5 ", "flag": "True", "rows": '[1, "a"]', "level": "2"},
        **{"free": "7", "unknown": "8", "loop": "9"},
    }
    body = "".join(f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in written.items())

    (call,) = read("glm45", f"<tool_call>g{body}</tool_call>", tools).tool_calls

    assert json.loads(call.arguments) == {
        **{"text": "5", "maybe": None, "count": 5, "flag": True, "rows": [1, "a"], "level": 2},
        **{"free": "7", "unknown": "8", "loop": "9"},
    }


@pytest.mark.parametrize("value", ["many", "1.5", "", "[", "nan", "[" * 100_000])
def test_a_value_of_another_type_stays_text(value: str) -> None:
    text = f"<tool_call>f<arg_key>x</arg_key><arg_value>{value}</arg_value></tool_call>"
    (call,) = read("glm45", text).tool_calls
    assert json.loads(call.arguments) == {"x": value}


@pytest.mark.parametrize("tools", [[{"name": "f"}], [{"function": {"name": "f", "parameters": []}}]])
def test_tools_without_a_schema_leave_arguments_text(tools: list[dict[str, Any]]) -> None:
    text = "<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>"
    assert read("glm45", text, tools).tool_calls == (ToolCall("f", '{"x": "1"}'),)


@pytest.mark.parametrize(
    ("family", "template", "specials"),
    [
        (
            "hermes",
            "{% for c in m.tool_calls %}<tool_call>{{ c.function.arguments | tojson }}</tool_call>{% endfor %}",
            (),
        ),
        ("hermes", "<|start_header_id|>{{ m.role }} <tool_call>{{ c.arguments }}", ("<|python_tag|>",)),
        ("qwen3_coder", "<tool_call>\n<function={{ c.name }}>\n<parameter={{ key }}>\n{{ value }}\n</parameter>", ()),
        ("llama3", '<|start_header_id|>{{ m.role }} {"name": n, "parameters": {}} <|python_tag|>', ()),
        ("plain", "<|start_header_id|>{{ m.role }}<|end_header_id|>{{ m.content }}", ("<|python_tag|>",)),
        ("mistral", "[INST]{{ m.content }}[/INST][TOOL_CALLS]{{ calls }}", ()),
        ("mistral", "[INST]{{ m.content }}[/INST]", ("[TOOL_CALLS]",)),
        ("deepseek", f"<{BAR}User{BAR}>{{{{ m.content }}}}<{BAR}Assistant{BAR}>", ()),
        ("glm45", "<|user|>{{ m.content }}<tool_call>{{ c.name }}<arg_key>{{ k }}</arg_key>", ()),
        ("kimi_k2", "<|im_user|>user<|im_middle|>{{ m.content }}<|im_end|>", ()),
        ("harmony", "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>", ()),
        ("plain", "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>", ("<|im_end|>", "<tool_call>")),
    ],
)
def test_a_template_tells_the_family(family: str, template: str, specials: tuple[str, ...]) -> None:
    assert family_of(template, specials) == family


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(ConfigError, match="no parser 'klingon'") as caught:
        make_parser("klingon")
    assert "hermes" in caught.value.hint


def test_prompts_that_open_the_reasoning() -> None:
    assert ends_in_reasoning("<|im_start|>assistant\n<think>\n")
    assert ends_in_reasoning("[/INST][THINK]")
    assert ends_in_reasoning("<|start|>assistant<|channel|>analysis<|message|>")
    assert not ends_in_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n")
