"""The protocols as agents speak them: bodies out, and replies read as the vendors' own clients read them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, ClassVar

BASH = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
Json = dict[str, Any]


@dataclass(frozen=True)
class ToolCall:
    """A call as the agent gets it; `arguments` is JSON text, or what the model wrote in its place."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Said:
    """A reply. `finish` is the protocol's own word, `usage` (prompt, completion), `echo` what goes into the history."""

    text: str
    reasoning: str
    calls: tuple[ToolCall, ...]
    finish: str
    usage: tuple[int, int] | None
    echo: list[Json]
    body: Json = field(compare=False, repr=False)

    def plain(self) -> tuple[Any, ...]:
        """What does not change when the same is said by another call."""
        return self.text, self.reasoning, [(call.name, call.arguments) for call in self.calls], self.finish


class Sse:
    """Server-sent events, from bytes in portions of any size: name and data of each, comments apart."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []
        self.comments = 0
        self._rest = b""

    def feed(self, data: bytes) -> None:
        *events, self._rest = (self._rest + data).split(b"\n\n")
        for event in events:
            name, texts = "", []
            for line in event.decode().split("\n"):
                key, _, value = line.partition(": ")
                name = value if key == "event" else name
                texts += [value] if key == "data" else []
                self.comments += line.startswith(":")
            if texts:
                self.events.append((name, "\n".join(texts)))


class Chat:
    """OpenAI Chat Completions."""

    name: ClassVar[str] = "chat"
    path: ClassVar[str] = "/v1/chat/completions"
    limit: ClassVar[str] = "max_completion_tokens"
    stop: ClassVar[str] = "stop"
    words: ClassVar[dict[str, str]] = {
        "stop": "stop",
        "stop_string": "stop",
        "tools": "tool_calls",
        "length": "length",
        "filter": "content_filter",
    }

    def body(self, history: list[Json], tools: bool, system: str, stream: bool) -> Json:
        head = [{"role": "system", "content": system}] if system else []
        body: Json = {"model": "gpt-x", "messages": [*head, *history], "stream": stream}
        if tools:
            function = {"name": "bash", "description": "Runs it.", "parameters": BASH}
            body["tools"] = [{"type": "function", "function": function}]
        return body | ({"stream_options": {"include_usage": True}} if stream else {})

    def user(self, text: str) -> Json:
        return {"role": "user", "content": text}

    def system(self, text: str) -> Json:
        return {"role": "system", "content": text}

    def image(self, text: str, data: str) -> Json:
        url = {"url": f"data:image/png;base64,{data}"}
        return {"role": "user", "content": [{"type": "text", "text": text}, {"type": "image_url", "image_url": url}]}

    def results(self, calls: tuple[ToolCall, ...], texts: list[str]) -> list[Json]:
        return [{"role": "tool", "tool_call_id": c.id, "content": t} for c, t in zip(calls, texts, strict=True)]

    def choice(self, how: str) -> Json:
        named = {"type": "function", "function": {"name": "bash"}}
        return {"tool_choice": named if how == "named" else how}

    def schema(self, schema: Json) -> Json:
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "reply", "schema": schema}}}

    def read(self, body: Json, index: int = 0) -> Said:
        choice = body["choices"][index]
        message, usage = choice["message"], body["usage"]
        calls = [
            ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
            for call in message.get("tool_calls") or ()
            if call["type"] == "function"
        ]
        return Said(
            text=message["content"] or "",
            reasoning=message.get("reasoning_content") or "",
            calls=tuple(calls),
            finish=choice["finish_reason"],
            usage=usage and (usage["prompt_tokens"], usage["completion_tokens"]),
            echo=[message],
            body=body,
        )

    def read_stream(self, events: list[tuple[str, str]]) -> Said:
        *chunks, last = [data for _, data in events]
        assert last == "[DONE]"
        message: Json = {"role": "assistant", "content": ""}
        finish, usage = None, None
        for chunk in map(json.loads, chunks):
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                assert finish is None, "nothing comes after the reason"
                delta = choice["delta"]
                for key in ("content", "reasoning_content", "refusal"):
                    if delta.get(key):
                        message[key] = (message.get(key) or "") + delta[key]
                for call in delta.get("tool_calls", ()):
                    assert call["index"] == len(message.setdefault("tool_calls", []))
                    message["tool_calls"].append({key: value for key, value in call.items() if key != "index"})
                finish = choice["finish_reason"]
        return self.read({"choices": [{"message": message, "finish_reason": finish}], "usage": usage})

    def acts(self, name: str, data: str) -> bool:
        """Whether an agent acts on an event."""
        choices = [] if data == "[DONE]" else json.loads(data)["choices"]
        return any(choice["finish_reason"] or choice["delta"].get("tool_calls") for choice in choices)

    def delta(self, name: str, data: str) -> str:
        """The text that an event adds."""
        choices = [] if data == "[DONE]" else json.loads(data)["choices"]
        return "".join(choice["delta"].get("content") or "" for choice in choices)

    def error(self, body: Json) -> tuple[str, str, str]:
        """Type, code and message of an error in this protocol's shape."""
        assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
        return body["error"]["type"], body["error"]["code"], body["error"]["message"]

    def stream_error(self, events: list[tuple[str, str]]) -> tuple[str, str]:
        """Code and message of the error that ends a stream."""
        _, code, message = self.error(json.loads(events[-1][1]))
        return code, message


