"""What servers are asked for, in the fields of vLLM and SGLang that change the answer. Others are ignored."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct, structs

from rollyard.schemas.call import Message

Limit = Annotated[int, Meta(ge=0)]


class Asked(Struct, frozen=True, kw_only=True):
    """A request, whatever its API. Of messages, ids and text the first that is there is the prompt."""

    prompt_ids: list[int] | None = None
    prompt: str | None = None
    messages: list[Message] = []
    tools: list[Message] | None = None
    template_options: dict[str, Any] | None = None
    max_tokens: int | None = None
    stop: list[str] = []


class StreamOptions(Struct, frozen=True):
    """`stream_options`."""

    include_usage: bool | None = None


class ChatRequest(Struct, frozen=True, kw_only=True):
    """A chat completion of vLLM or SGLang."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    model: str = ""
    tools: list[Message] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    rid: str | None = None

    def asked(self) -> Asked:
        """What the policy is asked for."""
        return Asked(
            prompt_ids=(self.kv_transfer_params or {}).get("prompt_token_ids"),
            messages=self.messages,
            tools=self.tools,
            template_options=self.chat_template_kwargs,
            max_tokens=self.max_completion_tokens or self.max_tokens,
            stop=_list(self.stop),
        )


class CompletionRequest(Struct, frozen=True, kw_only=True):
    """A completion of vLLM, whose replies end after 16 tokens unless it is asked for more."""

    prompt: list[int] | str
    model: str = ""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: int | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = 16
    stop: str | list[str] | None = None
    n: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    def asked(self) -> Asked:
        """What the policy is asked for."""
        asked = Asked(max_tokens=self.max_tokens, stop=_list(self.stop))
        if isinstance(self.prompt, str):
            return structs.replace(asked, prompt=self.prompt)
        return structs.replace(asked, prompt_ids=self.prompt)


class SglangSampling(Struct, frozen=True, kw_only=True):
    """`sampling_params` of SGLang, whose replies end after 128 tokens unless it is asked for more."""

    max_new_tokens: Limit | None = 128
    stop: str | list[str] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None


class GenerateRequest(Struct, frozen=True, kw_only=True):
    """SGLang's /generate."""

    input_ids: list[int] | None = None
    text: str | None = None
    sampling_params: SglangSampling = SglangSampling()
    stream: bool = False
    return_logprob: bool = False
    return_prompt_token_ids: bool = False
    rid: str | None = None

    def asked(self) -> Asked:
        """What the policy is asked for."""
        sampling = self.sampling_params
        return Asked(
            prompt_ids=self.input_ids, prompt=self.text, max_tokens=sampling.max_new_tokens, stop=_list(sampling.stop)
        )


def _list(stop: str | list[str] | None) -> list[str]:
    return [stop] if isinstance(stop, str) else stop or []
