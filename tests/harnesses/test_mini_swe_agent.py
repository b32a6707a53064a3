"""mini-swe-agent as it comes from PyPI, against a scripted model."""

from __future__ import annotations

import json
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest

from rollyard.harnesses.bundles.bundle import find_bundle
from rollyard.harnesses.mini_swe_agent import BUNDLE

pytestmark = pytest.mark.agent("mini-swe-agent")


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
    assert result.metrics == {"calls": 2.0}
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
    found = distributions(path=[str(find_bundle("mini_swe_agent") / "packages")])
    installed = {f"{each.name.lower().replace('_', '-').replace('.', '-')}=={each.version}" for each in found}
    locked = {line.split()[0] for line in BUNDLE.lock.read_text().splitlines() if "==" in line}
    assert "mini-swe-agent==2.4.6" in locked
    # What the bundle leaves out is not there, and what is there was locked.
    assert {each for each in locked - installed if not each.startswith(("pyarrow", "pandas"))} == set()
    assert installed <= locked
