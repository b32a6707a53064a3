"""Any agent in any sandbox, from the task to the sample; and how agents end that do not come to a good end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import agent_tools
import agents
import pytest
import pytest_asyncio
from matrix import AGENTS, BACKENDS, BUILT_IN, Cell, Matrix, conversation, open_matrix
from rig import Rig
from scenes import TASK, say, shell, write_first

from rollyard.schemas.task import Task

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

RUN_S = 60.0
"""Long enough for an agent to start on a busy machine; the other cells go on meanwhile."""
HANGING = [say("I wait.", write_first("codex"))] + [say("", shell("codex", "sleep 600"))] * 60
"""Codex asks again every ten seconds while a command goes on."""
IMPATIENT = {"config": {"model_providers": {"gateway": {"request_max_retries": 0, "stream_max_retries": 0}}}}
LIMITED = [say("I go on.", shell("claude", "true"))] * 4


SLOW = ("openclaw", "opencode")
"""Harnesses of the agents that take longest to start."""


@dataclass(frozen=True)
class Ending:
    """An agent that comes to no good end: in which sandbox, on what model, and with which settings."""

    harness: str
    backend: str
    turns: list[dict[str, Any]] | None  # None: no server of the model
    fields: dict[str, Any]


ENDINGS = {
    "deadline": Ending("codex", "bubblewrap", HANGING, {"run_s": RUN_S}),
    "deadline-docker": Ending("codex", "docker", HANGING, {"run_s": RUN_S}),
    "deadline-local": Ending("codex", "local", HANGING, {"run_s": RUN_S}),
    "no-model-codex": Ending("codex", "bubblewrap", None, {"args": IMPATIENT}),
    "no-model-docker": Ending("codex", "docker", None, {"args": IMPATIENT}),
    "no-model-claude": Ending("claude_code", "local", None, {"args": {"max_retries": 0}}),
    "calls-codex": Ending("codex", "docker", [say("", shell("codex", "true"))] * 4, {"max_calls": 2}),
    "calls-claude": Ending("claude_code", "bubblewrap", LIMITED, {"max_calls": 2}),
    "turns-claude": Ending("claude_code", "local", LIMITED, {"args": {"max_turns": 2}}),
}


def _cell(harness: str, backend: str) -> Any:
    needs = [harness] if harness in AGENTS else ["python"]
    return pytest.param(f"{harness}-{backend}", marks=[pytest.mark.agent(name) for name in needs])


CELLS = [_cell(harness, backend) for harness in (*BUILT_IN, *AGENTS) for backend in BACKENDS]
each_cell = pytest.mark.parametrize("cell", CELLS)


def ending(*names: str) -> Callable[..., Any]:
    """A test of some ENDINGS."""
    marks = {name: [pytest.mark.agent(ENDINGS[name].harness)] for name in names}
    return pytest.mark.parametrize("cell", [pytest.param(name, marks=marks[name]) for name in names])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def matrix(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Matrix]:
    """Its folder can be read by the user of jails."""
    async with open_matrix(tmp_path_factory.mktemp("matrix")) as matrix:
        yield matrix


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def played(request: pytest.FixtureRequest, matrix: Matrix) -> Mapping[str, Cell | str]:
    """What came of every cell that the selected tests want, all played side by side."""
    items = [item for item in request.session.items if getattr(item, "module", None) is request.module]
    wanted = {
        item.callspec.params["cell"]
        for item in items
        if hasattr(item, "callspec")
        and "cell" in item.callspec.params
        and not any(agent_tools.missing(*marker.args) for marker in item.iter_markers("agent"))
    }
    tasks: dict[str, Task] = {}
    # What takes longest begins first.
    for name in sorted(wanted, key=lambda name: (not name.startswith(("deadline", *SLOW)), name)):
        how = ENDINGS.get(name)
        harness, backend = (how.harness, how.backend) if how else name.split("-")
        if backend not in matrix.unusable:
            more = {"model": name, **how.fields} if how else {}
            tasks[name] = matrix.task(harness, backend, **more)
    turns: dict[str, list[dict[str, Any]]] = {}
    for name, task in tasks.items():
        how = ENDINGS.get(name)
        if how is None:
            turns[task.agent.model] = conversation(task.agent.harness)
        elif how.turns is not None:
            turns[name] = [{"match": "", "turns": how.turns}]
    async with asyncio.TaskGroup() as group:
        for name, said in turns.items():
            group.create_task(matrix.model(name, said))
    by_id = await matrix.play("matrix", list(tasks.values()))
    return {name: by_id[task.id] for name, task in tasks.items()}


def _backend(cell: str) -> str:
    return ENDINGS[cell].backend if cell in ENDINGS else cell.partition("-")[2]


@pytest.fixture
def done(cell: str, matrix: Matrix, played: Mapping[str, Cell | str]) -> Cell:
    """What came of the test's cell."""
    why = matrix.unusable.get(_backend(cell))
    if why is not None:
        pytest.skip(why)
    found = played[cell]
    assert isinstance(found, Cell), found
    return found


