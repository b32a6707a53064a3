"""The streams and buckets of an installation, made by one idempotent `ensure`.

Names and retention are public API: docs/architecture.md section 4.
"""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct

from rollyard.pipeline.bus import Bus
from rollyard.schemas import subjects
from rollyard.schemas.errors import BusAway, BusError, BusFull

_SECOND_NS: Final = 1_000_000_000
_MIB: Final = 1 << 20
_GIB: Final = 1 << 30
MAX_MSG_BYTES: Final = 1_000_000
PATIENCE_S: Final = 60.0
PAUSE_S: Final = 0.5


class Limits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much each stream may hold, in bytes. Read when a stream is made."""

    tasks_max_bytes: Annotated[int, Meta(description="tasks that are not admitted yet")] = 8 * _GIB
    stages_max_bytes: Annotated[int, Meta(description="messages between stages")] = 1 * _GIB
    log_max_bytes: Annotated[int, Meta(description="every call and every step")] = 64 * _GIB
    samples_max_bytes: Annotated[int, Meta(description="deliveries that nobody has trimmed")] = 32 * _GIB
    dead_max_bytes: Annotated[int, Meta(description="messages put aside for people")] = 1 * _GIB
    alarms_max_bytes: Annotated[int, Meta(description="alarms of runs")] = 64 * _MIB
    replicas: Annotated[int, Meta(description="copies of each stream, on as many servers of a cluster")] = 1


def stream_configs(limits: Limits) -> list[dict[str, Any]]:
    """The configuration of every stream, the ones behind the buckets included, in the server's own terms."""
    work = {"retention": "workqueue", "discard": "new"}
    kept = {"retention": "limits", "discard": "new", "allow_direct": True}
    newest = {"retention": "limits", "discard": "old", "allow_direct": True}
    bare: list[dict[str, Any]] = [
        {"name": subjects.TASKS, "subjects": ["task.*"], "max_bytes": limits.tasks_max_bytes, **work},
        {"name": subjects.STAGES, "subjects": ["stage.>"], "max_bytes": limits.stages_max_bytes, **work},
        {
            "name": subjects.LOG,
            "subjects": ["log.*.*.*"],
            "max_bytes": limits.log_max_bytes,
            "deny_delete": True,
            **kept,
        },
        {
            "name": subjects.SAMPLES,
            "subjects": ["sample.*.*.*", "group.*.*"],
            "max_bytes": limits.samples_max_bytes,
            **kept,
        },
        {
            "name": subjects.DEAD,
            "subjects": [
                "dead.*.*",
                "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.>",
                "$JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED.>",
            ],
            "max_bytes": limits.dead_max_bytes,
            **newest,
        },
        {"name": subjects.ALARMS, "subjects": ["alarm.*.*"], "max_bytes": limits.alarms_max_bytes, **newest},
    ]
    buckets = [
        {
            "name": subjects.kv_stream(bucket),
            "subjects": [f"$KV.{bucket}.>"],
            "retention": "limits",
            "discard": "new",
            "max_msgs_per_subject": 1,
            "allow_rollup_hdrs": True,
            "deny_delete": True,
            "allow_direct": True,
        }
        for bucket in subjects.BUCKETS
    ]
    common = {
        "storage": "file",
        "num_replicas": limits.replicas,
        "max_msg_size": MAX_MSG_BYTES,
        "duplicate_window": 120 * _SECOND_NS,
        # The default of 1,000 consumers is a ceiling for runs and places.
        "max_consumers": -1,
    }
    return [common | config for config in bare + buckets]


async def ensure(bus: Bus, limits: Limits | None = None) -> list[str]:
    """Make every stream and bucket that is missing. Returns one line for each setting that differs from ours.

    What exists is left as it is: an operator may have good reasons. A server that gives no answer for a moment, as at
    its start, is asked again. Raises BusError when JetStream refuses, or gives none for long.
    """
    drift: list[str] = []
    for config in stream_configs(limits or Limits()):
        name = config["name"]
        try:
            await _asked_again(bus, f"STREAM.CREATE.{name}", config)
        except BusFull as error:
            size = f"{config.get('max_bytes', 0) / _GIB:g} GiB"
            raise BusFull(
                f"nats-server has no room for stream {name} of {size}: {error.message}",
                hint="lower the sizes under [limits], or raise max_file in the configuration of nats-server",
            ) from error
        except BusError as error:
            if "(10058)" not in error.message:
                raise
            found = (await bus.stream_info(name))["config"]
            drift += [
                f"stream {name}: {key} is {found.get(key)!r}, this release makes {value!r}"
                for key, value in config.items()
                if found.get(key, None if value else value) != value
            ]
    return drift


async def _asked_again(bus: Bus, subject: str, config: dict[str, Any]) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            await bus.api(subject, config)
        except BusAway:
            # Making what is there already, as it is there, is no error.
            if bus.closed.is_set() or time.monotonic() > until_s:
                raise
            await asyncio.sleep(PAUSE_S)
        else:
            return


class ConsumerSpec(Struct, frozen=True, kw_only=True):
    """A durable pull consumer with explicit acks."""

    stream: str
    name: str
    filter_subject: str
    ack_wait_s: float = 20.0
    max_ack_pending: int = 20_000
    inactive_s: float = 0.0

    def body(self) -> dict[str, Any]:
        """The request that makes it. There is no max_deliver: it would leave messages stuck and invisible."""
        config: dict[str, Any] = {
            "durable_name": self.name,
            "filter_subject": self.filter_subject,
            "ack_policy": "explicit",
            "ack_wait": int(self.ack_wait_s * _SECOND_NS),
            "max_ack_pending": self.max_ack_pending,
            "max_deliver": -1,
            "deliver_policy": "all",
            "replay_policy": "instant",
        }
        if self.inactive_s:
            config["inactive_threshold"] = int(self.inactive_s * _SECOND_NS)
        return {"stream_name": self.stream, "config": config}


async def ensure_consumer(bus: Bus, spec: ConsumerSpec) -> None:
    """Make a consumer or bring its settings up to date. Raises BusError, for instance when filters overlap."""
    await bus.api(f"CONSUMER.CREATE.{spec.stream}.{spec.name}.{spec.filter_subject}", spec.body())


def fill(info: dict[str, Any]) -> float:
    """How full a stream is, 0 to 1, by its own byte limit; 0 when it has none."""
    limit = int(info["config"].get("max_bytes", -1))
    return int(info["state"]["bytes"]) / limit if limit > 0 else 0.0


def render(limits: Limits) -> str:
    """The stream configurations as JSON, for operators who create streams by other means."""
    return msgspec.json.format(msgspec.json.encode(stream_configs(limits))).decode()
