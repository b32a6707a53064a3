"""What a model's template can do, found out at registration by rendering a few small conversations. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from rollyard.gateway.tokens.continuation import Turn, continuation
from rollyard.gateway.tokens.renderer import Renderer
from rollyard.gateway.tokens.template import plain_messages
from rollyard.schemas.call import Message
from rollyard.schemas.errors import ModelError

_SHOWN_CHARS: Final = 24
_NAME, _ARGUMENT, _RESULT, _THOUGHT = "look_up", "argument0", "result0", "thought0"


@dataclass(frozen=True, slots=True)
class TemplateReport:
    """The findings. `rewrites` says, in words, after which messages the template writes the past differently.

    There a prompt cannot be continued: the gateway renders it anew, and the trajectory has one more branch.
    """

    append_only: bool
    rewrites: tuple[str, ...]
    tools: bool
    tool_results: bool
    parallel_calls: bool
    reasoning: bool
    old_reasoning: bool
    system: bool
    developer: bool
    system_later: bool
    looks_at_end_only: bool

    @property
    def summary(self) -> str:
        """One line for people."""
        parts = ["append-only" if self.append_only else "not append-only: " + "; ".join(self.rewrites)]
        if not self.tools:
            parts.append("tools are not shown to the model")
        elif not self.tool_results:
            parts.append("calls or their results are not shown to the model")
        elif not self.parallel_calls:
            parts.append("one call at a time")
        if not self.system:
            parts.append("system messages become text of the user")
        elif not self.system_later:
            parts.append("later system messages become text of the user")
        if not self.developer:
            parts.append("developer messages become system messages")
        if self.reasoning and not self.old_reasoning:
            parts.append("it would drop reasoning of earlier turns, which stays where a prompt is continued")
        if not self.looks_at_end_only:
            parts.append("the whole past is rendered at each call")
        return "; ".join(parts)


def check_template(renderer: Renderer) -> TemplateReport:
    """Render conversations with tools, results, reasoning, several turns and all roles. Raises nothing."""
    template, dialect = renderer.template, renderer.template.dialect
    tools = [_tool()]

    def shows(messages: list[Message], *words: str, declared: list[Message] | None = None) -> bool:
        try:
            text = template.render(plain_messages(messages), declared, True)
        except ModelError:
            return False
        return all(word in text for word in words)

    thinking = {**_asks("c00000000"), "reasoning_content": _THOUGHT}
    current = [_user(), thinking, _result("c00000000")]
    calls: list[Message] = [_asks("c00000000", "c00000001"), _result("c00000000"), _result("c00000001")]
    rewrites = tuple(found for after, turn in _steps(tools) if (found := _rewrite(renderer, after, turn, shows)))
    with_tools = shows([_user()], _NAME, declared=tools)
    return TemplateReport(
        append_only=not rewrites,
        rewrites=rewrites,
        tools=with_tools,
        tool_results=shows(current, _ARGUMENT, _RESULT, declared=tools),
        parallel_calls=shows([_user(), *calls], "c00000000" + _RESULT, "c00000001" + _RESULT, declared=tools),
        reasoning=shows(current, _THOUGHT, declared=tools),
        old_reasoning=shows([*current, _says(), _user()], _THOUGHT, declared=tools),
        system=dialect.system,
        developer=dialect.developer,
        system_later=dialect.system_later,
        looks_at_end_only=renderer.looks_at_end_only(False) and (not with_tools or renderer.looks_at_end_only(True)),
    )


def _steps(tools: list[Message]) -> list[tuple[str, Turn]]:
    """What can follow a reply, in words."""
    system: Message = {"role": "system", "content": "instructions"}
    start, call, result = [system, _user()], _asks("c00000000"), _result("c00000000")
    return [
        ("a user message", Turn(start, _says(), [_user("next")])),
        ("a tool result", Turn(start, call, [result], tools)),
        ("a second tool result", Turn([*start, call, result], call, [result], tools)),
        ("a tool result and a user message", Turn(start, call, [result, _user("next")], tools)),
        ("a user message once tools were used", Turn([*start, call, result], _says(), [_user("next")], tools)),
    ]


def _rewrite(renderer: Renderer, after: str, turn: Turn, shows: Callable[..., bool]) -> str:
    """What the template does to the past, in words; "" when it leaves it as it is, or cannot render this at all."""
    if not shows([*turn.history, turn.reply, *turn.new], declared=turn.tools):
        return ""
    plain = Turn(turn.history, turn.reply, plain_messages(turn.new), turn.tools)
    if continuation(renderer.tokenizer, renderer.template, plain) is not None:
        return ""
    before = renderer.template.render(plain_messages(turn.history), turn.tools, False)
    text = renderer.template.render(plain_messages([*turn.history, turn.reply, *turn.new]), turn.tools, True)
    at = next((at for at, (one, other) in enumerate(zip(before, text, strict=False)) if one != other), len(before))
    was, now = before[at : at + _SHOWN_CHARS], text[at : at + _SHOWN_CHARS]
    return f"after {after}, {was!r} in the past becomes {now!r}"


def _tool() -> Message:
    parameters = {"type": "object", "properties": {"q": {"type": "string", "description": "what"}}, "required": ["q"]}
    return {"type": "function", "function": {"name": _NAME, "description": "Looks it up.", "parameters": parameters}}


def _user(text: str = "question") -> Message:
    return {"role": "user", "content": text}


def _says() -> Message:
    return {"role": "assistant", "content": "answer"}


def _asks(*numbers: str) -> Message:
    function = {"name": _NAME, "arguments": {"q": _ARGUMENT}}
    calls = [{"id": number, "type": "function", "function": function} for number in numbers]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _result(number: str) -> Message:
    content = [{"type": "text", "text": number + _RESULT}]
    return {"role": "tool", "content": content, "tool_call_id": number, "name": _NAME}
