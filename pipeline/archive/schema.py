"""The columns of an archive: one row an event of the log. Documented in docs/archive.md.

`payload` is the event as it was logged, and the only column that replay decodes; the rest are facts from it, to filter
by. A release may add columns at the end; it never renames one or changes its type without a new version.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa

EVENTS_GLOB: Final = "run=*/events-*.parquet"
EVENTS_SCHEMA_VERSION: Final = 1

_COLUMNS: Final[list[tuple[str, pa.DataType, str]]] = [
    ("seq", pa.int64(), "LOG sequence: the order of the log"),
    ("time_ms", pa.int64(), "when it was stored, Unix ms"),
    ("subject", pa.string(), "where it was logged: log.<run>.<rollout>.<kind>"),
    ("run", pa.string(), "the run's name"),
    ("rollout_id", pa.string(), "the rollout"),
    ("kind", pa.string(), "call, life or commit"),
    ("type", pa.string(), "intent or end of a call; initialized, ran, evaluated or failed; commit. null: not readable"),
    ("attempt", pa.int64(), "the try at the rollout, from 1"),
    ("call_id", pa.string(), "of a call"),
    ("parent", pa.string(), "intent: the call whose reply the request continues"),
    ("scenario", pa.string(), "intent: main, sub_agent, compaction, summary, title, heartbeat or count"),
    ("protocol", pa.string(), "intent: the API that the agent spoke"),
    ("model", pa.string(), "intent: served model"),
    ("drift", pa.string(), "intent: why the parent's ids were not continued; null: they were"),
    ("status", pa.string(), "end: ok, error, aborted or superseded; ran and commit: how the rollout ended"),
    ("finish_reason", pa.string(), "end: stop, length or tool_calls"),
    ("untrainable", pa.string(), "end: why the ids cannot be trained on; null: they can"),
    ("error", pa.string(), "end, failed, ran, commit: what went wrong"),
    ("failure_kind", pa.string(), "failed, ran, commit: init, agent, agent_budget, llm, eval, infra or cancelled"),
    ("server", pa.string(), "end: id of the model server"),
    ("policy_version", pa.int64(), "end: weights at dispatch; null: not known"),
    ("prompt_tokens", pa.int64(), "end: as reported to the agent"),
    ("completion_tokens", pa.int64(), "end: as reported to the agent"),
    ("sampled_tokens", pa.int64(), "end: sampled ids that were recorded"),
    ("total_s", pa.float64(), "end: duration of the call in seconds; null: not known"),
    ("task_id", pa.string(), "life, commit: the task"),
    ("index", pa.int64(), "life, commit: of the rollout in its group, from 0"),
    ("reward", pa.float64(), "evaluated: null: no reward, never 0 instead"),
    ("stitcher", pa.string(), "commit: version of the stitcher"),
    ("samples", pa.int64(), "commit: samples that it names"),
    ("messages", pa.string(), "intent, JSON: the messages after those that the parent has, OpenAI Chat form"),
    ("reply", pa.string(), "end, JSON: the assistant message as sent, OpenAI Chat form"),
    ("blob", pa.string(), "SHA-256 of `payload` where the log held only a pointer to it; null: it held it inline"),
    ("payload", pa.binary(), "the event as it was logged: msgpack, as a zstd frame above 4 KB"),
]

EVENTS_SCHEMA: Final = pa.schema(
    [pa.field(name, kind, metadata={"description": words}) for name, kind, words in _COLUMNS],
    metadata={"table": "events", "schema_version": str(EVENTS_SCHEMA_VERSION)},
)
_MANY_VALUES: Final = {"call_id", "parent", "error", "messages", "reply", "blob", "payload"}
FEW_VALUES: Final = [name for name, kind, _ in _COLUMNS if kind == pa.string() and name not in _MANY_VALUES]
"""Columns whose values recur: they are written as a dictionary."""
