"""The reference of a task's fields, of the harnesses and of the evaluation rules, as Markdown for docs/task.md.

`python -m rollyard.stages.task_reference` prints it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any, Final

import msgspec
from msgspec import Struct, inspect

from rollyard.harnesses.harness import HARNESSES
from rollyard.schemas.task import Task
from rollyard.stages.evaluator import RULES

LONGEST_DEFAULT_CHARS: Final = 60

_WORDS: Final[dict[type, str]] = {
    inspect.StrType: "string",
    inspect.IntType: "integer",
    inspect.FloatType: "number",
    inspect.BoolType: "boolean",
    inspect.NoneType: "null",
    inspect.DictType: "object",
    inspect.StructType: "object",
    inspect.AnyType: "anything",
}


def reference() -> str:
    """Every field of a task with its default, then the arguments of each harness and each rule."""
    lines = ["## Fields", "", *_struct(Task, "")]
    lines += ["## Harnesses", "", "`agent.harness` names the agent, `agent.args` holds its arguments.", ""]
    for name in HARNESSES.shipped:
        module = import_module(HARNESSES.shipped[name].partition(":")[0])
        lines += [f"### Harness {name}", "", _doc(module), "", *_table(_args_of(module))]
    lines += ["## Evaluation rules", "", "`evaluation.rule` names the rule, `evaluation.args` holds its arguments.", ""]
    for name in RULES.shipped:
        module = import_module(RULES.shipped[name].partition(":")[0])
        lines += [f"### Rule {name}", "", _doc(module), "", *_table(RULES.load(name)), *_inner(RULES.load(name), name)]
    return "\n".join(lines).rstrip()


def _doc(module: Any) -> str:
    """What a module says that it holds, without the name that stands in the heading."""
    said = (module.__doc__ or "").strip().partition("\n")[0].partition(": ")[2]
    return said[:1].upper() + said[1:]


def _args_of(module: Any) -> type[Struct]:
    (found,) = [
        value
        for name, value in vars(module).items()
        if name.endswith("Args") and isinstance(value, type) and value.__module__ == module.__name__
    ]
    return found


def _struct(kind: type[Struct], path: str) -> Iterator[str]:
    """The table of a struct, then those of the structs inside it, each under the path to its fields."""
    if path:
        yield from (f"### {path}", "", (kind.__doc__ or "").strip(), "")
    yield from _table(kind)
    for field in _fields(kind):
        for inner in _parts(field.type):
            for item in _parts(inner.item_type) if isinstance(inner, inspect.VarTupleType) else [inner]:
                if isinstance(item, inspect.StructType):
                    yield from _struct(item.cls, f"{path}.{field.name}".lstrip("."))


def _inner(kind: type[Struct], name: str) -> Iterator[str]:
    """The tables of structs that are arguments of a rule."""
    for field in _fields(kind):
        for part in _parts(field.type):
            item = _bare(part.item_type) if isinstance(part, inspect.VarTupleType) else part
            if isinstance(item, inspect.StructType):
                yield from _struct(item.cls, f"{name}: {field.name}")


def _table(kind: type[Struct]) -> Iterator[str]:
    fields = _fields(kind)
    if not fields:
        yield from ("It has no arguments.", "")
        return
    yield from ("| field | type | default | means |", "| --- | --- | --- | --- |")
    for field in fields:
        cells = (f"`{field.name}`", _type(field.type), _default(field), _means(field))
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    yield ""


def _fields(kind: type[Struct]) -> tuple[inspect.Field, ...]:
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    return info.fields


def _bare(kind: inspect.Type) -> inspect.Type:
    """A type without its description."""
    return kind.type if isinstance(kind, inspect.Metadata) else kind


def _parts(kind: inspect.Type) -> list[inspect.Type]:
    """A type, or those that it is the union of, without their descriptions."""
    kind = _bare(kind)
    return [_bare(part) for part in kind.types] if isinstance(kind, inspect.UnionType) else [kind]


def _type(kind: inspect.Type) -> str:
    """The type in words, then the limits of its value."""
    parts = _parts(kind)
    return " or ".join(map(_word, parts)) + "".join(map(_limits, parts))


def _word(kind: inspect.Type, ending: str = "") -> str:
    kind = _bare(kind)
    if isinstance(kind, inspect.LiteralType):
        return ", ".join(f'`"{value}"`' for value in kind.values)
    if isinstance(kind, inspect.UnionType):
        return " or ".join(_word(part, ending) for part in kind.types)
    if isinstance(kind, inspect.VarTupleType):
        return f"list{ending} of {_word(kind.item_type, 's')}"
    if isinstance(kind, inspect.TupleType):
        return f"pair{ending} of {_word(kind.item_types[0], 's')}"
    return _WORDS[type(kind)] + ending


def _limits(kind: Any) -> str:
    """`, 1 to 4096` and the like."""
    low, over, high = (getattr(kind, name, None) for name in ("ge", "gt", "le"))
    if low is not None and high is not None:
        return f", {low:,} to {high:,}"
    parts = [f", at least {low:,}" if low is not None else "", f", over {over:,}" if over is not None else ""]
    return "".join(parts) + (f", at most {high:,}" if high is not None else "")


def _default(field: inspect.Field) -> str:
    if field.required:
        return "required"
    value = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
    if isinstance(_bare(field.type), inspect.StructType):
        return "see below"
    text = msgspec.json.encode(value).decode()
    return f"`{text}`" if len(text) <= LONGEST_DEFAULT_CHARS else "built in"


def _means(field: inspect.Field) -> str:
    kind = field.type
    if isinstance(kind, inspect.Metadata) and kind.extra_json_schema:
        return str(kind.extra_json_schema.get("description", ""))
    parts = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    for part in parts:
        if isinstance(part, inspect.Metadata) and part.extra_json_schema:
            return str(part.extra_json_schema.get("description", ""))
        if isinstance(part, inspect.StructType):
            return (part.cls.__doc__ or "").strip().rstrip(".").replace("\n", " ")
    return ""


if __name__ == "__main__":
    sys.stdout.write(reference() + "\n")
