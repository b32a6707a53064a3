from __future__ import annotations

import asyncio

import pytest

from rollyard.gateway.keys import SessionGrant
from rollyard.gateway.models import RunModels, resolve_model
from rollyard.pipeline.bus import Bus
from rollyard.pipeline.kv import Bucket
from rollyard.schemas import subjects
from rollyard.schemas.fleet import Run

GRANT = SessionGrant(run="r", rollout_id="x", attempt=1, model="policy")
MAP = {"claude-*": "policy", "*haiku*": "small", "claude-haiku-4-5": "exact", "GPT-5": "policy-2"}


@pytest.mark.parametrize(
    ("asked", "model"),
    [
        ("claude-haiku-4-5", "exact"),
        ("claude-haiku-5", "policy"),
        ("Some-HAIKU", "small"),
        ("gpt-5", "policy-2"),
        ("gpt-5-mini", "policy"),
        ("", "policy"),
    ],
)
def test_the_map_of_the_run_comes_first_and_then_the_key(asked: str, model: str) -> None:
    assert resolve_model(asked, GRANT, MAP) == model


def test_without_a_map_the_key_decides_even_if_the_name_is_served() -> None:
    assert resolve_model("judge", GRANT, {}) == "policy"


async def test_maps_of_runs_are_followed(bus: Bus) -> None:
    runs: Bucket[Run] = Bucket(bus, subjects.RUNS, Run)
    await runs.put(subjects.token("run 1"), Run(run="run 1", models={"*haiku*": "small"}))
    models = RunModels(bus)
    following = asyncio.create_task(models.run())
    while not models.of("run 1"):  # noqa: ASYNC110 - what is waited for happens in the bus
        await asyncio.sleep(0.01)
    assert models.of("run 1") == {"*haiku*": "small"}
    assert models.of("run 2") == {}
    await runs.put(subjects.token("run 1"), Run(run="run 1"))
    while models.of("run 1"):  # noqa: ASYNC110 - the same
        await asyncio.sleep(0.01)
    following.cancel()
