"""A rollout on its way through the stages: its state, the messages between stages, and the effects that are due.

Contract: docs/architecture.md section 5.1. The state is the truth; a message only says "look at
step n of this rollout".
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from rollyard.schemas import subjects
from rollyard.schemas.failure import Failure, Status
from rollyard.schemas.names import Attempt, SchemaVersion
from rollyard.schemas.task import SCHEMA_VERSION

StageName = Literal["init", "run", "eval", "aggregate"]
Position = Literal["init", "run", "eval", "aggregate", "committing", "ended"]


class Rollout(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which rollout this is. The id is a function of (run, task, index)."""

    run: Annotated[str, Meta(description="the run's name")]
    task_id: Annotated[str, Meta(description="the task's id; also the id of its group")]
    index: Annotated[int, Meta(ge=0, description="0 <= index < group_size")]
    group_size: Annotated[int, Meta(ge=1, description="rollouts of the group")]
    rollout_id: Annotated[str, Meta(description="subjects.rollout_id(run, task_id, index)")]

    @classmethod
    def of(cls, run: str, task_id: str, index: int, group_size: int) -> Rollout:
        """The rollout `index` of a task."""
        identity = subjects.rollout_id(run, task_id, index)
        return cls(run=run, task_id=task_id, index=index, group_size=group_size, rollout_id=identity)


