"""Real parts for every test: a nats-server for the session, a bus on streams of its own for each test."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import agent_tools
import pytest
import structlog
from hypothesis import settings
from msgspec import structs

from rollyard.gateway.local_model import demo_model_path
from rollyard.pipeline.blobs import BlobStore
from rollyard.pipeline.bus import Bus
from rollyard.pipeline.cancels import Cancels
from rollyard.pipeline.codec import decode, encode
from rollyard.pipeline.config import Config, NatsConfig, StoreConfig, WorkerConfig, WorkerStage
from rollyard.pipeline.dead import letters
from rollyard.pipeline.embedded import EmbeddedNats, nats_server
from rollyard.pipeline.handover import Handover
from rollyard.pipeline.kv import Bucket
from rollyard.pipeline.log import read_rollout
from rollyard.pipeline.pull import Delivered, Pull
from rollyard.pipeline.streams import ConsumerSpec, ensure, ensure_consumer
from rollyard.pipeline.taskstore import TaskStore
from rollyard.schemas import subjects
from rollyard.schemas.errors import SetupError
from rollyard.schemas.fleet import DeadLetter
from rollyard.schemas.rollout import Rollout, RolloutEvent, RolloutState
from rollyard.schemas.sample import Delivery
from rollyard.schemas.task import Task
from rollyard.stages.sandbox import open_backend
from rollyard.stages.stage import StageContext
from rollyard.stages.worker import run_worker

# How long one example takes says nothing on a shared machine. CI tries the same examples each time, so that a change
# lands by what it does; everybody else tries new ones.
settings.register_profile("rollyard", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("rollyard")

# What a script starts in the background ignores Ctrl-C, and so would every shell that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def logging_of_one_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A command that a test runs in this process sets up logging for itself, not for the tests after it."""
    configure = structlog.configure
    monkeypatch.setattr(
        structlog, "configure", lambda **given: configure(**given | {"cache_logger_on_first_use": False})
    )
    yield
    structlog.reset_defaults()


@pytest.fixture
async def nats(tmp_path: Path) -> AsyncIterator[EmbeddedNats]:
    """A nats-server with an empty store."""
    async with nats_server(tmp_path / "nats") as server:
        yield server


@pytest.fixture
async def bus(nats: EmbeddedNats, tmp_path: Path) -> AsyncIterator[Bus]:
    """A connection to it, with every stream made and a blob store."""
    async with Bus.connect(nats.url, name="test", blobs=BlobStore(tmp_path / "blobs")) as connection:
        assert await ensure(connection) == []
        yield connection


@dataclass
class Crew:
    """The stages on a test's bus: as handlers that the test calls, or at work as in a worker process."""

    bus: Bus
    config: Config
    context: StageContext

    @asynccontextmanager
    async def at_work(self, *stages: WorkerStage, slots: int = 16) -> AsyncIterator[None]:
        """A worker that works on these stages within the block."""
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(run_worker(self.config, stages, slots, stop))
            try:
                yield
            finally:
                stop.set()

    async def submit(self, *tasks: Task, run: str = "r") -> None:
        """Publish tasks, unchecked."""
        for task in tasks:
            await self.bus.publish(subjects.task_subject(run), encode(task))

    async def start(self, task: Task, index: int = 0, **changes: Any) -> RolloutState:
        """Store a task and the state of one of its rollouts, and publish the message that is due."""
        task = task.with_id()
        await self.context.tasks.put("r", task)
        rollout = Rollout.of("r", task.id, index, task.group_size)
        state = RolloutState(rollout=rollout, pool=task.sandbox.backend, max_attempts=task.max_attempts)
        state = structs.replace(state, **changes)
        handover = Handover(self.bus, self.context.perform)
        revision = await handover.states.create(subjects.rollout_key("r", rollout.rollout_id), state)
        message = state.message(revision)
        assert message is not None
        await handover.publish(state, message)
        return state

    async def take(self, stage: str, where: str | None = None, count: int = 1) -> list[Delivered]:
        """Messages of a stage, held by the test."""
        name, stage_filter = subjects.stage_consumer(stage, where), subjects.stage_filter(stage, where)
        await ensure_consumer(
            self.bus, ConsumerSpec(stream=subjects.STAGES, name=name, filter_subject=stage_filter, ack_wait_s=60)
        )
        got: list[Delivered] = []
        async with Pull(self.bus, subjects.STAGES, name, got.append).open() as pull:
            await pull.pull(count)
        assert len(got) == count
        return got

    async def state(self, rollout: Rollout) -> RolloutState:
        """The state of a rollout as it stands."""
        states: Bucket[RolloutState] = Bucket(self.bus, subjects.ROLLOUTS, RolloutState)
        found = await states.get(subjects.rollout_key(rollout.run, rollout.rollout_id))
        assert found is not None
        return found[0]

    async def due(self, run: str = "r") -> list[str]:
        """Subjects of the messages that wait in STAGES, one for each message."""
        counts = await self.bus.subjects(subjects.STAGES, f"stage.*.*.{run}")
        counts |= await self.bus.subjects(subjects.STAGES, f"stage.*.{run}")
        return sorted(subject for subject, count in counts.items() for _ in range(count))

    async def life(self, rollout: Rollout) -> list[RolloutEvent]:
        """What is logged about the life of a rollout."""
        events = await read_rollout(self.bus, rollout.run, rollout.rollout_id, kinds=("life",))
        return [event for _, event in events if isinstance(event, RolloutEvent)]

    async def deliveries(self, run: str = "r") -> list[Delivery]:
        """What the trainer of a run gets."""
        read = self.bus.read(subjects.SAMPLES, f"sample.{subjects.token(run)}.*.*")
        return [decode(stored.data, Delivery) async for stored in read]

    async def letters(self, run: str | None = None) -> list[DeadLetter]:
        """What was put aside."""
        return [letter async for _, letter in letters(self.bus, run)]

    async def until(self, condition: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """What `condition` gives as soon as it is true; the test's own timeout ends the wait."""
        while not (found := await condition()):  # noqa: ASYNC110 - what is waited for happens elsewhere
            await asyncio.sleep(0.02)
        return found


@pytest.fixture
async def crew(bus: Bus, nats: EmbeddedNats, tmp_path: Path) -> AsyncIterator[Crew]:
    """Stages with short waits, with the backends `none` and `local`."""
    (tmp_path / "secret").write_text("the secret of the tests")
    config = Config(
        nats=NatsConfig(url=nats.url),
        store=StoreConfig(data=str(tmp_path), blobs=str(tmp_path / "blobs")),
        worker=WorkerConfig(ack_wait_s=2.0, heartbeat_s=0.6, lease_s=2.0),
    )
    settings = {"root": str(config.sandboxes_dir())}
    async with (
        Cancels.following(bus) as cancels,
        open_backend("local", settings) as local,
        open_backend("none") as nothing,
    ):
        context = StageContext(
            bus=bus,
            config=config,
            worker="w1",
            tasks=TaskStore(bus),
            cancels=cancels,
            backends={"local": local, "none": nothing},
            secret=config.secret({}),
        )
        yield Crew(bus, config, context)
        for ref, _ in await local.list_owned():
            await (await local.open(ref)).destroy()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test where what its marker asks for is missing; fail it in CI, where it must be there."""
    missing = ""
    if item.get_closest_marker("model"):
        try:
            demo_model_path()
        except SetupError as error:
            missing = str(error)
    for marker in item.iter_markers("agent"):
        missing = missing or agent_tools.missing(*marker.args)
    if missing:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(missing)
