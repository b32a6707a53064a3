"""Whatever comes in, OpenAI's two completion endpoints make a request of it or refuse it."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.gateway.exchange import Finished, ModelRequest
from rollyard.gateway.protocols.chat import ChatProtocol
from rollyard.gateway.protocols.completions import CompletionsProtocol
from rollyard.gateway.protocols.protocol import Protocol
from rollyard.gateway.refusal import Refusal
from rollyard.gateway.scenario import classify
from rollyard.schemas.call import Usage

CHAT, COMPLETIONS = ChatProtocol(), CompletionsProtocol()

NAMES = (
    "role content name tool_calls function_call function arguments id type text image_url input_text refusal custom "
    "input assistant user tool none auto required allowed_tools mode tools reasoning reasoning_content tool_call_id "
    "_own format grammar definition \ud800 nan"
)
WORDS = st.sampled_from(NAMES.split())
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**70) | st.floats(allow_nan=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=8,
)
CALLS = st.fixed_dictionaries(
    {},
    optional={
        "id": VALUES,
        "type": st.sampled_from(["function", "custom", None]) | VALUES,
        "function": VALUES | st.fixed_dictionaries({"name": WORDS, "arguments": VALUES}),
        "custom": VALUES | st.fixed_dictionaries({"name": WORDS, "input": VALUES}),
    },
)
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool", "function"]) | VALUES},
    optional={
        "content": st.text(max_size=5) | VALUES,
        "tool_calls": st.lists(CALLS, max_size=2) | VALUES,
        "function_call": VALUES | st.fixed_dictionaries({"name": WORDS, "arguments": VALUES}),
        "name": VALUES,
        "reasoning": VALUES,
    },
)
TOOLS = st.fixed_dictionaries(
    {"type": st.sampled_from(["function", "custom"]) | VALUES},
    optional={"function": VALUES | st.fixed_dictionaries({"name": WORDS}), "custom": VALUES},
)
CHOICES = VALUES | st.fixed_dictionaries(
    {"type": st.sampled_from(["function", "custom", "allowed_tools"])},
    optional={"function": st.fixed_dictionaries({"name": WORDS}), "allowed_tools": VALUES, "name": WORDS},
)
FIELDS = {
    "messages": st.lists(MESSAGES, max_size=4) | VALUES,
    "prompt": VALUES | st.lists(st.integers(-1, 2**33), max_size=3),
    "tools": st.lists(TOOLS, max_size=2) | VALUES,
    "tool_choice": CHOICES,
    "functions": VALUES,
    "function_call": VALUES,
    **dict.fromkeys(["n", "max_tokens", "stop", "stream", "stream_options", "temperature", "logit_bias"], VALUES),
    **dict.fromkeys(["metadata", "user", "response_format", "echo", "suffix", "best_of", "model", "other"], VALUES),
}
FINE = {
    "messages": st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "assistant", "function"]), "content": st.none() | st.text(max_size=5)},
            optional={"function_call": st.just({"name": "f"}), "tool_calls": st.lists(CALLS, max_size=2)},
        ),
        min_size=1,
        max_size=4,
    ),
    "prompt": st.text(min_size=1, max_size=5),
}
ONE_FIELD = st.sampled_from(sorted(FIELDS)).flatmap(lambda name: st.fixed_dictionaries({name: FIELDS[name]}))
BODIES = st.fixed_dictionaries({}, optional=FIELDS) | st.builds(
    lambda fine, wild: fine | wild, st.fixed_dictionaries(FINE), ONE_FIELD
)


def read(protocol: Protocol, body: bytes) -> ModelRequest | None:
    try:
        return protocol.parse(body, {})
    except Refusal as refusal:
        status, refused = protocol.refuse(refusal)
        assert status == 400
        assert msgspec.json.decode(refused)["error"]["message"]
        return None


@pytest.mark.parametrize("protocol", [CHAT, COMPLETIONS])
@given(body=BODIES)
def test_any_object(protocol: Protocol, body: dict[str, Any]) -> None:
    request = read(protocol, json.dumps(body).encode())
    if request is None:
        return
    msgspec.json.encode((request.messages, request.tools, request.params, request.extras, request.prompt))
    assert all(isinstance(stop, str) and stop for stop in request.params.get("stop", ()))
    assert 1 <= request.n <= 16
    classify(request)
    made = [{"id": "c1", "type": "function", "function": {"name": "id", "arguments": "{"}}]
    reply = {"role": "assistant", "content": "x", "tool_calls": made}
    finished = [Finished("id", 1, reply, "tool_calls", Usage(), choice=choice) for choice in range(request.n)]
    assert len(msgspec.json.decode(protocol.reply(request, finished))["choices"]) == request.n
    assert protocol.stream(request).events(finished[0])


@pytest.mark.parametrize("protocol", [CHAT, COMPLETIONS])
@given(body=st.binary(max_size=50))
def test_any_bytes(protocol: Protocol, body: bytes) -> None:
    read(protocol, body)


@given(messages=st.lists(MESSAGES, min_size=1, max_size=4))
def test_reading_twice_changes_nothing(messages: list[Any]) -> None:
    request = read(CHAT, json.dumps({"messages": messages}).encode())
    if request is not None:
        again = read(CHAT, msgspec.json.encode({"messages": request.messages}))
        assert again is not None
        assert again.messages == request.messages