@each_cell
async def test_the_files_are_right_and_the_reward_is_1(cell: str, done: Cell) -> None:
    assert (done.delivery.status, done.delivery.reward) == ("completed", 1.0), done.told()
    assert (done.result.exit_code, done.result.failure) == (0, None), done.told()
    assert done.delivery.answer, done.told()


@each_cell
async def test_there_is_a_sample_of_every_call(cell: str, done: Cell) -> None:
    trained = {call for sample in done.delivery.samples for call in sample.calls}
    assert len(trained) == done.delivery.calls >= 3, done.told()
    assert all(any(sample.loss_mask) for sample in done.delivery.samples)
    if not cell.startswith("openclaw"):  # it moves its last message, so that each call is a branch
        assert len(done.delivery.samples) == 1


@each_cell
async def test_the_agent_says_what_it_did(cell: str, done: Cell) -> None:
    harness = cell.partition("-")[0]
    counted = {"codex": "tool_calls", "hermes": "calls", "mini_swe_agent": "calls", "bash": "turns"}
    if harness != "command":
        assert done.result.metrics[counted.get(harness, "turns")] >= 3, done.told()


@ending("deadline", "deadline-docker", "deadline-local")
async def test_an_agent_that_is_killed_at_its_deadline_leaves_what_it_did(cell: str, done: Cell) -> None:
    assert (done.delivery.status, done.delivery.reward) == ("truncated", 0.0), done.told()
    failure = done.delivery.failure
    assert failure is not None and failure.kind == "agent_budget", done.told()
    assert f"{RUN_S:g} s" in failure.message
    assert done.result.metrics["messages"] == 1, done.told()
    assert done.delivery.answer == "I wait."
    assert len(done.delivery.samples) == 1


@ending("no-model-codex", "no-model-docker", "no-model-claude")
async def test_an_agent_without_a_model_is_a_failure_of_the_model(cell: str, done: Cell) -> None:
    failure = done.delivery.failure
    assert (done.delivery.status, done.delivery.samples) == ("failed", ()), done.told()
    assert failure is not None and (failure.kind, failure.retryable) == ("llm", True), done.told()


@ending("calls-codex", "calls-claude", "turns-claude")
async def test_an_agent_at_its_limit_is_truncated(cell: str, done: Cell) -> None:
    failure = done.delivery.failure
    assert failure is not None and failure.kind == "agent_budget", done.told()
    assert (done.delivery.status, done.delivery.reward, done.delivery.calls) == ("truncated", 0.0, 2), done.told()


@pytest.mark.parametrize(
    "agent", [pytest.param(name, marks=pytest.mark.agent(name)) for name in ("codex", "opencode", "hermes")]
)
async def test_a_key_that_is_refused_is_no_failure_of_the_model(agent: str, matrix: Matrix) -> None:
    rig: Rig = matrix.rig
    job = agents.Job(
        url=rig.gateway.url,
        key="no key at all",
        prompt=TASK,
        home=rig.folder / f"refused-{agent}" / "home",
        work=rig.folder / f"refused-{agent}" / "work",
        options=IMPATIENT if agent == "codex" else {},
    )
    job.home.mkdir(parents=True)
    job.work.mkdir()
    done = await agents.run(agent, job)
    failure = done.result.failure
    assert failure is not None and (failure.kind, failure.retryable) == ("agent", False), done.told()
    assert "no session key" in failure.message
