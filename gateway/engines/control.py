"""What a weight update asks of a model server, by kind of engine: pause, load, resume, and which weights it serves.

vLLM needs VLLM_SERVER_DEV_MODE=1 for it. SGLang's part is from source, not run against a real SGLang.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

import aiohttp

from rollyard.gateway.engines.engine import headers
from rollyard.gateway.engines.upstream import get_json, post_json
from rollyard.schemas.errors import ModelError
from rollyard.schemas.fleet import LlmServer

# Whoever calls sets the limits that matter: a pause takes as long as the longest reply, a load as long as the weights.
_LONG_S: Final = 3600.0
_NO_DEV_MODE: Final = "start vLLM with VLLM_SERVER_DEV_MODE=1 in its environment"


class ServerControl(Protocol):
    """Weight updates of one kind of model server. Every method raises ModelError, with a hint where it cannot do it."""

    async def pause(self, server: LlmServer, *, abort: bool) -> None:
        """Sample no more; new calls wait in the server. Returns once nothing runs.

        Running calls are aborted: their replies end with finish_reason `abort` and what was sampled so far. Or they
        are not: vLLM finishes them first, SGLang holds them and goes on with them after `resume`.
        """
        ...

    async def resume(self, server: LlmServer) -> None:
        """Sample again."""
        ...

    async def abort_all(self, server: LlmServer) -> None:
        """End all running calls with what they have."""
        ...

    async def load(self, server: LlmServer, checkpoint: str, policy_version: int) -> None:
        """Read other weights of the same model from a path that the server sees, and bear their version."""
        ...

    async def mark(self, server: LlmServer, policy_version: int) -> None:
        """Bear a version: the weights have come by another way."""
        ...

    async def version(self, server: LlmServer) -> str | None:
        """The version that the server says it serves; None where it says none."""
        ...


def controls(client: aiohttp.ClientSession) -> dict[str, ServerControl]:
    """Control of every kind of engine, by the name that `LlmServer.engine` bears."""
    none = NoControl()
    return {"vllm": VllmControl(client), "sglang": SglangControl(client), "llamacpp": none, "openai": none}


class VllmControl:
    """See ServerControl."""

    def __init__(self, client: aiohttp.ClientSession) -> None:
        self._client = client

    async def pause(self, server: LlmServer, *, abort: bool) -> None:
        """See ServerControl."""
        await self._post(server, f"/pause?mode={'abort' if abort else 'wait'}")

    async def resume(self, server: LlmServer) -> None:
        """See ServerControl."""
        await self._post(server, "/resume")

    async def abort_all(self, server: LlmServer) -> None:
        """See ServerControl."""
        await self._post(server, "/abort_requests", {})

    async def load(self, server: LlmServer, checkpoint: str, policy_version: int) -> None:
        """See ServerControl. The workers read the checkpoint; what was cached under the old weights is dropped."""
        await self._post(
            server, "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": checkpoint}}
        )
        answer = await self._post(server, "/reset_prefix_cache")
        if isinstance(answer, dict) and answer.get("success") is False:
            raise ModelError(
                f"{server.url} did not drop what it had cached under the old weights",
                hint="calls still run there: pause it, or drain it, and update it once more",
                retryable=True,
            )
        await self.mark(server, policy_version)

    async def mark(self, server: LlmServer, policy_version: int) -> None:
        """See ServerControl."""
        await self._post(server, "/update_weight_version", {"new_version": str(policy_version)})

    async def version(self, server: LlmServer) -> str | None:
        """See ServerControl."""
        return _version(await get_json(self._client, f"{server.url}/weight_info", headers(server, "control")))

    async def _post(self, server: LlmServer, path: str, body: Any = None) -> Any:
        try:
            return await post_json(self._client, server.url + path, body, headers(server, "control"), timeout_s=_LONG_S)
        except ModelError as error:
            if error.status in (404, 405):
                raise ModelError(error.message, hint=_NO_DEV_MODE, status=error.status) from error
            raise


class SglangControl:
    """See ServerControl."""

    def __init__(self, client: aiohttp.ClientSession) -> None:
        self._client = client

    async def pause(self, server: LlmServer, *, abort: bool) -> None:
        """See ServerControl."""
        await self._post(server, "/pause_generation", {"mode": "abort" if abort else "retract"})

    async def resume(self, server: LlmServer) -> None:
        """See ServerControl."""
        await self._post(server, "/continue_generation", {})

    async def abort_all(self, server: LlmServer) -> None:
        """See ServerControl."""
        await self._post(server, "/abort_request", {"abort_all": True})

    async def load(self, server: LlmServer, checkpoint: str, policy_version: int) -> None:
        """See ServerControl. From then on the server calls its model by the path of the checkpoint."""
        body = {"model_path": checkpoint, "weight_version": str(policy_version), "flush_cache": True}
        await self._post(server, "/update_weights_from_disk", body)

    async def mark(self, server: LlmServer, policy_version: int) -> None:
        """See ServerControl."""
        body = {"new_version": str(policy_version), "abort_all_requests": False}
        await self._post(server, "/update_weight_version", body)

    async def version(self, server: LlmServer) -> str | None:
        """See ServerControl."""
        return _version(await get_json(self._client, f"{server.url}/model_info", headers(server, "control")))

    async def _post(self, server: LlmServer, path: str, body: Any) -> None:
        url = server.url + path
        answer = await post_json(self._client, url, body, headers(server, "control"), timeout_s=_LONG_S)
        if isinstance(answer, dict) and answer.get("success") is False:
            raise ModelError(f"{url} failed: {answer.get('message')}", hint="see the server's log", status=400)


class NoControl:
    """See ServerControl. A server that keeps the weights it was started with, and knows of no version."""

    async def pause(self, server: LlmServer, *, abort: bool) -> None:
        """See ServerControl."""
        raise _cannot(server)

    async def resume(self, server: LlmServer) -> None:
        """See ServerControl."""
        raise _cannot(server)

    async def abort_all(self, server: LlmServer) -> None:
        """See ServerControl."""
        raise _cannot(server)

    async def load(self, server: LlmServer, checkpoint: str, policy_version: int) -> None:
        """See ServerControl."""
        raise _cannot(server)

    async def mark(self, server: LlmServer, policy_version: int) -> None:
        """Nothing: its entry alone bears the version."""

    async def version(self, server: LlmServer) -> str | None:
        """See ServerControl."""
        return None


def _version(answer: Any) -> str | None:
    version = answer.get("weight_version") if isinstance(answer, dict) else None
    return None if version in (None, "default") else str(version)


def _cannot(server: LlmServer) -> ModelError:
    return ModelError(
        f"weights of the {server.engine} server {server.server_id} cannot be updated while it runs",
        hint="drain it, start another one with the new weights, and swap it for that one",
    )
