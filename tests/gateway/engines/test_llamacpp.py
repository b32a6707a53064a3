from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web

from rollyard.gateway.engines import engines
from rollyard.gateway.engines.engine import EngineRequest
from rollyard.gateway.engines.upstream import http_client
from rollyard.gateway.local_model import LocalModel
from rollyard.gateway.scripted_llm import serve_app
from rollyard.gateway.tokens.tokenizer import TextTokenizer
from rollyard.schemas.errors import ModelError
from rollyard.schemas.fleet import LlmServer
from rollyard.schemas.packed import TokenIds


async def sent(params: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """The body that goes out."""
    bodies: list[dict[str, Any]] = []

    async def handler(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        return web.Response(status=503)

    app = web.Application()
    app.router.add_post("/completion", handler)
    async with serve_app(app) as url, http_client() as client:
        server = LlmServer(server_id="s", url=url, engine="llamacpp", mode="tokens")
        request = {"call_id": "c", "server": server, "params": params, "prompt_ids": TokenIds.of([3, 4]), **fields}
        with pytest.raises(ModelError):
            await anext(engines(client)["llamacpp"].generate(EngineRequest(**request)))
    return bodies[0] if bodies else {}


async def test_parameters_by_the_names_that_llama_cpp_has() -> None:
    plain = await sent({"temperature": 0.5, "top_k": 0, "min_p": 0.0, "seed": 3, "stop": ["x"], "max_tokens": 9})
    expected = {
        "temperature": 0.5,
        "top_k": 0,
        "min_p": 0.0,
        "seed": 3,
        "stop": ["x"],
        "n_predict": 9,
        "prompt": [3, 4],
        "repeat_penalty": 1.0,
        "xtc_probability": 0.0,
        "return_tokens": True,
        "stream": True,
        "n_probs": 1,
    }
    assert plain.items() >= {k: v for k, v in expected.items() if not isinstance(v, list)}.items()
    assert (plain["prompt"], plain["stop"]) == ([3, 4], ["x"])
    assert plain.keys().isdisjoint({"max_tokens", "logit_bias", "json_schema", "repeat_last_n"})

    rich = await sent({"repetition_penalty": 1.2, "logit_bias": {"5": -100, "7": 1.5}, "presence_penalty": 0.5})
    assert (rich["repeat_penalty"], rich["presence_penalty"], rich["repeat_last_n"]) == (1.2, 0.5, -1)
    assert rich["logit_bias"] == [[5, -100.0], [7, 1.5]]
    assert rich["n_predict"] == -1
    assert "repetition_penalty" not in rich


@pytest.mark.parametrize(
    ("response_format", "schema"),
    [
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "array"}}}, {"type": "array"}),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "text"}, None),
    ],
)
async def test_a_format_is_passed_on_as_a_schema(response_format: Any, schema: Any) -> None:
    body = await sent({}, extras={"response_format": response_format})
    assert body.get("json_schema") == schema


async def test_biases_by_words_are_refused() -> None:
    assert await sent({"logit_bias": {"word": 1}}) == {}


async def test_messages_are_refused() -> None:
    assert await sent({}, prompt_ids=None) == {}


def local(model: LocalModel) -> LlmServer:
    return LlmServer(server_id="local", url=model.url, engine="llamacpp", mode="tokens")


@pytest.mark.model
async def test_a_probe_of_the_real_server(local_model: LocalModel) -> None:
    async with http_client() as client:
        probe = await engines(client)["llamacpp"].probe(local(local_model))
    assert (probe.trainable, probe.reason, probe.logprob_kind) == (True, "", "raw")
    assert (probe.vocab_size, probe.max_context) == (49152, 2048)
    assert probe.engine.startswith("llamacpp ")


@pytest.mark.model
async def test_the_real_server_counts_as_its_template_does(
    local_model: LocalModel, model_tokenizer: TextTokenizer
) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Count to five."}]
    text = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nCount to five.<|im_end|>\n<|im_start|>assistant\n"
    )
    async with http_client() as client:
        counted = await engines(client)["llamacpp"].count(local(local_model), messages)
    assert counted == len(model_tokenizer.encode_rendered(text, ""))


@pytest.mark.model
async def test_the_real_server_stops_and_constrains(
    local_model: LocalModel, model_tokenizer: TextTokenizer, joined: Any
) -> None:
    prompt = model_tokenizer.encode_plain("One two three four five")
    async with http_client() as client:
        engine = engines(client)["llamacpp"]

        async def ask(params: dict[str, Any], **fields: Any) -> Any:
            params = {"max_tokens": 16, "temperature": 0.0, **params}
            request = EngineRequest(call_id="c", server=local(local_model), params=params, prompt_ids=prompt, **fields)
            return [chunk async for chunk in engine.generate(request)]

        whole = joined(await ask({}))
        stop = model_tokenizer.decode(TokenIds.of(whole.ids[3:4]), True)
        stopped = joined(await ask({"stop": [stop]}))
        biased = joined(await ask({"logit_bias": {str(whole.ids[0]): -100}}))
        constrained = await ask({}, extras={"response_format": {"type": "json_object"}})

    assert (whole.faults, whole.finish_reasons, len(whole.ids)) == ([], ["length"], 16)
    assert (whole.usages[0].prompt_tokens, whole.usages[0].completion_tokens) == (len(prompt), 16)
    assert stopped.stop_string == stop
    assert stopped.finish_reasons == ["stop"]
    assert biased.ids[0] != whole.ids[0]
    assert joined(constrained).text.lstrip().startswith("{")
    assert all(chunk.constrained for chunk in constrained)
