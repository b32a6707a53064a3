"""What the headers of a delivery tell of it, so that runs are counted without reading bodies.

Names and values are public API: docs/architecture.md section 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from rollyard.schemas.sample import STRUCTURAL, Delivery

STATUS_HEADER: Final = "Rollyard-Status"
CALLS_HEADER: Final = "Rollyard-Calls"
DRIFT_HEADER: Final = "Rollyard-Drift"
TRAINED_HEADER: Final = "Rollyard-Trained"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryFacts:
    """How a rollout ended, its model calls, those that drifted for no good reason, and its trained tokens."""

    status: str = ""
    calls: int = 0
    drifted: int = 0
    trained_tokens: int = 0

    @classmethod
    def of(cls, delivery: Delivery) -> DeliveryFacts:
        """The facts of a delivery. Drift that belongs to how the agent works is left out."""
        return cls(
            status=delivery.status,
            calls=delivery.calls,
            drifted=sum(count for reason, count in delivery.drift.items() if reason not in STRUCTURAL),
            trained_tokens=sum(sample.loss_mask.data.count(1) for sample in delivery.samples),
        )

    @classmethod
    def read(cls, headers: Mapping[str, str]) -> DeliveryFacts:
        """The facts that stand in headers; a header that is missing or no number counts as 0."""
        calls = _number(headers, CALLS_HEADER)
        return cls(
            status=headers.get(STATUS_HEADER, ""),
            calls=calls,
            drifted=min(calls, _number(headers, DRIFT_HEADER)),
            trained_tokens=_number(headers, TRAINED_HEADER),
        )

    def headers(self) -> dict[str, str]:
        """The headers that tell them."""
        return {
            STATUS_HEADER: self.status,
            CALLS_HEADER: str(self.calls),
            DRIFT_HEADER: str(self.drifted),
            TRAINED_HEADER: str(self.trained_tokens),
        }


def _number(headers: Mapping[str, str], name: str) -> int:
    # Anybody may publish a delivery: what it says must not break whoever counts.
    text = headers.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else 0
