"""A small OpenAI-compatible server with faults, and agents in real sandboxes that talk to it."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rollyard.harnesses.bundles.bundle import find_bundle
from rollyard.harnesses.harness import AgentContext, needs_of, open_harness
from rollyard.schemas.rollout import AgentResult, Rollout
from rollyard.schemas.sandbox import SandboxSpec
from rollyard.schemas.task import AgentSpec, Task
from rollyard.stages.sandbox import Labels, Sandbox
from rollyard.stages.sandboxes.local import LocalBackend, LocalSettings

KEY = "rk-key"


@dataclass
class Upstream:
    """Plays `script`, one entry a request: an HTTP status, `drop`, `break`, a text, or a whole message.

    The last entry is repeated.
    """

    script: list[int | str | dict[str, Any]] = field(default_factory=lambda: ["answer"])
    headers: dict[str, str] = field(default_factory=dict)
    refusal: dict[str, Any] = field(default_factory=dict)
    requests: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Answer a chat completion."""
        assert request.headers["Authorization"] == f"Bearer {KEY}"
        body = await request.json()
        self.requests.append(body)
        entry = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(entry, int):
            return web.json_response({"error": self.refusal}, status=entry, headers=self.headers)
        if entry == "drop":
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        if body.get("stream"):
            return await self._stream(request, entry)
        message = entry if isinstance(entry, dict) else {"role": "assistant", "content": entry}
        finish = "tool_calls" if "tool_calls" in message else "stop"
        return web.json_response(
            {
                "id": "chatcmpl-1",
                "object": "chat.completion",
                "created": 1,
                "model": body["model"],
                "choices": [{"index": 0, "message": message, "finish_reason": finish}],
                "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
            }
        )

    async def _stream(self, request: web.Request, entry: str | dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b": ping\n\n")
        for character in str(entry):
            chunk = {"choices": [{"index": 0, "delta": {"content": character}, "finish_reason": None}]}
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            if entry == "break":
                assert request.transport is not None
                request.transport.close()
                return response
        await response.write(b'data: {"choices": [], "usage": {}}\n\ndata: [DONE]\n\n')
        return response


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    """A server on a free port."""
    handler = Upstream()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", handler.complete)
    async with TestServer(app) as server:
        handler.url = str(server.make_url("/v1"))
        yield handler


@dataclass
class Agents:
    """Runs agents as RUN does."""

    backend: LocalBackend
    upstream: Upstream
    sandbox: Sandbox | None = None

    async def run(
        self, harness: str, prompt: str, *, files: dict[str, str] | None = None, env: dict[str, str] | None = None,
        max_calls: int | None = None, timeout_s: float = 240, **args: Any,
    ) -> AgentResult:  # fmt: skip
        """One rollout from an empty sandbox to its result."""
        task = Task(
            prompt=prompt,
            agent=AgentSpec(harness=harness, model="m", args=args, max_calls=max_calls),
            sandbox=SandboxSpec(env=env or {}),
        )
        rollout = Rollout.of("run", "task", 0, 1)
        self.sandbox = sandbox = await self.backend.create(
            Labels(run="run", rollout_id=rollout.rollout_id, attempt=1, owner="test", created_ms=0)
        )
        needs = needs_of(open_harness(harness), args)
        context = AgentContext(
            rollout=rollout, attempt=1, task=task, base_url=self.upstream.url, api_key=KEY,
            home=sandbox.home, workdir=sandbox.workdir, bundle=str(find_bundle(needs.bundle)) if needs.bundle else "",
        )  # fmt: skip
        agent = open_harness(harness)
        agent.validate_args(args)
        await sandbox.put_files(files or {})
        await sandbox.put_files(agent.files(context), base="home")
        await sandbox.start("agent", agent.command(context), deadline_s=timeout_s)
        end = await sandbox.wait("agent")
        stdout, stderr = await sandbox.output("agent", 100_000)
        return await agent.result(context, end.exit_code, stdout, stderr, sandbox.read_file)


@pytest.fixture
async def agents(tmp_path: Path, upstream: Upstream) -> AsyncIterator[Agents]:
    """Agents that know only the upstream's address."""
    async with LocalBackend(
        LocalSettings(root=str(tmp_path / "sandboxes"), max_file_bytes=8 << 20, lease_s=600)
    ) as backend:
        yield Agents(backend, upstream)
        for ref, _ in await backend.list_owned():
            await (await backend.open(ref)).destroy()


@pytest.fixture
def program_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Programs find their client as they do in a sandbox."""
    from rollyard.harnesses import programs  # noqa: PLC0415

    monkeypatch.syspath_prepend(Path(programs.__file__).parent)
    yield
    for name in ("model_client", "bash_agent", "ask_agent"):
        sys.modules.pop(name, None)
