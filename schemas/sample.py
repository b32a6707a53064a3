"""What the trainer gets: samples, the one delivery of each rollout, and the group that closes over its rollouts."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct, field

from rollyard.schemas.call import Message
from rollyard.schemas.failure import Failure, Status
from rollyard.schemas.names import (
    Attempt,
    GroupId,
    GroupSize,
    Index,
    RolloutId,
    RunName,
    Scenario,
    SchemaVersion,
    TaskId,
    UnixMs,
)
from rollyard.schemas.packed import Logprobs, LossMask, TokenIds, Versions
from rollyard.schemas.policy import SamplePolicy
from rollyard.schemas.task import SCHEMA_VERSION


class Timings(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """When things happened, as logged, Unix ms; 0 where something did not happen."""

    initialized_ms: UnixMs = 0
    run_started_ms: UnixMs = 0
    run_ended_ms: UnixMs = 0
    evaluated_ms: UnixMs = 0


DriftReason = Literal[
    "re_tokenised",
    "re_templated",
    "reasoning_stripped",
    "arguments_rewritten",
    "system_changed",
    "tools_changed",
    "history_edited",
    "compaction",
    "sub_agent",
    "retry",
    "dead_reply_kept",
    "unknown",
]
STRUCTURAL: Final[frozenset[DriftReason]] = frozenset({"compaction", "sub_agent", "retry"})
"""Reasons that belong to how an agent works: such a call is to begin a branch, and nothing was lost by it."""

LinkKind = Literal["sub_agent", "compaction", "resume", "retry"]


class TurnSpan(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The sampled tokens [start, end) of one call within a sample."""

    start: Annotated[int, Meta(ge=0, description="first sampled token of the call")]
    end: Annotated[int, Meta(ge=0, description="one past the last")]
    turn: Annotated[int, Meta(ge=0, description="index of the call in this sample")]
    call_id: Annotated[str, Meta(description="the call")]
    scenario: Annotated[Scenario, Meta(description="what the call was for")] = "main"
    trained: Annotated[bool, Meta(description="whether its tokens are trained in this sample")] = True
    reward: Annotated[float | None, Meta(description="of this turn alone; null: the evaluation gave none")] = None
    params: Annotated[dict[str, Any] | None, Meta(description="its sampling parameters; null: those of the sample")] = (
        None
    )


class Link(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A call belongs to another one without continuing its tokens.

    sub_agent: to the call that started it. compaction: to the call whose conversation was condensed. resume: to the
    call whose conversation it goes on from. retry: to the dead call that it replaces.
    """

    kind: Annotated[LinkKind, Meta(description="why they belong together")]
    call_id: Annotated[str, Meta(description="the later call")]
    to: Annotated[str, Meta(description="the earlier call")]


class DriftPoint(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a call leaves the tokens of the call that its conversation continues, and why."""

    call_id: Annotated[str, Meta(description="the call that begins a new branch")]
    reason: Annotated[DriftReason, Meta(description="class of the break")]
    continues: Annotated[str | None, Meta(description="the call that it goes on from; null: not known")] = None
    position: Annotated[int, Meta(ge=0, description="leading tokens that both have: the first that differs")] = 0
    expected: Annotated[TokenIds, Meta(description="what stands there in the earlier call, at most 16 ids")] = field(
        default_factory=TokenIds
    )
    found: Annotated[TokenIds, Meta(description="what stands there in the later call, at most 16 ids")] = field(
        default_factory=TokenIds
    )
    message: Annotated[int | None, Meta(description="first message that differs; null: the messages are equal")] = None
    detail: Annotated[str, Meta(description="what differs in the messages, for people")] = ""


class Sample(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One trajectory as training data. token_ids, loss_mask, logprobs and policy_versions have the same length [n]."""

    sample_id: Annotated[str, Meta(description="digest of (rollout, attempt, branch, stitcher, sample policy)")]
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
    turns: Annotated[tuple[TurnSpan, ...], Meta(description="sampled tokens by call, in the order of `calls`")] = ()
    links: Annotated[tuple[Link, ...], Meta(description="what calls of this branch belong to outside it")] = ()
    drift: Annotated[tuple[DriftPoint, ...], Meta(description="breaks at which calls of this branch left others")] = ()
    rollout_reward: Annotated[
        float | None, Meta(description="the rollout's reward, whatever share of it is this sample's")
    ] = None
    masked: Annotated[str, Meta(description="why no token of it is trained: truncated or failed; empty: they are")] = ""
    cut_tokens: Annotated[int, Meta(description="tokens left out at its end, for the policy's `max_tokens`")] = 0
    incomplete: Annotated[
        bool, Meta(description="a call that continued this branch has no result in the log: it may be longer")
    ] = False
    policy: Annotated[str, Meta(description="digest of the sample policy that made it")] = ""
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
    policy: Annotated[SamplePolicy, Meta(description="how trajectories become samples")] = SamplePolicy()
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
    rewards: Annotated[dict[str, float], Meta(description="named parts from which the rule made the reward")] = {}
    agent_metrics: Annotated[dict[str, float], Meta(description="numbers that harness and hooks read")] = {}
    answer: Annotated[str, Meta(description="the agent's final answer")] = ""
    calls: Annotated[int, Meta(description="model calls of the attempt that counts")] = 0
    excluded: Annotated[dict[str, int], Meta(description="calls left out of the samples, counted by reason")] = {}
    drift: Annotated[dict[str, int], Meta(description="calls that did not continue sampled ids, by reason")] = {}
    lenience: Annotated[dict[str, int], Meta(description="calls matched by rules of lenient matching, by rule")] = {}
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
