"""Agents' bundles on the way into sandboxes: bound, seen, or missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollyard.harnesses.bundles.bundle import MARKER, Record, folder_of, known_bundles, recipe
from rollyard.pipeline.consumer import Ack
from rollyard.schemas.errors import HarnessError
from rollyard.schemas.task import AgentSpec, Task
from rollyard.stages.agent_install import agent_mounts
from rollyard.stages.capabilities import Capabilities
from rollyard.stages.init import Init
from rollyard.stages.stage import StageHandler


@pytest.fixture(autouse=True)
def no_bundles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine on which no bundle was made."""
    folder = tmp_path / "bundles"
    monkeypatch.setenv("ROLLYARD_BUNDLES", str(folder))
    return folder


def harnesses() -> list[str]:
    """Those whose agent is a bundle of the same name."""
    return [name for name in known_bundles() if name != "python"]


@pytest.mark.parametrize("name", harnesses())
async def test_init_reports_a_missing_bundle_and_the_command_that_makes_it(crew: Any, name: str) -> None:
    state = await crew.start(Task(prompt="p", id="t", agent=AgentSpec(harness=name), max_attempts=1))
    (held,) = await crew.take("init", "local")
    assert await StageHandler(crew.context, Init(crew.context))(held) == Ack()
    (event,) = await crew.life(state.rollout)
    assert event.kind == "failed" and event.failure is not None
    assert event.failure.kind == "init"
    assert f"the agent bundle {name} " in event.failure.message and "is missing" in event.failure.message
    assert event.failure.hint is not None and event.failure.hint.endswith(f"rollyard agent bundle {name}")
    # Nothing was made for it.
    assert await crew.context.backends["local"].list_owned() == []


@pytest.mark.parametrize("mounts", ["bind", "copy", "same"])
def test_a_missing_bundle_is_told_before_there_is_a_sandbox(mounts: Any) -> None:
    with pytest.raises(HarnessError, match=r"bundle codex .* is missing") as caught:
        agent_mounts(AgentSpec(harness="codex"), Capabilities(mounts=mounts))
    assert caught.value.hint is not None and "rollyard agent bundle codex" in caught.value.hint


def test_an_outdated_bundle_is_as_good_as_none(no_bundles: Path) -> None:
    folder = folder_of(recipe("codex"))
    folder.mkdir(parents=True)
    old = Record(name="codex", version="1", digest="of long ago", size_bytes=1, files=1)
    (folder / MARKER).write_bytes(msgspec.json.encode(old))
    with pytest.raises(HarnessError, match=r"outdated: .*codex"):
        agent_mounts(AgentSpec(harness="codex"), Capabilities(mounts="bind"))
