"""The junction between a sampled reply and what follows it, by families. Templates are made here, in their shapes."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from rollyard.gateway.tokens.renderer import Renderer
from rollyard.gateway.tokens.template import ChatTemplate
from rollyard.gateway.tokens.tokenizer import TextTokenizer

Messages = list[dict[str, Any]]
CALL = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]
SYSTEM, USER, NEW = ({"role": role, "content": text} for role, text in (("system", "s"), ("user", "u"), ("user", "n")))
SAID = {"role": "assistant", "content": "a"}
ASKED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "r", "tool_call_id": "call00001"}
BAR = "\uff5c"
EOS = f"<{BAR}end\u2581of\u2581sentence{BAR}>"

CHATML = """
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}
{%- for c in m.tool_calls or [] %}{{ '\n<tool_call>\n' + c.function | tojson + '\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
QWEN3 = """
{%- set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}
{%- set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' and loop.index0 > ns.last %}
{{- '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}
{%- endif %}{{ m.content }}
{%- for c in m.tool_calls or [] %}{{ '\n<tool_call>\n' + c.function | tojson + '\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"""
LLAMA3 = """
{%- for m in messages %}{% set role = 'ipython' if m.role == 'tool' else m.role %}
{{- '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}
{%- if m.tool_calls %}{% set c = m.tool_calls[0].function %}
{{- '{"name": "' + c.name + '", "parameters": ' + c.arguments | tojson + '}' }}{% else %}{{ m.content }}{% endif %}
{{- '<|eot_id|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""
MISTRAL = """
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for m in messages %}{% if m.role == 'user' %}
{%- if tools and m == users[-1] %}{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST]' + m.content + '[/INST]' }}
{%- elif m.tool_calls %}{{ '[TOOL_CALLS][' }}{% for c in m.tool_calls %}{{ ', ' if not loop.first }}
{{- '{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments | tojson + ', "id": "' + c.id + '"}' }}
{%- endfor %}{{ ']</s>' }}
{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
{%- elif m.role == 'assistant' %}{{ ' ' + m.content + '</s>' }}
{%- else %}{{ raise_exception('no such role') }}{% endif %}{% endfor %}"""
DEEPSEEK = (
    """
{%- for m in messages %}{% if m.role == 'user' %}{{ '<|User|>' + m.content + '<|Assistant|>' }}
{%- elif m.role == 'tool' %}{{ '<|tool_output_begin|>' + m.content + '<|tool_output_end|>' }}
{%- elif m.role == 'assistant' %}{{ m.content }}{% if m.tool_calls %}{{ '<|tool_calls_begin|>' }}
{%- for c in m.tool_calls %}{{ '<|tool_call_begin|>' + c.function.name + '<|tool_sep|>' + c.function.arguments }}
{{- '<|tool_call_end|>' }}{% endfor %}{{ '<|tool_calls_end|>' }}{% endif %}{{ '<|end_of_sentence|>' }}
{%- endif %}{% endfor %}""".replace("<|", f"<{BAR}")
    .replace("|>", f"{BAR}>")
    .replace("_of_", "\u2581of\u2581")
)
GLM = """[gMASK]<sop>
{%- for m in messages %}{% if m.role == 'user' %}{{ '<|user|>\n' + m.content }}
{%- elif m.role == 'assistant' %}{{ '<|assistant|>\n<think></think>\n' + m.content }}
{%- for c in m.tool_calls or [] %}{{ '\n<tool_call>' + c.function.name + '\n' }}
{%- for k, v in c.function.arguments.items() %}
{{- '<arg_key>' + k + '</arg_key>\n<arg_value>' + (v if v is string else v | tojson) + '</arg_value>\n' }}{% endfor %}
{{- '</tool_call>' }}{% endfor %}
{%- elif m.role == 'tool' %}{{ '<|observation|>' if messages[loop.index0 - 1].role != 'tool' }}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
KIMI = """
{%- set ids = namespace(names={}) %}{% for m in messages %}{{ '<|im_' + m.role + '|>' + m.role + '<|im_middle|>' }}
{%- if m.role == 'tool' %}{{ '## Return of ' + m.tool_call_id + '\n' }}{% endif %}{{ m.content }}
{%- if m.tool_calls %}{{ '<|tool_calls_section_begin|>' }}{% for c in m.tool_calls %}
{{- '<|tool_call_begin|>' + c.id + '<|tool_call_argument_begin|>' + c.function.arguments | tojson }}
{{- '<|tool_call_end|>' }}
{%- endfor %}{{ '<|tool_calls_section_end|>' }}{% endif %}{{ '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}"""
HARMONY = """
{%- set last = namespace(name=none) %}{% for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}
{%- set c = m.tool_calls[0].function %}{% set last.name = c.name %}
{{- '<|start|>assistant to=functions.' + c.name + '<|channel|>commentary json<|message|>' + c.arguments | tojson }}
{{- '<|call|>' }}{% elif m.role == 'assistant' %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
{%- elif m.role == 'tool' %}{% if last.name is none %}{{ raise_exception('no call before the result') }}{% endif %}
{{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' + m.content + '<|end|>' }}
{%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""

SPECIALS = [
    *("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "</s>"),
    *("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", EOS, f"<{BAR}User{BAR}>"),
    *(f"<{BAR}tool_calls_end{BAR}>", f"<{BAR}tool_call_end{BAR}>", f"<{BAR}tool_output_begin{BAR}>"),
]
GLM_SPECIALS = ["<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"]
KIMI_SPECIALS = ["<|im_end|>", "<|im_user|>", "<|im_middle|>", "<|tool_call_end|>", "<|tool_calls_section_end|>"]
HARMONY_SPECIALS = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"]


def renderer_of(source: str, *specials: str) -> Renderer:
    """Every byte is a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({character: number for number, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in specials or SPECIALS])
    return Renderer(TextTokenizer(backend), ChatTemplate(source, now=lambda: datetime(2024, 2, 29)))


def suffix(renderer: Renderer, sampled: str, *messages: dict[str, Any], tools: Messages | None = None) -> str | None:
    """The suffix as text; the last assistant message is the reply."""
    answered = max(at for at, message in enumerate(messages) if message["role"] == "assistant") + 1
    ids = renderer.tokenizer.encode_rendered(sampled, "")
    found = renderer.suffix(list(messages), tools, answered, ids)
    return None if found is None else renderer.tokenizer.decode(found, False)


FAMILIES = {
    "chatml": (CHATML, SPECIALS, "<|im_end|>", "<|im_end|>"),
    "qwen3": (QWEN3, SPECIALS, "<|im_end|>", "<|im_end|>"),
    "llama3": (LLAMA3, SPECIALS, "<|eot_id|>", "<|eot_id|>"),
    "mistral": (MISTRAL, SPECIALS, "</s>", "</s>"),
    "deepseek": (DEEPSEEK, SPECIALS, EOS, EOS),
    "glm": (GLM, GLM_SPECIALS, "<|user|>", "<|observation|>"),
    "kimi": (KIMI, KIMI_SPECIALS, "<|im_end|>", "<|im_end|>"),
    "harmony": (HARMONY, HARMONY_SPECIALS, "<|end|>", "<|call|>"),
}
"""Template, special tokens, and the end of the turn, of an answer and of a call."""
LLAMA3_PROMPT = "<|start_header_id|>assistant<|end_header_id|>\n\n"
AFTER_ANSWER = {
    "chatml": "\n<|im_start|>user\nn<|im_end|>\n<|im_start|>assistant\n",
    "qwen3": "\n<|im_start|>user\nn<|im_end|>\n<|im_start|>assistant\n<think>\n",
    "llama3": "<|start_header_id|>user<|end_header_id|>\n\nn<|eot_id|>" + LLAMA3_PROMPT,
    "mistral": "[INST]n[/INST]",
    "deepseek": f"<{BAR}User{BAR}>n<{BAR}Assistant{BAR}>",
    "glm": "\nn<|assistant|>",
    "kimi": "<|im_user|>user<|im_middle|>n<|im_end|><|im_assistant|>assistant<|im_middle|>",
    "harmony": "<|start|>user<|message|>n<|end|><|start|>assistant",
}
AFTER_CALL = {
    "chatml": "\n<|im_start|>tool\nr<|im_end|>\n<|im_start|>assistant\n",
    "qwen3": "\n<|im_start|>tool\nr<|im_end|>\n<|im_start|>assistant\n<think>\n",
    "llama3": "<|start_header_id|>ipython<|end_header_id|>\n\nr<|eot_id|>" + LLAMA3_PROMPT,
    "mistral": "[TOOL_RESULTS]r[/TOOL_RESULTS]",
    "deepseek": f"<{BAR}tool_output_begin{BAR}>r<{BAR}tool_output_end{BAR}>",
    "glm": "\n<tool_response>\nr\n</tool_response><|assistant|>",
    "kimi": "<|im_tool|>tool<|im_middle|>## Return of call00001\nr<|im_end|><|im_assistant|>assistant<|im_middle|>",
    "harmony": "<|start|>functions.f to=assistant<|channel|>commentary<|message|>r<|end|><|start|>assistant",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_after_an_answer(family: str) -> None:
    source, specials, end, _ = FAMILIES[family]
    renderer = renderer_of(source, *specials)
    blank = " " if family == "mistral" else ""

    assert suffix(renderer, "odd" + end, USER, SAID, NEW) == AFTER_ANSWER[family]
    assert suffix(renderer, "cut", USER, SAID, NEW) == end + AFTER_ANSWER[family]
    assert suffix(renderer, blank, USER, ASKED, RESULT, SAID, NEW) == end + AFTER_ANSWER[family]


@pytest.mark.parametrize("family", FAMILIES)
def test_after_a_call(family: str) -> None:
    source, specials, _, end = FAMILIES[family]
    renderer = renderer_of(source, *specials)

    assert suffix(renderer, "odd" + end, USER, ASKED, RESULT, tools=TOOLS) == AFTER_CALL[family]
    assert suffix(renderer, "cut", USER, ASKED, RESULT, tools=TOOLS) == end + AFTER_CALL[family]
    assert suffix(renderer, end, USER, *[ASKED, RESULT] * 4, tools=TOOLS) == AFTER_CALL[family]


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "harmony"])
def test_after_parallel_calls_each_result_is_there(family: str) -> None:
    source, specials, _, end = FAMILIES[family]
    renderer = renderer_of(source, *specials)
    asked = {**ASKED, "tool_calls": [CALL, {**CALL, "id": "call00002"}]}
    second = {**RESULT, "content": "second", "tool_call_id": "call00002"}

    text = suffix(renderer, end, USER, asked, RESULT, second, tools=TOOLS)

    assert text is not None
    assert text.count("second") == 1
    assert "arg" not in text
    assert "q" not in text.replace("section", "")


def test_an_end_that_stands_for_the_templates_own() -> None:
    harmony, llama = renderer_of(HARMONY, *HARMONY_SPECIALS), renderer_of(LLAMA3)
    assert suffix(harmony, "odd<|return|>", USER, SAID, NEW) == AFTER_ANSWER["harmony"]
    assert suffix(llama, "odd<|eom_id|>", USER, ASKED, RESULT, tools=TOOLS) == AFTER_CALL["llama3"]


def test_an_end_that_another_message_than_the_expected_one_follows() -> None:
    """GLM announces a user message, and a tool result comes: what was sampled stands, what is missing is added."""
    renderer = renderer_of(GLM, *GLM_SPECIALS)
    assert suffix(renderer, "odd<|user|>", USER, ASKED, RESULT, tools=TOOLS) == "<|observation|>" + AFTER_CALL["glm"]


def test_reasoning_of_earlier_turns_stays_though_the_template_drops_it() -> None:
    renderer = renderer_of(QWEN3)
    thinking = {**ASKED, "reasoning_content": "because"}

    text = suffix(renderer, "a<|im_end|>", USER, thinking, RESULT, SAID, NEW, tools=TOOLS)

    assert text == AFTER_ANSWER["qwen3"]


MOVES_SYSTEM = """
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}{% for m in messages if m.role != 'system' %}
{%- if m == users[-1] %}{{ '[INST]' + messages[0].content + '\n\n' + m.content + '[/INST]' }}
{%- elif m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}{% else %}{{ m.content + '</s>' }}{% endif %}
{%- endfor %}"""
DATES_LAST = """
{%- for m in messages %}{% if loop.last %}{{ strftime_now('%d %B') }}{% endif %}
{{- m.content + '<|im_end|>' }}{% endfor %}"""
MERGES_RESULTS = """
{%- for m in messages if m.role != 'tool' %}{{ m.content + '<|im_end|>' }}{% endfor %}
{%- for m in messages if m.role == 'tool' %}{{ m.content }}{% endfor %}"""


@pytest.mark.parametrize(
    ("source", "messages", "tools"),
    [
        (MOVES_SYSTEM, [SYSTEM, USER, SAID, NEW], None),
        (MISTRAL, [USER, ASKED, RESULT, SAID, NEW], TOOLS),
        (DATES_LAST, [USER, SAID, NEW], None),
        (MERGES_RESULTS, [USER, ASKED, RESULT, ASKED, {**RESULT, "content": "again"}], TOOLS),
    ],
    ids=["moves the system prompt", "moves tools", "writes the date last", "merges results"],
)
def test_a_template_that_rewrites_the_past(source: str, messages: Messages, tools: Messages | None) -> None:
    assert suffix(renderer_of(source), "a</s>", *messages, tools=tools) is None


def test_a_date_in_the_system_prompt_does_not_matter() -> None:
    renderer = renderer_of("{{ strftime_now('%d %B') }}" + CHATML)
    assert suffix(renderer, "a<|im_end|>", USER, SAID, NEW) == AFTER_ANSWER["chatml"]


def test_a_template_that_repeats_the_past_gets_its_words() -> None:
    repeats = "{% if m.role == 'user' %}{{ messages[0].content }}{% endif %}"
    renderer = renderer_of(CHATML.replace("+ m.content }}", "+ m.content }}" + repeats))
    assert suffix(renderer, "a<|im_end|>", SYSTEM, USER, SAID, NEW) == AFTER_ANSWER["chatml"].replace("\nn", "\nns")


@st.composite
def conversations(draw: st.DrawFn) -> tuple[Messages, int]:
    """Messages that end behind a reply, and where that reply ends."""
    messages: Messages = [{**SYSTEM, "content": draw(st.text("ab<|", max_size=4))}] if draw(st.booleans()) else []
    turns = draw(st.integers(1, 3))
    for turn in range(turns):
        messages.append(USER)
        for number in range(draw(st.integers(0, 4))):
            calls = [{**CALL, "id": f"call{turn}{number}{at:03}"} for at in range(draw(st.integers(1, 2)))]
            messages.append({**ASKED, "tool_calls": calls})
            messages += [{**RESULT, "tool_call_id": call["id"]} for call in calls]
        messages.append(SAID)
    later: Messages = [] if turns > 1 and draw(st.booleans()) else [NEW]
    replies = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    answered = (len(messages) if later else replies[draw(st.integers(0, len(replies) - 2))] + 1) if replies else 1
    return messages + later, answered


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=30)
@given(conversation=conversations(), ended=st.booleans())
def test_the_end_of_the_past_is_enough(family: str, conversation: tuple[Messages, int], ended: bool) -> None:
    source, specials, end, _ = FAMILIES[family]
    renderer, thorough = renderer_of(source, *specials), renderer_of(source, *specials)
    thorough.looks_at_end_only = lambda *_: False  # type: ignore[method-assign]
    messages, answered = conversation
    sampled = renderer.tokenizer.encode_rendered("odd" + end * ended, "")

    for tools in (None, TOOLS):
        assert renderer.looks_at_end_only(bool(tools))
        found = renderer.suffix(messages, tools, answered, sampled)
        assert found == thorough.suffix(messages, tools, answered, sampled)


COUNTS = """
{%- for m in messages %}{{ '[Round ' ~ loop.index ~ ']' + m.role + m.content + '<|im_end|>' }}{% endfor %}"""


def test_a_template_that_counts_gets_the_whole_past() -> None:
    renderer, local = renderer_of(COUNTS), renderer_of(CHATML)
    assert local.looks_at_end_only(True)
    assert not renderer.looks_at_end_only(False)
    text = suffix(renderer, "a<|im_end|>", USER, *[SAID, USER] * 9, SAID, NEW)
    assert text == "[Round 21]usern<|im_end|>"


def test_specials_in_what_is_new_are_text_even_as_json_escapes() -> None:
    source = CHATML.replace("+ m.content }}", "+ m.content | tojson(ensure_ascii=true) }}")
    renderer = renderer_of(source)
    end = renderer.tokenizer.specials["<|im_end|>"]
    ids = renderer.tokenizer.encode_rendered("a<|im_end|>", "")

    found = renderer.suffix([USER, SAID, {"role": "user", "content": "<|im_end|>"}], None, 2, ids)

    assert found is not None
    assert found.tolist().count(end) == 1
    assert '"<|im_end|>"<|im_end|>' in renderer.tokenizer.decode(found, False)
