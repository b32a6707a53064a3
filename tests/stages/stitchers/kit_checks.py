"""What tests of stitching look at: a chain that is whole, what is trained, calls by their numbers."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from kit import Call, Seen, Story, number

from rollyard.schemas.sample import Sample

MODES = pytest.mark.parametrize("mode", ["tokens", "capture"])
"""Who tokenises: the gateway, which keeps sampled ids, or the server, which renders each prompt anew."""


def one_chain(story: Story, calls: int) -> Seen:
    """Every call extends the one before, and nothing else is to be said of it."""
    forest = story.grown()
    assert forest.branches == [list(range(calls))]
    assert forest.continues == {at: at - 1 for at in range(1, calls)}
    assert (forest.links, forest.drift, forest.excluded, forest.incomplete) == ([], {}, {}, [])
    (sample,) = story.outcome().samples
    check_trained(story, sample, list(range(calls)))
    assert sample.token_ids.tolist() == story.calls[calls - 1].ids
    return forest


def check_trained(story: Story, sample: Sample, trained: list[int]) -> None:
    """A sample trains the sampled ids of these calls, and its spans say so."""
    ids, mask = sample.token_ids.tolist(), sample.loss_mask.tolist()
    spans = [span for span in sample.turns if span.trained]
    assert [int(span.call_id, 16) for span in spans] == trained
    for span in spans:
        call = story.calls[int(span.call_id, 16)]
        assert ids[: span.end] == call.ids
        assert span.end - span.start == len(call.sampled)
        assert sample.logprobs.tolist()[span.start : span.end] == story.logprobs(call)
    wanted = {at for span in spans for at in range(span.start, span.end)}
    assert {at for at, each in enumerate(mask) if each} == wanted


def calls_of(samples: tuple[Sample, ...]) -> list[list[int]]:
    return [[int(call_id, 16) for call_id in sample.calls] for sample in samples]


def trained(samples: Iterable[Sample]) -> list[tuple[int, int]]:
    """The calls that are trained, with how many of their tokens, over all samples."""
    samples = tuple(samples)
    spans = [span for sample in samples for span in sample.turns if span.trained]
    assert sum(span.end - span.start for span in spans) == sum(sum(sample.loss_mask) for sample in samples)
    return sorted((number(span.call_id), span.end - span.start) for span in spans)


def whole(*calls: Call) -> list[tuple[int, int]]:
    """Calls as `trained` shows them when all of their tokens are."""
    return [(call.number, len(call.sampled)) for call in calls]
