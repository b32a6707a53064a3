"""What the headers of a delivery tell, and what is made of those that anybody may have written."""

from __future__ import annotations

import pytest

from rollyard.pipeline.delivery_headers import DeliveryFacts
from rollyard.schemas.packed import Logprobs, LossMask, TokenIds, Versions
from rollyard.schemas.sample import STRUCTURAL, Delivery, Sample


def test_the_facts_of_a_delivery_leave_out_drift_that_belongs_to_the_agent() -> None:
    def sample(mask: list[int]) -> Sample:
        size = len(mask)
        return Sample(
            sample_id="s", run="r", task_id="t", group_id="t", rollout_id="x", index=0, attempt=1, branch=0, branches=2,
            scenario="main", status="completed", token_ids=TokenIds.of([7] * size), loss_mask=LossMask.of(mask),
            logprobs=Logprobs.of([0.0] * size), policy_versions=Versions.of([1] * size),
        )  # fmt: skip

    delivery = Delivery(
        run="r", task_id="t", group_id="t", group_size=1, rollout_id="x", index=0, attempt=1, status="truncated",
        calls=9, drift={"re_tokenised": 2, "unknown": 1} | dict.fromkeys(STRUCTURAL, 1),
        samples=(sample([0, 1, 1]), sample([0, 0]), sample([1])),
    )  # fmt: skip
    found = DeliveryFacts.of(delivery)
    assert found == DeliveryFacts(status="truncated", calls=9, drifted=3, trained_tokens=3)
    assert found.headers() == {
        "Rollyard-Status": "truncated",
        "Rollyard-Calls": "9",
        "Rollyard-Drift": "3",
        "Rollyard-Trained": "3",
    }
    assert DeliveryFacts.read(found.headers()) == found


@pytest.mark.parametrize("text", ["", "-1", "x", "1.5", "٣", "²", "9" * 5000])
def test_a_header_that_is_no_number_counts_as_none(text: str) -> None:
    read = DeliveryFacts.read({"Rollyard-Calls": text, "Rollyard-Drift": "4", "Rollyard-Trained": text})
    assert read == DeliveryFacts()
