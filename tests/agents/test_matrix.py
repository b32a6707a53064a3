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

# The first test of the module waits until every agent has been everywhere.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]

RUN_S = 25.0
"""Long enough for an agent to start on a busy machine."""
HANGING = [say("I wait.", write_first("codex"), shell("codex", "sleep 600"))]
IMPATIENT = {"config": {"model_providers": {"gateway": {"request_max_retries": 0, "stream_max_retries": 0}}}}
LIMITED = say("I go on.", shell("claude", "true"))


@dataclass(frozen=True)
class Ending:
    """An agent that comes to no good end: in which sandbox, on what model, and with which settings."""

    harness: str
    backend: str
    turns: list[dict[str, Any]] | None  # None: no server of the model
    fields: dict[str, Any]


ENDINGS = {
    "deadline": Ending("codex", "bubblewrap", HANGING, {"run_s": RUN_S}),
    "deadline-local": Ending("codex", "local", HANGING, {"run_s": RUN_S}),
    "no-model-codex": Ending("codex", "bubblewrap", None, {"args": IMPATIENT}),
    "no-model-claude": Ending("claude_code", "local", None, {"args": {"max_retries": 0}}),
    "calls-codex": Ending("codex", "docker", [say("", shell("codex", "true"))], {"max_calls": 2}),
    "calls-claude": Ending("claude_code", "bubblewrap", [LIMITED], {"max_calls": 2}),
    "turns-claude": Ending("claude_code", "local", [LIMITED], {"args": {"max_turns": 2}}),
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
async def played(request: pytest.FixtureRequest, matrix: Matrix) -> Mapping[str, Cell]:
    """What came of every cell that the selected tests want, all played side by side."""
    items = [item for item in request.session.items if getattr(item, "module", None) is request.module]
    wanted = {item.callspec.params["cell"]: item for item in items if hasattr(item, "callspec")}
    tasks: dict[str, Task] = {}
    for name, item in wanted.items():
        if any(agent_tools.missing(*marker.args) for marker in item.iter_markers("agent")):
            continue
        how = ENDINGS.get(name)
        harness, _, backend = name.partition("-") if how is None else (how.harness, "", how.backend)
        if backend not in matrix.backends:
            continue
        if how is not None:
            tasks[name] = matrix.task(harness, backend, model=name, **how.fields)
        else:
            tasks[name] = matrix.task(harness, backend)
    turns = {task.agent.model: conversation(task.agent.harness) for task in tasks.values()}
    for name, how in ENDINGS.items():
        turns.pop(name, None)
        if how.turns is not None and name in tasks:
            turns[name] = [{"match": "", "turns": how.turns * 4}]
    await asyncio.gather(*(matrix.model(name, said) for name, said in turns.items()))
    by_id = await matrix.play("matrix", tasks.values())
    return {name: by_id[task.id] for name, task in tasks.items()}


@pytest.fixture
def done(cell: str, played: Mapping[str, Cell]) -> Cell:
    """What came of the test's cell."""
    if cell not in played:
        pytest.skip("its backend does not work on this machine")
    return played[cell]


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


@ending("deadline", "deadline-local")
async def test_an_agent_that_is_killed_at_its_deadline_leaves_what_it_did(cell: str, done: Cell) -> None:
    assert (done.delivery.status, done.delivery.reward) == ("truncated", 0.0), done.told()
    failure = done.delivery.failure
    assert failure is not None and failure.kind == "agent_budget", done.told()
    assert f"{RUN_S:g} s" in failure.message
    assert done.result.metrics["messages"] == 1, done.told()
    assert done.delivery.answer == "I wait."
    assert len(done.delivery.samples) == 1


@ending("no-model-codex", "no-model-claude")
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
