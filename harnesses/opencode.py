"""Harness `opencode`: opencode, headless, over the Chat protocol. What went wrong is told by its `error` events."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Final

from msgspec import Meta, field

from rollyard.harnesses.bundled import CONFIG, AgentArgs, BundledHarness, merged
from rollyard.harnesses.bundles.npm import RIPGREP, RIPGREP_PATH, NpmRecipe
from rollyard.harnesses.harness import AgentContext, Command, ReadFile, agent_environment, convert_args
from rollyard.harnesses.reading import Reading, agent_result, json_lines, number, part, text
from rollyard.schemas.rollout import AgentResult

BUNDLE: Final = NpmRecipe(
    name="opencode",
    version="1.18.33",
    program="opencode",
    # The package opencode-ai only chooses among packages like this one, which runs on every x86-64 processor.
    packages={"opencode-linux-x64-baseline": "1.18.33"} | RIPGREP,
    take={"opencode-linux-x64-baseline/bin/opencode": "opencode"} | RIPGREP_PATH,
    kind="native",
    main="opencode",
)
QUIET: Final = {
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "OPENCODE_DISABLE_SHARE": "1",
}


class OpencodeArgs(AgentArgs, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of `opencode`."""

    max_steps: Annotated[int, Meta(ge=1, description="turns; null: the agent's max_calls")] | None = None
    title: Annotated[str, Meta(description="title of its session; empty: it asks the model for one")] = "task"
    context_tokens: Annotated[int, Meta(ge=1, description="context of the model")] = 200_000
    output_tokens: Annotated[int, Meta(ge=1, description="tokens that a reply may have")] = 32_000
    config: Annotated[dict[str, Any], Meta(description=f"{CONFIG} (opencode.json)")] = field(default_factory=dict)


class Opencode(BundledHarness):
    """Runs `opencode run --format json` with the prompt as its standard input."""

    name = "opencode"
    bundle = BUNDLE
    args_kind = OpencodeArgs

    def files(self, context: AgentContext) -> Mapping[str, str | bytes]:
        """opencode.json: the gateway as its provider, everything allowed, no updates and no sharing."""
        agent = context.task.agent
        args = convert_args(agent.args, OpencodeArgs, self.name)
        models = {agent.model: {"limit": {"context": args.context_tokens, "output": args.output_tokens}}}
        options = {"baseURL": context.base_url, "apiKey": context.api_key}
        config: dict[str, Any] = {
            "provider": {"gateway": {"npm": "@ai-sdk/openai-compatible", "options": options, "models": models}},
            "model": f"gateway/{agent.model}",
            "permission": {"*": "allow"},
            "autoupdate": False,
            "share": "disabled",
        }
        steps = args.max_steps or agent.max_calls
        if steps:
            config["agent"] = {"build": {"steps": steps}}
        return {".config/opencode/opencode.json": json.dumps(merged(config, args.config))}

    def command(self, context: AgentContext) -> Command:
        """Raises HarnessError."""
        args = convert_args(context.task.agent.args, OpencodeArgs, self.name)
        title = ("--title", args.title) if args.title else ()
        argv = (self.program(context), "run", "--format", "json", *title, *args.flags)
        return Command(argv, QUIET | agent_environment(context) | args.env, context.task.prompt.encode())

    async def result(
        self, context: AgentContext, exit_code: int | None, stdout: bytes, stderr: bytes, read: ReadFile
    ) -> AgentResult:
        """The answer is the text of its last step."""
        args = convert_args(context.task.agent.args, OpencodeArgs, self.name)
        steps = args.max_steps or context.task.agent.max_calls or 0
        return agent_result("opencode", exit_code, read_opencode(stdout, steps), stderr)

    def progress(self, stdout: bytes, stderr: bytes) -> Mapping[str, float]:
        """Turns, tool calls and tokens so far."""
        return read_opencode(stdout).metrics


def read_opencode(stdout: bytes, max_steps: int = 0) -> Reading:
    """What the events of `opencode run --format json` say; `max_steps` is the limit that it was given, 0: none."""
    answer, complaint, reason = "", "", ""
    counts = dict.fromkeys(("turns", "tool_calls", "input_tokens", "output_tokens"), 0.0)
    for event in json_lines(stdout):
        about = part(event, "part")
        match text(event, "type"):
            case "text":
                answer = text(about, "text")
            case "tool_use":
                counts["tool_calls"] += 1
            case "step_finish":
                reason = text(about, "reason")
                counts["turns"] += 1
                tokens = part(about, "tokens")
                cache = part(tokens, "cache")
                counts["input_tokens"] += number(tokens, "input") + number(cache, "read") + number(cache, "write")
                counts["output_tokens"] += number(tokens, "output") + number(tokens, "reasoning")
            case "error":
                error = part(event, "error")
                data = part(error, "data")
                complaint = text(data, "message") or text(error, "message") or text(error, "name") or "an error"
                if status := number(data, "statusCode"):
                    complaint += f" (HTTP status {status:g})"
    spent = bool(max_steps) and counts["turns"] >= max_steps and not complaint
    if spent:  # it was told that this step is its last
        complaint = f"it took {counts['turns']:g} steps"
    return Reading(
        answer=answer,
        # A step that ends with tool calls is followed by another one.
        finished=bool(complaint) or reason not in ("", "tool-calls"),
        complaint=complaint,
        out_of_budget=spent,
        metrics=counts,
    )
