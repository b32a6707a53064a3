"""The floor: what no builder of sequences can do without. Decode, check prefixes, concatenate.

python stitch_floor.py SESSIONS deltas|whole

`deltas` reads the events that Rollyard reads, `whole` calls with whole prompts. It knows no duplicates, no calls that
failed, no messages, no policy: everything went well, and in order.
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec
import numpy as np
import zstandard
from stitch_loop import serve

ZSTD = b"\x28\xb5\x2f\xfd"
decompress = zstandard.ZstdDecompressor().decompress
decode = msgspec.msgpack.Decoder().decode


def deltas(events: list[bytes]) -> list[tuple[Any, Any, Any]]:
    """Sequences from records that hold what their parent's do not."""
    records = [decode(decompress(data) if data.startswith(ZSTD) else data) for data in events]
    ends = {record["call_id"]: record for record in records if record["type"] == "end"}
    above: dict[str, str | None] = {}
    new: dict[str, bytes] = {}
    length: dict[str | None, int] = {None: 0}
    for record in records:
        if record["type"] != "intent":
            continue
        call_id, parent = record["call_id"], record.get("parent")
        end = ends[call_id]
        ids, shared = end["prompt_ids"], end.get("shared_prompt_ids", 0) * 4
        if parent is not None and shared != length[parent]:
            whole = b"".join(ids_of(parent, above, new, ends))
            ids = whole[:shared] + ids
            parent, ids = (parent, ids[len(whole) :]) if ids.startswith(whole) else (None, ids)
        above[call_id], new[call_id] = parent, ids
        length[call_id] = length[parent] + len(ids) + len(end["completion_ids"])
    leaves = new.keys() - set(above.values())
    return [columns(path_to(leaf, above), new, ends) for leaf in leaves]


def path_to(leaf: str | None, above: dict[str, str | None]) -> list[str]:
    """The calls from the root to `leaf`."""
    path = []
    while leaf is not None:
        path.append(leaf)
        leaf = above[leaf]
    return path[::-1]


def ids_of(leaf: str, above: dict[str, str | None], new: dict[str, bytes], ends: dict[str, Any]) -> list[bytes]:
    """The ids up to the end of `leaf`, in pieces."""
    return [part for call_id in path_to(leaf, above) for part in (new[call_id], ends[call_id]["completion_ids"])]


def columns(path: list[str], new: dict[str, bytes], ends: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Ids, mask and logprobs of the calls of a path."""
    ids: list[bytes] = []
    mask: list[bytes] = []
    logprobs: list[bytes] = []
    for call_id in path:
        prompt, end = new[call_id], ends[call_id]
        sampled = end["completion_ids"]
        ids += (prompt, sampled)
        mask += (bytes(len(prompt) // 4), b"\1" * (len(sampled) // 4))
        logprobs += (bytes(len(prompt)), end["logprobs"])
    return (
        np.frombuffer(b"".join(ids), "<u4"),
        np.frombuffer(b"".join(mask), "<u1"),
        np.frombuffer(b"".join(logprobs), "<f4"),
    )


def whole(calls: list[bytes]) -> list[tuple[Any, Any, Any]]:
    """Sequences from records that hold whole prompts."""
    ends = {record["call_id"]: record for record in map(decode, calls)}
    above: dict[str, str | None] = {}
    new: dict[str, bytes] = {}
    for call_id, record in ends.items():
        prompt, parent = record["prompt_ids"], record["parent"]
        before = ends[parent]["prompt_ids"] + ends[parent]["completion_ids"] if parent is not None else b""
        above[call_id] = parent if prompt.startswith(before) else None
        new[call_id] = prompt[len(before) :] if above[call_id] is not None else prompt
    leaves = new.keys() - set(above.values())
    return [columns(path_to(leaf, above), new, ends) for leaf in leaves]


def packed_calls(session: dict[str, Any]) -> list[bytes]:
    """The whole calls of a session as msgpack, a record each."""
    names = ("call_id", "parent")
    return [
        msgspec.msgpack.encode(
            {name: call[name] for name in names}
            | {"prompt_ids": call["prompt"], "completion_ids": call["sampled"], "logprobs": call["logprobs"]}
        )
        for call in session["calls"]
    ]


if __name__ == "__main__":
    if sys.argv[2] == "deltas":
        serve(lambda session: [data for _, kind, data in session["events"] if kind == "call"], deltas)
    else:
        serve(packed_calls, whole)
