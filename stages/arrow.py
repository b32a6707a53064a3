"""Deliveries to Arrow tables: one row a sample, one row a rollout. Columns: pipeline/arrow_schema.py.

Ids, masks, logprobs and versions go from their packed bytes into Arrow buffers; no Python number is made of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa

from rollyard.pipeline.arrow_schema import ROLLOUTS_SCHEMA, SAMPLES_SCHEMA
from rollyard.schemas.packed import Packed
from rollyard.schemas.sample import Delivery, Sample

_PACKED: Final[dict[str, Any]] = {
    "token_ids": pa.uint32(),
    "loss_mask": pa.uint8(),
    "logprobs": pa.float32(),
    "policy_versions": pa.int32(),
}
_JSON: Final = {"messages", "tools", "params", "metadata"}
_NESTED: Final = {"timings", "turns", "links", "drift"}


@dataclass(frozen=True, slots=True)
class Received:
    """A delivery and where it stands in SAMPLES."""

    seq: int
    time_ms: int
    delivery: Delivery


def samples_table(deliveries: Sequence[Received]) -> pa.Table:
    """The samples of deliveries, in their order."""
    rows = [(each, sample) for each in deliveries for sample in each.delivery.samples]
    samples = [sample for _, sample in rows]
    facts = [_sample_facts(each, sample) for each, sample in rows]
    columns: list[Any] = []
    for field in SAMPLES_SCHEMA:
        name = field.name
        if name in _PACKED:
            columns.append(_packed_column([getattr(sample, name) for sample in samples], _PACKED[name]))
        elif name in _JSON:
            columns.append(pa.array([_json(getattr(sample, name)) for sample in samples], field.type))
        elif name in _NESTED:
            columns.append(pa.array([_plain(getattr(sample, name)) for sample in samples], field.type))
        elif name in Sample.__struct_fields__:
            columns.append(pa.array([getattr(sample, name) for sample in samples], field.type))
        else:
            columns.append(pa.array([fact[name] for fact in facts], field.type))
    return pa.Table.from_arrays(columns, schema=SAMPLES_SCHEMA)


def _sample_facts(each: Received, sample: Sample) -> dict[str, Any]:
    trained = np.asarray(sample.loss_mask).astype(bool)
    versions = np.asarray(sample.policy_versions)[trained]
    known = versions[versions >= 0]
    return {
        "group_size": each.delivery.group_size,
        "failure_kind": each.delivery.failure.kind if each.delivery.failure else None,
        "tokens": len(sample.token_ids),
        "trained_tokens": int(trained.sum()),
        "min_policy_version": int(known.min()) if known.size else None,
        "max_policy_version": int(known.max()) if known.size else None,
        "stream_seq": each.seq,
        "delivered_ms": each.time_ms,
    }


def rollouts_table(deliveries: Sequence[Received]) -> pa.Table:
    """One row a delivery, those without samples included."""
    return pa.Table.from_pylist([_rollout_row(each) for each in deliveries], schema=ROLLOUTS_SCHEMA)


def _rollout_row(each: Received) -> dict[str, Any]:
    delivery, failure = each.delivery, each.delivery.failure
    return {
        "run": delivery.run,
        "task_id": delivery.task_id,
        "group_id": delivery.group_id,
        "group_size": delivery.group_size,
        "rollout_id": delivery.rollout_id,
        "index": delivery.index,
        "attempt": delivery.attempt,
        "status": delivery.status,
        "failure_kind": failure.kind if failure else None,
        "failure_message": failure.message if failure else None,
        "failure_hint": failure.hint if failure else None,
        "failure_retryable": failure.retryable if failure else None,
        "reward": delivery.reward,
        "metrics": sorted(delivery.metrics.items()),
        "answer": delivery.answer,
        "calls": delivery.calls,
        "excluded": sorted(delivery.excluded.items()),
        "drift": sorted(delivery.drift.items()),
        "lenience": sorted(delivery.lenience.items()),
        "sample_ids": [sample.sample_id for sample in delivery.samples],
        "trained_tokens": sum(sample.loss_mask.data.count(1) for sample in delivery.samples),
        "metadata": _json(delivery.metadata),
        "schema_version": delivery.schema_version,
        "stream_seq": each.seq,
        "delivered_ms": each.time_ms,
        "rewards": sorted(delivery.rewards.items()),
        "agent_metrics": sorted(delivery.agent_metrics.items()),
    }


def _packed_column(values: Sequence[Packed], item: Any) -> Any:
    offsets = np.zeros(len(values) + 1, dtype=np.int32)
    np.cumsum([len(value) for value in values], out=offsets[1:])
    data = pa.py_buffer(b"".join(value.data for value in values))
    items: Any = pa.Array.from_buffers(item, int(offsets[-1]), [None, data])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), items)


def _plain(value: Any) -> Any:
    """Structs as dicts of all their fields, ids as numbers, a turn's parameters as JSON."""
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    if isinstance(value, Packed):
        return value.tolist()
    if isinstance(value, dict):
        return _json(value)
    if isinstance(value, msgspec.Struct):
        return {name: _plain(getattr(value, name)) for name in value.__struct_fields__}
    return value


def _json(value: Any) -> str | None:
    return None if value is None else msgspec.json.encode(value).decode()
