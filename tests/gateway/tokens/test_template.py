from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from rollyard.gateway.tokens.template import ChatTemplate, plain_messages, text_of
from rollyard.schemas.errors import ModelError

USER = {"role": "user", "content": "hi"}


def render(source: str, messages: list[dict[str, Any]] | None = None, **options: Any) -> str:
    return ChatTemplate(source).render(messages or [USER], None, True, options)


def test_blocks_leave_no_blanks_and_loops_can_be_left() -> None:
    leave = "    {% if m.role == 'tool' %}\n{% continue %}\n{% endif %}\n"
    source = "{% for m in messages %}\n" + leave + "{{ m.content }}\n{% endfor %}"
    assert render(source, [USER, {"role": "tool", "content": "no"}, USER]) == "hi\nhi\n"


def test_json_keeps_unicode_and_markup() -> None:
    assert render("{{ {'a': 'é<b>'} | tojson }}") == '{"a": "é<b>"}'


def test_a_template_may_keep_notes_in_its_own_lists() -> None:
    assert (
        render("{% set seen = [] %}{% set _ = seen.append('a') %}{% set _ = seen.extend(['b']) %}{{ seen.pop(0) }}")
        == "a"
    )


def test_the_generation_block_is_its_body() -> None:
    assert render("a{% generation %}{{ messages[0].content }}{% endgeneration %}b") == "ahib"


def test_today_is_what_the_caller_says() -> None:
    template = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", now=lambda: datetime(2024, 2, 29))
    assert template.render([USER], None, True) == "2024-02-29"


def test_tokens_and_options_are_variables() -> None:
    template = ChatTemplate("{{ bos_token }}{{ enable_thinking }}", tokens={"bos_token": "<s>"})
    assert template.render([USER], None, True, {"enable_thinking": False}) == "<s>False"


def test_parts_become_text_and_arguments_objects() -> None:
    message = {
        "role": "assistant",
        "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
            {"id": "2", "type": "function", "function": {"name": "f", "arguments": "not json"}},
            {"id": "3", "type": "function", "function": {"name": "f", "arguments": '"text"'}},
        ],
    }

    (plain,) = plain_messages([message])

    assert plain["content"] == "a\nb"
    assert [call["function"]["arguments"] for call in plain["tool_calls"]] == [{"x": 1}, "not json", '"text"']
    assert plain_messages([plain]) == [plain]
    assert message["content"] != "a\nb"


def test_a_reply_without_text_suits_templates_that_need_text() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    reply = {"role": "assistant", "content": None, "tool_calls": [call]}
    adds = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
    writes = "{% for m in messages %}{{ m.content }}|{% endfor %}"
    asks = "{% for m in messages %}{% if m.content is none %}null{% else %}text{% endif %}{% endfor %}"
    needs = (
        "{% for m in messages %}{% if m.content is none %}{{ m.tool_calls[0].function.arguments | tojson }}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )

    assert render(adds, [USER, reply]) == "userhiassistant"
    assert render(writes, [USER, reply]) == "hi||"
    assert render(asks, [USER, reply]) == "texttext"
    assert render(needs, [USER, reply]) == "hi{}"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].update({'a': 1}) }}", "SecurityError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ missing.field }}", "UndefinedError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ],
)
def test_a_template_that_fails_is_a_model_error(source: str, says: str) -> None:
    with pytest.raises(ModelError, match=says) as caught:
        render(source)
    assert caught.value.hint
    assert caught.value.status == 400


def test_a_source_that_is_no_template_is_refused() -> None:
    with pytest.raises(ModelError, match="the chat template is broken"):
        ChatTemplate("{% for %}")


def test_content_that_is_not_text_is_refused() -> None:
    with pytest.raises(ModelError, match=r"not text.*image_url"):
        text_of([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:"}}])
    with pytest.raises(ModelError, match="not text"):
        text_of({"type": "text"})
