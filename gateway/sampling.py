"""Which sampling parameters a call is made with: the task's, else the agent's, else neutral ones. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from rollyard.gateway.keys import SessionGrant
from rollyard.schemas.call import Message
from rollyard.schemas.subjects import digest

NEUTRAL: Final[dict[str, Any]] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
"""Servers have defaults of their own that cut the distribution; training needs it whole, so these are always sent."""


def effective(
    asked: dict[str, Any], grant: SessionGrant, messages: Sequence[Message], tokens_left: int | None, choice: int = 0
) -> dict[str, Any]:
    """The parameters of one call, one of n choices. `tokens_left` is what the session may still sample."""
    wanted = grant.sampling
    own = {name: value for name in NEUTRAL if (value := getattr(wanted, name)) is not None}
    params = NEUTRAL | asked | own
    limits = [n for n in (wanted.max_tokens or asked.get("max_tokens"), tokens_left) if n is not None]
    params.pop("max_tokens", None)
    if limits:
        params["max_tokens"] = min(limits)
    stop = list(dict.fromkeys([*asked.get("stop", ()), *wanted.stop]))
    params.pop("stop", None)
    if stop:
        params["stop"] = stop
    if wanted.seed is not None:
        params["seed"] = call_seed(wanted.seed, grant.rollout_id, turn(messages), choice)
    return params


def turn(messages: Sequence[Message]) -> int:
    """How many replies a request already holds."""
    return sum(message.get("role") == "assistant" for message in messages)


def call_seed(seed: int, rollout_id: str, turn: int, choice: int = 0) -> int:
    """The seed of one call, 31 bits: a retry gets the same, every rollout, turn and choice another."""
    which = f"{turn}.{choice}" if choice else str(turn)
    return int(digest(str(seed), rollout_id, which, chars=8), 16) & 0x7FFF_FFFF
