"""How a rollout ended, as data."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct, structs

FailureClass = Literal["init", "agent", "agent_budget", "llm", "eval", "infra", "cancelled"]
Status = Literal["completed", "truncated", "failed", "cancelled"]

MAX_MESSAGE_CHARS = 2000
MAX_HINT_CHARS = 500

RETRYABLE: frozenset[FailureClass] = frozenset({"infra", "init", "llm"})
"""Failure classes after which a new attempt may do better."""


class Failure(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a rollout, or one attempt at it, did not complete. Longer texts are cut, since a state holds it."""

    kind: Annotated[FailureClass, Meta(description="which part failed")]
    message: Annotated[str, Meta(description="what happened")]
    hint: Annotated[str, Meta(description="what to do about it; empty when nothing is known")] = ""
    retryable: Annotated[bool, Meta(description="whether another attempt could help")] = False

    @classmethod
    def of(cls, kind: FailureClass, message: str, hint: str = "") -> Failure:
        """A failure whose retryability follows from its class."""
        return cls(kind=kind, message=message, hint=hint, retryable=kind in RETRYABLE)

    def __post_init__(self) -> None:
        if len(self.message) > MAX_MESSAGE_CHARS:
            structs.force_setattr(self, "message", self.message[:MAX_MESSAGE_CHARS])
        if len(self.hint) > MAX_HINT_CHARS:
            structs.force_setattr(self, "hint", self.hint[:MAX_HINT_CHARS])
