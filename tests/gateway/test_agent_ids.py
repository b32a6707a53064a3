from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from rollyard.gateway.agent_ids import MAX_CHARS, agent_ids
from rollyard.gateway.exchange import ModelRequest
from rollyard.schemas.call import AgentIds

TURN = {
    "session_id": "s1",
    "thread_id": "t2",
    "parent_thread_id": "t1",
    "request_kind": "turn",
    "subagent_kind": "thread_spawn",
    "window_number": 3,
}


def ids(headers: dict[str, str], **metadata: Any) -> AgentIds:
    return agent_ids(CIMultiDict(headers), ModelRequest(messages=[], context={"metadata": metadata}))


def as_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


@pytest.mark.parametrize(
    ("headers", "metadata", "found"),
    [
        pytest.param(
            {
                "User-Agent": "codex_exec/0.171.0 (Linux; x86_64) xterm",
                "session-id": "s1",
                "thread-id": "t1",
                "x-client-request-id": "t1",
                "x-codex-window-id": "t1:2",
                "x-codex-turn-metadata": as_json({"request_kind": "compaction", "window_number": 2}),
            },
            {"prompt_cache_key": "s1", "client_metadata": {"x-codex-turn-metadata": as_json({"request_kind": "?"})}},
            AgentIds(client="codex_exec/0.171.0", session="s1", thread="t1", window="2", kind="compaction"),
            id="codex",
        ),
        pytest.param(
            {
                "session-id": "s1",
                "thread-id": "t2",
                "x-openai-subagent": "collab_spawn",
                "x-codex-parent-thread-id": "t1",
            },
            {},
            AgentIds(session="s1", thread="t2", parent_thread="t1", sub_agent="collab_spawn"),
            id="codex sub-agent",
        ),
        pytest.param(
            {},
            {"client_metadata": {"x-codex-turn-metadata": as_json(TURN)}},
            AgentIds(session="s1", thread="t2", parent_thread="t1", sub_agent="thread_spawn", window="3", kind="turn"),
            id="codex, body only",
        ),
        pytest.param(
            {"user-agent": "claude-cli/2.1.197 (external, sdk-cli)", "X-Claude-Code-Session-Id": "s1"},
            {"user_id": as_json({"device_id": "d", "account_uuid": "", "session_id": "other"})},
            AgentIds(client="claude-cli/2.1.197", session="s1"),
            id="claude",
        ),
        pytest.param(
            {"x-claude-code-agent-id": "a2", "x-claude-code-parent-agent-id": "a1"},
            {"user_id": as_json({"session_id": "s1"})},
            AgentIds(session="s1", thread="a2", parent_thread="a1", sub_agent="a2"),
            id="claude sub-agent",
        ),
        pytest.param({}, {"user_id": "user_12ab_account__session_s1"}, AgentIds(session="s1"), id="claude of old"),
        pytest.param(
            {"user-agent": "opencode/1.18.33", "x-session-id": "ses_b", "x-session-affinity": "ses_b"},
            {},
            AgentIds(client="opencode/1.18.33", session="ses_b"),
            id="opencode",
        ),
        pytest.param(
            {"x-session-id": "ses_b", "x-parent-session-id": "ses_a"},
            {},
            AgentIds(session="ses_b", parent_thread="ses_a", sub_agent="ses_b"),
            id="opencode sub-agent",
        ),
        pytest.param(
            {"user-agent": "OpenAI/Python 3.57.0", "x-stainless-lang": "python"},
            {},
            AgentIds(client="OpenAI/Python 3.57.0"),
            id="mini-swe-agent, hermes",
        ),
        pytest.param(
            {"user-agent": "OpenAI/JS 7.15.0", "traceparent": "00-1-2-01"},
            {"prompt_cache_key": "k"},
            AgentIds(client="OpenAI/JS 7.15.0", session="k"),
            id="openclaw",
        ),
        pytest.param(
            {"x-conversation-id": "c", "user-agent": "Mozilla/5.0 (X11)"},
            {"user_id": "somebody", "user": "u"},
            AgentIds(client="Mozilla/5.0", session="c"),
            id="generic",
        ),
        pytest.param({}, {"metadata": {"session_id": "s", "thread_id": "t"}}, AgentIds(session="s", thread="t")),
        pytest.param({}, {}, AgentIds()),
    ],
)
def test_what_agents_say(headers: dict[str, str], metadata: dict[str, Any], found: AgentIds) -> None:
    assert ids(headers, **metadata) == found


@pytest.mark.parametrize("value", ["sk-abc", "ry-abc.def", "at ry-abc.def", "Bearer abc", "my-secret", "x my-secret y"])
@pytest.mark.parametrize("secret", [{"Authorization": "Bearer my-secret"}, {"x-api-key": "my-secret"}])
def test_credentials_are_not_kept(secret: dict[str, str], value: str) -> None:
    headers = {**secret, "x-session-id": value, "user-agent": value.replace(" ", "_")}
    assert ids(headers, prompt_cache_key=value, user_id=as_json({"session_id": value})) == AgentIds()
    assert ids(secret | {"x-session-id": "library-1.2"}) == AgentIds(session="library-1.2")


@pytest.mark.parametrize(
    "metadata",
    [
        {"user_id": "{"},
        {"user_id": "{" * 70_000},
        {"user_id": "[1]"},
        {"user_id": {"session_id": "s"}},
        {"x-codex-turn-metadata": "[" * 10_000},
        {"x-codex-turn-metadata": '{"session_id": ["s"], "thread_id": null, "request_kind": true}'},
        {"session_id": True},
        {"client_metadata": [], "metadata": 7},
    ],
)
def test_what_makes_no_sense_says_nothing(metadata: dict[str, Any]) -> None:
    assert ids({}, **metadata) == AgentIds()


@given(st.text(), st.text(), st.dictionaries(st.sampled_from(["session_id", "user_id", "metadata"]), st.text()))
def test_values_are_short_and_can_be_encoded(agent: str, session: str, metadata: dict[str, Any]) -> None:
    headers = {"user-agent": agent * 50, "x-session-id": session * 50}
    found = agent_ids(headers, ModelRequest(messages=[], context={"metadata": metadata}))
    for value in msgspec.to_builtins(found).values():
        assert len(value) <= MAX_CHARS
        assert value.isprintable()
    msgspec.json.encode(found)


def test_no_metadata() -> None:
    for context in ({}, {"metadata": None}, {"metadata": "x"}):
        assert agent_ids({}, ModelRequest(messages=[], context=context)) == AgentIds()
