"""Prompts in tokens mode: the renderer of each server, loaded once, and the next prompt of a session."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from rollyard.gateway.exchange import ModelRequest
from rollyard.gateway.sessions import KnownCall
from rollyard.gateway.tokens.parsers import ends_in_reasoning, family_of, make_parser
from rollyard.gateway.tokens.renderer import Renderer
from rollyard.gateway.tokens.reply import ReplyReader
from rollyard.gateway.tokens.selftest import check_template
from rollyard.gateway.tokens.template import ChatTemplate
from rollyard.gateway.tokens.tokenizer import load_tokenizer
from rollyard.schemas.call import Message
from rollyard.schemas.errors import ConfigError
from rollyard.schemas.fleet import LlmServer
from rollyard.schemas.packed import TokenIds

log = structlog.get_logger(__name__)

# Below this many messages, encoding costs less than the hop to a thread.
INLINE_MESSAGES: Final = 8
_THINK_TAIL: Final = 8


@dataclass(frozen=True, slots=True)
class Prompt:
    """The ids to send, and why they do not continue the parent's (None: they do, or there is no parent)."""

    ids: TokenIds
    drift: str | None
    model: ModelRenderer

    def reader(self, tools: Sequence[Message] | None, stops: Sequence[str], family: str) -> ReplyReader:
        """What reads the reply to this prompt."""
        tokenizer = self.model.renderer.tokenizer
        tail = tokenizer.decode(self.ids[-_THINK_TAIL:], skip_special=False)
        parser = make_parser(family or self.model.family, tools=tools, reasoning_open=ends_in_reasoning(tail))
        return ReplyReader(tokenizer, parser, stops, tokenizer.eos_ids)


class ModelRenderer:
    """Template and tokenizer of one model, and the family that its replies are written in."""

    def __init__(self, renderer: Renderer, family: str) -> None:
        self.renderer = renderer
        self.family = family
        self.report = check_template(renderer)

    async def next_prompt(
        self, request: ModelRequest, parent: KnownCall | None, shared: int, drift: str | None
    ) -> Prompt:
        """The prompt of a request that continues `parent`, unless there is a drift. Raises ModelError."""
        if (given := request.context.get("prompt_ids")) is not None:
            return Prompt(given, None, self)
        if request.prompt is not None:
            return Prompt(self.renderer.tokenizer.encode_rendered(request.prompt, ""), None, self)
        if parent is not None and drift is None:
            if not parent.exact:
                drift = "parent_ids_unknown"
            else:
                suffix = self.renderer.suffix(
                    request.messages, request.tools, shared, parent.completion_ids, request.template_options
                )
                if suffix is not None:
                    return Prompt(parent.ids() + suffix, None, self)
                drift = "template_not_append_only"
        return Prompt(await self._whole(request), drift, self)

    async def count(self, request: ModelRequest) -> int:
        """How many ids the prompt of a request has. Raises ModelError."""
        return len(await self._whole(request))

    async def _whole(self, request: ModelRequest) -> TokenIds:
        options = request.template_options
        if len(request.messages) < INLINE_MESSAGES:
            return self.renderer.prompt(request.messages, request.tools, options)
        return await asyncio.to_thread(self.renderer.prompt, request.messages, request.tools, options)


class Renderers:
    """Renderers by the path of their tokenizer."""

    def __init__(self) -> None:
        self._renderers: dict[str, ModelRenderer] = {}
        self._lock = asyncio.Lock()

    async def get(self, path: str) -> ModelRenderer:
        """The renderer of a tokenizer. Raises ConfigError when it cannot be loaded or has no chat template."""
        async with self._lock:
            renderer = self._renderers.get(path)
            if renderer is None:
                renderer = self._renderers[path] = await asyncio.to_thread(_load, path)
                tell = log.info if renderer.report.append_only else log.warning
                tell("chat_template", tokenizer=path, family=renderer.family, findings=renderer.report.summary)
            return renderer

    async def prepare(self, server: LlmServer) -> str:
        """Load what a server in tokens mode needs; returns the findings about its template. Raises ConfigError."""
        renderer = await self.get(server.tokenizer)
        if server.parser:
            make_parser(server.parser)
        return f"{server.parser or renderer.family}; {renderer.report.summary}"


def _load(path: str) -> ModelRenderer:
    tokenizer = load_tokenizer(Path(path))
    if not tokenizer.chat_template:
        raise ConfigError(f"the tokenizer {path} has no chat template", hint="put chat_template.jinja beside it")
    names = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
    renderer = Renderer(tokenizer, ChatTemplate(tokenizer.chat_template, tokens=names))
    return ModelRenderer(renderer, family_of(tokenizer.chat_template, tokenizer.specials))
