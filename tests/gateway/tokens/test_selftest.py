from __future__ import annotations

import pytest

from rollyard.gateway.scripted import chatml
from rollyard.gateway.tokens.renderer import Renderer
from rollyard.gateway.tokens.selftest import check_template
from rollyard.gateway.tokens.template import ChatTemplate
from rollyard.gateway.tokens.tokenizer import TextTokenizer

ANSWERS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}"
ONE_CALL = """
{%- for t in tools or [] %}{{ t | tojson }}{% endfor %}
{%- for m in messages %}{{ '[' + m.role + ']' + m.content }}{% if m.tool_calls %}
{%- if m.tool_calls | length > 1 %}{{ raise_exception('one call only') }}{% endif %}
{{- m.tool_calls[0].function | tojson }}{% endif %}{{ '<|im_end|>' }}{% endfor %}"""
THINKS = """
{%- set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}
{%- set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}{{ '[' + m.role + ']' }}
{%- if m.reasoning_content and loop.index0 > ns.last %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}
{{- m.content + '<|im_end|>' }}{% endfor %}"""
MOVES_TOOLS = """
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}{% for m in messages %}
{%- if tools and m == users[-1] %}{{ tools | tojson }}{% endif %}{{ '[' + m.role + ']' + m.content + '<|im_end|>' }}
{%- endfor %}"""


def summary(tokenizer: TextTokenizer, source: str) -> str:
    return check_template(Renderer(tokenizer, ChatTemplate(source))).summary


def test_a_template_that_does_everything(tokenizer: TextTokenizer) -> None:
    report = check_template(Renderer(tokenizer, ChatTemplate("{# developer #}" + chatml.TEMPLATE)))
    assert report.append_only
    assert report.tools
    assert report.parallel_calls
    assert report.looks_at_end_only
    assert report.summary == "append-only"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (ANSWERS, "append-only; tools are not shown to the model; developer messages become system messages"),
        (ONE_CALL, "append-only; one call at a time; developer"),
        (ANSWERS + "{{ tools | tojson if tools else '' }}", "calls or their results are not shown to the model"),
        (THINKS, "it would drop reasoning of earlier turns, which stays where a prompt is continued"),
        (ANSWERS.replace("[{{", "{{ loop.index }}[{{"), "the whole past is rendered at each call"),
        ("{{ raise_exception('nothing') }}", "system messages become text of the user"),
    ],
)
def test_what_a_template_does_not_do_is_said(tokenizer: TextTokenizer, source: str, says: str) -> None:
    assert says in summary(tokenizer, source)


def test_a_template_that_rewrites_the_past_is_found_with_the_place(tokenizer: TextTokenizer) -> None:
    report = check_template(Renderer(tokenizer, ChatTemplate(MOVES_TOOLS)))
    assert not report.append_only
    [after_tools] = [rewrite for rewrite in report.rewrites if rewrite.startswith("after a user message once tools")]
    assert after_tools.endswith("""'{"type": "function", "fu' in the past becomes 'user]question<|im_end|>['""")
    assert not any(rewrite.startswith("after a tool result,") for rewrite in report.rewrites)
    assert report.summary.startswith("not append-only: after ")
