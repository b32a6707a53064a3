from __future__ import annotations

from typing import Any

import pytest

from rollyard.gateway.tokens.template import ChatTemplate

Messages = list[dict[str, Any]]
SYSTEM = {"role": "system", "content": "s"}
DEVELOPER = {"role": "developer", "content": "d"}
USER = {"role": "user", "content": "u"}
SAID = {"role": "assistant", "content": "a"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": "y"}'}}
ASKED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "r", "tool_call_id": "1"}

ANY_ROLE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
KNOWS_DEVELOPER = "{# developer #}" + ANY_ROLE
DROPS_UNKNOWN = (
    "{% for m in messages if m.role in ('system', 'user', 'assistant', 'tool') %}[{{ m.role }}]{{ m.content }}"
    "{% endfor %}"
)
FIRST_ONLY = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('only at the start') }}"
    "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
GATHERS = (
    "{% for m in messages if m.role == 'system' %}[system]{{ m.content }}{% endfor %}"
    "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
ALTERNATES = (
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}{% if m.role != 'tool' and not m.tool_calls %}{% if (m.role == 'user') != (ns.n % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% set ns.n = ns.n + 1 %}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "messages", "text"),
    [
        (ANY_ROLE, [DEVELOPER, USER], "[system]d[user]u"),
        (KNOWS_DEVELOPER, [DEVELOPER, USER], "[developer]d[user]u"),
        (DROPS_UNKNOWN, [DEVELOPER, USER, SAID, DEVELOPER, USER], "[system]d[user]u[assistant]a[system]d[user]u"),
        (FIRST_ONLY, [SYSTEM, DEVELOPER, USER], "[system]s\n\nd[user]u"),
        (FIRST_ONLY, [SYSTEM, USER, SAID, SYSTEM, USER], "[system]s[user]u[assistant]a[user]s[user]u"),
        (GATHERS, [SYSTEM, DEVELOPER, USER], "[system]s[system]d[user]u"),
        (GATHERS, [SYSTEM, USER, SAID, SYSTEM, USER], "[system]s[user]u[assistant]a[user]s[user]u"),
        (ALTERNATES, [SYSTEM, DEVELOPER, USER], "[user]s\n\nd\n\nu"),
        (ALTERNATES, [SYSTEM, USER, SAID, SYSTEM, USER], "[user]s\n\nu[assistant]a[user]s\n\nu"),
        (ALTERNATES, [USER, ASKED, RESULT, USER, SYSTEM, SAID], "[user]u[assistant][tool]r\n\nu\n\ns[assistant]a"),
    ],
)
def test_messages_that_a_template_refuses_or_drops_are_put_in_another_form(
    source: str, messages: Messages, text: str
) -> None:
    before = [dict(message) for message in messages]

    assert ChatTemplate(source).render(messages, None, True) == text
    assert messages == before


def test_arguments_are_objects_or_text_as_the_template_wants_them() -> None:
    calls = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ ARGUMENTS }}{% endfor %}{% endfor %}"
    wants_text = calls.replace("ARGUMENTS", "c.function.name + c.function.arguments")
    wants_object = calls.replace("ARGUMENTS", "c.function.arguments.x")
    takes_both = calls.replace("ARGUMENTS", "c.function.arguments | tojson")

    for source, text in ((wants_text, 'f{"x": "y"}'), (wants_object, "y"), (takes_both, '{"x": "y"}')):
        assert ChatTemplate(source).render([USER, ASKED], None, True) == text


def test_a_template_that_can_do_everything_gets_messages_as_they_are() -> None:
    source = "{# developer #}{% for m in messages %}{{ m.role }}{{ m.content }}{{ m.tool_calls }}{% endfor %}"
    template = ChatTemplate(source)
    assert template.dialect.adapt([SYSTEM, DEVELOPER, USER, USER, SAID]) == [SYSTEM, DEVELOPER, USER, USER, SAID]