class Completions(Chat):
    """OpenAI Completions. Its history is one text."""

    name = "completions"
    path = "/v1/completions"
    limit = "max_tokens"

    def body(self, history: list[Json], tools: bool, system: str, stream: bool) -> Json:
        prompt = "\n".join(item["text"] for item in history)
        body: Json = {"model": "gpt-x", "prompt": prompt, "max_tokens": 500, "stream": stream}
        return body | ({"stream_options": {"include_usage": True}} if stream else {})

    def user(self, text: str) -> Json:
        return {"text": text}

    def read(self, body: Json, index: int = 0) -> Said:
        choice, usage = body["choices"][index], body["usage"]
        counted = usage and (usage["prompt_tokens"], usage["completion_tokens"])
        echo = [{"text": choice["text"]}]
        return Said(choice["text"], "", (), choice["finish_reason"], counted, echo, body)

    def read_stream(self, events: list[tuple[str, str]]) -> Said:
        *chunks, last = [data for _, data in events]
        assert last == "[DONE]"
        text, finish, usage = "", None, None
        for chunk in map(json.loads, chunks):
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                assert finish is None, "nothing comes after the reason"
                text, finish = text + choice["text"], choice["finish_reason"]
        return self.read({"choices": [{"text": text, "finish_reason": finish}], "usage": usage})

    def acts(self, name: str, data: str) -> bool:
        choices = [] if data == "[DONE]" else json.loads(data)["choices"]
        return any(choice["finish_reason"] for choice in choices)

    def delta(self, name: str, data: str) -> str:
        choices = [] if data == "[DONE]" else json.loads(data)["choices"]
        return "".join(choice["text"] for choice in choices)


