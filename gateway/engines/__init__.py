"""Adapters to model servers, one kind a file."""

from __future__ import annotations

import aiohttp

from rollyard.gateway.engines.engine import Engine
from rollyard.gateway.engines.llamacpp import LlamaCppEngine
from rollyard.gateway.engines.openai import OpenAIEngine
from rollyard.gateway.engines.sglang import SglangEngine
from rollyard.gateway.engines.vllm import VllmEngine


def engines(client: aiohttp.ClientSession) -> dict[str, Engine]:
    """Every engine by the name that `LlmServer.engine` bears."""
    return {
        "llamacpp": LlamaCppEngine(client),
        "vllm": VllmEngine(client),
        "sglang": SglangEngine(client),
        "openai": OpenAIEngine(client),
    }
