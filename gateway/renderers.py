"""Prompts in tokens mode: the tokenizer of each server, loaded once, and the next prompt of a session."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

from rollyard.gateway.exchange import ModelRequest
from rollyard.gateway.sessions import KnownCall
from rollyard.gateway.tokens.renderer import Renderer
from rollyard.gateway.tokens.template import ChatTemplate
from rollyard.gateway.tokens.tokenizer import load_tokenizer
from rollyard.schemas.errors import ConfigError
from rollyard.schemas.packed import TokenIds

# Below this many messages, encoding costs less than the hop to a thread.
INLINE_MESSAGES: Final = 8


class Renderers:
    """Renderers by the path of their tokenizer."""

    def __init__(self) -> None:
        self._renderers: dict[str, Renderer] = {}
        self._lock = asyncio.Lock()

    async def get(self, path: str) -> Renderer:
        """The renderer of a tokenizer. Raises ConfigError when it cannot be loaded or has no chat template."""
        async with self._lock:
            renderer = self._renderers.get(path)
            if renderer is None:
                renderer = self._renderers[path] = await asyncio.to_thread(_load, path)
            return renderer


def _load(path: str) -> Renderer:
    tokenizer = load_tokenizer(Path(path))
    if not tokenizer.chat_template:
        raise ConfigError(f"the tokenizer {path} has no chat template", hint="put chat_template.jinja beside it")
    names = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
    return Renderer(tokenizer, ChatTemplate(tokenizer.chat_template, tokens=names))


async def next_prompt(
    renderer: Renderer, request: ModelRequest, parent: KnownCall | None, shared: int, same_tools: bool
) -> tuple[TokenIds, str | None]:
    """The ids to send, and why they do not continue the parent's (None: they do, or there is no parent).

    Raises ModelError when the messages cannot be rendered.
    """
    drift = None
    if parent is not None:
        if not parent.exact:
            drift = "parent_ids_unknown"
        elif not same_tools:
            drift = "tools_changed"
        else:
            suffix = renderer.suffix(request.messages, request.tools, shared, parent.completion_ids)
            if suffix is not None:
                return parent.ids() + suffix, None
            drift = "template_not_append_only"
    if len(request.messages) < INLINE_MESSAGES:
        return renderer.prompt(request.messages, request.tools), drift
    return await asyncio.to_thread(renderer.prompt, request.messages, request.tools), drift
