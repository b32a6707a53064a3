"""What is refused, with which status and code, always in OpenAI's own shape."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from rollyard.gateway.app import redact
from rollyard.gateway.keys import sign
from rollyard.pipeline.embedded import nats_server
from rollyard.schemas import subjects
from rollyard.schemas.fleet import LlmServer
from rollyard.schemas.task import Sampling

USER: dict[str, Any] = {"role": "user", "content": "hello"}


def is_openai_error(body: Any) -> bool:
    return set(body["error"]) == {"message", "type", "param", "code"}


async def test_a_session_whose_time_is_over(stage: Any) -> None:
    await stage.model({"content": "hello"})
    gateway = await stage.gateway()
    status, _ = await stage.ask(gateway, [USER], key=stage.key(expires_ms=int(time.time() * 1000) + 60_000))
    assert status == 200
    status, body = await stage.ask(gateway, [USER], key=stage.key(expires_ms=int(time.time() * 1000) - 1))
    assert (status, body["error"]["code"]) == (400, "session_limit_exceeded")
    assert "wall time" in body["error"]["message"]


async def test_keys_that_are_none(stage: Any) -> None:
    gateway = await stage.gateway(ready=False)
    foreign = sign(stage.grant(), b"another secret")
    for key in ("sk-whatever", "r1", foreign, stage.key()[:-2]):
        status, body = await stage.ask(gateway, [USER], key=key)
        assert (status, body["error"]["code"]) == (401, "invalid_api_key")
        assert is_openai_error(body)
    async with stage.client.post(f"{gateway.url}/v1/chat/completions", json={"messages": [USER]}) as response:
        assert response.status == 401


async def test_a_key_as_bearer_header_or_path(stage: Any) -> None:
    await stage.model({"content": "hello"})
    gateway = await stage.gateway()
    ways = [
        ("", {"Authorization": f"bearer {stage.key()}"}),
        ("", {"x-api-key": stage.key()}),
        (f"/s/{stage.key()}", {"Authorization": "Bearer EMPTY"}),
    ]
    for prefix, headers in ways:
        url = f"{gateway.url}{prefix}/v1/chat/completions"
        async with stage.client.post(url, json={"messages": [USER]}, headers=headers) as response:
            assert response.status == 200
    async with stage.client.get(f"{gateway.url}/s/{stage.key()}/v1/models") as response:
        assert [model["id"] for model in (await response.json())["data"]] == ["default"]


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ({"messages": []}, "invalid_request", "`messages` is empty"),
        ({}, "invalid_request", "messages"),
        ({"messages": [{"content": "x"}]}, "invalid_request", "messages[0] has no role"),
        ({"messages": [USER], "n": 0}, "invalid_request", "n is 0"),
        ({"messages": [USER], "max_tokens": 0}, "invalid_request", "max_tokens is 0"),
        ({"messages": [USER], "temperature": "hot"}, "invalid_request", "temperature"),
    ],
)
async def test_bodies_that_are_not_acceptable(stage: Any, body: Any, code: str, words: str) -> None:
    gateway = await stage.gateway(ready=False)
    headers = {"x-api-key": stage.key()}
    async with stage.client.post(f"{gateway.url}/v1/chat/completions", json=body, headers=headers) as response:
        answer = await response.json()
        assert response.status == 400
    assert is_openai_error(answer)
    assert answer["error"]["code"] == code
    assert words in answer["error"]["message"]


async def test_unknown_fields_never_fail(stage: Any) -> None:
    await stage.model({"content": "hello"})
    gateway = await stage.gateway()
    odd = {"metadata": {"a": 1}, "store": False, "prompt_cache_key": "x", "reasoning_effort": None, "stop": None}
    status, _ = await stage.ask(gateway, [USER], **odd)
    assert status == 200


async def test_paths_and_methods_that_do_not_exist(stage: Any) -> None:
    gateway = await stage.gateway(ready=False)
    for method, path, status in (("GET", "/v1/nothing", 404), ("GET", "/v1/chat/completions", 405)):
        async with stage.client.request(method, gateway.url + path) as response:
            assert response.status == status
            assert is_openai_error(await response.json())


async def test_a_body_over_the_limit(stage: Any) -> None:
    gateway = await stage.gateway(ready=False, max_body_bytes=1000)
    status, body = await stage.ask(gateway, [{"role": "user", "content": "x" * 2000}])
    assert status == 413
    assert "1000 bytes" in body["error"]["message"]


async def test_no_server_yet(stage: Any) -> None:
    gateway = await stage.gateway(ready=False)
    async with stage.post(gateway, [USER]) as response:
        assert response.status == 503
        assert response.headers["Retry-After"] == "1"
        assert "no server for model 'default'" in (await response.json())["error"]["message"]
    assert await stage.events() == []


async def test_a_server_without_ids_is_refused_for_training_only(stage: Any) -> None:
    await stage.model({"content": "hello"}, engine="openai")
    gateway = await stage.gateway()
    status, body = await stage.ask(gateway, [USER])
    assert (status, body["error"]["code"]) == (400, "server_not_trainable")
    assert "no token ids" in body["error"]["message"]
    status, _ = await stage.ask(gateway, [USER], key=stage.key("judge", training=False))
    assert status == 200
    [end] = await stage.ends("judge")
    assert end.untrainable == "the server returned no token ids"
    assert end.reply == {"role": "assistant", "content": "hello"}


async def test_limits_of_a_session(stage: Any) -> None:
    await stage.model({"content": "hello world hello world"})
    gateways = [await stage.gateway(), await stage.gateway()]
    key = stage.key("calls", max_calls=2)
    for turn in range(2):
        assert (await stage.ask(gateways[turn], [USER], key=key))[0] == 200
    for gateway in gateways:
        status, body = await stage.ask(gateway, [USER], key=key)
        assert (status, body["error"]["code"]) == (400, "session_limit_exceeded")
        assert "max_calls=2" in body["error"]["message"]
    assert len(await stage.intents("calls")) == 2

    key = stage.key("tokens", max_tokens=3)
    status, body = await stage.ask(gateways[0], [USER], key=key)
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 3
    status, body = await stage.ask(gateways[0], [USER], key=key)
    assert status == 400
    assert "max_tokens=3" in body["error"]["message"]


async def test_calls_that_failed_spend_no_budget(stage: Any) -> None:
    await stage.model({"content": "hello", "fail_status": 500, "fail_times": 2})
    gateway = await stage.gateway()
    key = stage.key(max_calls=1)
    statuses = [(await stage.ask(gateway, [USER], key=key))[0] for _ in range(4)]
    assert statuses == [502, 502, 200, 400]


async def test_the_grant_overrides_what_the_agent_asks(stage: Any) -> None:
    await stage.model({"content": "hello world"})
    gateway = await stage.gateway()
    key = stage.key(sampling=Sampling(temperature=0.5, max_tokens=2, seed=3, stop=("END",)))
    await stage.ask(gateway, [USER], key=key, temperature=2, max_tokens=50, top_k=9, stop="STOP")
    [intent] = await stage.intents()
    params = dict(intent.params)
    assert params.pop("seed") >= 0
    assert params == {
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": 9,
        "min_p": 0.0,
        "max_tokens": 2,
        "stop": ["STOP", "END"],
    }


async def test_a_full_log_takes_no_new_calls(stage: Any) -> None:
    await stage.model({"content": "hello"})
    await stage.bus.publish(subjects.log_subject("run", "other", "life"), b"x")
    gateway = await stage.gateway(full_at=1e-15)
    async with stage.post(gateway, [USER]) as response:
        assert response.status == 503
        assert response.headers["Retry-After"] == "10"
        assert (await response.json())["error"]["code"] == "log_full"
    async with stage.client.get(f"{gateway.url}/readyz") as response:
        assert response.status == 503


async def test_a_bus_that_is_away(stage: Any, nats: Any, tmp_path: Path) -> None:
    await stage.model({"content": "hello"})
    gateway = await stage.gateway()
    os.kill(nats.pid, signal.SIGKILL)
    await nats.process.wait()

    async def refused() -> Any:
        async with stage.post(gateway, [USER]) as response:
            return response.status == 503 and response.headers["Retry-After"] and await response.json()

    body = await stage.until(refused)
    assert body["error"]["code"] == "log_unavailable"
    async with stage.client.get(f"{gateway.url}/healthz") as response:
        assert response.status == 200
    async with nats_server(tmp_path / "nats", nats.port):

        async def answered() -> bool:
            return (await stage.ask(gateway, [USER]))[0] == 200

        assert await stage.until(answered)
        await stage.aclose()


async def test_a_server_that_does_not_serve_the_model(stage: Any) -> None:
    await stage.model({"content": "hello"}, models=["another"])
    gateway = await stage.gateway(ready=False)

    async def told() -> Any:
        _, body = await stage.ask(gateway, [USER])
        return "does not serve 'scripted' but another" in body["error"]["message"]

    assert await stage.until(told)


async def test_a_server_without_a_tokenizer_cannot_be_used_in_tokens_mode(stage: Any) -> None:
    await stage.register(LlmServer(server_id="x", url="http://127.0.0.1:1", engine="llamacpp", mode="tokens"))
    gateway = await stage.gateway(ready=False)

    async def told() -> Any:
        _, body = await stage.ask(gateway, [USER])
        return "tokens mode needs a tokenizer" in body["error"]["message"]

    assert await stage.until(told)


async def test_a_prompt_that_is_too_long_in_capture_mode(stage: Any) -> None:
    await stage.model({"content": "hello"}, max_model_len=60)
    gateway = await stage.gateway()
    status, body = await stage.ask(gateway, [{"role": "user", "content": "hello " * 100}])
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    assert "maximum context length" in body["error"]["message"]


@pytest.mark.parametrize(
    ("path", "redacted"),
    [
        ("/s/ry-abc.def/v1/models", "/s/***/v1/models"),
        ("/s/ry-abc.def", "/s/***"),
        ("/v1/models", "/v1/models"),
        ("/v1/s/x", "/v1/s/x"),
    ],
)
def test_keys_stay_out_of_access_logs(path: str, redacted: str) -> None:
    assert redact(path) == redacted
