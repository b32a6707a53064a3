"""mini-swe-agent as it comes from PyPI, against a scripted model."""

from __future__ import annotations

import json
import os
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest

from rollyard.harnesses.mini_swe_agent import LOCK, MEND, tool_folder

pytestmark = pytest.mark.agent("mini-swe-agent")


@pytest.fixture(autouse=True)
def installed() -> None:
    if not (tool_folder() / "bin" / "mini").is_file():
        message = f"mini-swe-agent is not installed: {MEND}"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)


def call(command: str) -> dict[str, Any]:
    function = {"name": "bash", "arguments": json.dumps({"command": command})}
    return {
        "role": "assistant",
        "content": "I do that.",
        "tool_calls": [{"id": "call1", "type": "function", "function": function}],
    }


async def test_it_solves_a_task(agents: Any, upstream: Any) -> None:
    upstream.script = [
        call("echo hi >hello.txt; cat seed"),
        call("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo ok"),
    ]
    prompt = "Make {{hello.txt}}" + " and more" * 30_000  # more than one argument of a command line can hold
    result = await agents.run("mini_swe_agent", prompt, files={"seed": "s33d"}, timeout_s=240)
    assert (result.exit_code, result.answer, result.failure) == (0, "ok", None), result.output_tail
    assert result.metrics == {"model_calls": 2.0}
    assert (Path(agents.sandbox.workdir) / "hello.txt").read_text() == "hi\n"
    first, second = upstream.requests
    assert (first["model"], first["tools"][0]["function"]["name"]) == ("m", "bash")
    assert prompt in first["messages"][1]["content"]
    assert "s33d" in second["messages"][-1]["content"]


async def test_it_stops_at_the_tasks_limit_of_calls(agents: Any, upstream: Any) -> None:
    upstream.script = [call("true")]
    result = await agents.run("mini_swe_agent", "Loop", max_calls=2, timeout_s=240)
    assert result.failure.kind == "agent_budget", (result.failure, result.output_tail)
    assert len(upstream.requests) == 2


def test_the_lock_is_what_is_installed() -> None:
    site = next(tool_folder().glob("lib/python*/site-packages"))
    installed = {f"{found.name}=={found.version}" for found in distributions(path=[str(site)])}
    locked = set(LOCK.read_text().split())
    assert "mini-swe-agent==2.4.6" in locked
    assert {requirement for requirement in installed if not requirement.startswith(("pip==", "setuptools=="))} == locked
