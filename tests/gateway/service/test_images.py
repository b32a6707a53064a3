"""Images through a whole gateway: the model sees them, the log refers to them, and every gateway knows them again."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

import msgspec
import pytest
from aiohttp import web

from rollyard.gateway.scripted_llm import serve_app
from rollyard.pipeline.client import Client
from rollyard.pipeline.log import read_rollout
from rollyard.schemas import subjects
from rollyard.schemas.errors import BlobError
from rollyard.schemas.fleet import LlmServer
from rollyard.schemas.sample import Commit
from rollyard.stages.calls import resolve
from rollyard.stages.stitching import STITCHER_VERSION, samples_of

PNG = bytes(range(256)) * 1600
NAME = hashlib.sha256(PNG).hexdigest()
DATA = base64.b64encode(PNG).decode()
URL = f"data:image/png;base64,{DATA}"
REFERENCE = {"url": f"blob:{NAME}", "media_type": "image/png"}


class Eyes:
    """A vLLM in capture mode that keeps what it is asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**24)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        return app

    async def _models(self, _request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "eyes", "max_model_len": 100_000}]})

    async def _chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        messages = body["messages"]
        if messages != [{"role": "user", "content": "Hi"}]:
            self.asked.append(body)
        turn = sum(message["role"] == "assistant" for message in messages)
        choice = {
            "index": 0,
            "delta" if body.get("stream") else "message": {"role": "assistant", "content": f"seen {turn}"},
            "token_ids": [5],
            "logprobs": {"content": [{"token": "x", "logprob": -0.5}]},
            "finish_reason": "stop",
        }
        # The prompt of a turn goes on from the turn before.
        prompt = [1, 2, 3] + [5, 6] * turn
        usage = {"prompt_tokens": len(prompt), "completion_tokens": 1}
        answer = msgspec.json.encode({"choices": [choice], "prompt_token_ids": prompt, "usage": usage})
        return web.Response(body=b"data: " + answer + b"\n\ndata: [DONE]\n\n" if body.get("stream") else answer)


