"""Samples of a committed rollout made anew: by another stitcher, policy or reward, or where there were none. Pure.

What is asked for goes into a draft of the commit, so that it is the stitcher alone that makes samples. They get other
ids than the committed ones: those hold the stitcher's version and the policy, and here the evaluation rule too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, structs

from rollyard.pipeline.log import Events
from rollyard.schemas import subjects
from rollyard.schemas.policy import SamplePolicy
from rollyard.schemas.rollout import RolloutEvent
from rollyard.schemas.sample import Commit, Delivery, Sample
from rollyard.schemas.task import EvaluationSpec
from rollyard.stages.delivery import delivery_of
from rollyard.stages.evaluator import Verdict
from rollyard.stages.stitchers import v1
from rollyard.stages.stitching import STITCHER_VERSION, outcome_of


class Recipe(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How samples are made where it is not as each commit says."""

    stitcher: Annotated[str, Meta(description="version of the stitcher; empty: the commit's")] = ""
    policy: Annotated[SamplePolicy | None, Meta(description="null: the commit's")] = None
    reward: Annotated[EvaluationSpec | None, Meta(description="a rule that judges anew; null: as judged")] = None
    recover: Annotated[bool, Meta(description="whether rollouts that aggregate gave up get samples")] = False

    def changes(self) -> bool:
        """Whether anything is to be other than committed."""
        return self != Recipe()


@dataclass(frozen=True, slots=True)
class Draft:
    """A rollout on its way to new samples: the events that count, and what stands in the place of its commit."""

    commit: Commit
    events: Events
    recovered: bool = False


def draft_of(events: Events, commit: Commit, recipe: Recipe) -> Draft:
    """The draft for a rollout whose commit stands behind `events`."""
    before: Events = [(seq, event) for seq, event in events if not isinstance(event, Commit)]
    found = recovered(before, commit) if recipe.recover else None
    draft = structs.replace(found or commit, samples=())
    if recipe.policy is not None:
        draft = structs.replace(draft, policy=recipe.policy)
    # Version 1 knows no policy.
    deaf = recipe.policy is not None and (draft.stitcher or v1.VERSION) == v1.VERSION
    stitcher = recipe.stitcher or (STITCHER_VERSION if deaf else draft.stitcher)
    return Draft(structs.replace(draft, stitcher=stitcher), before, found is not None)


def was_given_up(commit: Commit) -> bool:
    """Whether aggregate committed this rollout as failed only because it could not make the samples."""
    failure = commit.failure
    return commit.status == "failed" and commit.cut_seq == 0 and failure is not None and failure.kind == "infra"


def recovered(events: Events, commit: Commit) -> Commit | None:
    """The commit that aggregate would have made from all of `events`; None where it did not give up, or nothing ran.

    How the rollout ended, its last transition says: that the agent ran, or that a later stage failed.
    """
    if not was_given_up(commit):
        return None
    counted = [(seq, event) for seq, event in events if event.attempt == commit.attempt]
    life = {seq: event for seq, event in sorted(counted, key=lambda item: item[0]) if isinstance(event, RolloutEvent)}
    ran = [seq for seq, event in life.items() if event.kind == "ran"]
    if not ran:
        return None
    closed = commit.closed_seq if commit.closed_seq in ran else ran[-1]
    failed = [event for seq, event in life.items() if event.kind == "failed" and seq > closed]
    failure = failed[-1].failure if failed else life[closed].failure
    status = life[closed].status or "completed"
    if failed:
        status = "cancelled" if failure is not None and failure.kind == "cancelled" else "failed"
    judged = [seq for seq, event in life.items() if event.kind == "evaluated" and seq > closed]
    return structs.replace(
        commit,
        status=status,
        failure=failure,
        cut_seq=max(seq for seq, _ in counted),
        closed_seq=closed,
        evaluated_seq=commit.evaluated_seq if commit.evaluated_seq in judged else (judged[-1] if judged else 0),
    )


def with_verdict(draft: Draft, verdict: Verdict) -> Draft:
    """The draft with `verdict` in the place of the rollout's evaluation, or behind all that counts if it had none."""
    commit = draft.commit
    events = [(seq, event) for seq, event in draft.events if seq <= commit.cut_seq]
    given: dict[str, Any] = {
        "reward": verdict.reward,
        "metrics": dict(verdict.metrics),
        "rewards": dict(verdict.rewards),
        "log": verdict.log,
        "turn_rewards": tuple(verdict.turn_rewards),
    }
    standing = dict(events).get(commit.evaluated_seq)
    if isinstance(standing, RolloutEvent):
        judged = structs.replace(standing, **given)
        events = [(seq, judged if seq == commit.evaluated_seq else event) for seq, event in events]
        return Draft(commit, events, draft.recovered)
    ran = ran_of(draft)
    assert ran is not None
    seq = commit.cut_seq + 1
    judged = RolloutEvent(kind="evaluated", rollout=ran.rollout, attempt=commit.attempt, at_ms=0, **given)
    return Draft(structs.replace(commit, cut_seq=seq, evaluated_seq=seq), [*events, (seq, judged)], draft.recovered)


def ran_of(draft: Draft) -> RolloutEvent | None:
    """What RUN logged of the attempt that counts; None when nothing that counts says that its agent ended."""
    closed = draft.commit.closed_seq
    found = dict(draft.events).get(closed) if closed <= draft.commit.cut_seq else None
    return found if isinstance(found, RolloutEvent) and found.kind == "ran" else None


def remade(draft: Draft, rule: EvaluationSpec | None = None) -> Delivery:
    """The rollout with its new samples, as aggregate would deliver it; `rule` is the one that judged it anew.

    Raises ReplayError for a stitcher that is not in this package.
    """
    outcome = outcome_of(draft.events, draft.commit)
    if rule is not None:
        outcome = replace(outcome, samples=tuple(_renamed(sample, rule) for sample in outcome.samples))
    return delivery_of(draft.commit, outcome, draft.events)


def _renamed(sample: Sample, rule: EvaluationSpec) -> Sample:
    """The sample under an id that holds the evaluation rule too."""
    identity = subjects.digest(sample.sample_id, msgspec.json.encode(rule, order="sorted"))
    return structs.replace(sample, sample_id="s" + identity)
