"""Events of the log to rows of an archive. Columns: pipeline/archive/schema.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pyarrow as pa

from rollyard.pipeline.archive.schema import EVENTS_SCHEMA
from rollyard.pipeline.bus import BLOB_HEADER
from rollyard.pipeline.contents import Contents
from rollyard.pipeline.jetstream import Stored
from rollyard.pipeline.log import LogEvent, decode_event
from rollyard.schemas.call import CallEnd, CallIntent
from rollyard.schemas.errors import DecodeError, TooNew
from rollyard.schemas.failure import Failure
from rollyard.schemas.rollout import RolloutEvent


def events_batch(events: Sequence[Stored], run: str, contents: Contents) -> pa.RecordBatch:
    """The rows of some events of a run. An event that cannot be decoded has its bytes and no facts.

    Raises TooNew for an event that a newer release wrote, BlobError for one whose tools or system prompt are gone.
    """
    rows = [_row(stored, run, contents) for stored in events]
    arrays = [pa.array([row.get(field.name) for row in rows], field.type) for field in EVENTS_SCHEMA]
    return pa.RecordBatch.from_arrays(arrays, schema=EVENTS_SCHEMA)


def _row(stored: Stored, run: str, contents: Contents) -> dict[str, Any]:
    _, _, rollout_id, kind = stored.subject.split(".")
    row: dict[str, Any] = {
        "seq": stored.seq,
        "time_ms": stored.time_ms,
        "subject": stored.subject,
        "run": run,
        "rollout_id": rollout_id,
        "kind": kind,
        "blob": stored.headers.get(BLOB_HEADER),
        "payload": stored.data,
    }
    try:
        event = decode_event(stored, contents)
    except TooNew:
        raise
    except DecodeError:
        return row
    return row | {"attempt": event.attempt} | _facts(event)


def _facts(event: LogEvent) -> dict[str, Any]:
    if isinstance(event, CallIntent):
        asked = _same(event, ("call_id", "parent", "scenario", "protocol", "model", "drift"))
        return {"type": "intent", "messages": _json(event.messages), **asked}
    if isinstance(event, CallEnd):
        told = ("call_id", "status", "finish_reason", "untrainable", "error", "server", "policy_version")
        return {
            "type": "end",
            "prompt_tokens": event.usage.prompt_tokens,
            "completion_tokens": event.usage.completion_tokens,
            "sampled_tokens": len(event.completion_ids),
            "total_s": event.timings.total_s,
            "reply": None if event.reply is None else _json(event.reply),
            **_same(event, told),
        }
    if isinstance(event, RolloutEvent):
        life = {"type": event.kind, "status": event.status, "reward": event.reward}
        return life | _same(event.rollout, ("task_id", "index")) | _failure(event.failure)
    commit = {"type": "commit", "samples": len(event.samples)}
    return commit | _same(event, ("task_id", "index", "status", "stitcher")) | _failure(event.failure)


def _same(event: msgspec.Struct, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(event, name) for name in names}


def _failure(failure: Failure | None) -> dict[str, Any]:
    return {} if failure is None else {"failure_kind": failure.kind, "error": failure.message}


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
