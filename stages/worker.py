"""A worker: any subset of the stages in one process. Start as many as you like, kill them as you like."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, Final

import structlog

from rollyard.pipeline.blobs import BlobStore
from rollyard.pipeline.bus import Bus
from rollyard.pipeline.cancels import Cancels
from rollyard.pipeline.config import Config, WorkerStage
from rollyard.pipeline.consumer import ConsumerLoop
from rollyard.pipeline.leases import LeaseView, hold_lease
from rollyard.pipeline.relay import relay_beside
from rollyard.pipeline.streams import ConsumerSpec, ensure
from rollyard.pipeline.taskstore import TaskStore
from rollyard.schemas import subjects
from rollyard.schemas.errors import BusError, SandboxError
from rollyard.schemas.fleet import Lease
from rollyard.schemas.subjects import digest
from rollyard.stages.admit import Admit
from rollyard.stages.aggregate import Aggregate
from rollyard.stages.eval import Eval
from rollyard.stages.init import Init
from rollyard.stages.owner import Owners
from rollyard.stages.plugin_check import check_configured, check_task
from rollyard.stages.run import Run
from rollyard.stages.sandbox import ANY_PLACE, SandboxBackend, open_backend
from rollyard.stages.stage import Stage, StageContext, StageHandler
from rollyard.stages.sweeper import sweep_orphans

log = structlog.get_logger(__name__)

SANDBOX_STAGES: Final = frozenset({"init", "run", "eval"})
CONNECT_WAIT_S: Final = 60.0
ROOM_LOOK_S: Final = 0.1
DRAIN_S: Final = {"init": 15.0, "run": 0.0, "eval": 0.0, "aggregate": 15.0}
"""How long held messages may go on after a stop. Agents and evaluation commands live on by themselves."""


async def run_worker(config: Config, stages: Sequence[WorkerStage], slots: int, stop: asyncio.Event) -> None:
    """Work in the given stages until `stop` is set. Raises BusError when the bus closes the connection for good."""
    name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
    blobs = BlobStore(config.blobs_dir())
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(
            Bus.connect(config.nats.url, name=f"worker-{name}", blobs=blobs, wait_s=CONNECT_WAIT_S)
        )
        for difference in await ensure(bus, config.limits):
            log.warning("stream_differs", difference=difference)
        check_configured(config)
        if SANDBOX_STAGES & set(stages):
            stack.enter_context(Owners(config.sandboxes_dir()).held(name))
            await stack.enter_async_context(relay_beside(config))
        secret = config.secret() if SANDBOX_STAGES & set(stages) else b""
        backends = await _open_backends(stack, config, secret)
        context = StageContext(
            bus=bus,
            config=config,
            worker=name,
            tasks=TaskStore(bus),
            cancels=await stack.enter_async_context(Cancels.following(bus)),
            backends=backends,
            secret=secret,
        )
        await _hold_places(stack, context, stages)
        jobs = [job async for job in _jobs(stack, context, stages, slots)]
        log.info("worker_started", stages=list(stages), slots=slots, places=sorted(_places(backends.values())))
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(_fail_when_closed(bus))
            running = [group.create_task(job(stop)) for job in jobs]
            await asyncio.wait(running)
            watch.cancel()


async def _open_backends(stack: AsyncExitStack, config: Config, secret: bytes) -> dict[str, SandboxBackend]:
    backends: dict[str, SandboxBackend] = {}
    for name in config.worker.backends:
        settings = backend_settings(config, name)
        if secret:
            # Two installations may share a daemon or an account: neither may sweep the other's sandboxes.
            settings.setdefault("installation", installation(secret))
        backends[name] = await stack.enter_async_context(open_backend(name, settings))
    return backends


def installation(secret: bytes) -> str:
    """What tells the sandboxes of this installation from others' at the same daemon or account."""
    return digest(secret, chars=12)


def backend_settings(config: Config, name: str) -> dict[str, Any]:
    """What a backend is told: what all get, and what [backends.NAME] says over it."""
    common = {
        "root": str(config.sandboxes_dir()),
        "lease_s": config.worker.lease_s * 4,
        "relay": str(config.relay_dir()),
        "gateway_url": config.gateway.address(),
    }
    return common | config.backends.get(name, {})


def _places(backends: Iterable[SandboxBackend]) -> set[str]:
    return {backend.place for backend in backends}


