"""The rig of this folder: opened once, with every scripted conversation of the cases."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

pytest.register_assert_rewrite(
    "speakers", "gateway_rig", "cases_conversation", "cases_tools", "cases_streams", "cases_errors"
)

from conformance_table import EVERY, features  # noqa: E402 - after the line above, so that its assertions tell more
from gateway_rig import Rig, open_rig  # noqa: E402
from odd_server import OddServer  # noqa: E402

from rollyard.gateway.scripted import chatml  # noqa: E402
from rollyard.gateway.service import RunningGateway  # noqa: E402
from rollyard.gateway.tokens.tokenizer import TextTokenizer  # noqa: E402

SHORT_CONTEXT = 150
JOIN_AFTER_S = 0.15
PING_S = 0.15
MAX_BODY_BYTES = 200_000


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: TextTokenizer, tokenizer_folder: Path
) -> AsyncIterator[Rig]:
    # The same tokenizer, with a template that shows tools and reasoning.
    folder = tmp_path_factory.mktemp("tokenizer")
    shutil.copytree(tokenizer_folder, folder, dirs_exist_ok=True)
    (folder / "chat_template.jinja").write_text(chatml.TEMPLATE)
    conversations = [{"match": each.opening, "turns": each.turns} for each in features()]
    async with open_rig(tmp_path_factory.mktemp("rig"), tokenizer) as rig:
        for name in EVERY:
            flavour, _, mode = name.partition("-")
            path = folder if mode == "tokens" else None
            await rig.scripted(name, conversations, tokenizer=path, flavour=flavour)
            if flavour == "vllm":
                await rig.scripted(f"short-{mode}", conversations, tokenizer=path, max_model_len=SHORT_CONTEXT)
        await rig.scripted("bare", conversations, engine="openai")
        await rig.serve(OddServer().app(), "odd", engine="vllm", upstream_model="odd")
        yield rig


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(rig: Rig) -> RunningGateway:
    return await rig.gateway(ping_s=PING_S, join_after_s=JOIN_AFTER_S, max_body_bytes=MAX_BODY_BYTES)
