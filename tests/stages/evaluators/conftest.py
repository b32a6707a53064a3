"""Rules at work in a real sandbox of the backend `local`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rollyard.schemas.rollout import AgentResult
from rollyard.schemas.sandbox import SandboxSpec
from rollyard.schemas.task import EvaluationSpec, Task
from rollyard.stages.evaluator import EvalContext, JudgeAccess, Verdict, open_rule
from rollyard.stages.sandbox import Labels, Sandbox
from rollyard.stages.sandboxes.local import LocalBackend, LocalSettings


@dataclass
class Court:
    """Judges by a rule; `sandbox` is the fresh one, `agent` that of the agent."""

    sandbox: Sandbox
    agent: Sandbox

    async def judge(self, rule: str, args: Mapping[str, Any], **given: Any) -> Verdict:
        spec = SandboxSpec(**given.pop("spec", {}))
        task = Task(
            prompt=given.pop("prompt", "p"), sandbox=spec, evaluation=EvaluationSpec(rule=rule, args=dict(args))
        )
        diff: bytes | None = given.pop("diff", None)

        async def changed() -> bytes | None:
            return diff

        context = EvalContext(
            task=task,
            result=AgentResult(exit_code=0, answer=given.pop("answer", "")),
            sandbox=self.sandbox,
            agent=self.agent,
            isolation="fresh",
            timeout_s=given.pop("timeout_s", 60.0),
            process=given.pop("process", "eval"),
            judge=given.pop("access", JudgeAccess("http://127.0.0.1:9/v1", lambda model: f"key of {model}")),
            diff=changed,
        )
        assert not given
        return await open_rule(rule, args).reward(context)


@pytest.fixture
async def court(tmp_path: Path) -> AsyncIterator[Court]:
    async with LocalBackend(LocalSettings(root=str(tmp_path / "sandboxes"))) as backend:
        made = [
            await backend.create(Labels(run="r", rollout_id="r1", attempt=1, owner="w", created_ms=0, role=role))
            for role in ("eval", "agent")
        ]
        yield Court(*made)
        for sandbox in made:
            await sandbox.destroy()
