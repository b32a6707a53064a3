"""What an agent says of itself: session, thread, sub-agent, in headers and in the metadata of the body. Pure.

Agents name the same things differently; one table says under which names, the most exact first. Nothing is made up:
what an agent does not say stays empty.

| agent | says |
| --- | --- |
| Codex | session, thread, parent thread, window and kind of request, in headers and again as JSON |
| Claude Code | session and, in sub-agents, their id and their parent's, in headers; session also in metadata.user_id |
| opencode | session (each sub-agent has its own) and the parent's, in headers |
| Hermes, OpenClaw, mini-swe-agent | nothing but the program, which may be that of its HTTP library |
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from rollyard.gateway import keys
from rollyard.gateway.exchange import ModelRequest
from rollyard.schemas.call import AgentIds

MAX_CHARS: Final = 256
MAX_JSON_CHARS: Final = 65_536
"""Codex lists workspaces in its JSON; what is longer is not looked into."""

Named = Mapping[str, Any]

_NAMES: Final[dict[str, tuple[str, ...]]] = {
    "session": (
        "x-claude-code-session-id",
        "session-id",
        "session_id",
        "x-opencode-session",
        "x-session-id",
        "x-session-affinity",
        "x-hermes-session-id",
        "x-litellm-session-id",
        "x-conversation-id",
        "conversation_id",
        "prompt_cache_key",
    ),
    "thread": ("thread-id", "thread_id", "x-claude-code-agent-id", "x-thread-id"),
    "parent_thread": (
        "x-codex-parent-thread-id",
        "x-claude-code-parent-agent-id",
        "parent_thread_id",
        "x-parent-session-id",
        "x-parent-thread-id",
    ),
    "sub_agent": ("x-openai-subagent", "x-claude-code-agent-id", "subagent_kind"),
    "window": ("x-codex-window-id", "window_number"),
    "kind": ("request_kind",),
}
_TURN: Final = "x-codex-turn-metadata"
_CREDENTIAL: Final = re.compile(rf"^(sk-|(bearer|basic)[ _])|(?<![a-z]){keys.PREFIX}[\w-]+\.[\w-]", re.I)


def agent_ids(headers: Mapping[str, str], request: ModelRequest) -> AgentIds:
    """Ids of at most MAX_CHARS characters. `headers` are looked up by lower-case names.

    Body metadata is looked for in `request.context["metadata"]`. A value that is or holds a credential is dropped.
    """
    secrets = _secrets(headers)
    sources = list(_sources(headers, request.context.get("metadata")))
    found = {field: _first(sources, names, secrets) for field, names in _NAMES.items()}
    # Codex names a window `<thread>:<count>`; the thread stands beside it.
    found["window"] = found["window"].rpartition(":")[2]
    if found["parent_thread"] and not found["sub_agent"]:
        found["sub_agent"] = found["thread"] or found["session"]
    return AgentIds(client=_client(headers.get("user-agent", ""), secrets), **found)


def _sources(headers: Mapping[str, str], metadata: Any) -> Iterator[Named]:
    """Where names are looked up, the most exact first: headers, JSON in them, the body's metadata, JSON in it."""
    yield headers
    yield _parsed(headers.get(_TURN))
    if not isinstance(metadata, dict):
        return
    # Responses has two fields of metadata, which stand here under their names.
    for part in (metadata.get("client_metadata"), metadata.get("metadata"), metadata):
        if isinstance(part, dict):
            yield part
            yield _parsed(part.get(_TURN))
            yield _user(part.get("user_id"))


def _first(sources: list[Named], names: tuple[str, ...], secrets: list[str]) -> str:
    for source in sources:
        for name in names:
            if value := _clean(source.get(name), secrets):
                return value
    return ""


def _clean(value: Any, secrets: list[str]) -> str:
    """An id as it may be kept: printable, short, no credential."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value or _CREDENTIAL.search(value):
        return ""
    if any(secret in value for secret in secrets):
        return ""
    return "".join(character for character in value[:MAX_CHARS] if character.isprintable()).strip()


def _secrets(headers: Mapping[str, str]) -> list[str]:
    named = (headers.get("authorization", "").rpartition(" ")[2], headers.get("x-api-key", ""))
    return [secret.strip() for secret in named if secret.strip()]


def _client(user_agent: str, secrets: list[str]) -> str:
    """The first product of a user agent. `OpenAI/JS 7.15.0` has its version apart."""
    product, _, rest = user_agent.strip().partition(" ")
    version = rest.split(" ", 1)[0]
    return _clean(f"{product} {version}" if version[:1].isdigit() else product, secrets)


def _user(value: Any) -> Named:
    """Claude's user_id: JSON, and in older releases `user_<hash>_account_<uuid>_session_<uuid>`."""
    if isinstance(value, str) and "_session_" in value and not value.startswith("{"):
        return {"session_id": value.rpartition("_session_")[2]}
    return _parsed(value)


def _parsed(value: Any) -> Named:
    if not isinstance(value, str) or not value.startswith("{") or len(value) > MAX_JSON_CHARS:
        return {}
    try:
        parsed = msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}
