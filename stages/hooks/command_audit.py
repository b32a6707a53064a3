"""Hook `command_audit`: which tools the model asked its agent to use, from the gateway's log.

That is what can be known honestly: the log holds each tool call exactly as it was sampled, and an agent cannot change
it. It does not show what a command started in turn, what an agent does without being asked, or commands that a model
writes as plain text. Shell histories and process lists show less, and an agent may write what it likes there.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from rollyard.schemas.call import CallEnd
from rollyard.schemas.rollout import AgentResult
from rollyard.stages.hook import HookArgs, HookContext, Veto

FILE: Final = "commands.jsonl"


class CommandAudit(HookArgs, kw_only=True):
    """Adds `commands.jsonl`, one tool call a line, and the metrics tool_calls and flagged_calls."""

    flag: Annotated[tuple[str, ...], Meta(description="regular expressions looked for in name and arguments")] = ()
    on_flag: Annotated[Literal["count", "fail"], Meta(description="fail: the attempt ends as class agent")] = "count"

    def __post_init__(self) -> None:
        try:
            self.flags = [re.compile(pattern) for pattern in self.flag]
        except re.error as error:
            raise ValueError(f"{error.pattern!r} is no regular expression: {error}") from error

    async def after_run(self, context: HookContext, result: AgentResult) -> None:
        """Read the calls of the attempt, and judge them."""
        if context.read_calls is None:
            return
        found = [
            call for event in await context.read_calls() if isinstance(event, CallEnd) for call in tool_calls(event)
        ]
        lines, flagged = [], []
        for call in found:
            text = f"{call['name']} {call['arguments']}"
            hits = [each.pattern for each in self.flags if each.search(text)]
            lines.append(msgspec.json.encode({**call, "flags": hits} if hits else call))
            flagged += [text[:200]] if hits else []
        context.add_metric("tool_calls", len(found))
        context.add_metric("flagged_calls", len(flagged))
        if found:
            context.add_file(FILE, b"\n".join(lines) + b"\n")
        if flagged:
            context.add_metadata("flagged_calls", flagged[:20])
            if self.on_flag == "fail":
                raise Veto("agent", f"{len(flagged)} tool calls are not allowed, the first is: {flagged[0]}")


def tool_calls(event: CallEnd) -> list[dict[str, Any]]:
    """The tool calls of one reply: when, which tool, and its arguments as they were sampled."""
    if event.status != "ok" or not isinstance(event.reply, dict):
        return []
    calls = []
    for call in event.reply.get("tool_calls") or ():
        function = call.get("function") or {}
        calls.append(
            {
                "at_ms": event.at_ms,
                "call_id": event.call_id,
                "name": str(function.get("name", "")),
                "arguments": str(function.get("arguments", "")),
            }
        )
    return calls
