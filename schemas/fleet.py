"""What processes tell each other about themselves: leases, model servers, policy versions, cancels."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from rollyard.schemas.names import RunName, SchemaVersion, UnixMs
from rollyard.schemas.policy import SamplePolicy
from rollyard.schemas.task import SCHEMA_VERSION


class Lease(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A process, place or pool is alive; renewed well within `lease_s`. A value of `nodes`, `gateways` or `pools`.

    Readers measure the age of a lease by their own clock, from the moment at which they saw it change.
    """

    owner: Annotated[str, Meta(description="place, gateway incarnation, or pool")]
    lease_s: Annotated[float, Meta(gt=0, description="seconds after which it is dead when not renewed")]
    renewal: Annotated[int, Meta(description="counts up at each renewal")] = 0
    url: Annotated[str, Meta(description="base URL of a gateway, empty until it listens; else empty")] = ""
    schema_version: SchemaVersion = SCHEMA_VERSION


class LlmServer(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A model server of the pool; a value of `llm_servers`."""

    server_id: Annotated[str, Meta(description="its name in the pool")]
    url: Annotated[str, Meta(description="base URL without /v1, for example http://127.0.0.1:8000")]
    engine: Annotated[Literal["llamacpp", "vllm", "sglang", "openai"], Meta(description="which adapter speaks to it")]
    model: Annotated[str, Meta(description="name under which agents ask for it")] = "default"
    upstream_model: Annotated[str, Meta(description="name that the server knows; empty: `model`")] = ""
    tokenizer: Annotated[str, Meta(description="path of tokenizer.json or GGUF; needed in tokens mode")] = ""
    mode: Annotated[Literal["tokens", "capture"], Meta(description="who tokenises: gateway or server")] = "capture"
    parser: Annotated[str, Meta(description="how replies are written, in tokens mode; empty: as the template")] = ""
    aliases: Annotated[tuple[str, ...], Meta(description="further names under which agents may ask for it")] = ()
    state: Annotated[
        Literal["serving", "paused", "draining", "swapping"], Meta(description="set by weight updates")
    ] = "serving"
    update: Annotated[str, Meta(description="weight update that has it out of service; empty: none")] = ""
    note: Annotated[str, Meta(description="why it is out of service, for people")] = ""
    api_key_env: Annotated[str, Meta(description="environment variable of the gateway that holds the key")] = ""
    policy_version: Annotated[int | None, Meta(description="weights it serves; null: not known")] = None
    vocab_size: Annotated[int, Meta(ge=0, description="ids are below it; 0: as the probe or the tokenizer says")] = 0
    max_context: Annotated[int, Meta(description="tokens of prompt and reply together; 0: not known")] = 0
    logprob_kind: Annotated[Literal["raw", "processed", "unknown"], Meta(description="what its logprobs mean")] = (
        "unknown"
    )
    trainable: Annotated[bool, Meta(description="whether it returns token ids; set by the probe")] = True
    schema_version: SchemaVersion = SCHEMA_VERSION


class PolicyVersion(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The trainer's announcement of its newest weights; a value of `policy`."""

    run: RunName
    version: Annotated[int, Meta(description="the trainer's count of its updates")]
    at_ms: UnixMs = 0
    schema_version: SchemaVersion = SCHEMA_VERSION


class Cancel(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A run, task or rollout is to end; a value of `cancel`."""

    reason: Annotated[str, Meta(description="what the deliveries will say")] = "cancelled by the user"
    at_ms: UnixMs = 0
    schema_version: SchemaVersion = SCHEMA_VERSION


class DeadLetter(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message that could not be worked on, kept in DEAD for people."""

    stage: Annotated[str, Meta(description="who could not work on it")]
    run: RunName
    subject: Annotated[str, Meta(description="where the message was published")]
    reason: Annotated[str, Meta(description="why it could not be worked on")]
    body: Annotated[bytes, Meta(description="the message as it was")] = b""
    rollout_id: Annotated[str, Meta(description="empty: not known")] = ""
    at_ms: UnixMs = 0
    schema_version: SchemaVersion = SCHEMA_VERSION


class Run(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A training run or experiment; a value of `runs`."""

    run: RunName
    created_ms: UnixMs = 0
    training: Annotated[bool, Meta(description="refuse servers that return no token ids")] = True
    models: Annotated[
        dict[str, str],
        Meta(description="served model by the name that agents ask for, or a pattern such as *haiku*"),
    ] = {}
    samples: Annotated[SamplePolicy, Meta(description="for tasks that say nothing of it")] = SamplePolicy()
    schema_version: SchemaVersion = SCHEMA_VERSION


class ClosedSession(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The gateway answers 410 to this session from now on; a value of `sessions`, whose presence is what counts."""

    reason: Annotated[str, Meta(description="why")] = "the attempt has ended"
    at_ms: UnixMs = 0
    schema_version: SchemaVersion = SCHEMA_VERSION
