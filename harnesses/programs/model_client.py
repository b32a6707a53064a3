"""A chat model behind an OpenAI-compatible server, for agents. It lies beside the agent's program in the sandbox.

Lost connections and refusals that pass (429 and 5xx) are tried again for `patience_s`, for a gateway may be restarting.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from http.client import HTTPConnection, HTTPResponse

EXIT_ERROR = 1
EXIT_LIMIT = 2
EXIT_NO_MODEL = 3
LIMIT_CODES = ("session_limit_exceeded", "context_length_exceeded")
READ_TIMEOUT_S = 600.0
MAX_PAUSE_S = 5.0


class AgentError(Exception):
    """The agent cannot go on; `exit_code` says why."""

    def __init__(self, message: str, exit_code: int = EXIT_ERROR) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class _TryAgain(Exception):
    """A failure that may pass; the server may have said when."""

    def __init__(self, message: str, pause_s: float = 0.0) -> None:
        super().__init__(message)
        self.pause_s = pause_s


class Model:
    """The model that OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL name."""

    def __init__(self, patience_s: float) -> None:
        self._url = urlsplit(os.environ["OPENAI_BASE_URL"].rstrip("/"))
        self._key = os.environ["OPENAI_API_KEY"]
        self._name = os.environ.get("OPENAI_MODEL", "default")
        self._patience_s = patience_s
        self._connection: HTTPConnection | None = None

    def reply(self, messages: list[dict[str, str]], *, stream: bool) -> str:
        """The text of the model's next message. Raises AgentError."""
        body = json.dumps({"model": self._name, "messages": messages, "stream": stream}).encode()
        give_up_at, pause_s = 0.0, 0.1
        while True:
            try:
                return self._ask(body, stream)
            except _TryAgain as failure:
                self._disconnect()
                now = time.monotonic()
                give_up_at = give_up_at or now + self._patience_s
                wait_s = max(failure.pause_s, pause_s * (0.5 + random.random()))
                if now + wait_s > give_up_at:
                    raise AgentError(f"no reply from the model: {failure}", EXIT_NO_MODEL) from failure
                time.sleep(wait_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)

    def _ask(self, body: bytes, stream: bool) -> str:
        from http.client import HTTPException  # noqa: PLC0415 - see _connect

        try:
            connection = self._connection or self._connect()
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._key}"}
            connection.request("POST", f"{self._url.path}/chat/completions", body, headers)
            response = connection.getresponse()
            if response.status != 200:
                raise _refusal(response)
            return _streamed(response) if stream else _whole(response)
        except (OSError, HTTPException, ValueError) as error:
            raise _TryAgain(f"{type(error).__name__}: {error}") from error

    def _connect(self) -> HTTPConnection:
        if self._url.scheme == "http":
            # Loading OpenSSL takes a quarter of the time that a small agent needs to start.
            sys.modules.setdefault("ssl", None)  # type: ignore[arg-type]
        import http.client  # noqa: PLC0415 - only now is it known what it must load

        secure = self._url.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        self._connection = kind(self._url.hostname or "", self._url.port, timeout=READ_TIMEOUT_S)
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None


def _refusal(response: HTTPResponse) -> Exception:
    text = response.read().decode(errors="replace")
    message = f"HTTP {response.status}: {text[:500]}"
    if any(code in text for code in LIMIT_CODES):
        return AgentError(message, EXIT_LIMIT)
    if response.status not in (408, 409, 429) and response.status < 500:
        return AgentError(message)
    retry_after = response.getheader("Retry-After") or ""
    return _TryAgain(message, min(float(retry_after), MAX_PAUSE_S) if retry_after.isdigit() else 0.0)


def _whole(response: HTTPResponse) -> str:
    reply = json.loads(response.read())
    return str(reply["choices"][0]["message"].get("content") or "")


def _streamed(response: HTTPResponse) -> str:
    """The text of a stream of server-sent events. A stream without its end counts as a lost connection."""
    parts: list[str] = []
    while line := response.readline():
        name, _, data = line.strip().partition(b":")
        if name != b"data":
            continue
        if data.strip() == b"[DONE]":
            response.read()
            return "".join(parts)
        event: dict[str, Any] = json.loads(data)
        if "error" in event:
            raise _TryAgain(f"the stream broke: {event['error']}")
        parts += [choice.get("delta", {}).get("content") or "" for choice in event.get("choices", [])]
    raise _TryAgain("the stream ended before its end")


def read_config() -> dict[str, Any]:
    """The JSON file that the command line names."""
    with open(sys.argv[1], encoding="utf-8") as file:  # noqa: PTH123 - pathlib takes long to import
        config: dict[str, Any] = json.load(file)
    return config


def chat(system: str, examples: list[list[str]], prompt: str) -> list[dict[str, str]]:
    """The messages of a conversation: each example alternates between user and assistant."""
    messages = [{"role": "system", "content": system}] if system else []
    for example in [*examples, [prompt]]:
        roles = ("user", "assistant")
        messages += [{"role": roles[number % 2], "content": text} for number, text in enumerate(example)]
    return messages
