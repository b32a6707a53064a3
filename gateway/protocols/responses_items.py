"""Items of the Responses protocol as Chat messages. Pure.

A reply is many items: reasoning, a message, calls. They become one assistant message again, which equals the reply that
was sent. Ids of ours say which reply an item belongs to; without them, items that stand together do.

Items that a model of ours can make nothing of (hosted calls, another vendor's sealed reasoning, types that nobody
knows) are never an error and never shown: they would be noise in front of the model. They stay in the log, in `_items`
of the assistant message that they belong to, or of the message that follows them.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from rollyard.gateway.protocols.responses_content import content_of, is_text, reasoning_of, sealed_by_others
from rollyard.gateway.protocols.responses_ids import call_of_item, is_raw
from rollyard.gateway.protocols.responses_tools import Tool, Toolbox
from rollyard.gateway.refusal import Refusal
from rollyard.schemas.call import Message

ITEMS: Final = "_items"
REPLY_OF: Final = "_reply_of"
_RESULTS: Final = frozenset({"function_call_output", "custom_tool_call_output", "local_shell_call_output"})


def messages_of(items: list[Any], toolbox: Toolbox, where: str = "input") -> tuple[list[Message], list[Any]]:
    """The messages, and items after the last one that belong to none. Tools found in items join the toolbox.

    Raises Refusal (400) that names the field.
    """
    conversation = _Conversation(toolbox)
    for index, item in enumerate(items):
        conversation.add(item, f"{where}[{index}]")
    return conversation.messages, conversation.left_over


class _Conversation:
    def __init__(self, toolbox: Toolbox) -> None:
        self.messages: list[Message] = []
        self.left_over: list[Any] = []
        self._toolbox = toolbox
        self._reply: Message | None = None  # the last one, while only tool results stand after it
        self._of_call: str | None = None

    def add(self, item: Any, where: str) -> None:
        if not isinstance(item, dict):
            raise Refusal(400, "invalid_request", f"{where} is not an object", param=where)
        kind = item.get("type") or ("message" if "role" in item else None)
        if not isinstance(kind, str):
            raise Refusal(400, "invalid_request", f"{where} has no type", param=f"{where}.type")
        match kind:
            case "message" if item.get("role") == "assistant":
                self._say(item, where)
            case "message":
                self._message(_role(item, where), content_of(item.get("content"), f"{where}.content"))
            case "reasoning":
                self._reason(item)
            case "item_reference" if (call_id := call_of_item(item.get("id"))) is not None:
                self._open(item)[REPLY_OF] = call_id
            case "additional_tools":
                self._toolbox.offer(_tools(item, where), f"{where}.tools")
            case "agent_message":
                sender = f"Message from {item.get('author')} to {item.get('recipient')}:"
                parts = [{"type": "input_text", "text": sender}, *_readable(item.get("content"))]
                self._message("user", content_of(parts, f"{where}.content"))
            case _ if kind.endswith("_output"):
                self._result(kind, item, where)
            case _ if kind.endswith("_call") and _is_client_call(kind, item):
                self._call(kind, item, where)
            case _:
                self._pass_over(item)

    def _message(self, role: str, content: Any, **more: Any) -> None:
        message: Message = {"role": role, "content": content, **more}
        if role != "tool":
            self._reply = None
        if self.left_over:
            message[ITEMS], self.left_over = self.left_over, []
        self.messages.append(message)

    def _open(self, item: dict[str, Any], *, text: bool = False) -> Message:
        """The assistant message that an item of a reply belongs to, made if there is none."""
        call_id, reply = call_of_item(item.get("id")), self._reply
        if reply is not None:
            same = call_id is not None and call_id == self._of_call
            stranger = call_id is None or self._of_call is None
            # A reply has one text: without ids, the next one begins another reply, unless calls wait for results.
            another = text and reply["content"] is not None and "tool_calls" not in reply
            if same or (stranger and not another and self.messages[-1] is reply):
                self._of_call = self._of_call or call_id
                return reply
        self._message("assistant", None)
        self._reply, self._of_call = self.messages[-1], call_id
        return self._reply

    def _say(self, item: dict[str, Any], where: str) -> None:
        reply = self._open(item, text=True)
        content = item.get("content")
        if isinstance(content, list):
            refusals = [part["refusal"] for part in content if isinstance(part, dict) and part.get("refusal")]
            content = [part for part in content if not (isinstance(part, dict) and part.get("type") == "refusal")]
            if refusals:
                reply["refusal"] = "\n".join(map(str, refusals))
        parts = content_of(content, f"{where}.content")
        before = reply["content"]
        reply["content"] = parts if before in (None, "") else [*_parts(before), *_parts(parts)]

    def _reason(self, item: dict[str, Any]) -> None:
        reply = self._open(item)
        if text := reasoning_of(item):
            before = reply.get("reasoning_content")
            reply["reasoning_content"] = f"{before}\n\n{text}" if before else text
        if sealed_by_others(item):
            reply.setdefault(ITEMS, []).append(item)

    def _call(self, kind: str, item: dict[str, Any], where: str) -> None:
        name, arguments = self._called(kind, item, where)
        call_id = _call_id(item, where)
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._open(item).setdefault("tool_calls", []).append(call)

    def _called(self, kind: str, item: dict[str, Any], where: str) -> tuple[str, str]:
        """Name and arguments as the model gave them."""
        space = item.get("namespace")
        namespace = space if isinstance(space, str) else None
        match kind:
            case "function_call":
                tool = Tool("function", _text(item, "name", where), namespace)
                arguments = item.get("arguments")
                return self._toolbox.name(tool), arguments if isinstance(arguments, str) else _json(arguments or {})
            case "custom_tool_call":
                tool = Tool("custom", _text(item, "name", where), namespace)
                text = _text(item, "input", where)
                return self._toolbox.name(tool), text if is_raw(item.get("id")) else _json({"input": text})
            case "tool_search_call":
                arguments = item.get("arguments")
                text = arguments if isinstance(arguments, str) else _json(arguments or {})
                return self._toolbox.name(Tool("tool_search", "tool_search")), text
            case "local_shell_call":
                action = item.get("action")
                told = action if isinstance(action, dict) else {}
                known = {key: value for key, value in told.items() if key != "type" and value not in (None, {})}
                return self._toolbox.name(Tool("local_shell", "local_shell")), _json(known)
        # Calls of other kinds that the agent itself carries out: what the item says is the call.
        said = {key: value for key, value in item.items() if key not in ("id", "call_id", "type", "status")}
        return kind.removesuffix("_call"), _json(said)

    def _result(self, kind: str, item: dict[str, Any], where: str) -> None:
        content: Any
        if kind == "tool_search_output" and "output" not in item:
            content = self._found(item, where)
        else:
            output = item.get("output")
            if isinstance(output, list) and all(map(_is_part, output)):
                content = content_of(output, f"{where}.output")
            else:
                content = output if isinstance(output, str) else _json(output)
        if kind not in _RESULTS and item.get("call_id") is None:
            self._pass_over(item)  # the result of a call that ran on the vendor's servers
        else:
            self._message("tool", content, tool_call_id=_call_id(item, where))

    def _found(self, item: dict[str, Any], where: str) -> str:
        """What a tool search found, for the model. It stands here and not among the tools of the request, so that the
        prompt only grows.
        """
        functions = self._toolbox.describe(_tools(item, where), f"{where}.tools")
        return _json([each["function"] for each in functions])

    def _pass_over(self, item: dict[str, Any]) -> None:
        if self._reply is not None and self.messages[-1] is self._reply:
            self._reply.setdefault(ITEMS, []).append(item)
        else:
            self.left_over.append(item)


def _is_part(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("type"), str)


def _is_client_call(kind: str, item: dict[str, Any]) -> bool:
    return f"{kind}_output" in _RESULTS or item.get("call_id") is not None


def _role(item: dict[str, Any], where: str) -> str:
    role = item.get("role")
    if not isinstance(role, str) or not role:
        raise Refusal(400, "invalid_request", f"{where} has no role", param=f"{where}.role")
    return role


def _text(item: dict[str, Any], key: str, where: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise Refusal(400, "invalid_request", f"{where}.{key} is not a string", param=f"{where}.{key}")
    return value


def _call_id(item: dict[str, Any], where: str) -> str:
    for value in (item.get("call_id"), item.get("id")):
        if isinstance(value, str) and value:
            return value
    raise Refusal(400, "invalid_request", f"{where} has no call_id", param=f"{where}.call_id")


def _tools(item: dict[str, Any], where: str) -> list[Any]:
    tools = item.get("tools")
    if not isinstance(tools, list):
        raise Refusal(400, "invalid_request", f"{where}.tools is not a list", param=f"{where}.tools")
    return tools


def _readable(content: Any) -> list[Any]:
    parts = [{"type": "input_text", "text": content}] if isinstance(content, str) else content
    return [part for part in parts or () if is_text(part)]


def _parts(content: Any) -> list[Any]:
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
