"""Weight updates at a real vLLM: pauses, aborts, replies that are gone on with, and other weights from a folder."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from rollyard.gateway.tokens.renderer import Renderer
from rollyard.schemas.errors import ModelError
from rollyard.schemas.packed import TokenIds

USER: dict[str, Any] = {"role": "user", "content": "hello"}
LONG = {"max_tokens": 400, "ignore_eos": True, "temperature": 0.0}


async def cut(vllm: Any, how: str, reply: type[Any], **request: Any) -> Any:
    """A reply that is aborted after some pieces."""
    pieces = []
    async with aclosing(vllm.generate(**request)) as chunks:
        async for chunk in chunks:
            pieces.append(chunk)
            if len(pieces) == 5:
                if how == "pause":
                    await vllm.control.pause(vllm.server, abort=True)
                else:
                    await vllm.control.abort_all(vllm.server)
    return reply(pieces)


@pytest.mark.parametrize("how", ["pause", "abort_all"])
async def test_an_aborted_reply_is_gone_on_with(vllm: Any, renderer: Renderer, joined: Any, how: str) -> None:
    """What was sampled before and after is, id for id, what one reply is that nobody aborts."""
    prompt = renderer.prompt([USER], None)
    begun = await cut(vllm, how, joined, prompt_ids=prompt, params=LONG)
    assert (begun.finish_reason, begun.faults) == ("abort", [])
    assert len(begun.ids) == len(begun.logprobs) == begun.usage.completion_tokens
    assert 0 < len(begun.ids) < 400

    await vllm.control.resume(vllm.server)
    rest = LONG | {"max_tokens": 400 - len(begun.ids)}
    end = await vllm.ask(prompt_ids=prompt + TokenIds.of(begun.ids), params=rest)
    whole = await vllm.ask(prompt_ids=prompt, params=LONG)
    assert begun.ids + end.ids == whole.ids
    assert begun.logprobs + end.logprobs == pytest.approx(whole.logprobs, abs=0.05)


@pytest.mark.parametrize("how", ["pause", "abort_all"])
async def test_an_aborted_reply_in_capture_mode_is_an_error(vllm: Any, joined: Any, how: str) -> None:
    with pytest.raises(ModelError, match="aborted the call") as failed:
        await cut(vllm, how, joined, messages=[USER], params=LONG)
    assert failed.value.retryable


@pytest.mark.parametrize("abort", [True, False])
async def test_new_calls_wait_while_it_is_paused(vllm: Any, abort: bool) -> None:
    await vllm.control.pause(vllm.server, abort=abort)
    assert await vllm.get("/is_paused") == {"is_paused": True}
    call = asyncio.ensure_future(vllm.ask(messages=[USER]))
    await asyncio.sleep(1)
    assert not call.done()
    await vllm.control.resume(vllm.server)
    assert len((await call).ids) == 8
    assert await vllm.get("/is_paused") == {"is_paused": False}


async def test_what_runs_is_finished_before_a_pause(vllm: Any, joined: Any) -> None:
    pieces = []
    async with aclosing(vllm.generate(messages=[USER], params=LONG | {"max_tokens": 60})) as chunks:
        async for chunk in chunks:
            pieces.append(chunk)
            if len(pieces) == 2:
                await vllm.control.pause(vllm.server, abort=False)
                assert await vllm.metric("vllm:num_requests_running") == 0
    reply = joined(pieces)
    assert (len(reply.ids), reply.finish_reason) == (60, "length")


async def test_a_paused_server_is_paused_once_more_and_resumed_twice(vllm: Any) -> None:
    """An update that is repeated after it died does so."""
    for _ in range(2):
        await vllm.control.pause(vllm.server, abort=True)
    for _ in range(2):
        await vllm.control.resume(vllm.server)
    assert len((await vllm.ask(messages=[USER])).ids) == 8


async def test_versions(vllm: Any) -> None:
    await vllm.control.mark(vllm.server, 3)
    assert await vllm.control.version(vllm.server) == "3"
    await vllm.control.mark(vllm.server, 4)
    assert await vllm.control.version(vllm.server) == "4"


async def test_other_weights_are_loaded_while_it_is_paused(vllm: Any, checkpoints: tuple[Path, Path]) -> None:
    first, second = checkpoints
    greedy = {"messages": [USER], "params": LONG | {"max_tokens": 24}}

    async def load(checkpoint: Path, version: int) -> None:
        await vllm.control.pause(vllm.server, abort=True)
        await vllm.control.load(vllm.server, str(checkpoint), version)
        await vllm.control.resume(vllm.server)
        assert await vllm.control.version(vllm.server) == str(version)

    await load(first, 10)
    before = await vllm.ask(**greedy)
    await load(second, 11)
    after = await vllm.ask(**greedy)
    await load(first, 12)
    again = await vllm.ask(**greedy)
    assert after.ids != before.ids
    assert (again.ids, again.logprobs) == (before.ids, before.logprobs)


async def test_weights_that_are_not_there(vllm: Any, checkpoints: tuple[Path, Path], tmp_path: Path) -> None:
    """vLLM has let go of the old ones by then: it must sample nothing before it has weights again, or it dies."""
    greedy = {"messages": [USER], "params": LONG | {"max_tokens": 8}}
    first, _ = checkpoints
    before = await vllm.ask(**greedy)
    await vllm.control.mark(vllm.server, 20)
    await vllm.control.pause(vllm.server, abort=True)
    try:
        with pytest.raises(ModelError) as failed:
            await vllm.control.load(vllm.server, str(tmp_path / "nothing"), 21)
        # Not a refusal: an update does not take the server for one that has its old weights.
        assert failed.value.status == 500
        assert await vllm.control.version(vllm.server) == "20"
    finally:
        await vllm.control.load(vllm.server, str(first), 22)
    await vllm.control.resume(vllm.server)
    assert (await vllm.ask(**greedy)).ids == before.ids


async def test_what_is_cached_under_the_old_weights_is_not_kept_unseen(
    vllm: Any, checkpoints: tuple[Path, Path]
) -> None:
    """While calls run vLLM keeps its cache, and says so in a body with status 200: the version is not borne then."""
    first, _ = checkpoints
    await vllm.control.mark(vllm.server, 30)
    async with aclosing(vllm.generate(messages=[USER], params=LONG)) as chunks:
        await anext(chunks)
        with pytest.raises(ModelError, match="cached under the old weights") as failed:
            await vllm.control.load(vllm.server, str(first), 31)
    assert failed.value.retryable
    assert await vllm.control.version(vllm.server) == "30"
