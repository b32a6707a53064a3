"""One synthetic model call in the log, for harnesses that start no process: samples flow though no model was asked."""

from __future__ import annotations

import asyncio
import secrets
from typing import Final

from rollyard.harnesses.harness import AgentContext
from rollyard.pipeline.bus import Bus
from rollyard.pipeline.codec import encode
from rollyard.pipeline.single_error import single_error
from rollyard.schemas import subjects
from rollyard.schemas.call import CallEnd, CallIntent, Usage
from rollyard.schemas.packed import Logprobs, TokenIds
from rollyard.stages.stage import now_ms

PROMPT_IDS: Final = TokenIds.of(range(1, 33))
REPLY_IDS: Final = TokenIds.of(range(100, 116))
LOGPROBS: Final = Logprobs.of([-0.5] * len(REPLY_IDS))


async def log_synthetic_call(bus: Bus, context: AgentContext) -> None:
    """Log the intent and the end of a call that never took place, both under protocol `synthetic`."""
    rollout = context.rollout
    call_id = secrets.token_hex(12)
    at_ms = now_ms()
    intent = CallIntent(
        call_id=call_id,
        run=rollout.run,
        rollout_id=rollout.rollout_id,
        attempt=context.attempt,
        gateway="",
        at_ms=at_ms,
        latest_end_ms=at_ms + 60_000,
        protocol="synthetic",
        model=context.task.agent.model,
        messages=[{"role": "user", "content": context.task.prompt}],
    )
    end = CallEnd(
        call_id=call_id,
        run=rollout.run,
        rollout_id=rollout.rollout_id,
        attempt=context.attempt,
        at_ms=at_ms,
        status="ok",
        prompt_ids=PROMPT_IDS,
        completion_ids=REPLY_IDS,
        logprobs=LOGPROBS,
        reply={"role": "assistant", "content": "ok"},
        finish_reason="stop",
        usage=Usage(prompt_tokens=len(PROMPT_IDS), completion_tokens=len(REPLY_IDS)),
    )
    subject = subjects.log_subject(rollout.run, rollout.rollout_id, "call")
    with single_error():
        async with asyncio.TaskGroup() as group:
            group.create_task(bus.publish(subject, encode(intent), msg_id=f"{call_id}.intent"))
            group.create_task(bus.publish(subject, encode(end), msg_id=f"{call_id}.end"))
