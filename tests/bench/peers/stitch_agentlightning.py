"""agentlightning: the walk of its adapter, which compares each call with the one before, and pads the rows.

python stitch_agentlightning.py SESSIONS

Runs in an environment that has agentlightning. What comes after the walk is tensors: torch, tensordict and verl are
stood in for, and the adapter is left where it makes the fifth of them, since by then all rows are there.
"""

from __future__ import annotations

import sys
import types
from array import array
from typing import Any

from stitch_loop import Columns, serve


class _Rows(Exception):
    """All rows are there."""


class _Tensors:
    """What the adapter makes tensors of."""

    def __init__(self) -> None:
        self.made: list[list[list[int]]] = []

    def make(self, rows: list[list[int]]) -> _Tensors:
        self.made.append(rows)
        if len(self.made) == 5:
            raise _Rows
        return self

    def to(self, device: object) -> _Tensors:
        return self


class _Module(types.ModuleType):
    """A module in which every name is a class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


for each in ("torch", "tensordict", "verl", "numpy"):
    sys.modules[each] = _Module(each)

from agentlightning.verl import rollout_adapter  # noqa: E402 - after the modules that stand in
from agentlightning.verl.agl_rollout_manager import CompletedRollout, Triplet  # noqa: E402


def rollout_of(session: dict[str, Any]) -> CompletedRollout:
    """The calls of a session as triplets, in the order of their replies."""
    triplets = [
        Triplet(
            prompt={"token_ids": array("I", call["prompt"]).tolist()},
            response={
                "token_ids": array("I", call["sampled"]).tolist(),
                "log_probs": array("f", call["logprobs"]).tolist(),
            },
        )
        for call in session["calls"]
    ]
    return CompletedRollout(
        rollout_id="r", data_id="d", step=0, sample_idx_in_step=0, enqueue_time=0.0, final_reward=1.0, triplets=triplets
    )


def build(rollout: CompletedRollout) -> _Tensors:
    """Walk and rows."""
    longest = max(len(each.prompt["token_ids"]) for each in rollout.triplets) + 2048
    adapter = rollout_adapter.RolloutAdapter(
        max_prompt_length=longest,
        max_response_length=longest,
        device=None,
        pad_token_id=0,
        trace_aggregator_level="trajectory",
    )
    tensors = _Tensors()
    rollout_adapter.torch.LongTensor = tensors.make
    try:
        adapter.get_train_data_batch([rollout])
    except _Rows:
        return tensors
    raise RuntimeError("the adapter made fewer tensors than were expected; is this another version?")


def columns(tensors: _Tensors) -> list[Columns]:
    """The rows without what they are padded with; logprobs are not among what was made."""
    sequences = []
    for prompt, prompt_here, response, response_here, trained in zip(*tensors.made, strict=True):
        asked, told = sum(prompt_here), sum(response_here)
        ids = prompt[len(prompt) - asked :] + response[:told]
        sequences.append((ids, [0] * asked + trained[:told], [0.0] * len(ids)))
    return sequences


if __name__ == "__main__":
    serve(rollout_of, build, columns)
