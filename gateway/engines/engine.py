"""What the gateway asks of a model server, whatever its kind: one Protocol, one file for each variant."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, Protocol

from msgspec import Meta, Struct

from rollyard.schemas.call import Message, Usage
from rollyard.schemas.errors import ModelError
from rollyard.schemas.fleet import LlmServer
from rollyard.schemas.packed import Logprobs, TokenIds

LogprobKind = Literal["raw", "processed", "unknown"]


NEUTRAL_PENALTIES: Final = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""A model's generation_config.json may set these, and servers follow it unless the request says otherwise."""


class EngineRequest(Struct, frozen=True, kw_only=True):
    """One dispatch of a call. With `prompt_ids` (tokens mode) these are the prompt, whatever the messages say.

    With `prompt` in place of messages, a bare text is continued (capture mode).
    """

    call_id: Annotated[str, Meta(description="sent as x-request-id")]
    server: LlmServer
    params: Annotated[dict[str, Any], Meta(description="sampling parameters, see gateway/sampling.py")] = {}
    messages: list[Message] = []
    tools: list[Message] | None = None
    extras: Annotated[dict[str, Any], Meta(description="tool_choice, response_format and the like")] = {}
    prompt_ids: TokenIds | None = None
    prompt: str | None = None
    stream: Annotated[
        bool,
        Meta(description="whether the agent reads a stream; else the server may answer whole"),
    ] = True
    logprob_kind: Annotated[LogprobKind, Meta(description="what the server's logprobs mean, as far as is known")] = (
        "unknown"
    )


class EngineChunk(Struct, frozen=True, kw_only=True):
    """A piece of a reply, as servers stream it.

    `finish_reason` is stop, length, tool_calls or content_filter; in tokens mode also `abort`: the server was stopped
    in mid-reply, and prompt and sampled ids can be continued.
    """

    text: Annotated[str, Meta(description="by the server; in tokens mode what counts is the ids")] = ""
    reasoning: str = ""
    tool_calls: Annotated[list[dict[str, Any]], Meta(description="deltas in OpenAI's form, by `index`")] = []
    token_ids: Annotated[TokenIds | None, Meta(description="ids sampled in this piece")] = None
    logprobs: Annotated[Logprobs | None, Meta(description="of token_ids")] = None
    prompt_ids: Annotated[TokenIds | None, Meta(description="ids of the prompt, once, where the server tells them")] = (
        None
    )
    finish_reason: str | None = None
    stop_string: Annotated[str | None, Meta(description="stop string that ended the reply")] = None
    usage: Usage | None = None
    fault: Annotated[str | None, Meta(description="why the ids of this reply are not exact")] = None
    constrained: Annotated[
        str | None, Meta(description="why exact ids have logprobs of another distribution than they came from")
    ] = None
    policy_version: Annotated[int | None, Meta(description="as the server itself reports it")] = None


def merge(chunks: Sequence[EngineChunk]) -> list[EngineChunk]:
    """Pieces that came together as one, so that each costs little; those of another policy version stay apart."""
    if len(chunks) < 2:
        return list(chunks)
    runs: list[list[EngineChunk]] = []
    for chunk in chunks:
        if runs and chunk.policy_version == runs[-1][0].policy_version:
            runs[-1].append(chunk)
        else:
            runs.append([chunk])
    return [_merged(run) for run in runs]


def _merged(run: list[EngineChunk]) -> EngineChunk:
    if len(run) == 1:
        return run[0]
    ids = [chunk.token_ids.data for chunk in run if chunk.token_ids is not None]
    logprobs = [chunk.logprobs.data for chunk in run if chunk.logprobs is not None]
    return EngineChunk(
        text="".join([chunk.text for chunk in run]),
        reasoning="".join([chunk.reasoning for chunk in run]),
        tool_calls=[call for chunk in run for call in chunk.tool_calls],
        token_ids=TokenIds(b"".join(ids)) if ids else None,
        logprobs=Logprobs(b"".join(logprobs)) if logprobs else None,
        prompt_ids=next((chunk.prompt_ids for chunk in run if chunk.prompt_ids is not None), None),
        finish_reason=next((chunk.finish_reason for chunk in reversed(run) if chunk.finish_reason), None),
        stop_string=next((chunk.stop_string for chunk in reversed(run) if chunk.stop_string), None),
        usage=next((chunk.usage for chunk in reversed(run) if chunk.usage is not None), None),
        fault=next((chunk.fault for chunk in run if chunk.fault), None),
        constrained=run[0].constrained,
        policy_version=run[0].policy_version,
    )


class Probe(Struct, frozen=True, kw_only=True):
    """What a server can do, found out by asking it."""

    trainable: Annotated[bool, Meta(description="returns the exact ids of what it sampled, with logprobs")]
    reason: Annotated[str, Meta(description="why it is not trainable")] = ""
    engine: Annotated[str, Meta(description="kind and version")] = ""
    version: Annotated[str, Meta(description="of the engine; empty: not known")] = ""
    logprob_kind: Annotated[LogprobKind, Meta(description="what its logprobs mean, see engines/probe.py")] = "unknown"
    vocab_size: Annotated[int, Meta(description="0: not known")] = 0
    max_context: Annotated[int, Meta(description="tokens of prompt and reply together; 0: not known")] = 0


class Engine(Protocol):
    """A kind of model server. Asks for a stream always: only then is a dropped connection noticed at once."""

    modes: ClassVar[frozenset[str]]
    """Which of `tokens` and `capture` it can do."""

    def generate(self, request: EngineRequest) -> AsyncGenerator[EngineChunk, None]:
        """The reply, piece by piece; the last piece has a finish_reason. Closing the generator aborts the call.

        Raises ModelError; its status is the server's, or 0 when it was not reached or broke off.
        """
        ...

    async def probe(self, server: LlmServer) -> Probe:
        """Ask for a few tokens. Raises ModelError when the server is not healthy."""
        ...

    async def count(
        self,
        server: LlmServer,
        messages: list[Message],
        tools: list[Message] | None = None,
        template: dict[str, Any] | None = None,
    ) -> int | None:
        """Tokens of a conversation and the generation prompt, by the server's own template and tokenizer.

        None where the server cannot tell. Raises ModelError.
        """
        ...


def headers(server: LlmServer, call_id: str) -> dict[str, str]:
    """Request headers: the call's id, and the key where the server wants one. Raises ModelError when it is not set."""
    result = {"x-request-id": call_id}
    if server.api_key_env:
        key = os.environ.get(server.api_key_env)
        if not key:
            raise ModelError(
                f"the key of model server {server.server_id} is not set",
                hint=f"set {server.api_key_env} in the environment of the gateway",
            )
        result["Authorization"] = f"Bearer {key}"
    return result
