"""The trainer's end of the bus: publish tasks, read results, cancel, announce weights.

    async with rollyard.connect(run="my-run") as client:
        await client.submit([{"prompt": "What is 2 + 2?", "group_size": 8}])
        async for batch in client.groups():
            ...

`SyncClient` is the same without async.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from msgspec import structs

from rollyard.pipeline import results
from rollyard.pipeline.alarms import alarms
from rollyard.pipeline.blobs import BlobStore
from rollyard.pipeline.bus import Bus
from rollyard.pipeline.codec import decode, encode
from rollyard.pipeline.datafolder import find_config
from rollyard.pipeline.kv import Bucket
from rollyard.pipeline.pool_client import PoolClient, check_version
from rollyard.pipeline.progress import RunStatus, run_status
from rollyard.pipeline.reader import AckMode, Reader
from rollyard.pipeline.results import GroupBatch
from rollyard.pipeline.samplepolicy import as_policy, check_same
from rollyard.pipeline.single_error import single_error
from rollyard.pipeline.taskfile import Check, TaskFile, check_tasks, decode_task, read_task_file
from rollyard.schemas import subjects
from rollyard.schemas.alarm import Alarm
from rollyard.schemas.errors import BlobError, BusError, ConfigError, Conflict, TaskError, WaitTimeout
from rollyard.schemas.fleet import Cancel, DeadLetter, PolicyVersion, Run
from rollyard.schemas.policy import SamplePolicy
from rollyard.schemas.sample import Delivery, Sample
from rollyard.schemas.task import Task, TaskProgress

T = TypeVar("T")
Tasks = Task | Mapping[str, Any] | str | Path | Iterable[Task | Mapping[str, Any]]

URL_VARIABLE: Final = "ROLLYARD_NATS_URL"
ACK_WAIT_S: Final = 20.0
_AT_ONCE: Final = 64
_MANY: Final = 256
_LOOK_AT_DEAD_S: Final = 2.0
_SHOWN_IDS: Final = 5


@dataclass(frozen=True, slots=True)
class SubmitReport:
    """What `submit` did. `task_ids` are those of all tasks given, in their order, each once."""

    accepted: int
    repeated: int
    task_ids: tuple[str, ...]


@asynccontextmanager
async def connect(
    url: str | None = None,
    *,
    run: str,
    name: str = "trainer",
    blobs: str | Path | None = None,
    ack_wait_s: float = ACK_WAIT_S,
    training: bool = True,
    samples: SamplePolicy | Mapping[str, Any] | None = None,
) -> AsyncIterator[Client]:
    """Connect to a running Rollyard as the trainer of `run`.

    `url` and `blobs`, the folder of large payloads, come from the variable ROLLYARD_NATS_URL and the configuration
    (ROLLYARD_CONFIG, ./rollyard.toml) where they are not given. `ack_wait_s`: results that a trainer held when it died
    come again after so long. `training=False` makes a new run one for evaluation, which may use model servers that
    return no token ids. `samples` is the sample policy of a new run, for tasks that have none. Raises BusError when
    nobody answers there, ConfigError for a run's name that cannot be, or for another policy than the run has.
    """
    _check_name(run)
    policy = as_policy(samples) if samples is not None else None
    config, _ = find_config()
    address = url or os.environ.get(URL_VARIABLE) or config.nats.url
    store = BlobStore(Path(blobs) if blobs is not None else config.blobs_dir())
    async with Bus.connect(address, name=f"{name}-{run}", blobs=store) as bus:
        try:
            await bus.stream_info(subjects.TASKS)
        except BusError as error:
            raise BusError(
                f"NATS at {address} answers, but Rollyard's streams are not there: {error.message}",
                hint="start `rollyard up`, or point the url at the server that it uses",
            ) from error
        client = Client(bus, run, ack_wait_s=ack_wait_s, training=training, samples=policy)
        await client.check_policy()
        try:
            yield client
        finally:
            await client.close_readers()


class Client(PoolClient):
    """A trainer's view of one run. Make one with `connect`."""

    def __init__(
        self,
        bus: Bus,
        run: str,
        *,
        ack_wait_s: float = ACK_WAIT_S,
        training: bool = True,
        samples: SamplePolicy | None = None,
    ) -> None:
        super().__init__(bus)
        self.run = run
        self._ack_wait_s = ack_wait_s
        self._training = training
        self._policy = samples
        self._runs = Bucket[Run](bus, subjects.RUNS, Run)
        self._tasks = Bucket[TaskProgress](bus, subjects.TASK_BUCKET, TaskProgress)
        self._submitted: dict[str, str] = {}
        self._first_dead_seq = 0
        self._readers: list[Reader[Any]] = []

    # --- tasks ---

    async def submit(self, tasks: Tasks, *, check: Check | None = None) -> SubmitReport:
        """Publish tasks: one, several, or those of a JSONL file (a path). All are checked before any is published.

        A task that the run has with the same content counts as repeated and is not published; one whose id has other
        content is refused. To submit the same tasks again after an error is safe. Raises TaskError, ConfigError for
        another sample policy than the run has, BusError, BlobError.
        """
        given = _read(tasks, check)
        await self.check_policy()
        standing = await self._standing(given.tasks)
        clashes = [task.id for task in given.tasks if standing.get(task.id, "") not in ("", task.content_hash())]
        if clashes:
            raise TaskError(
                f"run {self.run!r} has other content under {_ids(clashes)}; nothing was submitted",
                hint="give the tasks other ids, or leave out `id` so that it is made from the content",
            )
        new = [task for task in given.tasks if task.id not in standing]
        await self._publish(new)
        repeated = given.repeated + len(given.tasks) - len(new)
        return SubmitReport(len(new), repeated, tuple(task.id for task in given.tasks))

    async def _standing(self, tasks: list[Task]) -> dict[str, str]:
        """Content hash of those tasks that were submitted by this client or accepted by the run, by id."""
        standing: dict[str, str] = {}

        if len(tasks) > _MANY:
            async for _, known, _ in self._tasks.items(f"{subjects.token(self.run)}.*"):
                standing[known.task_id] = known.content_hash
            return self._submitted | standing

        async def look(task: Task) -> None:
            found = await self._tasks.get(subjects.task_key(self.run, task.id))
            if found is not None:
                standing[task.id] = found[0].content_hash
            elif task.id in self._submitted:
                standing[task.id] = self._submitted[task.id]

        await _each(tasks, look)
        return standing

    async def _publish(self, tasks: list[Task]) -> None:
        if not tasks:
            return
        await self._announce()
        done = 0
        subject = subjects.task_subject(self.run)

        async def publish(task: Task) -> None:
            nonlocal done
            content = task.content_hash()
            await self.bus.publish(subject, encode(task), msg_id=subjects.digest(self.run, task.id, content))
            self._submitted[task.id] = content
            done += 1

        try:
            await _each(tasks, publish)
        except (BusError, BlobError) as error:
            message = f"{done} of {len(tasks)} tasks were published, then: {error.message}"
            hint = f"{error.hint}; then submit the same tasks again: none is taken twice".removeprefix("; then ")
            raise type(error)(message, hint=hint) from error

    async def _announce(self) -> None:
        """Before the first task: write down the run's name, since subjects may hold only a hash of it."""
        if self._first_dead_seq:
            return
        policy = self._policy or SamplePolicy()
        run = Run(run=self.run, created_ms=_now_ms(), training=self._training, samples=policy)
        try:
            await self._runs.create(subjects.token(self.run), run)
        except Conflict:
            await self.check_policy()
        dead = await self.bus.stream_info(subjects.DEAD)
        self._first_dead_seq = int(dead["state"]["last_seq"]) + 1

    async def check_policy(self) -> None:
        """Raises ConfigError when the run has another sample policy than this client was given."""
        if self._policy is not None and (standing := await self._runs.get(subjects.token(self.run))) is not None:
            check_same(self.run, standing[0].samples, self._policy)

    async def cancel(
        self, task_id: str | None = None, index: int | None = None, *, reason: str = "cancelled by the trainer"
    ) -> None:
        """End the run, one task, or one rollout of a task, whether it waits or runs.

        Each rollout that had not ended delivers with status `cancelled` and no samples, so groups still close.
        """
        if index is not None and (task_id is None or index < 0):
            raise TaskError("a rollout is named by its task_id and an index from 0", hint="give both")
        bucket = Bucket[Cancel](self.bus, subjects.CANCEL, Cancel)
        try:
            key = subjects.cancel_key(self.run, task_id, index)
        except ValueError as error:
            raise TaskError(f"task_id: {error}", hint="give the id that `submit` reported") from None
        await bucket.put(key, Cancel(reason=reason[:2000], at_ms=_now_ms()))

    # --- results ---

    def deliveries(self, *, durable: str = "default", ack: AckMode = "next") -> Reader[Delivery]:
        """An endless iterator over finished rollouts, whatever became of them, in the order of their delivery.

        It goes on where the durable name stopped, whichever process read under it. ack="next": asking for the next item
        acknowledges the last one. ack="manual": `await reader.ack()` acknowledges all that was handed out; do so when a
        step is safe. What was not acknowledged comes again, in any order: see `rollyard.pipeline.reader`.
        """
        return self._keep(results.delivery_reader(self.bus, self.run, durable, ack, self._ack_wait_s))

    def samples(self, *, durable: str = "default", ack: AckMode = "next") -> Reader[Sample]:
        """The samples of the deliveries, one by one; a delivery is acknowledged with its last sample."""
        return self._keep(results.sample_reader(self.bus, self.run, durable, ack, self._ack_wait_s))

    def groups(self, *, durable: str = "default", ack: AckMode = "next") -> Reader[GroupBatch]:
        """Complete groups only: each with a delivery for every rollout, ordered by index."""
        return self._keep(results.group_reader(self.bus, self.run, durable, ack, self._ack_wait_s))

    async def blob(self, reference: str) -> bytes:
        """The bytes of an image that a sample's messages refer to, by its url `blob:<name>`. Raises BlobError."""
        return await self.bus.contents.blob(reference)

    def _keep(self, reader: Reader[T]) -> Reader[T]:
        self._readers.append(reader)
        return reader

    async def close_readers(self) -> None:
        """Give back what the readers hold and have not acknowledged."""
        for reader in self._readers:
            await reader.close()
        self._readers.clear()

    # --- the run ---

    async def set_models(self, models: Mapping[str, str]) -> None:
        """Which served model an agent of this run gets that asks for a name, or for one of a pattern: {"*haiku*": "m"}.

        For all others it is the model of the task. Holds for new calls, in place of what was set before.
        """
        await self._announce()
        key = subjects.token(self.run)
        while True:
            standing = await self._runs.get(key)
            assert standing is not None
            with suppress(Conflict):
                await self._runs.update(key, structs.replace(standing[0], models=dict(models)), standing[1])
                return

    async def publish_policy_version(self, version: int, *, force: bool = False) -> None:
        """Announce the trainer's newest weights. Raises Conflict for one below the announced one, unless `force`."""
        bucket = Bucket[PolicyVersion](self.bus, subjects.POLICY, PolicyVersion)
        key = subjects.token(self.run)
        announced = PolicyVersion(run=self.run, version=check_version(version), at_ms=_now_ms())
        while True:
            standing = await bucket.get(key)
            if standing is not None and version < standing[0].version and not force:
                raise Conflict(
                    f"policy version {version} of run {self.run!r} is below {standing[0].version}, the announced one",
                    hint="go on counting from there, or pass force=True to go back",
                )
            try:
                await (bucket.update(key, announced, standing[1]) if standing else bucket.create(key, announced))
            except Conflict:
                continue
            return

    async def policy_version(self) -> int | None:
        """The announced version, or None: where a trainer that starts again goes on counting."""
        found = await Bucket[PolicyVersion](self.bus, subjects.POLICY, PolicyVersion).get(subjects.token(self.run))
        return found[0].version if found else None

    async def alarms(self) -> list[Alarm]:
        """What is wrong with the run, oldest first: see `Alarm`. Each kind is raised once; none is taken back."""
        return [alarm async for alarm in alarms(self.bus, self.run)]

    async def status(self) -> RunStatus:
        """How far the run is."""
        return await run_status(self.bus, self.run)

    async def wait(self, task_ids: Iterable[str] | None = None, *, timeout_s: float | None = None) -> None:
        """Return when tasks are closed, all of their rollouts delivered. Without ids: all that this client submitted.

        Raises TaskError when a task that this client submitted is refused, WaitTimeout after `timeout_s`.
        """
        waiting = {subjects.task_key(self.run, task): task for task in task_ids or self._submitted}
        wanted = len(waiting)
        if not waiting:
            return
        try:
            with single_error():
                async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as group:
                    refused = group.create_task(self._until_refused())
                    await self._until_closed(waiting)
                    refused.cancel()
        except TimeoutError:
            raise WaitTimeout(
                f"{len(waiting)} of {wanted} tasks of run {self.run!r} are not closed after {timeout_s} s: "
                f"{_ids(sorted(waiting.values()))}",
                hint=f"`rollyard status --run {self.run}` tells where they are",
            ) from None

    async def _until_closed(self, waiting: dict[str, str]) -> None:
        async for key, task, _ in self._tasks.watch(f"{subjects.token(self.run)}.*"):
            if task is not None and task.progress == "closed":
                waiting.pop(key, None)
                if not waiting:
                    return

    async def _until_refused(self) -> None:
        """Ends with TaskError when admit puts a task aside that this client submitted."""
        while True:
            letters = self.bus.read(
                subjects.DEAD, subjects.dead_subject("admit", self.run), start_seq=max(1, self._first_dead_seq)
            )
            async for stored in letters:
                self._first_dead_seq = stored.seq + 1
                letter: DeadLetter = decode(stored.data, DeadLetter)
                task = _task_of(letter.body)
                if task is not None and self._submitted.get(task.id) == task.content_hash():
                    del self._submitted[task.id]
                    raise TaskError(f"task {task.id!r} was refused: {letter.reason}", hint="`rollyard dead` shows it")
            await asyncio.sleep(_LOOK_AT_DEAD_S)


