"""How a rollout ended, as data."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

FailureClass = Literal["init", "agent", "agent_budget", "llm", "eval", "infra", "cancelled"]
Status = Literal["completed", "truncated", "failed", "cancelled"]

RETRYABLE: frozenset[FailureClass] = frozenset({"infra", "init", "llm"})
"""Failure classes after which a new attempt may do better."""


class Failure(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a rollout, or one attempt at it, did not complete."""

    kind: Annotated[FailureClass, Meta(description="which part failed")]
    message: Annotated[str, Meta(description="what happened")]
    hint: Annotated[str, Meta(description="what to do about it; empty when nothing is known")] = ""
    retryable: Annotated[bool, Meta(description="whether another attempt could help")] = False

    @classmethod
    def of(cls, kind: FailureClass, message: str, hint: str = "") -> Failure:
        """A failure whose retryability follows from its class. Messages are cut at 2,000 characters."""
        return cls(kind=kind, message=message[:2000], hint=hint[:500], retryable=kind in RETRYABLE)