class Responses:
    """OpenAI Responses."""

    name: ClassVar[str] = "responses"
    path: ClassVar[str] = "/v1/responses"
    limit: ClassVar[str] = "max_output_tokens"
    stop: ClassVar[str] = "stop"
    words: ClassVar[dict[str, str]] = {
        "stop": "completed",
        "stop_string": "completed",
        "tools": "completed",
        "length": "incomplete: max_output_tokens",
        "filter": "incomplete: content_filter",
    }

    def body(self, history: list[Json], tools: bool, system: str, stream: bool) -> Json:
        body: Json = {"model": "gpt-x", "input": history, "store": False, "stream": stream}
        if system:
            body["instructions"] = system
        if tools:
            body["tools"] = [{"type": "function", "name": "bash", "description": "Runs it.", "parameters": BASH}]
        return body

    def user(self, text: str) -> Json:
        return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}

    def system(self, text: str) -> Json:
        return {"type": "message", "role": "system", "content": [{"type": "input_text", "text": text}]}

    def image(self, text: str, data: str) -> Json:
        image = {"type": "input_image", "image_url": f"data:image/png;base64,{data}"}
        return {"role": "user", "content": [{"type": "input_text", "text": text}, image]}

    def results(self, calls: tuple[ToolCall, ...], texts: list[str]) -> list[Json]:
        return [
            {"type": "function_call_output", "call_id": call.id, "output": text}
            for call, text in zip(calls, texts, strict=True)
        ]

    def choice(self, how: str) -> Json:
        return {"tool_choice": {"type": "function", "name": "bash"} if how == "named" else how}

    def schema(self, schema: Json) -> Json:
        return {"text": {"format": {"type": "json_schema", "name": "reply", "schema": schema}}}

    def read(self, body: Json) -> Said:
        assert body["object"] == "response" and body["error"] is None
        text, reasoning, calls = "", "", []
        for item in body["output"]:
            if item["type"] == "message":
                text += "".join(part["text"] for part in item["content"])
            elif item["type"] == "reasoning":
                reasoning += "".join(part["text"] for part in item.get("content") or item["summary"])
            elif item["type"] == "function_call":
                calls.append(ToolCall(item["call_id"], item["name"], item["arguments"]))
        usage, why = body["usage"], body["incomplete_details"]
        finish = body["status"] + (f": {why['reason']}" if why else "")
        counted = (usage["input_tokens"], usage["output_tokens"])
        return Said(text, reasoning, tuple(calls), finish, counted, body["output"], body)

    def read_stream(self, events: list[tuple[str, str]]) -> Said:
        read = [(name, json.loads(data)) for name, data in events]
        assert [name for name, _ in read] == [data["type"] for _, data in read]
        assert [data["sequence_number"] for _, data in read] == list(range(len(read)))
        whole = read[-1][1]["response"]
        assert [data["item"] for name, data in read if name == "response.output_item.done"] == whole["output"]
        said = self.read(whole)
        for kind, text in (("output_text", said.text), ("reasoning_text", said.reasoning)):
            assert "".join(data["delta"] for name, data in read if name == f"response.{kind}.delta") == text
        return said

    def acts(self, name: str, data: str) -> bool:
        return name in ("response.output_item.done", "response.completed", "response.incomplete")

    def delta(self, name: str, data: str) -> str:
        return str(json.loads(data)["delta"]) if name == "response.output_text.delta" else ""

    def error(self, body: Json) -> tuple[str, str, str]:
        return Chat().error(body)

    def stream_error(self, events: list[tuple[str, str]]) -> tuple[str, str]:
        name, data = events[-1]
        assert name == "response.failed"
        error = json.loads(data)["response"]["error"]
        return error["code"], error["message"]


