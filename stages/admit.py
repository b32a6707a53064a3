"""ADMIT: validates tasks and fans each out into the rollouts of its group. It alone turns one message into many.

Contract: docs/architecture.md 4 and 5.11. Runs are found by asking TASKS for its subjects, so that a task which
was published by plain NATS for a new run is seen. Runs take turns, and no more rollouts are let in than the window
holds, give or take the groups of one turn.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from bisect import bisect_right
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import structlog
from msgspec import structs

from rollyard.pipeline.bus import Bus
from rollyard.pipeline.config import AdmitConfig
from rollyard.pipeline.crash import checkpoint
from rollyard.pipeline.dead import bury
from rollyard.pipeline.handover import MAX_DELIVERIES, Handover
from rollyard.pipeline.kv import Bucket
from rollyard.pipeline.pull import ConsumerGone, Delivered, Pull, backoff_s
from rollyard.pipeline.single_error import single_error
from rollyard.pipeline.streams import ConsumerSpec, ensure_consumer, fill
from rollyard.pipeline.taskfile import decode_task
from rollyard.schemas import subjects
from rollyard.schemas.errors import BusError, Conflict, RollyardError, TaskError
from rollyard.schemas.failure import Failure
from rollyard.schemas.fleet import Run
from rollyard.schemas.rollout import Rollout, RolloutState
from rollyard.schemas.task import Task, TaskProgress
from rollyard.stages.stage import StageContext, now_ms

log = structlog.get_logger(__name__)

STAGE: Final = "admit"
RUNS_AT_A_TIME: Final = 64
TASKS_AT_A_TIME: Final = 16
FAN_OUT_AT_A_TIME: Final = 64
DISCOVERY_S: Final = 1.0
WINDOW_LOOK_S: Final = 0.1
FULL_LOOK_S: Final = 1.0
INACTIVE_S: Final = 600.0
MOST_BACKOFF_S: Final = 5.0


class Admit:
    """Lets tasks in, run by run. `check` tells what is wrong with a task that only its plug-ins know."""

    def __init__(self, context: StageContext, check: Callable[[Task], list[str]]) -> None:
        self._context = context
        self._bus = context.bus
        self._check = check
        self._handover = Handover(context.bus, context.perform)
        self._window = Window(context.bus, context.config.admit)
        self._last = ""
        self._runs: dict[str, Run] = {}
        self._held: dict[int, Delivered] = {}

    async def run(self, stop: asyncio.Event) -> None:
        """Admit until `stop` is set; tasks that are held then are given back."""
        async with asyncio.TaskGroup() as group:
            heartbeat = group.create_task(self._heartbeat())
            try:
                while not stop.is_set():
                    try:
                        worked = await self._turn(stop)
                    except BusError as error:
                        if self._bus.closed.is_set():
                            raise
                        log.warning("admit_waits_for_the_bus", error=error.message)
                        worked = False
                    if not worked:
                        await sleep_until(stop, DISCOVERY_S / 4)
            finally:
                heartbeat.cancel()

    async def _turn(self, stop: asyncio.Event) -> bool:
        """One turn over the runs that have tasks, from where the last turn ended; whether anything was admitted."""
        waiting = sorted(await self._bus.subjects(subjects.TASKS, "task.*"))
        first = bisect_right(waiting, self._last)
        worked = False
        for subject in (waiting[first:] + waiting[:first])[:RUNS_AT_A_TIME]:
            if stop.is_set():
                return worked
            self._last = subject
            worked |= await self._admit_from(subject.partition(".")[2], stop)
        return worked

    async def _admit_from(self, run_token: str, stop: asyncio.Event) -> bool:
        """Admit a few tasks of one run."""
        name = f"admit-{run_token if _is_run(run_token) else subjects.digest(run_token)}"
        spec = ConsumerSpec(
            stream=subjects.TASKS,
            name=name,
            filter_subject=f"task.{run_token}",
            ack_wait_s=self._context.config.worker.ack_wait_s,
            inactive_s=INACTIVE_S,
        )
        await self._window.wait(stop)
        got: list[Delivered] = []
        pull = Pull(self._bus, subjects.TASKS, name, got.append)
        async with pull.open():
            try:
                await pull.pull(TASKS_AT_A_TIME, no_wait=True)
            except ConsumerGone:
                await ensure_consumer(self._bus, spec)
                await pull.pull(TASKS_AT_A_TIME, no_wait=True)
        self._held.update({delivered.seq: delivered for delivered in got})
        try:
            async with asyncio.TaskGroup() as group:
                for delivered in got:
                    group.create_task(delivered.nak() if stop.is_set() else self._admit(run_token, delivered))
        finally:
            for delivered in got:
                self._held.pop(delivered.seq, None)
        return bool(got)

    async def _admit(self, run_token: str, delivered: Delivered) -> None:
        """Take one task in, put it aside in DEAD, or give it back: no task holds up the others."""
        checkpoint("admit.received")
        again_s = backoff_s(delivered.deliveries, most_s=MOST_BACKOFF_S)
        try:
            refusal = await self._refusal(run_token, delivered)
            if refusal:
                await bury(self._bus, STAGE, delivered, refusal)
                return
        except RollyardError as error:
            log.warning("admit_failed", run=run_token, error=str(error))
            await delivered.nak(again_s)
            return
        checkpoint("admit.before_ack")
        await delivered.ack()

    async def _refusal(self, run_token: str, delivered: Delivered) -> str:
        """Admit a task; why that cannot be, or nothing when it is done. Raises RollyardError: try again."""
        try:
            if not _is_run(run_token):
                raise _no_subject(run_token)
            task = decode_task(await delivered.body(), self._check)
            await self._accept(run_token, task)
        except TaskError as error:
            return str(error)
        except RollyardError:
            raise
        except Exception as error:
            # The boundary: a bug that one task hits must not stop the others.
            log.exception("admit_crashed", run=run_token, deliveries=delivered.deliveries)
            if delivered.deliveries <= MAX_DELIVERIES:
                raise RollyardError(f"admit crashed: {error!r}") from error
            return f"admit crashed {delivered.deliveries} times on this task: {error!r}"
        return ""

    async def _accept(self, run_token: str, task: Task) -> None:
        """Store the task and its rollouts. Raises TaskError when its id is taken by another content."""
        store = self._context.tasks
        of_run = await self._run(run_token)
        run = of_run.run
        key = subjects.task_key(run, task.id)
        progress = TaskProgress(content_hash=task.content_hash(), group_size=task.group_size, task_id=task.id, run=run)
        try:
            revision = await store.progress.create(key, progress)
        except Conflict:
            found = await store.progress.get(key)
            if found is None:
                raise
            progress, revision = found
            _check_same(task, progress)
            if progress.progress != "admitting":
                log.info("task_repeated", run=run, task=task.id)
                return
        await store.put(run, task)
        await self._fan_out(of_run, task)
        checkpoint("admit.fanned_out")
        try:
            await store.progress.update(key, structs.replace(progress, progress="fanned_out"), revision)
        except Conflict:
            log.info("task_moved_while_admitting", run=run, task=task.id)

    async def _run(self, run_token: str) -> Run:
        """What is known about a run; one that nobody announced is called by its token."""
        if run_token not in self._runs:
            runs: Bucket[Run] = Bucket(self._bus, subjects.RUNS, Run)
            found = await runs.get(run_token)
            if found is None:
                run = Run(run=run_token, created_ms=now_ms())
                with suppress(Conflict):
                    await runs.create(run_token, run)
                found = run, 0
            self._runs[run_token] = found[0]
        return self._runs[run_token]

    async def _fan_out(self, run: Run, task: Task) -> None:
        """One state and one message for each rollout of the group; repeating it changes nothing."""
        limit = asyncio.Semaphore(FAN_OUT_AT_A_TIME)

        async def one(index: int) -> None:
            async with limit:
                await self._start(Rollout.of(run.run, task.id, index, task.group_size), task, run.training)

        with single_error():
            async with asyncio.TaskGroup() as group:
                for index in range(task.group_size):
                    group.create_task(one(index))
        self._window.admitted(task.group_size)

    async def _start(self, rollout: Rollout, task: Task, training: bool) -> None:
        state = RolloutState(
            rollout=rollout,
            max_attempts=task.max_attempts,
            pool=task.sandbox.backend,
            training=training,
            admitted_ms=now_ms(),
            writer=secrets.token_hex(4),
        )
        cancel = self._context.cancels.find(rollout)
        if cancel is not None:
            failure = Failure.of("cancelled", cancel.reason)
            state = structs.replace(state, position="aggregate", status="cancelled", failure=failure)
        key = subjects.rollout_key(rollout.run, rollout.rollout_id)
        try:
            revision = await self._handover.states.create(key, state)
        except Conflict:
            found = await self._handover.states.get(key)
            if found is None or found[0].step > 0 or found[0].position == "ended":
                return
            state, revision = found
        checkpoint("admit.after_state")
        message = state.message(revision)
        assert message is not None
        await self._handover.publish(state, message)

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(self._context.config.worker.heartbeat_s)
            for delivered in list(self._held.values()):
                await delivered.progress()


def _is_run(run_token: str) -> bool:
    return len(run_token) <= subjects.MAX_ID_CHARS and subjects.token(run_token) == run_token


def _no_subject(run_token: str) -> TaskError:
    if len(run_token) > subjects.MAX_ID_CHARS:
        hint = f"the name of a run has at most {subjects.MAX_ID_CHARS} characters"
    else:
        hint = f"tasks of a run of that name are published to {subjects.task_subject(run_token)}"
    return TaskError(f"task.{run_token[: subjects.MAX_ID_CHARS]} is not the subject of a run", hint=hint)


def _check_same(task: Task, standing: TaskProgress) -> None:
    if task.content_hash() != standing.content_hash:
        raise TaskError(
            f"task id {task.id!r} is taken in run {standing.run!r} by a task with other content",
            hint="give the new task an id of its own",
        )


class Window:
    """How many rollouts are in flight, and whether the streams have room for more."""

    def __init__(self, bus: Bus, settings: AdmitConfig) -> None:
        self._bus = bus
        self._settings = settings
        self._in_flight = 0
        self._looked_s = 0.0

    def admitted(self, rollouts: int) -> None:
        """Count rollouts that were let in since the last look."""
        self._in_flight += rollouts

    async def wait(self, stop: asyncio.Event) -> None:
        """Return when there is room for a group, or when `stop` is set."""
        while not stop.is_set():
            if time.monotonic() - self._looked_s > WINDOW_LOOK_S:
                full = await self._look()
                if full is not None:
                    log.error("admit_stopped_stream_full", stream=full[0], fill=round(full[1], 3))
                    await sleep_until(stop, FULL_LOOK_S)
                    continue
            if self._in_flight < self._settings.window:
                return
            await sleep_until(stop, WINDOW_LOOK_S)

    async def _look(self) -> tuple[str, float] | None:
        """Refresh the count; the stream that is too full, if there is one."""
        self._looked_s = time.monotonic()
        for stream in (subjects.STAGES, subjects.LOG, subjects.SAMPLES):
            info = await self._bus.stream_info(stream)
            if stream == subjects.STAGES:
                self._in_flight = int(info["state"]["messages"])
            if fill(info) >= self._settings.full:
                return stream, fill(info)
        return None


async def sleep_until(stop: asyncio.Event, timeout_s: float) -> None:
    """Sleep for `timeout_s`, or until `stop` is set."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await stop.wait()
