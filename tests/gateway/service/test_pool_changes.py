"""The pool changes under whole gateways: over HTTP, by a map of models, and with two real llama.cpp servers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec import structs

from rollyard.gateway.local_model import LocalModel, local_model_server
from rollyard.pipeline.client import Client
from rollyard.schemas.errors import WaitTimeout
from rollyard.schemas.fleet import LlmServer
from rollyard.schemas.task import Sampling

USER: dict[str, Any] = {"role": "user", "content": "hello"}
ADMIN = b"the admin token of the tests"


@pytest.fixture
def trainer(stage: Any) -> Client:
    return Client(stage.bus, "run")


async def test_the_admin_endpoints_of_a_gateway(stage: Any) -> None:
    await stage.model({"content": "hello"})
    gateway = await stage.gateway(admin_token=ADMIN)
    for path, key, status in (
        ("/admin/servers", ADMIN.decode(), 200),
        ("/admin/servers", stage.key(), 403),
        (f"/s/{stage.key()}/admin/servers", stage.key(), 404),
        ("/v1/models", ADMIN.decode(), 401),
    ):
        headers = {"Authorization": f"Bearer {key}"}
        async with stage.client.get(gateway.url + path, headers=headers) as response:
            assert response.status == status, path


async def test_a_run_maps_the_names_that_agents_ask_for(stage: Any, trainer: Client) -> None:
    await stage.model({"content": "big"}, name="s1")
    await stage.model({"content": "small"}, name="s2")
    [_, second] = await trainer.servers()
    await trainer.add_server(structs.replace(second, model="little", aliases=("small",)))
    await trainer.set_models({"*haiku*": "small"})
    gateway = await stage.gateway()

    async def known() -> bool:
        return bool(gateway.gateway.run_models.of("run"))

    await stage.until(known)
    for asked, reply in (("claude-haiku-4-5", "small"), ("claude-opus-4-5", "big"), ("little", "big")):
        status, body = await stage.ask(gateway, [USER], model=asked, key=stage.key(f"r-{reply}-{asked[:6]}"))
        assert (status, body["choices"][0]["message"]["content"], body["model"]) == (200, reply, asked)


@pytest.mark.model
async def test_a_real_server_is_swapped_for_another_one(stage: Any, trainer: Client, local_model: LocalModel) -> None:
    """llama.cpp loads no weights in place: a second server takes over, under the new policy version."""

    def entry(name: str, model: LocalModel, version: int) -> LlmServer:
        tokens = {"mode": "tokens", "tokenizer": str(model.tokenizer)}
        return LlmServer(server_id=name, url=model.url, engine="llamacpp", policy_version=version, **tokens)  # type: ignore[arg-type]

    async def busy() -> bool:
        return any(one.calls for one in gateway.gateway.pool.entries())

    await stage.register(entry("old", local_model, 0))
    gateway = await stage.gateway()
    [failed] = (await trainer.update_weights(1, checkpoint="/c")).failed
    assert "llamacpp server old cannot be updated while it runs; it goes on with the weights" in failed.detail
    assert "swap it" in failed.hint
    async with local_model_server(slots=1, context=2048) as other:
        key = stage.key(sampling=Sampling(temperature=1.0, seed=5, max_tokens=30))
        asking = asyncio.create_task(stage.ask(gateway, [USER], key=key))
        await stage.until(busy)
        await trainer.swap_server("old", entry("new", other, 1))
        status, body = await asking
        assert status == 200, body
        assert [server.server_id for server in await trainer.servers()] == ["new"]
        messages = [USER, body["choices"][0]["message"], {"role": "user", "content": "Go on."}]
        short = stage.key(sampling=Sampling(temperature=1.0, seed=5, max_tokens=8))
        assert (await stage.ask(gateway, messages, key=short))[0] == 200
        ends = await stage.ends()
        told = [(end.server, end.policy_version, end.untrainable) for end in ends]
        assert told == [("old", 0, None), ("new", 1, None)]
        # One conversation over two servers is one chain of ids.
        assert ends[1].shared_prompt_ids == len(ends[0].prompt_ids) + len(ends[0].completion_ids)
        with pytest.raises(WaitTimeout, match=r"server gone, after 0\.5 s: .*127\.0\.0\.1:1/"):
            await trainer.swap_server(
                "new", structs.replace(entry("gone", other, 2), url="http://127.0.0.1:1"), timeout_s=0.5
            )
        # Weights that came by a restart in place: the entry alone bears the version.
        assert (await trainer.update_weights(2)).failed == ()
        [server] = await trainer.servers()
        assert (server.server_id, server.state, server.policy_version) == ("new", "serving", 2)
