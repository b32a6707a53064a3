"""What a script file may say. Its format is told in rollyard.gateway.scripted_llm."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from rollyard.schemas.errors import ConfigError

FinishReason = Literal["stop", "length", "tool_calls", "abort"]
Delay = Annotated[float, Meta(ge=0, le=3600)]


class ScriptedToolCall(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tool call of a turn. The policy makes its id."""

    name: Annotated[str, Meta(min_length=1)]
    arguments: dict[str, Any] = {}


class Turn(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One reply, and how well the server behaves while giving it."""

    content: Annotated[str, Meta(description="text; {prompt}, {last} and {turn} are filled in")] = ""
    reasoning: Annotated[str, Meta(description="thought before the content, in <think> tags")] = ""
    tool_calls: tuple[ScriptedToolCall, ...] = ()
    finish_reason: Annotated[FinishReason | None, Meta(description="null: stop or tool_calls, as fits")] = None
    delay_s: Annotated[Delay, Meta(description="wait before the first byte")] = 0.0
    chunk_delay_s: Annotated[Delay, Meta(description="wait before each chunk of a stream")] = 0.0
    fail_status: Annotated[int, Meta(ge=400, le=599, description="HTTP status to fail with")] | None = None
    break_after_tokens: (
        Annotated[int, Meta(ge=0, description="cut the connection after so many sampled tokens")] | None
    ) = None
    fail_times: Annotated[int, Meta(ge=1, description="how often the same request fails or breaks")] = 1


class Conversation(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The replies of one conversation. The last one is repeated for ever."""

    turns: Annotated[tuple[Turn, ...], Meta(min_length=1)]
    match: Annotated[str, Meta(description="part of a user message; empty: any")] = ""


class Script(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole script. The first conversation that matches is played."""

    conversations: Annotated[tuple[Conversation, ...], Meta(min_length=1)]
    models: Annotated[tuple[str, ...], Meta(min_length=1, description="names that are served")] = ("scripted",)
    noncanonical: Annotated[bool, Meta(description="sample some texts as other ids than a tokenizer would")] = True
    chat_template: Annotated[
        Literal["model", "chatml_tools"], Meta(description="the model's own, or ChatML with Hermes tool calls")
    ] = "model"
    flavour: Annotated[Literal["vllm", "sglang"], Meta(description="whose API it speaks")] = "vllm"
    max_model_len: Annotated[int, Meta(ge=1, description="tokens of prompt and reply together")] = 32_768
    tokens_per_chunk: Annotated[int, Meta(ge=1, description="sampled tokens in a chunk of a stream")] = 1


def load_script(path: Path) -> Script:
    """Read a script file. Raises ConfigError that names the place of the mistake."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Script)
    except OSError as error:
        raise ConfigError(f"cannot read the script {path}: {error.strerror}", hint="is the path right?") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"the script {path} is wrong: {error}", hint="see `rollyard scripted-llm --help`") from error
