"""Chat templates: messages to text, as the model was trained on it.

A template comes with a model, from the network: it runs in jinja's immutable sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rollyard.gateway.tokens.dialect import dialect_of
from rollyard.schemas.call import Message
from rollyard.schemas.errors import ModelError


class ChatTemplate:
    """A Jinja chat template. `tokens` are variables it may use (`bos_token`); `now` is what it takes for today.

    Raises ModelError when the source is not a template.
    """

    def __init__(
        self, source: str, *, tokens: Mapping[str, str] | None = None, now: Callable[[], datetime] = datetime.now
    ) -> None:
        environment = _Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = _tojson
        environment.globals.update(raise_exception=_raise, strftime_now=lambda form: now().strftime(form))
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"the chat template is broken: {error}", hint="give the model's own template") from error
        self._tokens = dict(tokens or {})
        self.dialect = dialect_of(source, lambda messages: self._rendered(messages, None, False, {}))

    def render(
        self,
        messages: list[Message],
        tools: list[Message] | None,
        add_generation_prompt: bool,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as text, in the template's dialect. `options` are variables, such as `enable_thinking`.

        Raises ModelError when the template refuses the messages, or they hold more than text.
        """
        return self._rendered(self.dialect.adapt(plain_messages(messages)), tools, add_generation_prompt, options or {})

    def _rendered(
        self, messages: list[Message], tools: list[Message] | None, generate: bool, options: Mapping[str, Any]
    ) -> str:
        variables = {**self._tokens, **options, "messages": messages, "tools": tools or None}
        try:
            return self._template.render(variables, add_generation_prompt=generate)
        except Exception as error:  # a template is a program: any error can come out of it
            raise ModelError(
                f"the chat template refuses the messages: {type(error).__name__}: {error}",
                hint="check the order of roles and that the model supports tools; capture mode needs no template",
                status=400,
            ) from error


def plain_messages(messages: list[Message]) -> list[Message]:
    """Messages as templates expect them: content text or null, tool arguments as objects. Idempotent.

    Raises ModelError for content that is not text.
    """
    return [_plain_message(message) for message in messages]


def _plain_message(message: Message) -> Message:
    plain = {**message, "content": text_of(message.get("content"))}
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [_plain_call(call) for call in calls]
    return plain


def _plain_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def text_of(content: Any) -> str | None:
    """The text of a message's content: a string, null, or text parts, which are joined by newlines."""
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [part if isinstance(part, str) else _text_part(part) for part in content]
        if None not in texts:
            return "\n".join(text for text in texts if text is not None)
    raise ModelError(
        f"a message's content is not text: {str(content)[:80]}",
        hint="send text parts only; images need a server in capture mode",
        status=400,
    )


def _text_part(part: Any) -> str | None:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    return text if isinstance(text, str) else None


class _Sandbox(ImmutableSandboxedEnvironment):
    """Templates may keep notes in lists, as Kimi's does. What the renderer hands out is a copy."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, list) and attr in ("append", "extend", "pop"):
            return True
        return super().is_safe_attribute(obj, attr, value)


class _Generation(Extension):
    """The `{% generation %}` block, which marks sampled text for other libraries. Here only its body counts."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
