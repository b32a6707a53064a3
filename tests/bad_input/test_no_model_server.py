"""No model server: the rollout ends as data, after tries that end too, and everybody says what is missing."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec import structs

from rollyard.gateway.service import gateway_service
from rollyard.gateway.settings import GatewaySettings
from rollyard.pipeline.config import GatewayConfig
from rollyard.pipeline.doctor import model_servers
from rollyard.pipeline.embedded import free_port
from rollyard.pipeline.kv import Bucket
from rollyard.pipeline.progress import render_status, run_status
from rollyard.schemas import subjects
from rollyard.schemas.fleet import LlmServer
from rollyard.schemas.rollout import Rollout
from rollyard.schemas.task import AgentSpec, Task


@asynccontextmanager
async def with_gateway(crew: Any) -> AsyncIterator[None]:
    """A gateway of which the workers know."""
    settings = GatewaySettings(secret=crew.context.secret)
    async with gateway_service(crew.bus, settings) as gateway:
        crew.config = structs.replace(crew.config, gateway=GatewayConfig(url=gateway.url))
        yield


def asking(harness: str) -> Task:
    agent = AgentSpec(harness=harness, args={"patience_s": 1.5})
    return Task(prompt="Are you there?", id="t", agent=agent, max_attempts=2)


@pytest.mark.parametrize("harness", ["ask", "bash"])
async def test_without_a_server_the_rollout_fails_as_llm_after_its_attempts(crew: Any, harness: str) -> None:
    await crew.submit(asking(harness))
    async with with_gateway(crew), crew.at_work("admit", "init", "run", "eval", "aggregate"):

        async def in_run() -> bool:
            return any(subject.startswith("stage.run.") for subject in await crew.due())

        await crew.until(in_run)
        line = render_status(await run_status(crew.bus, "r"), None, 0.0, None)
        (delivery,) = await crew.until(crew.deliveries)
    assert "no model server is registered: see `rollyard llm add`" in line
    assert (delivery.status, delivery.attempt, delivery.samples) == ("failed", 2, ())
    failure = delivery.failure
    assert (failure.kind, failure.retryable) == ("llm", True)
    assert "the agent got no answer from the model" in failure.message
    assert "HTTP 503" in failure.message
    assert "no server for model 'default' is registered; known models: none" in failure.message
    assert failure.hint == "is a model server registered, and does it answer? `rollyard doctor` tells"
    events = await crew.life(Rollout.of("r", "t", 0, 1))
    assert [(event.attempt, event.failure.kind) for event in events if event.kind == "failed"] == [
        (1, "llm"),
        (2, "llm"),
    ]


async def test_a_server_that_is_down_is_named(crew: Any) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    await Bucket(crew.bus, subjects.LLM_SERVERS, LlmServer).put("s1", LlmServer(server_id="s1", url=url, engine="vllm"))
    await crew.submit(asking("ask"))
    async with with_gateway(crew), crew.at_work("admit", "init", "run", "eval", "aggregate"):
        (delivery,) = await crew.until(crew.deliveries)
    assert (delivery.status, delivery.failure.kind) == ("failed", "llm")
    assert "no server for model 'default' is healthy: s1: " in delivery.failure.message
    finding = await model_servers(crew.config)
    assert finding.status == "warn"
    assert re.match(rf"s1 at {url} cannot be reached: .*refused", finding.found)
    assert "rollyard llm rm" in finding.mend


async def test_a_gateway_that_is_away_is_a_failure_of_the_same_kind(crew: Any) -> None:
    crew.config = structs.replace(crew.config, gateway=GatewayConfig(url=f"http://127.0.0.1:{free_port()}"))
    await crew.submit(structs.replace(asking("ask"), max_attempts=1))
    async with crew.at_work("admit", "init", "run", "eval", "aggregate"):
        (delivery,) = await crew.until(crew.deliveries)
    assert (delivery.status, delivery.failure.kind) == ("failed", "llm")
    assert "ConnectionRefusedError" in delivery.failure.message


async def test_doctor_says_that_there_is_none(crew: Any) -> None:
    finding = await model_servers(crew.config)
    assert (finding.status, finding.found) == ("warn", "none is registered")
    assert "rollyard llm add" in finding.mend
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        entry = LlmServer(server_id="s1", url=url, engine="vllm")
        await Bucket(crew.bus, subjects.LLM_SERVERS, LlmServer).put("s1", entry)
        finding = await model_servers(crew.config)
        assert (finding.status, finding.found) == ("ok", f"s1 at {url}")
    broken = json.dumps({"server_id": "s2", "url": "http://[", "engine": "vllm"}).encode()
    await crew.bus.publish(subjects.kv_subject(subjects.LLM_SERVERS, "s2"), broken)
    assert "s2 at http://[ cannot be reached" in (await model_servers(crew.config)).found
