"""verifiers v1: its message graph, turn by turn as its interception server builds it, and a walk for each branch.

python stitch_verifiers.py SESSIONS

Runs in an environment that has verifiers.
"""

from __future__ import annotations

from array import array
from typing import Any

from stitch_loop import Columns, serve
from verifiers.v1 import graph
from verifiers.v1.trace import Trace
from verifiers.v1.types import (
    AssistantMessage,
    Response,
    SystemMessage,
    Tool,
    ToolCall,
    ToolMessage,
    TurnTokens,
    UserMessage,
)

Turn = tuple[list[Any], list[Tool], Response]


def message_of(message: dict[str, Any]) -> Any:
    """A message in its types."""
    role = message["role"]
    if role == "assistant":
        calls = [
            ToolCall(id=call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"])
            for call in message.get("tool_calls", ())
        ]
        return AssistantMessage(content=message["content"], tool_calls=calls or None)
    if role == "tool":
        return ToolMessage(tool_call_id=message["tool_call_id"], content=message["content"])
    return (SystemMessage if role == "system" else UserMessage)(content=message["content"])


def turns_of(session: dict[str, Any]) -> list[Turn]:
    """The calls of a session as requests and responses with the renderer's spans."""
    turns = []
    for call in session["calls"]:
        tools = [Tool(**tool["function"]) for tool in call["tools"]]
        tokens = TurnTokens.model_construct(
            prompt_ids=array("I", call["prompt"]).tolist(),
            completion_ids=array("I", call["sampled"]).tolist(),
            completion_logprobs=array("f", call["logprobs"]).tolist(),
            message_spans=call["spans"],
        )
        response = Response.model_construct(
            id=call["call_id"],
            created=int(call["ended_s"]),
            model="model",
            message=message_of(call["reply"]),
            finish_reason="stop",
            tokens=tokens,
        )
        turns.append(([message_of(message) for message in call["messages"]], tools, response))
    return turns


def build(turns: list[Turn]) -> list[Columns]:
    """The graph, and the columns of each branch."""
    trace = Trace.model_construct(nodes=[], calls=[], tools=[], mm_token_type_id_map={})
    for messages, tools, response in turns:
        graph.prepare_turn(trace, messages, tools).commit(response)
    return [(branch.token_ids, branch.sampled_mask, branch.logprobs) for branch in trace.branches]


if __name__ == "__main__":
    serve(turns_of, build)
