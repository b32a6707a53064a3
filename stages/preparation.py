"""Making a sandbox and filling it as a task says: INIT does it for the agent, EVAL for a fresh one."""

from __future__ import annotations

from typing import Literal

from rollyard.schemas.failure import Failure
from rollyard.schemas.rollout import RolloutState
from rollyard.schemas.task import Task
from rollyard.stages.sandbox import Labels, Plan, Sandbox
from rollyard.stages.stage import StageContext, StageFailed, now_ms


async def make_sandbox(
    context: StageContext, state: RolloutState, task: Task, role: Literal["agent", "eval"] = "agent"
) -> Sandbox:
    """A new sandbox as the task wants it, empty. Raises SandboxError, StageFailed."""
    backend = context.backend(task.sandbox.backend)
    labels = Labels(
        run=state.rollout.run,
        rollout_id=state.rollout.rollout_id,
        attempt=state.attempt,
        owner=context.worker,
        created_ms=now_ms(),
        role=role,
    )
    spec = task.sandbox
    plan = Plan(
        image=spec.image,
        workdir=spec.workdir,
        user=spec.user,
        network=backend.capabilities.network(spec.network),
        allow_hosts=spec.allow_hosts,
        read_only=spec.read_only,
        limits=spec.limits,
    )
    return await backend.create(labels, plan)


async def fill_sandbox(context: StageContext, sandbox: Sandbox, task: Task) -> None:
    """Files and setup commands, without the agent. Raises SandboxError, StageFailed of class init."""
    await sandbox.put_files(task.sandbox.files)
    for number, step in enumerate(task.sandbox.steps(), 1):
        ended = await sandbox.exec(step.run, env=task.sandbox.env, timeout_s=step.timeout_s or task.timeouts.init_s)
        if ended.timed_out or ended.exit_code != 0:
            how = "ran out of time" if ended.timed_out else f"ended with {ended.exit_code}"
            tail = (ended.stderr or ended.stdout)[-500:].decode(errors="replace").strip()
            raise StageFailed(Failure.of("init", f"setup command {number} {how}: {tail}", "see sandbox.setup"))
