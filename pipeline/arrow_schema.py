"""The columns of the Parquet files: one row a sample, one row a rollout.

Columns bear the names of the fields of `Sample` and `Delivery`; what those hold as dicts or lists of messages is JSON
text here. The rest are facts that a trainer or an evaluation filters by. `schema_version` stands in each file's
metadata. A release may add columns at the end; it never renames one or changes its type without a new version.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa

ARROW_SCHEMA_VERSION: Final = 1

_TIMINGS: Final = pa.struct(
    [(name, pa.int64()) for name in ("initialized_ms", "run_started_ms", "run_ended_ms", "evaluated_ms")]
)

_TURN: Final = pa.struct(
    [
        *((name, pa.int64()) for name in ("start", "end")),
        ("turn", pa.int32()),
        *((name, pa.string()) for name in ("call_id", "scenario")),
        ("trained", pa.bool_()),
        ("reward", pa.float64()),
        ("params", pa.string()),
    ]
)
_LINK: Final = pa.struct([(name, pa.string()) for name in ("kind", "call_id", "to")])
_DRIFT_POINT: Final = pa.struct(
    [
        *((name, pa.string()) for name in ("call_id", "reason", "continues")),
        ("position", pa.int64()),
        *((name, pa.list_(pa.uint32())) for name in ("expected", "found")),
        ("message", pa.int32()),
        ("detail", pa.string()),
    ]
)

_SAMPLE_COLUMNS: Final[list[tuple[str, pa.DataType, str]]] = [
    ("sample_id", pa.string(), "digest of (rollout, attempt, branch, stitcher, sample policy)"),
    ("run", pa.string(), "the run's name"),
    ("task_id", pa.string(), "the task's id"),
    ("group_id", pa.string(), "equal to task_id"),
    ("rollout_id", pa.string(), "the rollout"),
    ("index", pa.int32(), "of the rollout in its group"),
    ("attempt", pa.int32(), "the try that counts, from 1"),
    ("branch", pa.int32(), "0 <= branch < branches"),
    ("branches", pa.int32(), "samples of this rollout"),
    ("scenario", pa.string(), "main, sub_agent, compaction, summary, title or heartbeat"),
    ("status", pa.string(), "completed or truncated"),
    ("token_ids", pa.list_(pa.uint32()), "prompt and sampled ids, shape [n]"),
    ("loss_mask", pa.list_(pa.uint8()), "1 where a token was sampled and is trained, shape [n]"),
    ("logprobs", pa.list_(pa.float32()), "as sampled; 0.0 where loss_mask is 0; NaN: not known, shape [n]"),
    ("policy_versions", pa.list_(pa.int32()), "weights of each sampled token, else -1, shape [n]"),
    ("reward", pa.float64(), "of the rollout; null: none, never 0 instead"),
    ("logprob_kind", pa.string(), "raw, processed or unknown"),
    ("messages", pa.string(), "JSON: the whole conversation, OpenAI Chat form; images as blob:<SHA-256>"),
    ("tools", pa.string(), "JSON: tool definitions of the last call; null: none"),
    ("calls", pa.list_(pa.string()), "ids of the calls of this branch, first to last"),
    ("model", pa.string(), "served model of the last call"),
    ("params", pa.string(), "JSON: sampling parameters of the last call"),
    ("finish_reason", pa.string(), "of the last call"),
    ("timings", _TIMINGS, "when things happened, Unix ms; 0 where something did not happen"),
    ("stitcher", pa.string(), "version of the stitcher that made it"),
    ("metadata", pa.string(), "JSON: the task's"),
    ("schema_version", pa.int32(), "version of the Sample record"),
    ("group_size", pa.int32(), "rollouts of the group"),
    ("failure_kind", pa.string(), "why a truncated rollout did not complete; null: it did"),
    ("tokens", pa.int64(), "n, the length of token_ids"),
    ("trained_tokens", pa.int64(), "tokens where loss_mask is 1"),
    ("min_policy_version", pa.int32(), "oldest weights of a trained token; null: not known"),
    ("max_policy_version", pa.int32(), "newest weights of a trained token; null: not known"),
    ("stream_seq", pa.int64(), "SAMPLES sequence of the delivery"),
    ("delivered_ms", pa.int64(), "when the delivery was stored, Unix ms"),
    ("turns", pa.list_(_TURN), "sampled tokens by call, [start, end); params: JSON, null: those of the sample"),
    ("links", pa.list_(_LINK), "what calls of this branch belong to outside it: sub_agent, compaction, resume, retry"),
    ("drift", pa.list_(_DRIFT_POINT), "breaks at which calls of this branch left others"),
    ("rollout_reward", pa.float64(), "the rollout's reward, whatever share of it is this sample's"),
    ("masked", pa.string(), "why no token of it is trained: truncated or failed; empty: they are"),
    ("cut_tokens", pa.int64(), "tokens left out at its end, for the policy's max_tokens"),
    ("incomplete", pa.bool_(), "a call that continued this branch has no result in the log"),
    ("policy", pa.string(), "digest of the sample policy that made it"),
]

_ROLLOUT_COLUMNS: Final[list[tuple[str, pa.DataType, str]]] = [
    ("run", pa.string(), "the run's name"),
    ("task_id", pa.string(), "the task's id"),
    ("group_id", pa.string(), "equal to task_id"),
    ("group_size", pa.int32(), "rollouts of the group"),
    ("rollout_id", pa.string(), "the rollout"),
    ("index", pa.int32(), "0 <= index < group_size"),
    ("attempt", pa.int32(), "the try that counts, from 1"),
    ("status", pa.string(), "completed, truncated, failed or cancelled"),
    ("failure_kind", pa.string(), "init, agent, agent_budget, llm, eval, infra or cancelled; null: no failure"),
    ("failure_message", pa.string(), "what happened"),
    ("failure_hint", pa.string(), "what to do about it"),
    ("failure_retryable", pa.bool_(), "whether another attempt could help"),
    ("reward", pa.float64(), "null: none, never 0 instead"),
    ("metrics", pa.map_(pa.string(), pa.float64()), "further numbers of the evaluation"),
    ("answer", pa.string(), "the agent's final answer"),
    ("calls", pa.int32(), "model calls of the attempt that counts"),
    ("sample_ids", pa.list_(pa.string()), "its samples, none, one or several"),
    ("trained_tokens", pa.int64(), "tokens of its samples where loss_mask is 1"),
    ("metadata", pa.string(), "JSON: the task's"),
    ("schema_version", pa.int32(), "version of the Delivery record"),
    ("stream_seq", pa.int64(), "SAMPLES sequence of the delivery"),
    ("delivered_ms", pa.int64(), "when the delivery was stored, Unix ms"),
    ("excluded", pa.map_(pa.string(), pa.int32()), "calls left out of the samples, by reason"),
    ("drift", pa.map_(pa.string(), pa.int32()), "calls that did not continue sampled ids, by reason"),
    ("lenience", pa.map_(pa.string(), pa.int32()), "calls matched by rules of lenient matching, by rule"),
    ("rewards", pa.map_(pa.string(), pa.float64()), "named parts from which the rule made the reward"),
    ("agent_metrics", pa.map_(pa.string(), pa.float64()), "numbers that harness and hooks read"),
]


def _schema(table: str, columns: list[tuple[str, pa.DataType, str]]) -> pa.Schema:
    fields = [pa.field(name, kind, metadata={"description": words}) for name, kind, words in columns]
    return pa.schema(fields, metadata={"table": table, "schema_version": str(ARROW_SCHEMA_VERSION)})


SAMPLES_SCHEMA: Final = _schema("samples", _SAMPLE_COLUMNS)
ROLLOUTS_SCHEMA: Final = _schema("rollouts", _ROLLOUT_COLUMNS)


def describe(schema: pa.Schema) -> str:
    """A Markdown table of the columns."""
    rows = [f"| {each.name} | {each.type} | {(each.metadata or {})[b'description'].decode()} |" for each in schema]
    return "\n".join(["| column | type | meaning |", "| --- | --- | --- |", *rows])
