"""Harness `claude_code`: Claude Code, headless, over the Messages protocol.

The last line of its output is the `result`. Its subtype is `success` also when the API failed: `is_error` counts. An
agent that was killed has written no such line.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, field

from rollyard.harnesses.bundled import AgentArgs, BundledHarness
from rollyard.harnesses.bundles.npm import RIPGREP, RIPGREP_PATH, NpmRecipe
from rollyard.harnesses.harness import AgentContext, Command, ReadFile, agent_environment, convert_args
from rollyard.harnesses.reading import Reading, agent_result, json_lines, number, part, text
from rollyard.schemas.rollout import AgentResult

BUNDLE: Final = NpmRecipe(
    name="claude_code",
    version="2.1.197",
    program="claude",
    packages={"@anthropic-ai/claude-code": "2.1.197"} | RIPGREP,
    take={"@anthropic-ai/claude-code-linux-x64/claude": "claude"} | RIPGREP_PATH,
    kind="native",
    main="claude",
)
QUIET: Final = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",  # telemetry, error reports, updates, the call for a title
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_INSTALLATION_CHECKS": "1",
    "IS_SANDBOX": "1",  # else it refuses to work as root without asking
}


class ClaudeArgs(AgentArgs, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of `claude_code`."""

    max_turns: Annotated[int, Meta(ge=1, description="turns of the main agent; null: the agent's max_calls")] | None = (
        None
    )
    max_retries: Annotated[int, Meta(ge=0, description="how often a failed call is tried again")] = 10
    settings: Annotated[dict[str, Any], Meta(description="the agent's own settings (settings.json)")] = field(
        default_factory=dict
    )


class ClaudeCode(BundledHarness):
    """Runs `claude -p` with the prompt as its standard input; all of it is allowed."""

    name = "claude_code"
    bundle = BUNDLE
    args_kind = ClaudeArgs
    kept_files = (".claude/projects/**/*.jsonl",)

    def files(self, context: AgentContext) -> Mapping[str, str | bytes]:
        """Its settings, if the task has any; it needs no file."""
        args = convert_args(context.task.agent.args, ClaudeArgs, self.name)
        return {".claude/settings.json": msgspec.json.encode(args.settings)} if args.settings else {}

    def command(self, context: AgentContext) -> Command:
        """Raises HarnessError."""
        args = convert_args(context.task.agent.args, ClaudeArgs, self.name)
        turns = args.max_turns or context.task.agent.max_calls
        argv = (
            *(self.program(context), "-p", "--output-format", "stream-json", "--verbose"),
            *("--dangerously-skip-permissions", "--model", context.task.agent.model),
            *(("--max-turns", str(turns)) if turns else ()),
            *args.flags,
        )
        env = QUIET | {"CLAUDE_CODE_MAX_RETRIES": str(args.max_retries)} | agent_environment(context) | args.env
        return Command(argv, env, context.task.prompt.encode())

    async def result(
        self, context: AgentContext, exit_code: int | None, stdout: bytes, stderr: bytes, read: ReadFile
    ) -> AgentResult:
        """The answer is the result's text, else its last text so far."""
        return agent_result("Claude Code", exit_code, read_claude(stdout), stderr)

    def progress(self, stdout: bytes, stderr: bytes) -> Mapping[str, float]:
        """Turns, tool calls and retries so far."""
        return read_claude(stdout).metrics


def read_claude(stdout: bytes) -> Reading:
    """What the events of `claude -p --output-format stream-json` say."""
    answer, result = "", None
    retry: dict[str, Any] = {}  # the last event, if it tells of one
    messages: set[str] = set()
    counts = {"tool_calls": 0.0, "retries": 0.0}
    for event in json_lines(stdout):
        retry = event if text(event, "subtype") == "api_retry" else {}
        match text(event, "type"), text(event, "subtype"):
            case "assistant", _:
                message = part(event, "message")
                messages.add(text(message, "id"))
                content = message.get("content")
                for block in content if isinstance(content, list) else []:
                    if text(block, "type") == "text":
                        answer = text(block, "text")
                    counts["tool_calls"] += text(block, "type") == "tool_use"
            case "system", "api_retry":
                counts["retries"] += 1
            case "result", _:
                result = event
    counts["turns"] = float(len(messages))
    if result is None:
        status = number(retry, "error_status")
        trying = f"it was still trying a failed call again (HTTP status {status:g})" if status else ""
        return Reading(answer=answer, complaint=trying, metrics=counts)
    usage = part(result, "usage")
    counts["turns"] = number(result, "num_turns") or counts["turns"]
    counts["input_tokens"] = sum(
        number(usage, key) for key in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    )
    counts["output_tokens"] = number(usage, "output_tokens")
    subtype = text(result, "subtype")
    return Reading(
        answer=text(result, "result") or answer,
        finished=True,
        complaint=_complaint(result, subtype),
        out_of_budget=subtype == "error_max_turns",
        metrics=counts,
    )


def _complaint(result: Mapping[str, Any], subtype: str) -> str:
    if result.get("is_error") is False and subtype == "success":
        return ""
    errors = result.get("errors")
    said = [each for each in errors if isinstance(each, str)] if isinstance(errors, list) else []
    status = number(result, "api_error_status")
    words = text(result, "result") or "; ".join(said) or subtype or "it says that there was an error"
    return f"{words} (HTTP status {status:g})" if status else words