@pytest.fixture
async def eyes(stage: Any) -> Any:
    eyes = Eyes()
    async with serve_app(eyes.app()) as url:
        await stage.register(LlmServer(server_id="eyes", url=url, engine="vllm", upstream_model="eyes"))
        yield eyes


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def picture(url: str = URL, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


async def converse(stage: Any, gateway: Any, turns: int, rollout: str = "r1") -> list[dict[str, Any]]:
    """A conversation about one picture of so many turns; returns its messages."""
    messages = [user({"type": "text", "text": "what is it?"}, picture(detail="low"))]
    for turn in range(turns):
        status, answer = await stage.ask(gateway, messages, key=stage.key(rollout))
        assert status == 200, answer
        messages += [answer["choices"][0]["message"], {"role": "user", "content": f"go on {turn}"}]
    return messages


async def logged_bytes(stage: Any, rollout: str) -> int:
    read = stage.bus.read(subjects.LOG, subjects.log_subject("run", rollout, "call"))
    return sum([len(stored.data) async for stored in read])


def stored(stage: Any) -> list[str]:
    return [path.name for path in stage.bus.blobs.folder.rglob("*") if path.is_file()]


async def test_the_model_sees_the_image_and_the_log_holds_it_once(stage: Any, eyes: Eyes) -> None:
    gateway = await stage.gateway()
    sizes = {}
    for turns in (5, 70):
        await converse(stage, gateway, turns, f"r{turns}")
        sizes[turns] = await logged_bytes(stage, f"r{turns}")
    assert len(eyes.asked) == 75
    assert {body["messages"][0]["content"][1]["image_url"]["url"] for body in eyes.asked} == {URL}
    assert stored(stage) == [NAME]
    # The image is larger than all that is logged of 70 turns, one of them whole.
    assert sizes[70] < 1.5 * 70 / 5 * sizes[5] < len(PNG), sizes
    records = resolve(await read_rollout(stage.bus, "run", "r70", kinds=("call",)))
    assert [record.intent.shared_messages for record in records[:4]] == [0, 2, 4, 6]
    assert records[-1].messages[0]["content"][1]["image_url"] == {**REFERENCE, "detail": "low"}


async def test_another_gateway_knows_the_conversation_again_from_the_log(stage: Any, eyes: Eyes) -> None:
    messages = await converse(stage, await stage.gateway(), 3)
    cold = await stage.gateway()
    strict = await stage.gateway(canonical_off=("images_by_content",))
    for gateway in (cold, strict):
        status, _ = await stage.ask(gateway, messages)
        assert status == 200
    first, _, third, known, unknown = await stage.intents()
    assert (known.parent, known.shared_messages, known.drift) == (third.call_id, 6, None)
    assert (unknown.shared_messages, unknown.drift) == (0, "system_changed")
    assert first.call_id != third.call_id
    assert [body["messages"][0] for body in eyes.asked] == [messages[0]] * 5


async def test_a_sample_holds_the_reference_and_the_trainer_gets_the_bytes(stage: Any, eyes: Eyes) -> None:
    await converse(stage, await stage.gateway(), 2)
    events = await read_rollout(stage.bus, "run", "r1")
    ids: dict[str, Any] = {"run": "run", "task_id": "t", "group_id": "t", "rollout_id": "r1", "index": 0, "attempt": 1}
    commit = Commit(**ids, group_size=1, status="completed", cut_seq=events[-1][0], stitcher=STITCHER_VERSION)
    [sample] = samples_of(events, commit)
    assert sample.token_ids.tolist() == [1, 2, 3, 5, 6, 5]
    assert sample.messages[0]["content"][1] == picture(f"blob:{NAME}", media_type="image/png", detail="low")
    client = Client(stage.bus, "run")
    assert await client.blob(f"blob:{NAME}") == await client.blob(NAME) == PNG
    with pytest.raises(BlobError, match="no blob name"):
        await client.blob("blob:../../etc/passwd")


async def test_what_messages_and_responses_send_is_kept_the_same_way(stage: Any, eyes: Eyes) -> None:
    gateway = await stage.gateway()
    source = {"type": "base64", "media_type": "image/png", "data": DATA}
    asked = user({"type": "text", "text": "what is it?"}, {"type": "image", "source": source, "name": "shot"})
    messages = [asked]
    for _ in range(2):
        body = {"model": "m", "max_tokens": 10, "messages": messages}
        async with stage.client.post(
            f"{gateway.url}/v1/messages", json=body, headers={"x-api-key": stage.key()}
        ) as response:
            assert response.status == 200, await response.text()
            messages = [*messages, {"role": "assistant", "content": (await response.json())["content"]}, user()]
            messages[-1]["content"] = [{"type": "text", "text": "go on"}]
    first, second = await stage.intents()
    assert (second.parent, second.shared_messages) == (first.call_id, 2)
    assert DATA[:100] not in msgspec.json.encode(first).decode()
    block = {"type": "image", "source": {**source, "data": f"blob:{NAME}"}, "name": "shot"}
    assert first.messages[0]["content"][1] == {"type": "image_url", "image_url": REFERENCE, "_block": block}

    headers = {"Authorization": f"Bearer {stage.key('r2')}"}
    shown = user({"type": "input_text", "text": "what is it?"}, {"type": "input_image", "image_url": URL})
    previous: dict[str, Any] = {}
    for items in ([shown], [{"role": "user", "content": "go on"}]):
        body = {"model": "m", "input": items, **previous}
        async with stage.client.post(f"{gateway.url}/v1/responses", json=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            previous = {"previous_response_id": (await response.json())["id"]}
    first, second = await stage.intents("r2")
    assert (second.parent, second.shared_messages) == (first.call_id, 2)
    assert first.messages[0]["content"][1]["image_url"] == REFERENCE
    assert [body["messages"][0]["content"][1]["image_url"]["url"] for body in eyes.asked] == [URL] * 4
    assert stored(stage) == [NAME]


async def test_a_reference_of_ours_is_not_taken_from_an_agent(stage: Any, eyes: Eyes) -> None:
    gateway = await stage.gateway()
    status, answer = await stage.ask(gateway, [user(picture(f"blob:{NAME}", media_type="image/png"))])
    assert (status, answer["error"]["param"]) == (400, "messages")
    assert "send the image itself" in answer["error"]["message"]
    assert await stage.intents() == []
    assert eyes.asked == []
