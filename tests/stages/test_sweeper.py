"""What dead workers left behind goes; what somebody may still use stays."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.schemas.rollout import Position, Rollout, RolloutState, SandboxRef
from rollyard.schemas.task import Task
from rollyard.stages.sandbox import Labels
from rollyard.stages.stage import now_ms
from rollyard.stages.sweeper import is_orphan, sweep_once

ROLLOUT = Rollout.of("r", "t", 0, 1)
REF = SandboxRef(backend="local", place="here", handle="/a")
OTHER = SandboxRef(backend="local", place="here", handle="/b")


def labels(attempt: int = 1, created_ms: int = 0, rollout: Rollout = ROLLOUT) -> Labels:
    return Labels(run="r", rollout_id=rollout.rollout_id, attempt=attempt, owner="w", created_ms=created_ms)


@given(
    st.sampled_from(["init", "run", "eval", "aggregate", "committing", "ended"]),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from([None, REF, OTHER]),
)
def test_an_orphan_is_what_no_state_can_lead_to(
    position: Position, attempt: int, labelled: int, sandbox: SandboxRef | None
) -> None:
    state = RolloutState(rollout=ROLLOUT, position=position, attempt=attempt, sandbox=sandbox)
    orphan = is_orphan(REF, labels(labelled), state)
    if position == "ended" or labelled < attempt:
        assert orphan
    elif labelled > attempt or position == "init" or sandbox == REF:
        assert not orphan
    else:
        assert orphan == (position in ("run", "eval"))


def test_a_rollout_without_a_state_has_no_sandbox() -> None:
    assert is_orphan(REF, labels(), None)


async def make(crew: Any, attempt: int = 1, index: int = 0, created_ms: int = 0) -> Any:
    rollout = Rollout.of("r", "t", index, 9)
    return await crew.context.backends["local"].create(labels(attempt, created_ms, rollout))


async def left(crew: Any) -> set[str]:
    return {ref.handle for ref, _ in await crew.context.backends["local"].list_owned()}


@pytest.fixture
def task() -> Task:
    return Task(prompt="p", id="t", group_size=9)


async def test_only_orphans_of_some_age_go(crew: Any, task: Task) -> None:
    used, superseded = await make(crew, attempt=2), await make(crew)
    await crew.start(task, 0, position="run", step=2, attempt=2, place=used.ref.place, sandbox=used.ref)
    without_state, young = await make(crew, index=1), await make(crew, index=2, created_ms=now_ms())
    in_init = await make(crew, index=3)
    await crew.start(task, 3)
    assert await sweep_once(crew.context, 30_000) == 2
    assert await left(crew) == {used.ref.handle, young.ref.handle, in_init.ref.handle}
    assert await sweep_once(crew.context, 0) == 1
    assert without_state.ref.handle not in await left(crew)
    assert superseded.ref.handle not in await left(crew)


async def test_broken_labels_do_not_cost_an_agent_its_sandbox(crew: Any, task: Task) -> None:
    used, half_made = await make(crew), await make(crew, index=1)
    await crew.start(task, 0, position="run", step=1, place=used.ref.place, sandbox=used.ref)
    Path(used.ref.handle, "labels.json").write_text("{")
    Path(half_made.ref.handle, "labels.json").unlink()
    assert await sweep_once(crew.context, 0) == 1
    assert await left(crew) == {used.ref.handle}


async def test_one_that_cannot_be_removed_does_not_keep_the_others(crew: Any) -> None:
    stuck = [await make(crew, index=index) for index in range(3)]
    blocks = [Path(sandbox.ref.handle + ".gone") for sandbox in stuck]
    for block in blocks:
        block.write_text("in the way")
    free = await make(crew, index=3)
    assert await sweep_once(crew.context, 0) == 1
    assert await left(crew) == {sandbox.ref.handle for sandbox in stuck}
    for block in blocks:
        block.unlink()
    assert await sweep_once(crew.context, 0) == 3
    assert not Path(free.ref.handle).exists()


async def test_a_folder_that_is_gone_is_told_and_no_reason_to_stop(crew: Any) -> None:
    from rollyard.schemas.errors import SandboxError  # noqa: PLC0415

    root = crew.config.sandboxes_dir()
    shutil.rmtree(root)
    with pytest.raises(SandboxError, match="the local sandboxes cannot be listed"):
        await sweep_once(crew.context, 0)
    with pytest.raises(SandboxError, match="the lease of the local sandboxes cannot be renewed"):
        await crew.context.backends["local"].renew_lease()
    root.mkdir()
    assert await sweep_once(crew.context, 0) == 0