def _read(tasks: Tasks, check: Check | None) -> TaskFile:
    match tasks:
        case str() | Path():
            return read_task_file(tasks, check)
        case Task() | Mapping():
            return check_tasks([tasks], check)
        case Iterable():
            return check_tasks(tasks, check)
    raise TaskError(f"cannot submit a {type(tasks).__name__}", hint="give tasks, dictionaries or the path of a file")


def _task_of(body: bytes) -> Task | None:
    try:
        return decode_task(body)
    except TaskError:
        return None


def _ids(ids: list[str]) -> str:
    shown = ", ".join(repr(task_id) for task_id in ids[:_SHOWN_IDS])
    return shown if len(ids) <= _SHOWN_IDS else f"{shown} and {len(ids) - _SHOWN_IDS} more"


def _check_name(run: str) -> None:
    try:
        subjects.token(run)
    except ValueError as error:
        raise ConfigError(f"run: {error}", hint="name the run with run='...'") from None


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


async def _each(items: Iterable[T], work: Callable[[T], Awaitable[None]]) -> None:
    """Do `work` for every item, some at a time; the first error ends it and is raised."""
    left = iter(items)

    async def worker() -> None:
        for item in left:
            await work(item)

    with single_error():
        async with asyncio.TaskGroup() as group:
            for _ in range(_AT_ONCE):
                group.create_task(worker())
