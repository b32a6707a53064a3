"""Hook `webhook`: tells a web service of the agent's end: one JSON document by POST, tried a few times.

The document holds no key, no environment and no prompt. A token stands in a variable of the worker's environment,
never in a task or in an error.
"""

from __future__ import annotations

import asyncio
import os
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

import aiohttp
from msgspec import Meta, to_builtins

from rollyard.schemas.errors import ConfigError
from rollyard.schemas.failure import Failure
from rollyard.schemas.rollout import AgentResult
from rollyard.stages.hook import HookArgs, HookContext

FIRST_PAUSE_S: Final = 0.5


class WebhookRefused(Exception):
    """The service did not take the document."""


class Webhook(HookArgs, kw_only=True):
    """POSTs {event, run, task_id, rollout_id, index, attempt, status, failure, metrics, metadata, answer, artifacts}.

    `event` is `ran` or `failed`. The header Idempotency-Key names rollout, attempt and event, since it may come twice.
    """

    url: Annotated[str, Meta(description="http or https address")]
    token_env: Annotated[str, Meta(description="variable of the worker with a bearer token; empty: none")] = ""
    events: Annotated[tuple[str, ...], Meta(description="which to tell of: ran, failed")] = ("ran", "failed")
    with_answer: Annotated[bool, Meta(description="whether the answer goes along")] = True
    max_tries: Annotated[int, Meta(ge=1, le=10, description="tries, with growing pauses between them")] = 3
    request_s: Annotated[float, Meta(gt=0, le=600, description="time limit of one try")] = 10.0

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url is no http address: {parts.scheme}://{parts.hostname or ''}")
        if parts.username or parts.password:
            raise ValueError("url holds a password; put a token into a variable, and name it in token_env")
        if unknown := set(self.events) - {"ran", "failed"}:
            raise ValueError(f"events are ran and failed, not {min(unknown)!r}")

    async def after_run(self, context: HookContext, result: AgentResult) -> None:
        """Tell of an agent whose rollout goes on to EVAL."""
        if context.failure is None or context.failure.kind == "agent_budget":
            await self._tell(context, "ran", "truncated" if context.failure else "completed", context.failure)

    async def on_error(self, context: HookContext, failure: Failure) -> None:
        """Tell of an attempt that ends here."""
        await self._tell(context, "failed", "cancelled" if failure.kind == "cancelled" else "failed", failure)

    async def _tell(self, context: HookContext, event: str, status: str, failure: Failure | None) -> None:
        if event in self.events:
            await self._post(context, document(context, event, status, failure, self.with_answer))

    async def _post(self, context: HookContext, body: dict[str, Any]) -> None:
        name = f"{context.rollout.rollout_id}.{context.attempt}.{body['event']}"
        headers = {"Idempotency-Key": name, "User-Agent": "rollyard"}
        if self.token_env:
            token = os.environ.get(self.token_env, "").strip()
            if not token:
                raise ConfigError(f"the variable {self.token_env} has no token", hint="set it where RUN works")
            headers["Authorization"] = f"Bearer {token}"
        trouble = ""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self.request_s)) as client:
            for tries in range(1, self.max_tries + 1):
                try:
                    async with client.post(self.url, json=body, headers=headers, allow_redirects=False) as response:
                        if response.status < 300:
                            return
                        trouble = f"HTTP {response.status}"
                        if response.status < 500 and response.status not in (408, 425, 429):
                            break
                except (aiohttp.ClientError, TimeoutError) as error:
                    trouble = type(error).__name__
                if tries < self.max_tries:
                    await asyncio.sleep(FIRST_PAUSE_S * 2 ** (tries - 1))
        # Its host only: a path or query may hold what is not for a log.
        raise WebhookRefused(f"{urlsplit(self.url).hostname} did not take it: {trouble}")


def document(
    context: HookContext, event: str, status: str, failure: Failure | None, with_answer: bool
) -> dict[str, Any]:
    """What is sent."""
    rollout, result = context.rollout, context.result
    body = {
        "event": event,
        "run": rollout.run,
        "task_id": rollout.task_id,
        "rollout_id": rollout.rollout_id,
        "index": rollout.index,
        "attempt": context.attempt,
        "status": status,
        "failure": to_builtins(failure),
        "metrics": dict(result.metrics) if result else {},
        "metadata": to_builtins(result.metadata) if result else {},
        "artifacts": to_builtins(result.artifacts) if result else [],
    }
    return body | ({"answer": result.answer} if result and with_answer else {})
