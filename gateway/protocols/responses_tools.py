"""Tools of the Responses protocol: every kind as a function that any model can call, and calls back in their own kind.

A custom tool takes free text: the model gets a function with one string, `input`. A namespace is flattened into
`namespace__name`. Tools that run on the vendor's servers (web_search, ...) cannot be offered; they are kept aside.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, get_args

import msgspec
from msgspec import Struct, field

from rollyard.gateway.refusal import Refusal
from rollyard.schemas.call import Message

Kind = Literal["function", "custom", "local_shell", "tool_search"]
_KINDS: Final[dict[Any, Kind]] = {kind: kind for kind in get_args(Kind)}

_LOCAL_SHELL: Final[dict[str, Any]] = {
    "name": "local_shell",
    "description": "Runs a command on the user's machine and returns its output.",
    "parameters": {
        "type": "object",
        "properties": {
            "command": {"type": "array", "items": {"type": "string"}, "description": "program and arguments"},
            "working_directory": {"type": "string"},
            "timeout_ms": {"type": "integer"},
            "env": {"type": "object", "additionalProperties": {"type": "string"}},
            "user": {"type": "string"},
        },
        "required": ["command"],
    },
}
_TOOL_SEARCH: Final[dict[str, Any]] = {
    "name": "tool_search",
    "description": "Searches for more tools. Those that it returns can be called from then on.",
    "parameters": {
        "type": "object",
        "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}},
        "required": ["query"],
    },
}
_INPUT: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


class Tool(Struct, frozen=True):
    """What a function of the model is in the agent's own terms."""

    kind: Kind
    name: str
    namespace: str | None = None

    def flat(self) -> str:
        """The name that the model knows it by, unless that is taken."""
        if self.namespace is None:
            return self.name
        return self.namespace + ("" if self.namespace.endswith("__") else "__") + self.name


class Toolbox(Struct):
    """The tools of one request, and the way between their names and the model's."""

    offered: list[Message] = field(default_factory=list)
    left_out: list[Any] = field(default_factory=list)
    _by_name: dict[str, Tool] = field(default_factory=dict)
    _names: dict[Tool, str] = field(default_factory=dict)

    def offer(self, tools: Iterable[Any], where: str) -> None:
        """Take tools in; of two that are the same, the first counts. Raises Refusal (400) that names the field."""
        known = self.names()
        for function in self.describe(tools, where):
            if (name := function["function"]["name"]) not in known:
                known.add(name)
                self.offered.append(function)

    def describe(self, tools: Iterable[Any], where: str) -> list[Message]:
        """Learn the names of tools without offering them; returns them as functions. Raises Refusal (400)."""
        functions: list[Message] = []
        for index, tool in enumerate(tools):
            functions += self._learn(tool, f"{where}[{index}]")
        return functions

    def tool(self, name: str) -> Tool:
        """What the model called. A name that nobody offered is a function: the agent says that there is none."""
        return self._by_name.get(name) or Tool("function", name)

    def name(self, tool: Tool) -> str:
        """What the model calls a tool."""
        return self._names.get(tool) or tool.flat()

    def names(self) -> set[str]:
        """Names of the functions that are offered."""
        return {each["function"]["name"] for each in self.offered}

    def only(self, names: set[str]) -> None:
        """Offer no others than these."""
        self.offered = [each for each in self.offered if each["function"]["name"] in names]

    def _learn(self, tool: Any, where: str) -> list[Message]:
        if not isinstance(tool, dict) or not isinstance(kind := tool.get("type"), str):
            raise Refusal(400, "invalid_request", f"{where} has no type", param=f"{where}.type")
        inner = tool.get(kind)
        spec = inner if isinstance(inner, dict) else tool  # Chat Completions nest what a tool says of itself
        match kind:
            case "function" | "custom":
                return self._function(spec, kind, None, where)
            case "namespace":
                return self._namespace(spec, where)
            case "local_shell":
                return self._add(Tool("local_shell", "local_shell"), _LOCAL_SHELL)
            case "tool_search" if spec.get("execution") == "client":
                own = {key: spec[key] for key in ("description", "parameters") if spec.get(key)}
                return self._add(Tool("tool_search", "tool_search"), _TOOL_SEARCH | own)
            case _:
                self.left_out.append(tool)
                return []

    def _namespace(self, spec: dict[str, Any], where: str) -> list[Message]:
        namespace = _name(spec, where)
        functions: list[Message] = []
        for index, tool in enumerate(_listed(spec, "tools", where)):
            kind = tool.get("type") if isinstance(tool, dict) else None
            if kind in ("function", "custom"):
                functions += self._function(tool, kind, namespace, f"{where}.tools[{index}]")
            else:
                self.left_out.append({**spec, "tools": [tool]})
        if functions:
            # A namespace has no place of its own in the prompt: the first of its tools tells what it is about.
            first = functions[0]["function"]
            first["description"] = _joined(spec.get("description"), first["description"])
        return functions

    def _function(self, spec: dict[str, Any], kind: Kind, namespace: str | None, where: str) -> list[Message]:
        name = _name(spec, where)
        function: dict[str, Any] = {"name": name, "description": _joined(spec.get("description"))}
        if kind == "custom":
            function["description"] = _joined(function["description"], _format(spec.get("format")))
            function["parameters"] = _INPUT
        else:
            function["parameters"] = spec.get("parameters") or {"type": "object", "properties": {}}
            if spec.get("strict"):
                function["strict"] = True
        return self._add(Tool(kind, name, namespace), function)

    def _add(self, tool: Tool, function: dict[str, Any]) -> list[Message]:
        name = self._names.get(tool)
        if name is None:
            name = tool.flat()
            while name in self._by_name:
                name += "_"
            self._by_name[name] = tool
            self._names[tool] = name
        return [{"type": "function", "function": {**function, "name": name}}]


