"""What INIT and RUN tell a harness about an attempt: the same facts, whichever process asks."""

from __future__ import annotations

from rollyard.gateway.keys import SessionGrant, sign
from rollyard.harnesses.harness import AgentContext, Harness
from rollyard.schemas.rollout import RolloutState
from rollyard.schemas.task import Task
from rollyard.stages.agent_install import bundle_folder, python_program
from rollyard.stages.sandbox import Sandbox
from rollyard.stages.stage import StageContext, now_ms


def agent_context(
    context: StageContext, state: RolloutState, task: Task, sandbox: Sandbox, harness: Harness
) -> AgentContext:
    """The attempt's facts, its session key among them; a harness that starts no process gets no key.

    Raises HarnessError when the agent's bundle is not there.
    """
    agent = task.agent
    grant = SessionGrant(
        run=state.rollout.run,
        rollout_id=state.rollout.rollout_id,
        attempt=state.attempt,
        model=agent.model,
        sampling=agent.sampling,
        max_calls=agent.max_calls,
        max_tokens=agent.max_tokens,
        expires_ms=now_ms() + int(agent.max_wall_s * 1000) if agent.max_wall_s is not None else None,
        training=state.training,
    )
    capabilities = context.backend(sandbox.ref.backend).capabilities
    return AgentContext(
        rollout=state.rollout,
        attempt=state.attempt,
        task=task,
        base_url=(sandbox.gateway_url or context.config.gateway.address()) + "/v1",
        api_key="" if harness.in_process else sign(grant, context.secret),
        home=sandbox.home,
        workdir=sandbox.workdir,
        python=python_program(agent, capabilities),
        bundle=bundle_folder(agent, capabilities),
    )
