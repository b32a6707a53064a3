"""NeMo Gym: prefix_merging on captured calls whose parents are resolved, and all its chains as columns.

python stitch_nemo.py SESSIONS whole|deltas|records

Runs in an environment that has nemo-gym. `deltas` are its entries with `delta_records` switched on, `records` begins
with the lines of its store.
"""

from __future__ import annotations

import sys
from array import array
from typing import Any

import orjson
from nemo_gym.token_id_capture.builder import prefix_merging
from nemo_gym.token_id_capture.records import ParentResolutionStatus, TokenEntry, stamp_lineage
from stitch_loop import Columns, serve


def entries_of(session: dict[str, Any]) -> list[TokenEntry]:
    """The calls of a session as its gateway captures them."""
    by_id = {call["call_id"]: call for call in session["calls"]}
    entries = []
    for call in session["calls"]:
        parent = by_id.get(call["parent"])
        prompt = array("I", call["prompt"]).tolist()
        sampled = array("I", call["sampled"]).tolist()
        known = (len(parent["prompt"]) + len(parent["sampled"])) // 4 if parent is not None else 0
        as_delta = sys.argv[2] == "deltas" and parent is not None
        entry = TokenEntry(
            rollout_id="rollout",
            model_call_id=call["call_id"],
            model="model",
            prompt_token_ids=prompt,
            generation_token_ids=sampled,
            generation_log_probs=array("f", call["logprobs"]).tolist(),
            output_items=[{"type": "message", **call["reply"]}],
            created_at=call["ended_s"],
        )
        if as_delta:
            entry.prompt_token_ids = prompt[known:]
            entry.prompt_is_delta = True
        status = ParentResolutionStatus.RESOLVED if parent is not None else ParentResolutionStatus.ROOT
        entries.append(stamp_lineage(entry, call["parent"], parent_resolution=status, cumulative=prompt + sampled))
    return entries


def build(entries: list[TokenEntry]) -> list[Columns]:
    """Its chains, flattened: it delivers one of them, which is not held against it here."""
    sequences = []
    for chain in prefix_merging(entries).chains:
        ids = list(chain.root_prompt)
        mask, logprobs = [0] * len(ids), [0.0] * len(ids)
        for link in chain.links:
            sampled = link.entry.generation_token_ids
            ids += link.interstitial
            ids += sampled
            mask += [0] * len(link.interstitial) + [1] * len(sampled)
            logprobs += [0.0] * len(link.interstitial) + link.entry.generation_log_probs
        sequences.append((ids, mask, logprobs))
    return sequences


def lines_of(session: dict[str, Any]) -> list[bytes]:
    """The calls as its store keeps them."""
    return [orjson.dumps(entry.model_dump(mode="json")) for entry in entries_of(session)]


def read_and_build(lines: list[bytes]) -> list[Columns]:
    """The same, with the reading of its store."""
    return build([TokenEntry.model_validate(orjson.loads(line)) for line in lines])


if __name__ == "__main__":
    if sys.argv[2] == "records":
        serve(lines_of, read_and_build)
    else:
        serve(entries_of, build)