class Messages:
    """Anthropic Messages."""

    name: ClassVar[str] = "messages"
    path: ClassVar[str] = "/v1/messages"
    limit: ClassVar[str] = "max_tokens"
    stop: ClassVar[str] = "stop_sequences"
    words: ClassVar[dict[str, str]] = {
        "stop": "end_turn",
        "stop_string": "stop_sequence",
        "tools": "tool_use",
        "length": "max_tokens",
        "filter": "refusal",
    }

    def body(self, history: list[Json], tools: bool, system: str, stream: bool) -> Json:
        body: Json = {"model": "claude-x", "max_tokens": 4000, "messages": history, "stream": stream}
        if system:
            body["system"] = [{"type": "text", "text": system, "cache_control": {"type": "ephemeral"}}]
        if tools:
            body["tools"] = [{"name": "bash", "description": "Runs it.", "input_schema": BASH}]
        return body

    def user(self, text: str) -> Json:
        return {"role": "user", "content": text}

    def system(self, text: str) -> Json:
        return {"role": "system", "content": text}

    def image(self, text: str, data: str) -> Json:
        source = {"type": "base64", "media_type": "image/png", "data": data}
        return {"role": "user", "content": [{"type": "text", "text": text}, {"type": "image", "source": source}]}

    def results(self, calls: tuple[ToolCall, ...], texts: list[str]) -> list[Json]:
        blocks = [
            {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": text}]}
            for call, text in zip(calls, texts, strict=True)
        ]
        return [{"role": "user", "content": blocks}]

    def choice(self, how: str) -> Json:
        return {
            "tool_choice": {"named": {"type": "tool", "name": "bash"}, "required": {"type": "any"}}.get(
                how, {"type": how}
            )
        }

    def schema(self, schema: Json) -> Json:
        return {"output_config": {"format": {"type": "json_schema", "schema": schema}}}

    def read(self, body: Json) -> Said:
        assert (body["type"], body["role"]) == ("message", "assistant")
        blocks = body["content"]
        usage = body["usage"]
        told = usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]
        calls = [
            ToolCall(block["id"], block["name"], json.dumps(block["input"], ensure_ascii=False))
            for block in blocks
            if block["type"] == "tool_use"
        ]
        return Said(
            text="".join(block["text"] for block in blocks if block["type"] == "text"),
            reasoning="".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
            calls=tuple(calls),
            finish=body["stop_reason"],
            usage=(told, usage["output_tokens"]),
            echo=[{"role": "assistant", "content": blocks}] if blocks else [],
            body=body,
        )

    def read_stream(self, events: list[tuple[str, str]]) -> Said:
        read = [json.loads(data) for _, data in events]
        assert [name for name, _ in events] == [data["type"] for data in read]
        read = [data for data in read if data["type"] != "ping"]
        assert (read[0]["type"], read[-1]["type"]) == ("message_start", "message_stop")
        message, inputs = read[0]["message"], {}
        for data in read[1:-1]:
            match data["type"]:
                case "content_block_start":
                    assert data["index"] == len(message["content"])
                    message["content"].append(data["content_block"])
                case "content_block_delta":
                    block, delta = message["content"][data["index"]], data["delta"]
                    for key in delta.keys() - {"type", "partial_json"}:
                        block[key] = block.get(key, "") + delta[key]
                    if "partial_json" in delta:
                        inputs[data["index"]] = inputs.get(data["index"], "") + delta["partial_json"]
                case "message_delta":
                    message |= data["delta"]
                    message["usage"] = data["usage"]
        for index, text in inputs.items():
            message["content"][index]["input"] = self._input(text)
        return self.read(message)

    def _input(self, text: str) -> Any:
        """Arguments as Claude Code keeps them: those that are no JSON in a wrapping of its own."""
        try:
            return json.loads(text or "{}")
        except ValueError:
            return {"__unparsedToolInput": {"raw": text[:2048], "len": len(text)}}

    def acts(self, name: str, data: str) -> bool:
        block = json.loads(data).get("content_block", {})
        return name in ("message_delta", "message_stop") or block.get("type") == "tool_use"

    def delta(self, name: str, data: str) -> str:
        return str(json.loads(data)["delta"].get("text", "")) if name == "content_block_delta" else ""

    def error(self, body: Json) -> tuple[str, str, str]:
        assert set(body) == {"type", "error"} and set(body["error"]) == {"type", "message"} and body["type"] == "error"
        return body["error"]["type"], "", body["error"]["message"]

    def stream_error(self, events: list[tuple[str, str]]) -> tuple[str, str]:
        name, data = events[-1]
        assert name == "error"
        kind, _, message = self.error(json.loads(data))
        return kind, message


Speaker = Chat | Responses | Messages
SPEAKERS: dict[str, Speaker] = {each.name: each for each in (Chat(), Responses(), Messages(), Completions())}
