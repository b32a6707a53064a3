"""Harness `hermes`: Hermes Agent, headless, over the Chat protocol.

Its exit status is 0 also when the API failed, so the usage file that it writes at its end is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

from msgspec import Meta, field

from rollyard.harnesses.bundled import CONFIG, PROMPT_FILE, AgentArgs, BundledHarness, merged
from rollyard.harnesses.bundles.python import PythonRecipe
from rollyard.harnesses.harness import AgentContext, Command, ReadFile, agent_environment, convert_args
from rollyard.harnesses.reading import Reading, agent_result, json_object, number, text
from rollyard.schemas.rollout import AgentResult

BUNDLE: Final = PythonRecipe(
    name="hermes",
    version="0.19.0",
    program="hermes",
    requirement="hermes-agent==0.19.0",
    main="hermes_cli.main:main",
)
STARTER: Final = "hermes_start.py"
USAGE: Final = ".rollyard/usage.json"
MAX_USAGE_BYTES: Final = 1 << 20
METRICS: Final = {"api_calls": "calls", "input_tokens": "input_tokens", "output_tokens": "output_tokens"}
QUIET: Final = {"HERMES_DISABLE_LAZY_INSTALLS": "1", "HERMES_SKIP_NODE_BOOTSTRAP": "1"}


class HermesArgs(AgentArgs, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of `hermes`."""

    max_turns: Annotated[int, Meta(ge=1, description="model calls; null: the agent's max_calls")] | None = None
    config: Annotated[dict[str, Any], Meta(description=f"{CONFIG} (config.yaml)")] = field(default_factory=dict)


class Hermes(BundledHarness):
    """Runs Hermes for one prompt, which a starter reads from a file: a command line could not hold a long one."""

    name = "hermes"
    bundle = BUNDLE
    args_kind = HermesArgs

    def files(self, context: AgentContext) -> Mapping[str, str | bytes]:
        """config.yaml (JSON is YAML), the prompt, and the starter."""
        agent = context.task.agent
        args = convert_args(agent.args, HermesArgs, self.name)
        model = {"default": agent.model, "provider": "custom", "base_url": context.base_url, "api_key": context.api_key}
        config: dict[str, Any] = {
            "model": model | {"api_mode": "chat_completions"},
            "security": {"allow_lazy_installs": False},
        }
        turns = args.max_turns or agent.max_calls
        if turns:
            config["agent"] = {"max_turns": turns}
        return {
            ".hermes/config.yaml": json.dumps(merged(config, args.config)),
            PROMPT_FILE: context.task.prompt,
            f".rollyard/{STARTER}": (Path(__file__).with_name("programs") / STARTER).read_bytes(),
        }

    def command(self, context: AgentContext) -> Command:
        """Raises HarnessError."""
        args = convert_args(context.task.agent.args, HermesArgs, self.name)
        home = context.home
        python = (self.program(context, "python3"), "-E", "-s", "-B", "-X", "utf8", f"{home}/.rollyard/{STARTER}")
        argv = (*python, f"{home}/{PROMPT_FILE}", "--usage-file", f"{home}/{USAGE}", "--yolo", *args.flags)
        env = QUIET | agent_environment(context) | {"HERMES_HOME": f"{home}/.hermes"} | args.env
        return Command(argv, env)

    async def result(
        self, context: AgentContext, exit_code: int | None, stdout: bytes, stderr: bytes, read: ReadFile
    ) -> AgentResult:
        """The answer is the standard output, unless that is a complaint."""
        args = convert_args(context.task.agent.args, HermesArgs, self.name)
        turns = args.max_turns or context.task.agent.max_calls or 0
        usage = await read(f"{context.home}/{USAGE}", MAX_USAGE_BYTES)
        return agent_result("Hermes", exit_code, read_hermes(stdout, usage, turns), stderr or stdout)


def read_hermes(stdout: bytes, usage: bytes | None, max_turns: int = 0) -> Reading:
    """What the usage file says; None: it was not written. `max_turns` is the limit that it was given, 0: none."""
    answer = stdout.decode(errors="replace").strip()
    report = json_object(usage or b"")
    if report is None:
        return Reading(answer=answer)
    metrics = {name: number(report, key) for key, name in METRICS.items()}
    failed = report.get("failed") is not False
    # At its limit it asks once more, for a summary, and calls that completed.
    spent = 0 < max_turns < metrics["calls"]
    complaint = ""
    if failed:
        complaint = text(report, "failure") or answer[-500:] or "it says that it failed"
    elif spent:
        complaint = f"it made {metrics['calls']:g} calls"
    elif report.get("completed") is not True:
        complaint = "it says that it did not complete its work"
    return Reading(
        answer="" if failed else answer,
        finished=True,
        complaint=complaint,
        out_of_budget=spent,
        metrics=metrics,
    )
