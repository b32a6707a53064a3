"""The trainer client for programs without async: the same calls, on an event loop in a thread of its own.

Heartbeats go on while the trainer computes, so results may be held for as long as a step takes. It works inside
Jupyter, whose own loop it leaves alone.

    with rollyard.connect_sync(run="my-run") as client:
        client.submit("tasks.jsonl")
        for batch in client.groups():
            ...
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine, Iterable, Mapping
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from rollyard.pipeline.client import ACK_WAIT_S, Client, SubmitReport, Tasks, connect
from rollyard.pipeline.pool_client import TIMEOUT_S
from rollyard.pipeline.progress import RunStatus
from rollyard.pipeline.reader import AckMode, Reader
from rollyard.pipeline.results import GroupBatch
from rollyard.pipeline.taskfile import Check
from rollyard.schemas.alarm import Alarm
from rollyard.schemas.errors import BusError, RollyardError
from rollyard.schemas.fleet import LlmServer
from rollyard.schemas.policy import SamplePolicy
from rollyard.schemas.sample import Delivery, Sample
from rollyard.schemas.weights import WeightReport

T = TypeVar("T")


def connect_sync(
    url: str | None = None,
    *,
    run: str,
    name: str = "trainer",
    blobs: str | Path | None = None,
    ack_wait_s: float = ACK_WAIT_S,
    training: bool = True,
    samples: SamplePolicy | Mapping[str, Any] | None = None,
) -> SyncClient:
    """Connect, as `connect` does. Use the result in a `with` block, or call its `close()`."""
    return SyncClient(url, run=run, name=name, blobs=blobs, ack_wait_s=ack_wait_s, training=training, samples=samples)


class SyncReader(Generic[T]):
    """A plain endless iterator; acknowledgement is that of `rollyard.pipeline.reader.Reader`."""

    def __init__(self, client: SyncClient, reader: Reader[T]) -> None:
        self._client = client
        self._reader = reader
        self._received = 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        # By number: an item whose way to us was cut short, by Ctrl-C, is handed out again and not lost.
        item = self._client.call(self._reader.item(self._received + 1))
        self._received += 1
        return item

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ack(self) -> int:
        """Acknowledge every message that was handed out in full; returns how many. They do not come again."""
        return self._client.call(self._reader.ack())

    def close(self) -> None:
        """Stop, and give back what was not acknowledged."""
        self._client.call(self._reader.close())


class SyncClient:
    """`Client` without async; see there for what the methods do. Made by `connect_sync`."""

    def __init__(self, url: str | None = None, *, run: str, name: str, **settings: Any) -> None:
        self.run = run
        self._closing = asyncio.Event()
        self._ready: concurrent.futures.Future[tuple[asyncio.AbstractEventLoop, Client]] = concurrent.futures.Future()
        session = self._session(url, run=run, name=name, **settings)
        self._thread = threading.Thread(target=asyncio.run, args=(session,), name=f"rollyard-{name}", daemon=True)
        self._thread.start()
        try:
            self._loop, self._client = self._ready.result()
        except RollyardError:
            self._thread.join()
            raise

    async def _session(self, url: str | None, **settings: Any) -> None:
        try:
            async with connect(url, **settings) as client:
                self._ready.set_result((asyncio.get_running_loop(), client))
                await self._closing.wait()
        except BaseException as error:  # whatever it is, the thread that waits must hear of it
            if self._ready.done():
                raise
            self._ready.set_exception(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give back what the readers hold, and disconnect."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine of the async client on its loop, and return what it returns."""
        if not self._thread.is_alive() or threading.current_thread() is self._thread:
            work.close()
            raise BusError("the client is closed", hint="make a new one with connect_sync")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise BusError("the client was closed meanwhile", hint="make a new one with connect_sync") from None
        except BaseException:
            future.cancel()
            raise

    def submit(self, tasks: Tasks, *, check: Check | None = None) -> SubmitReport:
        """Publish tasks, all checked before any is published."""
        return self.call(self._client.submit(tasks, check=check))

    def cancel(
        self, task_id: str | None = None, index: int | None = None, *, reason: str = "cancelled by the trainer"
    ) -> None:
        """End the run, one task, or one rollout of a task."""
        self.call(self._client.cancel(task_id, index, reason=reason))

    def deliveries(self, *, durable: str = "default", ack: AckMode = "next") -> SyncReader[Delivery]:
        """Finished rollouts, without end."""
        return SyncReader(self, self._client.deliveries(durable=durable, ack=ack))

    def samples(self, *, durable: str = "default", ack: AckMode = "next") -> SyncReader[Sample]:
        """Samples of the deliveries, without end."""
        return SyncReader(self, self._client.samples(durable=durable, ack=ack))

    def groups(self, *, durable: str = "default", ack: AckMode = "next") -> SyncReader[GroupBatch]:
        """Complete groups, without end."""
        return SyncReader(self, self._client.groups(durable=durable, ack=ack))

    def blob(self, reference: str) -> bytes:
        """The bytes of an image that a sample's messages refer to."""
        return self.call(self._client.blob(reference))

    def servers(self) -> list[LlmServer]:
        """Every model server of the pool."""
        return self.call(self._client.servers())

    def add_server(self, server: LlmServer | None = None, **fields: Any) -> None:
        """Add a model server, or replace its entry."""
        self.call(self._client.add_server(server, **fields))

    def remove_server(self, server_id: str) -> None:
        """Take a model server out of the pool."""
        self.call(self._client.remove_server(server_id))

    def pause_server(self, server_id: str) -> None:
        """Send no new calls to a model server."""
        self.call(self._client.pause_server(server_id))

    def drain_server(self, server_id: str, *, timeout_s: float = TIMEOUT_S) -> None:
        """The same, and wait until no call runs there."""
        self.call(self._client.drain_server(server_id, timeout_s=timeout_s))

    def resume_server(self, server_id: str) -> None:
        """Send calls to a model server again."""
        self.call(self._client.resume_server(server_id))

    def swap_server(self, old_id: str, server: LlmServer, *, timeout_s: float = TIMEOUT_S) -> None:
        """Put a new model server in the place of another."""
        self.call(self._client.swap_server(old_id, server, timeout_s=timeout_s))

    def set_server_version(self, server_id: str, version: int) -> None:
        """Say which weights a model server of the pool serves from now on."""
        self.call(self._client.set_server_version(server_id, version))

    def update_weights(self, version: int, **settings: Any) -> WeightReport:
        """Have model servers serve other weights; the settings are those of `Client.update_weights`."""
        return self.call(self._client.update_weights(version, **settings))

    def set_models(self, models: Mapping[str, str]) -> None:
        """Which served model agents get that ask for certain names."""
        self.call(self._client.set_models(models))

    def publish_policy_version(self, version: int, *, force: bool = False) -> None:
        """Announce the trainer's newest weights."""
        self.call(self._client.publish_policy_version(version, force=force))

    def policy_version(self) -> int | None:
        """The announced version, or None."""
        return self.call(self._client.policy_version())

    def alarms(self) -> list[Alarm]:
        """What is wrong with the run, oldest first."""
        return self.call(self._client.alarms())

    def status(self) -> RunStatus:
        """How far the run is."""
        return self.call(self._client.status())

    def wait(self, task_ids: Iterable[str] | None = None, *, timeout_s: float | None = None) -> None:
        """Return when tasks are closed; without ids, all that this client submitted."""
        self.call(self._client.wait(task_ids, timeout_s=timeout_s))