class SandboxRef(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a sandbox is: enough for another process, at the same place, to open it."""

    backend: Annotated[str, Meta(description="name of the backend that made it")]
    place: Annotated[str, Meta(description="from where it can be reached")]
    handle: Annotated[str, Meta(description="the backend's own name for it, for example a path")]


class CloseSession(Struct, frozen=True, tag="close_session", kw_only=True):
    """Effect: the gateway answers 410 to this attempt's key from now on."""

    attempt: Attempt


class DestroySandbox(Struct, frozen=True, tag="destroy_sandbox", kw_only=True):
    """Effect: kill what runs in the sandbox and remove it."""

    attempt: Attempt
    sandbox: Annotated[SandboxRef, Meta(description="what to remove")]


Effect = CloseSession | DestroySandbox


class RolloutState(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a rollout stands; a value of the `rollouts` bucket, at most 16 KB.

    `step` counts hand-overs. The message that is due is `message()`. After the end only identity, status and attempt
    stay.
    """

    rollout: Annotated[Rollout, Meta(description="whose it is")]
    position: Annotated[Position, Meta(description="the stage whose message is due, or committing, or ended")] = "init"
    step: Annotated[int, Meta(ge=0, description="hand-overs so far; a message names the step it belongs to")] = 0
    attempt: Annotated[int, Meta(ge=1, description="the current try, from 1")] = 1
    max_attempts: Annotated[int, Meta(ge=1, description="tries allowed")] = 3
    pool: Annotated[str, Meta(description="pool whose INIT workers make the sandbox")] = "local"
    place: Annotated[str | None, Meta(description="where the sandbox is; null before INIT")] = None
    sandbox: Annotated[SandboxRef | None, Meta(description="null before INIT and after the end")] = None
    carried: Annotated[Any, Meta(description="what the INIT of the task's handler returned, at most 8 KB")] = None
    closed_seq: Annotated[int, Meta(description="LOG sequence of the event that ended the agent; 0: none")] = 0
    evaluated_seq: Annotated[int, Meta(description="LOG sequence of the evaluation; 0: none")] = 0
    status: Annotated[Status | None, Meta(description="set once the outcome is known")] = None
    failure: Annotated[Failure | None, Meta(description="why it did not complete")] = None
    effects: Annotated[tuple[Effect, ...], Meta(description="due before the message is published; idempotent")] = ()
    training: Annotated[bool, Meta(description="Run.training: whether model servers must return token ids")] = True
    admitted_ms: Annotated[int, Meta(description="when it was admitted, Unix ms")] = 0
    writer: Annotated[str, Meta(description="random id of whoever wrote this value")] = ""
    schema_version: SchemaVersion = SCHEMA_VERSION

    def stage(self) -> StageName | None:
        """The stage whose message is due now, or None after the end."""
        if self.position == "ended":
            return None
        return "aggregate" if self.position == "committing" else self.position

    def message(self, revision: int) -> StageMessage | None:
        """The message that is due now, or None after the end; `revision` is that of this state in its bucket."""
        stage = self.stage()
        if stage is None:
            return None
        return StageMessage(
            rollout=self.rollout, stage=stage, step=self.step, attempt=self.attempt, state=self, revision=revision
        )

    def where(self) -> str | None:
        """Pool or place in the subject of the due message."""
        return {"init": self.pool, "run": self.place, "eval": self.place}.get(self.position)


class StageMessage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message of the STAGES stream.

    It carries the state that it belongs to, so that its first delivery need not ask for it; a later one does.
    """

    rollout: Annotated[Rollout, Meta(description="whose it is")]
    stage: Annotated[StageName, Meta(description="who is to work on it")]
    step: Annotated[int, Meta(description="the step of the state that this message belongs to")]
    attempt: Annotated[int, Meta(description="the try it belongs to")]
    takeover: Annotated[
        Failure | None,
        Meta(description="set when somebody outside asks to replace that step: do not work, move on for this reason"),
    ] = None
    state: Annotated[RolloutState | None, Meta(description="the state at that step; null in a takeover")] = None
    revision: Annotated[int, Meta(description="revision of that state in the `rollouts` bucket; 0: not known")] = 0
    schema_version: SchemaVersion = SCHEMA_VERSION


class Artifact(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A file that is kept of a rollout, as a blob."""

    name: Annotated[str, Meta(description="path below the working directory, or the collector's own name for it")]
    blob: Annotated[str, Meta(description="SHA-256 of the content, its name in the blob store")]
    size_bytes: Annotated[int, Meta(description="bytes that are kept")]
    truncated: Annotated[bool, Meta(description="whether the file was longer")] = False


class AgentResult(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an agent left behind, as its harness read it."""

    exit_code: Annotated[int | None, Meta(description="exit status; negative: killed by that signal; null: unknown")]
    answer: Annotated[str, Meta(description="the agent's final answer, at most 64 KiB of it")] = ""
    output_tail: Annotated[str, Meta(description="the last 4 KiB of its standard error, for people")] = ""
    metrics: Annotated[dict[str, float], Meta(description="numbers that the harness and hooks read")] = {}
    artifacts: Annotated[tuple[Artifact, ...], Meta(description="files that are kept: outputs, diff, logs")] = ()
    metadata: Annotated[dict[str, Any], Meta(description="what hooks added")] = {}
    failure: Annotated[
        Failure | None, Meta(description="why the agent did not finish, kind agent, agent_budget or llm; null: it did")
    ] = None


class RolloutEvent(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A transition in the life of a rollout, in the LOG under kind `life`."""

    kind: Annotated[
        Literal["initialized", "ran", "evaluated", "failed"], Meta(description="which stage ended, or that one failed")
    ]
    rollout: Annotated[Rollout, Meta(description="whose it is")]
    attempt: Attempt
    at_ms: Annotated[int, Meta(description="when the stage ended, Unix ms")]
    started_ms: Annotated[int, Meta(description="when the stage started work, Unix ms")] = 0
    worker: Annotated[str, Meta(description="name of the worker")] = ""
    place: Annotated[str | None, Meta(description="where the sandbox is")] = None
    result: Annotated[
        AgentResult | None, Meta(description="of kind `ran`, and of `failed` when it was the agent that failed")
    ] = None
    status: Annotated[Status | None, Meta(description="of kind `ran`: completed or truncated")] = None
    reward: Annotated[float | None, Meta(description="of kind `evaluated`; null: no reward, never 0 instead")] = None
    rewards: Annotated[dict[str, float], Meta(description="named parts from which the rule made the reward")] = {}
    metrics: Annotated[dict[str, float], Meta(description="further numbers of the evaluation")] = {}
    log: Annotated[str, Meta(description="the end of what the verifier wrote, at most 16 KiB, for people")] = ""
    turn_rewards: Annotated[
        tuple[float | None, ...],
        Meta(description="of kind `evaluated`: rewards of the main agent's calls, in their order; empty: none"),
    ] = ()
    failure: Annotated[Failure | None, Meta(description="of kind `failed` or a truncated `ran`")] = None
    schema_version: SchemaVersion = SCHEMA_VERSION