async def _hold_places(stack: AsyncExitStack, context: StageContext, stages: Sequence[str]) -> None:
    """Show that the places and pools that this worker serves live, and keep their sandboxes from ending themselves."""
    if not SANDBOX_STAGES & set(stages):
        return
    lease_s = context.config.worker.lease_s
    for place in _places(context.backends.values()) - {ANY_PLACE}:
        lease = Lease(owner=place, lease_s=lease_s)
        await stack.enter_async_context(hold_lease(context.bus, subjects.NODES, lease, release=False))
    for backend in context.backends.values():
        # One each: a daemon that hangs must not cost agents of another backend their lease.
        await stack.enter_async_context(_background(_renew_sandboxes(backend, lease_s / 3)))
    if "init" in stages:
        for pool in context.backends:
            lease = Lease(owner=pool, lease_s=lease_s)
            await stack.enter_async_context(hold_lease(context.bus, subjects.POOLS, lease, release=False))
        await stack.enter_async_context(_background(sweep_orphans(context)))


async def _renew_sandboxes(backend: SandboxBackend, period_s: float) -> None:
    while True:
        try:
            await backend.renew_lease()
        except SandboxError as error:
            log.error("sandboxes_not_renewed", backend=backend.name, error=str(error))
        except Exception:  # the boundary: a backend of somebody else's own
            log.exception("sandboxes_not_renewed", backend=backend.name)
        await asyncio.sleep(period_s)


@asynccontextmanager
async def _background(work: Awaitable[None]) -> AsyncIterator[None]:
    task = asyncio.ensure_future(work)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _jobs(
    stack: AsyncExitStack, context: StageContext, stages: Sequence[str], slots: int
) -> AsyncIterator[Callable[[asyncio.Event], Coroutine[None, None, None]]]:
    """What to run for each stage: admit by itself, the others a consumer loop for each pool or place."""
    pools, places = sorted(context.backends), sorted(_places(context.backends.values()))
    for name in stages:
        match name:
            case "admit":
                yield Admit(context, check_task).run
            case "init":
                for pool in pools:
                    room = _Room(context, context.backends[pool].place)
                    yield _loop(context, Init(context), pool, slots, room).run
            case "run":
                for place in places:
                    yield _loop(context, Run(context), place, slots).run
            case "eval":
                for place in places:
                    yield _loop(context, Eval(context), place, slots).run
            case "aggregate":
                gateways = await stack.enter_async_context(LeaseView.following(context.bus, subjects.GATEWAYS))
                yield _loop(context, Aggregate(context, gateways), None, slots).run


def _loop(
    context: StageContext,
    stage: Stage,
    where: str | None,
    slots: int,
    room: Callable[[], Awaitable[int]] | None = None,
) -> ConsumerLoop:
    settings = context.config.worker
    spec = ConsumerSpec(
        stream=subjects.STAGES,
        name=subjects.stage_consumer(stage.name, where),
        filter_subject=subjects.stage_filter(stage.name, where),
        ack_wait_s=settings.ack_wait_s,
    )
    return ConsumerLoop(
        context.bus,
        spec,
        StageHandler(context, stage),
        slots=slots,
        heartbeat_s=settings.heartbeat_s,
        drain_s=DRAIN_S[stage.name],
        room=room,
    )


class _Room:
    """How many more sandboxes may be made ready at a place before RUN has taken some."""

    def __init__(self, context: StageContext, place: str) -> None:
        self._context = context
        self._place = place
        self._waiting = 0
        self._looked_s = -ROOM_LOOK_S

    async def __call__(self) -> int:
        if time.monotonic() - self._looked_s >= ROOM_LOOK_S:
            self._looked_s = time.monotonic()
            self._waiting = await self._look()
        return self._context.config.worker.max_ready - self._waiting

    async def _look(self) -> int:
        consumer = subjects.stage_consumer("run", self._place)
        try:
            info = await self._context.bus.api(f"CONSUMER.INFO.{subjects.STAGES}.{consumer}")
            return int(info["num_pending"])
        except BusError:
            # Nobody has served RUN at this place yet.
            stage_filter = subjects.stage_filter("run", self._place)
            return sum((await self._context.bus.subjects(subjects.STAGES, stage_filter)).values())


async def _fail_when_closed(bus: Bus) -> None:
    await bus.closed.wait()
    raise BusError("the bus closed the connection for good", hint="see the log of nats-server; start the worker again")
