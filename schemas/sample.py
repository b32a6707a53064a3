"""What the trainer gets: samples, the one delivery of each rollout, and the group that closes over its rollouts."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from rollyard.schemas.call import Message, Scenario
from rollyard.schemas.failure import Failure, Status
from rollyard.schemas.names import Attempt, GroupId, GroupSize, Index, RolloutId, RunName, SchemaVersion, TaskId, UnixMs
from rollyard.schemas.packed import Logprobs, LossMask, TokenIds, Versions
from rollyard.schemas.task import SCHEMA_VERSION


class Timings(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """When things happened, as logged, Unix ms; 0 where something did not happen."""

    initialized_ms: UnixMs = 0
    run_started_ms: UnixMs = 0
    run_ended_ms: UnixMs = 0
    evaluated_ms: UnixMs = 0


class Sample(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One trajectory as training data. token_ids, loss_mask, logprobs and policy_versions have the same length [n]."""

    sample_id: Annotated[str, Meta(description="digest of (rollout, attempt, branch, stitcher, policy)")]
    run: RunName
    task_id: TaskId
    group_id: Annotated[str, Meta(description="equal to task_id")]
    rollout_id: RolloutId
    index: Annotated[int, Meta(description="of the rollout in its group")]
    attempt: Attempt
    branch: Annotated[int, Meta(description="0 <= branch < branches")]
    branches: Annotated[int, Meta(description="samples of this rollout")]
    scenario: Annotated[Scenario, Meta(description="what the branch was for")]
    status: Annotated[Status, Meta(description="how the rollout ended")]
    token_ids: Annotated[TokenIds, Meta(description="prompt and sampled ids, shape [n]")]
    loss_mask: Annotated[LossMask, Meta(description="1 where a token was sampled and is trained, shape [n]")]
    logprobs: Annotated[Logprobs, Meta(description="as sampled; 0.0 where loss_mask is 0, shape [n]")]
    policy_versions: Annotated[Versions, Meta(description="weights of each sampled token, else -1, shape [n]")]
    reward: Annotated[float | None, Meta(description="of the rollout; null: none, never 0 instead")] = None
    logprob_kind: Annotated[str, Meta(description="raw, processed or unknown")] = "unknown"
    messages: Annotated[list[Message], Meta(description="the whole conversation, OpenAI Chat form")] = []
    tools: Annotated[list[Message] | None, Meta(description="tool definitions of the last call")] = None
    calls: Annotated[tuple[str, ...], Meta(description="ids of the calls of this branch, first to last")] = ()
    model: Annotated[str, Meta(description="served model of the last call")] = ""
    params: Annotated[dict[str, Any], Meta(description="sampling parameters of the last call")] = {}
    finish_reason: Annotated[str | None, Meta(description="of the last call")] = None
    timings: Annotated[Timings, Meta(description="of the rollout")] = Timings()
    stitcher: Annotated[str, Meta(description="version of the stitcher that made it")] = ""
    metadata: Annotated[dict[str, Any], Meta(description="the task's")] = {}
    schema_version: SchemaVersion = SCHEMA_VERSION


class SampleDigest(Struct, frozen=True, kw_only=True):
    """What a commit remembers of a sample."""

    sample_id: Annotated[str, Meta(description="of the sample")]
    digest: Annotated[str, Meta(description="of the sample's canonical encoding")]


class Commit(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The decision which events make a rollout's samples. Created once, in the LOG under kind `commit`.

    Samples are a function of (events up to `cut_seq`, this record) and of nothing else.
    """

    run: RunName
    task_id: TaskId
    group_id: GroupId
    group_size: GroupSize
    rollout_id: RolloutId
    index: Index
    attempt: Attempt
    status: Annotated[Status, Meta(description="how the rollout ended")]
    failure: Annotated[Failure | None, Meta(description="why it did not complete; null: it did")] = None
    cut_seq: Annotated[int, Meta(description="LOG sequence of the last event that counts; 0: none counts")] = 0
    closed_seq: Annotated[int, Meta(description="LOG sequence of the event that ended the agent; 0: none")] = 0
    evaluated_seq: Annotated[int, Meta(description="LOG sequence of the evaluation; 0: none")] = 0
    lost_calls: Annotated[tuple[str, ...], Meta(description="calls whose end never came")] = ()
    stitcher: Annotated[str, Meta(description="version of the stitcher")] = ""
    samples: Annotated[tuple[SampleDigest, ...], Meta(description="digest of each sample")] = ()
    metadata: Annotated[dict[str, Any], Meta(description="the task's")] = {}
    schema_version: SchemaVersion = SCHEMA_VERSION


class Delivery(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The one message that a finished rollout sends to the trainer."""

    run: RunName
    task_id: TaskId
    group_id: GroupId
    group_size: GroupSize
    rollout_id: RolloutId
    index: Index
    attempt: Attempt
    status: Annotated[Status, Meta(description="how the rollout ended")]
    failure: Annotated[Failure | None, Meta(description="why it did not complete; null: it did")] = None
    reward: Annotated[float | None, Meta(description="null: none, never 0 instead")] = None
    metrics: Annotated[dict[str, float], Meta(description="further numbers of the evaluation")] = {}
    answer: Annotated[str, Meta(description="the agent's final answer")] = ""
    calls: Annotated[int, Meta(description="model calls of the attempt that counts")] = 0
    excluded: Annotated[dict[str, int], Meta(description="calls left out of the samples, counted by reason")] = {}
    drift: Annotated[dict[str, int], Meta(description="calls that did not continue sampled ids, by reason")] = {}
    samples: Annotated[tuple[Sample, ...], Meta(description="none, one or several")] = ()
    metadata: Annotated[dict[str, Any], Meta(description="the task's")] = {}
    schema_version: SchemaVersion = SCHEMA_VERSION


class Group(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All rollouts of a task have been delivered. Created once under `group.<run>.<group>`."""

    run: RunName
    task_id: TaskId
    group_id: GroupId
    size: Annotated[int, Meta(description="deliveries of the group")]
    first_seq: Annotated[int, Meta(description="SAMPLES sequence of its first delivery; 0: not known")] = 0
    schema_version: SchemaVersion = SCHEMA_VERSION
