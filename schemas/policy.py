"""Which of a rollout's tokens are trained, and what reward they get: the sample policy of a task or run."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct, json

from rollyard.schemas.names import Scenario
from rollyard.schemas.subjects import digest

Fate = Literal["keep", "mask", "drop"]

LENIENCE_RULES: Final = (
    "private_keys_dropped",
    "images_by_content",
    "cache_control_dropped",
    "foreign_reply_keys_dropped",
    "ids_not_compared",
    "text_parts_joined",
    "reply_edges_trimmed",
    "arguments_parsed",
    "null_equals_absent",
    "reply_known_by_call_ids",
    "floating_user_message",
    "last_user_extended",
    "volatile_system_lines",
    "masked_secrets",
    "trailing_space",
    "tool_result_reminders",
    "malformed_tool_input",
)
"""What `lenience_off` may name."""


class SamplePolicy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How trajectories become samples. A commit holds the one in effect, so that replay obeys it."""

    scenarios: Annotated[
        tuple[Scenario, ...], Meta(min_length=1, description="calls of these scenarios are trained; others are context")
    ] = ("main", "sub_agent")
    min_trained_tokens: Annotated[int, Meta(ge=1, description="a sample with fewer trained tokens is dropped")] = 1
    max_tokens: Annotated[int, Meta(ge=2, description="tokens that a sample may have; null: no limit")] | None = None
    too_long: Annotated[
        Literal["cut", "drop"],
        Meta(description="a longer sample: cut keeps at most its first `max_tokens` tokens, drop leaves it out"),
    ] = "cut"
    truncated: Annotated[
        Fate, Meta(description="samples of truncated rollouts: keep, mask (train no token of them) or drop")
    ] = "keep"
    failed: Annotated[Fate, Meta(description="the same for failed rollouts")] = "drop"
    reward: Annotated[
        Literal["all", "main", "split"],
        Meta(description="every sample gets the rollout's reward, only those of the main agent, or an equal share"),
    ] = "all"
    lenience_off: Annotated[
        tuple[str, ...], Meta(description="rules of lenient matching that are switched off, by name")
    ] = ()

    def digest(self) -> str:
        """What tells two policies apart in the id of a sample."""
        return digest(json.encode(self, order="sorted"))
