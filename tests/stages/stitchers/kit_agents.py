"""Agents in three protocols: each keeps its history in its own form, and appends what it says and hears."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec
from kit import Call, Story
from kit_template import Reply

from rollyard.schemas.call import Message

MARK = {"cache_control": {"type": "ephemeral"}}


@dataclass
class Agent:
    """What they have in common. `history` is in the protocol's form."""

    story: Story
    system: str = "You help."
    tools: list[Message] | None = None
    headers: dict[str, str] = field(default_factory=dict)
    stream: bool = True
    history: list[Any] = field(default_factory=list)
    speaks: ClassVar[str] = "chat"

    def body(self) -> dict[str, Any]:
        raise NotImplementedError

    def begin(self, *said: Any) -> Call:
        """Say something; the call waits for its end."""
        self.history += said
        return self.story.begin(deepcopy(self.body()), self.speaks, self.headers)

    def take(self, call: Call) -> Call:
        """The reply goes into the history."""
        echo = call.echo()
        self.history += echo if isinstance(echo, list) else [echo]
        return call

    def ask(self, *said: Any, reply: Reply | None = None, **end: Any) -> Call:
        """Say something; the reply goes into the history if it came whole."""
        call = self.begin(*said).finish(reply, **end)
        return self.take(call) if call.end and call.end.status == "ok" else call


class Chat(Agent):
    """OpenAI Chat."""

    def body(self) -> dict[str, Any]:
        first = [{"role": "system", "content": self.system}] if self.system else []
        body = {"model": "m", "messages": [*first, *self.history], "stream": self.stream}
        return {**body, "tools": self.tools} if self.tools else body


@dataclass
class Messages(Agent):
    """Anthropic Messages, as Claude Code speaks it: a cache mark stands on the last block of the last message."""

    extra: dict[str, Any] = field(default_factory=dict)
    speaks: ClassVar[str] = "messages"

    def body(self) -> dict[str, Any]:
        messages = deepcopy(self.history)
        last = messages[-1]["content"]
        if isinstance(last, list) and last:
            last[-1] |= MARK
        return {
            "model": "m",
            "max_tokens": 32000,
            "system": [{"type": "text", "text": self.system}],
            "messages": messages,
            "tools": [
                {"name": each["function"]["name"], "input_schema": each["function"]["parameters"]}
                for each in self.tools or ()
            ],
            "stream": self.stream,
            **self.extra,
        }


@dataclass
class Responses(Agent):
    """OpenAI Responses, as Codex speaks it: the system prompt is the first item, ids are on every item."""

    metadata: dict[str, Any] = field(default_factory=dict)
    speaks: ClassVar[str] = "responses"

    def body(self) -> dict[str, Any]:
        return {
            "model": "m",
            "input": [item("developer", self.system), *self.history],
            "tools": [{"type": "function", **each["function"]} for each in self.tools or ()],
            "stream": self.stream,
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "client_metadata": self.metadata,
        }


# --- what is said, in each form ---


def user(content: Any) -> Message:
    """In Chat form, and in that of Messages."""
    return {"role": "user", "content": content}


def text(*texts: str) -> list[Message]:
    """Blocks of text, of Messages."""
    return [{"type": "text", "text": each} for each in texts]


def blocks(*parts: Any) -> Message:
    """A user message of blocks, of Messages: texts, or blocks as they are."""
    return user([part if isinstance(part, dict) else {"type": "text", "text": part} for part in parts])


def item(role: str, said: str, number: str | None = None) -> Message:
    """A message item of Responses."""
    kind = "output_text" if role == "assistant" else "input_text"
    message = {"type": "message", "role": role, "content": [{"type": kind, "text": said}]}
    return {**message, "id": f"msg_{number}"} if number else message


def called_ids(call: Call) -> list[str]:
    """The ids of the tool calls of a reply."""
    assert call.end is not None
    assert call.end.reply is not None
    return [each["id"] for each in call.end.reply["tool_calls"]]


def result(call: Call, said: str, index: int = 0) -> Message:
    """The result of a tool that a reply called, in Chat form."""
    return {"role": "tool", "tool_call_id": called_ids(call)[index], "content": said}


def tool_result(call: Call, said: Any, index: int = 0) -> Message:
    """The same as a block of Messages."""
    return {"type": "tool_result", "tool_use_id": called_ids(call)[index], "content": said}


def output(call: Call, said: str, index: int = 0) -> Message:
    """The same as an item of Responses."""
    return {
        "type": "function_call_output",
        "id": f"fco_{call.number}{index}",
        "call_id": called_ids(call)[index],
        "output": said,
    }


def tool(name: str) -> Message:
    """A tool in Chat form."""
    parameters = {"type": "object", "properties": {"command": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "description": f"run {name}", "parameters": parameters}}


def runs(command: str, *, thinks: str = "", says: str = "", name: str = "bash", space: str = "") -> Reply:
    """A reply that calls a tool. `space`: what the model writes between key and value, where agents write nothing."""
    given = msgspec.json.encode(command).decode()
    return Reply(text=says, thinks=thinks, calls=((name, f'{{"command":{space}{given}}}'),))


BASH = [tool("bash")]
