"""How each agent is run at a gateway alone: as its harness says, in a folder, with a home of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import agent_tools

from rollyard.harnesses.bundles.bundle import find_bundle
from rollyard.harnesses.harness import AgentContext, open_harness
from rollyard.schemas.rollout import AgentResult, Rollout
from rollyard.schemas.task import AgentSpec, Task, Timeouts

LIMIT_S = 600.0
"""No run of these tests takes nearly as long; an agent that hangs is killed, and its test fails."""
NOWHERE = "http://127.0.0.1:9"
MODEL = "scripted-model"
"""A name that no agent knows."""
OPTIONS: dict[str, dict[str, Any]] = {"opencode": {"title": ""}}
"""So that the calls which harnesses leave out are seen as well."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What an agent is given. `url` has no path; `options` are arguments of its harness."""

    url: str
    key: str
    prompt: str
    home: Path
    work: Path
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Done:
    """What an agent left, and what its harness makes of that. `exit_code` is -9 when its time was over."""

    exit_code: int
    stdout: str
    stderr: str
    work: Path
    result: AgentResult

    def events(self) -> list[dict[str, Any]]:
        """Its output, where that is a JSON object a line."""
        return [json.loads(line) for line in self.stdout.splitlines() if line.startswith("{")]

    def told(self) -> str:
        """For the message of an assertion."""
        return f"exit code {self.exit_code}\n{self.stdout[-3000:]}\n{self.stderr[-3000:]}\n{self.result.failure}"


def context_of(agent: str, job: Job) -> AgentContext:
    """What the agent's harness is told."""
    name = agent_tools.HARNESSES.get(agent, agent)
    task = Task(
        prompt=job.prompt,
        agent=AgentSpec(harness=name, model=MODEL, args=OPTIONS.get(name, {}) | job.options),
        timeouts=Timeouts(run_s=LIMIT_S),
    )
    return AgentContext(
        rollout=Rollout.of("run", "task", 0, 1),
        attempt=1,
        task=task,
        base_url=f"{job.url}/v1",
        api_key=job.key,
        home=str(job.home),
        workdir=str(job.work),
        python=sys.executable,
        bundle=str(find_bundle(name)),
    )


async def run(agent: str, job: Job, limit_s: float = LIMIT_S) -> Done:
    """Run an agent to its end. What it started ends with it."""
    context = context_of(agent, job)
    harness = open_harness(context.task.agent.harness)
    harness.validate_args(context.task.agent.args)
    for name, content in harness.files(context).items():
        path = job.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    command = harness.command(context)
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
    (job.home / "stdin").write_bytes(command.stdin)
    with (
        (job.home / "stdin").open("rb") as stdin,
        (job.home / "stdout").open("wb") as stdout,
        (job.home / "stderr").open("wb") as stderr,
    ):
        process = await asyncio.create_subprocess_exec(
            *command.argv,
            cwd=job.work,
            env=env | command.env,
            stdin=stdin,
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
    said, told = (job.home / "stdout").read_bytes(), (job.home / "stderr").read_bytes()
    return Done(
        exit_code=exit_code,
        stdout=said.decode(errors="replace"),
        stderr=told.decode(errors="replace"),
        work=job.work,
        result=await harness.result(context, exit_code, said, told, _read),
    )


async def _read(path: str, max_bytes: int) -> bytes | None:
    try:
        return Path(path).read_bytes()[:max_bytes]
    except FileNotFoundError:
        return None