def _name(spec: dict[str, Any], where: str) -> str:
    name = spec.get("name")
    if not isinstance(name, str) or not name:
        raise Refusal(400, "invalid_request", f"{where} has no name", param=f"{where}.name")
    return name


def _listed(spec: dict[str, Any], key: str, where: str) -> list[Any]:
    value = spec.get(key)
    if value is not None and not isinstance(value, list):
        raise Refusal(400, "invalid_request", f"{where}.{key} is not a list", param=f"{where}.{key}")
    return value or []


def _joined(*texts: Any) -> str:
    return "\n\n".join(text for text in texts if isinstance(text, str) and text)


def _format(form: Any) -> str:
    if not isinstance(form, dict) or form.get("type") in (None, "text"):
        return ""
    if form.get("type") == "grammar":
        return f"`input` must match this {form.get('syntax', '')} grammar:\n{form.get('definition', '')}"
    return f"`input` must have this format: {msgspec.json.encode(form).decode()}"


def tool_choice(asked: Any, toolbox: Toolbox) -> Any:
    """`tool_choice` in Chat's form; None where it says nothing that can be asked of a model.

    `allowed_tools` leaves only those in the toolbox. A choice of a tool that cannot be offered is left out.
    Raises Refusal (400).
    """
    if not toolbox.offered:
        return None
    if not isinstance(asked, dict):
        return asked if asked in ("auto", "none", "required") else None
    if asked.get("type") == "allowed_tools":
        inner = asked.get("allowed_tools")
        inner = inner if isinstance(inner, dict) else asked
        tools = _listed(inner, "tools", "tool_choice")
        allowed = {name for tool in tools if (name := _chosen(tool, toolbox))}
        toolbox.only(allowed)
        mode = inner.get("mode")
        return mode if toolbox.offered and mode in ("auto", "required") else None
    name = _chosen(asked, toolbox)
    return {"type": "function", "function": {"name": name}} if name else None


def _chosen(choice: Any, toolbox: Toolbox) -> str | None:
    """The offered name of a tool that a choice names."""
    if not isinstance(choice, dict):
        return None
    kind = choice.get("type")
    inner = choice.get(kind) if isinstance(kind, str) else None
    spec = inner if isinstance(inner, dict) else choice
    name, namespace = spec.get("name"), spec.get("namespace")
    if not isinstance(kind, str) or kind not in _KINDS:
        return None
    name = kind if kind in ("local_shell", "tool_search") else name
    if not isinstance(name, str):
        return None
    namespace = namespace if isinstance(namespace, str) else None
    offered = toolbox.names()
    for tool in (Tool(_KINDS[kind], name, namespace), toolbox.tool(name)):
        if (found := toolbox.name(tool)) in offered:
            return found
    return None


def calls_as_items(calls: Iterable[Mapping[str, Any]], toolbox: Toolbox) -> list[dict[str, Any]]:
    """A reply's tool calls as items without id and status. `raw` stands in for a custom call's id mark."""
    return [_call_as_item(call, toolbox) for call in calls]


def _call_as_item(call: Mapping[str, Any], toolbox: Toolbox) -> dict[str, Any]:
    function = call.get("function") or {}
    arguments = str(function.get("arguments") or "")
    tool = toolbox.tool(str(function.get("name") or ""))
    item: dict[str, Any] = {"type": f"{tool.kind}_call", "call_id": call.get("id")}
    if tool.kind == "local_shell" and (action := _shell_action(arguments)) is not None:
        return {**item, "action": action}
    if tool.kind == "tool_search":
        parsed = _object(arguments)
        return {**item, "execution": "client", "arguments": arguments if parsed is None else parsed}
    if tool.kind == "custom":
        parsed = _object(arguments)
        plain = parsed is not None and parsed.keys() == {"input"} and isinstance(parsed["input"], str)
        text = parsed["input"] if parsed is not None and plain else arguments
        item |= {"type": "custom_tool_call", "name": tool.name, "input": text, "raw": not plain}
    else:
        item |= {"type": "function_call", "name": tool.name, "arguments": arguments}
    if tool.namespace is not None:
        item["namespace"] = tool.namespace
    return item


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


class _Exec(Struct, forbid_unknown_fields=True):
    command: list[str]
    working_directory: str | None = None
    timeout_ms: int | None = None
    env: dict[str, str] | None = None
    user: str | None = None


def _shell_action(arguments: str) -> dict[str, Any] | None:
    """The action of a local shell call; None when the arguments are none that it can express."""
    parsed = _object(arguments)
    try:
        msgspec.convert(parsed, _Exec)
    except msgspec.ValidationError:
        return None
    if parsed is None or any(value is None or value == {} for value in parsed.values()):
        return None
    return {"type": "exec", "env": {}, **parsed}
