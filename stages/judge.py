"""The session of a model that judges: an attempt number of its own, so that no call of it can become a sample."""

from __future__ import annotations

from typing import Final

from rollyard.gateway.keys import SessionGrant, sign
from rollyard.schemas.rollout import RolloutState
from rollyard.stages.evaluator import JudgeAccess
from rollyard.stages.stage import StageContext, now_ms

JUDGE_ATTEMPTS: Final = 1 << 20
"""Added to a rollout's attempt. Samples are made of the calls of the committed attempt only, and `max_attempts` is far
below, so that these calls stand in the rollout's log and are never trained."""
MARGIN_S: Final = 60.0


def judge_attempt(attempt: int) -> int:
    """The attempt under which calls of the judge of `attempt` are logged."""
    return JUDGE_ATTEMPTS + attempt


def judge_access(context: StageContext, state: RolloutState, timeout_s: float) -> JudgeAccess | None:
    """The way to a model for the evaluation of a rollout; None when this worker has no secret to sign keys with."""
    if not context.secret:
        return None
    expires_ms = now_ms() + int((timeout_s + MARGIN_S) * 1000)

    def key_for(model: str) -> str:
        grant = SessionGrant(
            run=state.rollout.run,
            rollout_id=state.rollout.rollout_id,
            attempt=judge_attempt(state.attempt),
            model=model,
            expires_ms=expires_ms,
            training=False,
        )
        return sign(grant, context.secret)

    return JudgeAccess(context.config.gateway.address() + "/v1", key_for)
