"""Harness `codex`: Codex CLI, headless, over the Responses protocol.

Its exit status is 0 also when nothing of a reply reached it, so its events are read: a turn must have been completed,
and sampled tokens must have led to something. Items of type `error` are remarks, and `error` events announce retries.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Final

from msgspec import Meta, field

from rollyard.harnesses.bundled import CONFIG, AgentArgs, BundledHarness, merged
from rollyard.harnesses.bundles.npm import NpmRecipe
from rollyard.harnesses.harness import AgentContext, Command, ReadFile, agent_environment, convert_args
from rollyard.harnesses.reading import Reading, agent_result, json_lines, number, part, text
from rollyard.schemas.rollout import AgentResult

VENDOR: Final = "@openai/codex-linux-x64/vendor/x86_64-unknown-linux-musl"
BUNDLE: Final = NpmRecipe(
    name="codex",
    version="0.171.0",
    program="codex",
    packages={"@openai/codex": "0.171.0"},
    take={f"{VENDOR}/bin/codex": "codex", f"{VENDOR}/codex-path": "path"},
    kind="static",
    main="codex",
)
ANSWER: Final = ".rollyard/answer.txt"
MAX_ANSWER_FILE_BYTES: Final = 1 << 20
WORK: Final = ("command_execution", "file_change", "mcp_tool_call", "collab_tool_call", "web_search")
SILENT_TOKENS: Final = 16
"""A reply of so many tokens says something; an empty one has one or two."""


class CodexArgs(AgentArgs, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of `codex`."""

    config: Annotated[dict[str, Any], Meta(description=f"{CONFIG} (config.toml)")] = field(default_factory=dict)


class Codex(BundledHarness):
    """Runs `codex exec --json` with a configuration of its own; the prompt is its standard input."""

    name = "codex"
    bundle = BUNDLE
    args_kind = CodexArgs
    kept_files = (".codex/sessions/**/*.jsonl",)

    def files(self, context: AgentContext) -> Mapping[str, str | bytes]:
        """config.toml: the gateway as its only provider, no questions asked, nothing else asked of the network."""
        config = {
            "model": context.task.agent.model,
            "model_provider": "gateway",
            "approval_policy": "never",
            "sandbox_mode": "danger-full-access",
            "check_for_update_on_startup": False,
            "analytics": {"enabled": False},
            "feedback": {"enabled": False},
            "features": {"apps": False, "plugins": False},
            "model_providers": {
                "gateway": {
                    "name": "gateway",
                    "base_url": context.base_url,
                    "env_key": "GATEWAY_KEY",
                    "wire_api": "responses",
                }
            },
        }
        args = convert_args(context.task.agent.args, CodexArgs, self.name)
        return {".codex/config.toml": to_toml(merged(config, args.config)), ".rollyard/.keep": ""}

    def command(self, context: AgentContext) -> Command:
        """The folder need be no git repository. Raises HarnessError."""
        args = convert_args(context.task.agent.args, CodexArgs, self.name)
        argv = (self.program(context), "exec", "--json", "--skip-git-repo-check", "-C", context.workdir)
        env = agent_environment(context) | {"GATEWAY_KEY": context.api_key} | args.env
        answer = ("-o", f"{context.home}/{ANSWER}")
        return Command((*argv, *answer, *args.flags, "-"), env, context.task.prompt.encode())

    async def result(
        self, context: AgentContext, exit_code: int | None, stdout: bytes, stderr: bytes, read: ReadFile
    ) -> AgentResult:
        """The answer is the file that Codex wrote at its end, else its last message so far."""
        reading = read_codex(stdout)
        kept = await read(f"{context.home}/{ANSWER}", MAX_ANSWER_FILE_BYTES) or b""
        answer = kept.decode(errors="replace") or reading.answer
        told = Reading(
            answer=answer,
            finished=reading.finished,
            complaint=reading.complaint,
            out_of_budget=reading.out_of_budget,
            metrics=reading.metrics,
        )
        return agent_result("Codex", exit_code, told, stderr)

    def progress(self, stdout: bytes, stderr: bytes) -> Mapping[str, float]:
        """Messages and tool calls so far."""
        return read_codex(stdout).metrics


def read_codex(stdout: bytes) -> Reading:
    """What the events of `codex exec --json` say."""
    answer, complaint, finished = "", "", False
    counts = dict.fromkeys(("messages", "tool_calls", "reconnects", "input_tokens", "output_tokens"), 0.0)
    for event in json_lines(stdout):
        match text(event, "type"):
            case "item.completed":
                item = part(event, "item")
                kind = text(item, "type")
                if kind == "agent_message":
                    answer = text(item, "text")
                    counts["messages"] += 1
                counts["tool_calls"] += kind in WORK
            case "error":
                counts["reconnects"] += text(event, "message").startswith("Reconnecting")
            case "turn.failed":
                finished = True
                complaint = text(part(event, "error"), "message") or "its turn failed, without a word why"
            case "turn.completed":
                finished, complaint = True, ""
                for key in ("input_tokens", "output_tokens"):
                    counts[key] += number(part(event, "usage"), key)
    silent = not counts["messages"] and not counts["tool_calls"]
    if finished and not complaint and silent and counts["output_tokens"] > SILENT_TOKENS:
        complaint = f"neither a message nor a call of the {counts['output_tokens']:g} sampled tokens reached it"
    return Reading(answer=answer, finished=finished, complaint=complaint, metrics=counts)


def to_toml(config: Mapping[str, Any], prefix: str = "") -> str:
    """A configuration as TOML, one dotted key a line."""
    lines = []
    for key, value in config.items():
        path = prefix + (key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else json.dumps(key))
        lines.append(to_toml(value, f"{path}.") if isinstance(value, dict) else f"{path} = {json.dumps(value)}\n")
    return "".join(lines)
