"""What dead workers left behind goes; what somebody may still use stays."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from rollyard.schemas.errors import SandboxError
from rollyard.schemas.rollout import Position, Rollout, RolloutState, SandboxRef
from rollyard.schemas.task import Task
from rollyard.stages.owner import Owners
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


@given(
    st.sampled_from(["init", "run", "eval", "aggregate", "committing", "ended"]), st.integers(1, 3), st.integers(1, 3)
)
def test_a_sandbox_of_an_evaluation_lives_as_long_as_that(position: Position, attempt: int, labelled: int) -> None:
    state = RolloutState(rollout=ROLLOUT, position=position, attempt=attempt, sandbox=OTHER)
    orphan = is_orphan(REF, structs.replace(labels(labelled), role="eval"), state)
    if position == "eval" and labelled == attempt:
        assert not orphan
    if position in ("aggregate", "committing", "ended") and labelled <= attempt:
        assert orphan
    assert orphan or labelled >= attempt


def test_what_a_dead_init_was_making_is_an_orphan_at_once() -> None:
    state = RolloutState(rollout=ROLLOUT, position="init")
    assert not is_orphan(REF, labels(), state)
    assert is_orphan(REF, labels(), state, owner_lives=False)


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


async def test_what_a_killed_init_was_making_goes_though_its_rollout_is_still_there(crew: Any, task: Task) -> None:
    await crew.start(task, 0)
    owners = Owners(crew.config.sandboxes_dir())
    made = await crew.context.backends["local"].create(structs.replace(labels(), owner="w2"))
    with owners.held("w2"):
        assert await sweep_once(crew.context, 0) == 0
    assert await sweep_once(crew.context, 0) == 1
    assert not Path(made.ref.handle).exists()


@pytest.mark.parametrize("role", ["warm", "check"])
async def test_sandboxes_of_no_rollout_live_as_long_as_their_owner(crew: Any, role: Any) -> None:
    owners = Owners(crew.config.sandboxes_dir())
    backend = crew.context.backends["local"]

    async def spare(owner: str, age_s: float) -> str:
        created_ms = now_ms() - int(age_s * 1000)
        free = Labels(run="", rollout_id="spare", attempt=1, owner=owner, created_ms=created_ms, role=role)
        return str((await backend.create(free)).ref.handle)

    with owners.held("dead"):
        pass
    with owners.held("living"):
        handles = [await spare(*each) for each in (("living", 9e4), ("w1", 9e4), ("elsewhere", 60))]
        await spare("dead", 60)
        await spare("elsewhere", 4000)
        assert await sweep_once(crew.context, 30_000) == 2
        assert await left(crew) == set(handles)


async def test_a_backend_that_cannot_list_does_not_keep_the_others(crew: Any) -> None:
    class Away:
        name = "away"

        async def list_owned(self) -> Any:
            raise SandboxError("the daemon is away")

    crew.context.backends = {"away": Away(), **crew.context.backends}
    await make(crew)
    with pytest.raises(SandboxError, match="the daemon is away"):
        await sweep_once(crew.context, 0)
    assert await left(crew) == set()


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
    root = crew.config.sandboxes_dir()
    shutil.rmtree(root)
    with pytest.raises(SandboxError, match="the local sandboxes cannot be listed"):
        await sweep_once(crew.context, 0)
    with pytest.raises(SandboxError, match="the lease of the local sandboxes cannot be renewed"):
        await crew.context.backends["local"].renew_lease()
    root.mkdir()
    assert await sweep_once(crew.context, 0) == 0
