"""The bus: one connection to NATS JetStream, with the few operations that Rollyard builds on.

`publish`, `create` (once), `compare_and_set`, `last`, `read`. Every write that ends in a timeout is settled by reading
back who wrote what stands there: a refusal may be caused by one's own stored message. Contract: docs/architecture.md
section 4; what JetStream and nats-py do under faults was measured before this was written.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, Final

import msgspec
import nats.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg

from rollyard.pipeline.blobs import BlobStore
from rollyard.pipeline.contents import Contents
from rollyard.pipeline.inflight import ByteBudget
from rollyard.pipeline.jetstream import (
    NOT_FOUND,
    ApiError,
    FastHeaders,
    Stored,
    api_error,
    check_page_end,
    decode_get_reply,
    decode_pub_ack,
    is_page_end,
    parse_headers,
    unix_ms,
)
from rollyard.pipeline.replies import Replies
from rollyard.schemas import subjects
from rollyard.schemas.errors import BusAway, BusError, BusFull, Conflict, TooLarge

log = structlog.get_logger(__name__)

INLINE_MAX_BYTES: Final = 512 * 1024
IN_FLIGHT_MAX_BYTES: Final = 2_000_000
REQUEST_TIMEOUT_S: Final = 5.0
WRITE_TRIES: Final = 12
PAGE_MESSAGES: Final = 256
PAGE_BYTES: Final = 4_000_000
WRITER_HEADER: Final = "Rollyard-Writer"
BLOB_HEADER: Final = "Rollyard-Blob"
EXPECTED_SEQ_HEADER: Final = "Nats-Expected-Last-Subject-Sequence"
MSG_ID_HEADER: Final = "Nats-Msg-Id"


class Bus:
    """A connection that reconnects for ever. Make one with `async with Bus.connect(url, name=...) as bus`."""

    def __init__(self, client: Client, blobs: BlobStore | None) -> None:
        self.client = client
        self.blobs = blobs
        self.contents = Contents(blobs)
        self.closed = asyncio.Event()
        self.on_reconnect: set[Callable[[], None]] = set()
        self._closing = False
        self._replies = Replies(client)
        self._budget = ByteBudget(IN_FLIGHT_MAX_BYTES)

    @classmethod
    @asynccontextmanager
    async def connect(
        cls, url: str, *, name: str, blobs: BlobStore | None = None, wait_s: float = 5.0
    ) -> AsyncIterator[Bus]:
        """Connect; the first connection may take up to `wait_s`. Raises BusError when there is no server by then."""
        client = FastHeaders()
        bus = cls(client, blobs)
        await bus._open(url, name, wait_s)
        try:
            yield bus
        finally:
            bus._closing = True
            with suppress(nats.errors.Error, TimeoutError, OSError):
                await client.flush(timeout=2)
            await client.close()

    async def _open(self, url: str, name: str, wait_s: float) -> None:
        last_error: Exception | None = None

        async def on_error(error: Exception) -> None:
            nonlocal last_error
            last_error = error
            log.debug("bus_error", error=repr(error))

        async def on_disconnect() -> None:
            self._replies.connection_lost()
            if not self._closing:
                log.warning("bus_disconnected", url=url)

        async def on_reconnect() -> None:
            log.info("bus_reconnected", url=url)
            for listener in list(self.on_reconnect):
                listener()

        async def on_close() -> None:
            self.closed.set()

        deadline = time.monotonic() + wait_s
        while True:
            try:
                await self.client.connect(
                    url,
                    name=name,
                    error_cb=on_error,
                    disconnected_cb=on_disconnect,
                    reconnected_cb=on_reconnect,
                    closed_cb=on_close,
                    allow_reconnect=False,
                    connect_timeout=2,
                    max_reconnect_attempts=1,
                    reconnect_time_wait=0,
                    ping_interval=15,
                    # Every subject is made of tokens that subjects.token() has checked.
                    skip_subject_validation=True,
                    pending_size=64 * 1024 * 1024,
                )
            except (OSError, TimeoutError, nats.errors.Error) as error:
                if time.monotonic() >= deadline:
                    raise BusError(
                        f"cannot reach NATS at {url}: {last_error or error!r}",
                        hint="start one with `rollyard up`, or set [nats] url",
                    ) from error
                await asyncio.sleep(0.2)
                continue
            # The first connection must fail in bounded time, later ones may take for ever.
            self.client.options["allow_reconnect"] = True
            self.client.options["max_reconnect_attempts"] = -1
            self.client.options["reconnect_time_wait"] = 0.5
            await self._replies.start()
            return

    # --- requests ---

    async def request(
        self, subject: str, data: bytes = b"", *, headers: dict[str, str] | None = None, timeout_s: float = 0
    ) -> Msg:
        """One request to the server or to a service. Raises BusError when no answer comes or nobody listens."""
        try:
            reply = await self._replies.ask(subject, data, headers, timeout_s or REQUEST_TIMEOUT_S)
        except BusError:
            raise
        except (nats.errors.Error, OSError) as error:
            raise BusAway(f"the bus refused a request: {error!r}", hint="see the log of nats-server") from error
        if reply.headers and reply.headers.get("Status") == "503":
            raise BusError(f"nobody answers on {subject}", hint="is JetStream enabled, and does the stream exist?")
        return reply

    async def api(self, call: str, body: Any = None) -> dict[str, Any]:
        """A JetStream API call, `$JS.API.<call>`, with a JSON body. Raises BusError with the server's own words."""
        data = msgspec.json.encode(body) if body is not None else b""
        reply = await self.request(f"$JS.API.{call}", data)
        answer: dict[str, Any] = msgspec.json.decode(reply.data)
        if "error" in answer:
            raise api_error(msgspec.convert(answer["error"], ApiError), call)
        return answer

    async def stream_info(self, stream: str) -> dict[str, Any]:
        """Configuration and state of a stream."""
        return await self.api(f"STREAM.INFO.{stream}")

    async def subjects(self, stream: str, subject_filter: str) -> dict[str, int]:
        """How many messages each subject under a filter holds."""
        found: dict[str, int] = {}
        while True:
            body = {"subjects_filter": subject_filter, "offset": len(found)}
            info = await self.api(f"STREAM.INFO.{stream}", body)
            page: dict[str, int] = info["state"].get("subjects") or {}
            found.update(page)
            if not page or len(found) >= info.get("total", len(found)):
                return found

    # --- writing ---

    async def publish(self, subject: str, data: bytes, *, msg_id: str | None = None) -> int:
        """Store a message and return its sequence.

        With `msg_id` a timeout is retried, since the server drops what it has; without, the caller decides.
        Raises BusFull when a limit of the stream or store is reached, TooLarge, BusError.
        """
        headers = {MSG_ID_HEADER: msg_id} if msg_id else {}
        body = await self._claim_check(data, headers)
        for left in reversed(range(WRITE_TRIES if msg_id else 1)):
            try:
                return await self._write(subject, body, headers)
            except (BusFull, Conflict, TooLarge):
                raise
            except BusError:
                if not left or self.closed.is_set():
                    raise
                await asyncio.sleep(0.1)
        raise AssertionError("unreachable")

    async def create(self, subject: str, data: bytes, *, headers: Mapping[str, str] | None = None) -> tuple[int, bool]:
        """Create once: the first writer wins for as long as its message is stored.

        Returns (sequence of what stands there, whether this call wrote it). Raises BusFull, TooLarge, BusError.
        """
        try:
            return await self.compare_and_set(subject, data, 0, headers=headers), True
        except Conflict:
            standing = await self.last(subject)
            if standing is None:
                raise BusError(f"{subject} existed and is gone: purged while somebody could create it") from None
            return standing.seq, False

    async def compare_and_set(
        self, subject: str, data: bytes, expected_seq: int, *, headers: Mapping[str, str] | None = None
    ) -> int:
        """Store a message if the newest one of its subject has `expected_seq` (0: none); returns the new sequence.

        Raises Conflict when another one stands there, BusFull, TooLarge, BusError.
        """
        writer = secrets.token_hex(8)
        sent = {**(headers or {}), EXPECTED_SEQ_HEADER: str(expected_seq), WRITER_HEADER: writer}
        body = await self._claim_check(data, sent)
        for left in reversed(range(WRITE_TRIES)):
            try:
                return await self._write(subject, body, sent)
            except (BusFull, TooLarge):
                raise
            except BusError as error:
                if self.closed.is_set():
                    raise
                settled = await self._settle(subject, writer, expected_seq, error)
                if settled:
                    return settled
                if not left:
                    raise
                await asyncio.sleep(0.1)
        raise AssertionError("unreachable")

    async def _settle(self, subject: str, writer: str, expected_seq: int, error: BusError) -> int:
        """After a failed write: the sequence if it was stored after all, 0 if it may be tried again, else Conflict."""
        try:
            standing = await self.last(subject)
        except BusError:
            return 0
        if standing is not None and standing.headers.get(WRITER_HEADER) == writer:
            return standing.seq
        if (standing.seq if standing else 0) != expected_seq:
            raise Conflict(f"{subject} is not at sequence {expected_seq} any more") from error
        return 0

    async def _write(self, subject: str, body: bytes, headers: dict[str, str]) -> int:
        claim = await self._budget.acquire(len(body) + 256)
        try:
            reply = await self.request(subject, body, headers=headers or None)
        finally:
            self._budget.release(claim)
        ack = decode_pub_ack(reply.data)
        if ack.error is not None:
            raise api_error(ack.error, subject)
        return ack.seq

    async def _claim_check(self, data: bytes, headers: dict[str, str]) -> bytes:
        if len(data) <= INLINE_MAX_BYTES:
            return data
        if self.blobs is None:
            raise TooLarge(
                f"a message of {len(data)} bytes is over the {INLINE_MAX_BYTES} that go inline",
                hint="configure [store] blobs, a folder that every role can read",
            )
        headers[BLOB_HEADER] = await asyncio.to_thread(self.blobs.put, data)
        return b""

    # --- reading ---

    async def last(self, subject: str) -> Stored | None:
        """The newest message of a subject, from the stream's leader: it sees every acknowledged write."""
        return await self._get(subjects.stream_of(subject), {"last_by_subj": subject})

    async def get(self, stream: str, seq: int) -> Stored | None:
        """The message with that sequence, or None: from any server, and from the leader when that one lacks it."""
        if stream not in (subjects.TASKS, subjects.STAGES):  # work queues have no direct get
            reply = await self.request(f"$JS.API.DIRECT.GET.{stream}", msgspec.json.encode({"seq": seq}))
            if "Nats-Sequence" in (reply.headers or {}):
                return await self._from_direct(stream, reply)
        return await self._get(stream, {"seq": seq})

    async def _get(self, stream: str, query: dict[str, Any]) -> Stored | None:
        reply = await self.request(f"$JS.API.STREAM.MSG.GET.{stream}", msgspec.json.encode(query))
        found = decode_get_reply(reply.data)
        if found.error is not None:
            if found.error.err_code in NOT_FOUND:
                return None
            raise api_error(found.error, stream)
        assert found.message is not None
        raw = found.message
        return await self.resolve(
            Stored(stream, raw.subject, raw.seq, unix_ms(raw.time), raw.data, parse_headers(raw.hdrs))
        )

    async def read(
        self, stream: str, subject_filter: str, *, start_seq: int = 1, until_seq: int | None = None
    ) -> AsyncIterator[Stored]:
        """What a stream holds now under a filter, in order, by batched direct get.

        In a cluster any replica may answer, and lag: a caller that knows a sequence which must be there checks for it.
        """
        seq = start_seq
        page: asyncio.Task[tuple[list[Msg], int]] | None = None
        try:
            while until_seq is None or seq <= until_seq:
                messages, pending = await (page or self._page(stream, subject_filter, seq))
                if messages:
                    seq = int((messages[-1].headers or {})["Nats-Sequence"]) + 1
                if more := bool(messages) and pending > 0 and (until_seq is None or seq <= until_seq):
                    # The server looks for the next page while this one is worked on.
                    page = asyncio.create_task(self._page(stream, subject_filter, seq))
                for message in messages:
                    stored = await self._from_direct(stream, message)
                    if until_seq is not None and stored.seq > until_seq:
                        return
                    yield stored
                if not more:
                    return
        finally:
            if page is not None and not page.cancel() and not page.cancelled():
                page.exception()  # nobody waits for it any more

    async def _page(self, stream: str, subject_filter: str, seq: int) -> tuple[list[Msg], int]:
        """The next messages from `seq` on, and how many the server has behind them."""
        query = {"seq": seq, "next_by_subj": subject_filter, "batch": PAGE_MESSAGES, "max_bytes": PAGE_BYTES}
        messages = await self._replies.ask_many(
            f"$JS.API.DIRECT.GET.{stream}", msgspec.json.encode(query), is_page_end, REQUEST_TIMEOUT_S
        )
        end = messages.pop()
        check_page_end(end, stream)
        return messages, int((end.headers or {}).get("Nats-Num-Pending", "0"))

    async def get_direct(self, subject: str) -> Stored | None:
        """The newest message of a subject from any server: cheap, for what is written once and never changed."""
        stream = subjects.stream_of(subject)
        reply = await self.request(f"$JS.API.DIRECT.GET.{stream}.{subject}")
        if (reply.headers or {}).get("Status") == "404":
            return None
        return await self._from_direct(stream, reply)

    async def _from_direct(self, stream: str, message: Msg) -> Stored:
        headers = message.headers or {}
        stored = Stored(
            stream,
            headers.pop("Nats-Subject"),
            int(headers.pop("Nats-Sequence")),
            unix_ms(headers.pop("Nats-Time-Stamp")),
            message.data,
            headers,
        )
        return await self.resolve(stored) if BLOB_HEADER in headers else stored

    async def resolve(self, stored: Stored) -> Stored:
        """The same message, its body fetched from the blob store when it is a pointer. Raises BlobError."""
        name = stored.headers.get(BLOB_HEADER)
        if name is None:
            return stored
        if self.blobs is None:
            raise TooLarge(f"{stored.subject} is a pointer to a blob", hint="configure [store] blobs")
        return replace(stored, data=await asyncio.to_thread(self.blobs.get, name))
