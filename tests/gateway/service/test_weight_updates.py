"""Weights change while calls run: replies that are cut go on, drained servers finish, calls that wait are told."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollyard.schemas.packed import TokenIds
from rollyard.schemas.weights import WeightUpdate

USER: dict[str, Any] = {"role": "user", "content": "hello"}
LONG = "the assistant lists files and returns the answer to the user. " * 4


async def update(gateway: Any, how: str, version: int = 8) -> None:
    report = await gateway.gateway.desk.update(
        WeightUpdate(update_id=f"u{version}", version=version, how=how, servers=("s1",)),  # type: ignore[arg-type]
        lambda progress: None,
    )
    assert [(server.step, server.policy_version) for server in report.servers] == [("done", version)], report


@pytest.mark.parametrize("flavour", ["vllm", "sglang"])
async def test_a_reply_that_is_cut_goes_on_with_the_new_weights(
    stage: Any, tokenizer_folder: Path, flavour: str
) -> None:
    turn = {"content": LONG, "chunk_delay_s": 0.02}
    await stage.model(turn, engine=flavour, tokenizer=str(tokenizer_folder), flavour=flavour)
    gateway = await stage.gateway()
    asked = asyncio.create_task(stage.ask(gateway, [USER]))
    await stage.until(stage.intents)
    await asyncio.sleep(0.3)
    await update(gateway, "abort")
    status, body = await asked
    assert status == 200
    [end] = await stage.ends()
    first, second = stage.journal()
    assert end.completion_ids == TokenIds.of(first.token_ids + second.token_ids)
    assert second.prompt_token_ids == first.prompt_token_ids + first.token_ids
    assert end.logprobs.tolist() == pytest.approx(first.logprobs + second.logprobs)
    cut = len(first.token_ids)
    assert 0 < cut < len(end.completion_ids)
    assert [(span.start, span.end, span.policy_version) for span in end.version_spans] == [
        (0, cut, 7),
        (cut, len(end.completion_ids), 8),
    ]
    assert (end.policy_version, end.policy_version_end, end.untrainable) == (7, 8, None)
    assert end.usage.completion_tokens == body["usage"]["completion_tokens"] == len(end.completion_ids)


async def test_a_drained_server_finishes_its_replies_on_the_old_weights(stage: Any, tokenizer_folder: Path) -> None:
    await stage.model({"content": LONG, "chunk_delay_s": 0.01}, tokenizer=str(tokenizer_folder))
    gateway = await stage.gateway()
    asked = asyncio.create_task(stage.ask(gateway, [USER]))
    await stage.until(stage.intents)
    await asyncio.sleep(0.1)
    updating = asyncio.create_task(update(gateway, "drain"))

    async def draining() -> bool:
        return not gateway.gateway.pool.entries()[0].serving

    await stage.until(draining)
    waiting = asyncio.create_task(stage.ask(gateway, [{"role": "user", "content": "after"}]))
    assert (await asked)[0] == 200
    await updating
    assert (await waiting)[0] == 200
    old, new = await stage.ends()
    assert [(end.policy_version, end.policy_version_end, end.version_spans) for end in (old, new)] == [
        (7, None, ()),
        (8, None, ()),
    ]


async def test_a_call_that_waits_too_long_for_new_weights_is_told_when_to_come_again(stage: Any) -> None:
    await stage.model({"content": "hello"})
    gateway = await stage.gateway(pause_wait_s=0.2)
    [entry] = gateway.gateway.pool.entries()
    await gateway.gateway.desk.servers.change(entry.server.server_id, state="paused", note="by hand")

    async def paused() -> bool:
        return not gateway.gateway.pool.entries()[0].serving

    await stage.until(paused)
    async with stage.post(gateway, [USER]) as response:
        assert response.status == 503
        assert int(response.headers["Retry-After"]) > 0
        assert "by hand" in (await response.json())["error"]["message"]
