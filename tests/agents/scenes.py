"""What agents are given to do, and what their model says to it. All texts are made up here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

TASK = "Please make the file first.txt, look at it, and make second.txt beside it."
FIRST = "one: Äpfel & <b>“früh”</b>\n"
SECOND = "two\n"


@dataclass(frozen=True, kw_only=True)
class Scene:
    """One run of one agent, with a model of its own. `script` holds further keys of the script; see `Rig.model`."""

    agent: str
    conversations: list[dict[str, Any]]
    prompt: str = TASK
    tokens: bool = False
    script: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


def shell(agent: str, command: str) -> dict[str, Any]:
    """A call of the tool that runs a command, as this agent knows it."""
    name, key, more = {
        "codex": ("exec_command", "cmd", {}),
        "claude": ("Bash", "command", {"description": "Run a command"}),
        "hermes": ("terminal", "command", {}),
        "mini-swe-agent": ("bash", "command", {}),
        "opencode": ("bash", "command", {"description": "Run a command"}),
        "openclaw": ("exec", "command", {}),
    }[agent]
    return {"name": name, "arguments": {key: command, **more}}


def say(content: str, *calls: dict[str, Any], **turn: Any) -> dict[str, Any]:
    """A turn of a script."""
    return {"content": content, "tool_calls": list(calls), **turn}


def last(agent: str) -> dict[str, Any]:
    """The turn with which the work ends: mini-swe-agent wants a command for that."""
    if agent == "mini-swe-agent":
        return say("", shell(agent, "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; cat second.txt"))
    return say("Both files are there.")


def write_first(agent: str) -> dict[str, Any]:
    return shell(agent, f"printf %s '{FIRST}' > first.txt")


def task(agent: str, **first_turn: Any) -> list[dict[str, Any]]:
    """The replies to TASK: a file is written, then one is read and one written in the same turn."""
    both = (shell(agent, "cat first.txt"), shell(agent, "echo two > second.txt"))
    turns = [say("I write the first file.", write_first(agent), **first_turn), say("", *both), last(agent)]
    return [{"match": "", "turns": turns}]


def scenes(*names: str) -> pytest.MarkDecorator:
    """A test of several SCENES of its module."""
    return pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.scene(name)) for name in names])
