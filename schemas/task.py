"""What a trainer publishes: a task, with its agent, sandbox and evaluation settings."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, json, structs

from rollyard.schemas.names import Duration, Name, SchemaVersion
from rollyard.schemas.policy import SamplePolicy
from rollyard.schemas.sandbox import SandboxSpec
from rollyard.schemas.subjects import MAX_ID_CHARS, digest

SCHEMA_VERSION = 1
MAX_PROMPT_BYTES = 10_000_000
MAX_GROUP_SIZE = 4096
_NEWER_FIELDS = ("samples", "hooks", "outputs", "data_source", "handler")


class Sampling(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Sampling parameters. What the agent's own request says is overridden by what is set here."""

    temperature: Annotated[float, Meta(ge=0, le=10, description="softmax temperature; null: the agent's")] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1, description="nucleus mass; null: the agent's, else 1")] | None = None
    top_k: Annotated[int, Meta(ge=0, description="0 switches it off; null: the agent's, else 0")] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1, description="0 switches it off; null: the agent's, else 0")] | None = None
    max_tokens: Annotated[int, Meta(ge=1, description="tokens a reply may have; null: the agent's")] | None = None
    stop: Annotated[tuple[str, ...], Meta(max_length=16, description="further stop strings")] = ()
    seed: (
        Annotated[int, Meta(ge=0, description="base seed, mixed with rollout and turn; null: the server's choice")]
        | None
    ) = None


class AgentSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Which agent works on the task, and within which limits."""

    harness: Annotated[Name, Meta(description="name of a harness, or `package.module:Class`")] = "ask"
    model: Annotated[Name, Meta(description="name of a served model, as the gateways know it")] = "default"
    sampling: Annotated[Sampling, Meta(description="sampling parameters of every call")] = Sampling()
    max_calls: Annotated[int, Meta(ge=1, description="model calls an attempt may make; null: no limit")] | None = None
    max_tokens: Annotated[int, Meta(ge=1, description="sampled tokens of all calls; null: no limit")] | None = None
    max_wall_s: (
        Annotated[float, Meta(gt=0, description="no model call later than so after RUN began; null: no limit")] | None
    ) = None
    max_idle_s: (
        Annotated[
            float, Meta(gt=0, description="seconds without model call and output until it is ended; null: no limit")
        ]
        | None
    ) = None
    args: Annotated[dict[str, Any], Meta(description="options of the harness")] = {}


class EvaluationSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How the reward is made."""

    rule: Annotated[Name, Meta(description="name of an evaluation rule")] = "none"
    args: Annotated[dict[str, Any], Meta(description="arguments of the rule")] = {}
    sandbox: Annotated[
        Literal["auto", "same", "fresh"],
        Meta(
            description="where commands of the rule run: in the agent's own sandbox, or in a fresh one that gets only "
            "the agent's working directory; auto: as the rule says, which is fresh where the agent could tamper"
        ),
    ] = "auto"
    max_tries: Annotated[int, Meta(ge=1, le=20, description="tries at a rule that does not work")] = 3
    skip: Annotated[
        tuple[Literal["empty_diff", "no_answer", "truncated"], ...],
        Meta(description="what an agent may have left for which the rule is not run, and the reward is skip_reward"),
    ] = ()
    skip_reward: Annotated[float, Meta(description="reward of what `skip` names")] = 0.0


class HookSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One hook around the agent's run. Hooks run in the order in which they stand."""

    hook: Annotated[Name, Meta(description="name of a hook, or `package.module:Class`")]
    args: Annotated[dict[str, Any], Meta(description="options of the hook")] = {}
    on_failure: Annotated[
        Literal["ignore", "fail"], Meta(description="what a hook that raises means: nothing, or a failed attempt")
    ] = "ignore"


class Timeouts(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Wall-clock limits of one attempt, each for one stage, in seconds. Waiting for a stage does not count."""

    init_s: Annotated[Duration, Meta(description="files, setup commands and the agent's own files")] = 300.0
    run_s: Annotated[Duration, Meta(description="the agent's work; it is killed then, and the rollout truncated")] = (
        900.0
    )
    eval_s: Annotated[Duration, Meta(description="the evaluation")] = 300.0


class Task(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One prompt with its settings, and how many rollouts it wants. Only `prompt` is required."""

    prompt: Annotated[str, Meta(min_length=1, description="what the agent is asked, at most 10 MB of UTF-8")]
    id: Annotated[str, Meta(max_length=MAX_ID_CHARS, description="unique in the run; empty: made from the content")] = (
        ""
    )
    agent: AgentSpec = AgentSpec()
    sandbox: SandboxSpec = SandboxSpec()
    evaluation: EvaluationSpec = EvaluationSpec()
    group_size: Annotated[
        int, Meta(ge=1, le=MAX_GROUP_SIZE, description="rollouts of this task; together they are a group")
    ] = 1
    timeouts: Timeouts = Timeouts()
    samples: (
        Annotated[SamplePolicy, Meta(description="which tokens are trained, and their reward; null: as the run says")]
        | None
    ) = None
    hooks: Annotated[tuple[HookSpec, ...], Meta(description="after those of the workers' configuration")] = ()
    outputs: Annotated[
        tuple[str, ...], Meta(description="files kept of each rollout: paths or patterns below the working directory")
    ] = ()
    data_source: Annotated[str, Meta(description="where it comes from, for handlers and statistics")] = ""
    handler: Annotated[
        str, Meta(description="`package.module:Class` that does the work of stages itself; empty: none")
    ] = ""
    max_attempts: Annotated[int, Meta(ge=1, le=100, description="tries at each rollout, the first included")] = 3
    metadata: Annotated[dict[str, Any], Meta(description="the user's own; comes back on every sample")] = {}
    schema_version: Annotated[int, Meta(ge=1, description="version of this record")] = SCHEMA_VERSION

    def content_hash(self) -> str:
        """A digest of everything but the id, independent of key order and of defaults left out."""
        content = {name: getattr(self, name) for name in self.__struct_fields__ if name != "id"}
        # Left out when empty, so that tasks without them keep the ids that they had before there were such fields.
        for name in _NEWER_FIELDS:
            if not content[name]:
                del content[name]
        return digest(json.encode(content, order="sorted"), chars=32)

    def with_id(self) -> Task:
        """This task with an id: its own, else `t-` and the start of its content hash."""
        return self if self.id else structs.replace(self, id="t-" + self.content_hash()[:16])


class TaskProgress(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How far a task is; a value of the `tasks` bucket."""

    content_hash: Annotated[str, Meta(description="Task.content_hash() of the accepted task")]
    group_size: Annotated[int, Meta(description="rollouts of the task")]
    progress: Annotated[str, Meta(description="admitting, fanned_out or closed")] = "admitting"
    task_id: Annotated[str, Meta(description="the user's id")] = ""
    run: Annotated[str, Meta(description="the run's name")] = ""
    schema_version: SchemaVersion = SCHEMA_VERSION
