"""Samples of one rollout, made by hand: turns, forks, links and breaks, where a token is a character or a byte."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import cycle
from pathlib import Path
from typing import Any

from rollyard.schemas.packed import Logprobs, LossMask, TokenIds, Versions
from rollyard.schemas.sample import Delivery, DriftPoint, Link, Sample, TurnSpan
from rollyard.stages.arrow import Received
from rollyard.stages.cuts import Cuts

LOGPROBS = (-0.01, -0.3, -1.0, -2.0, -4.0, -6.0)
ROLLOUT = "r5d3f0c2a9b7e41d8c6a0f2e3"

Turn = tuple[str, str, str]
"""Call id, what the prompt adds, what is sampled."""


def ids_of(text: str) -> TokenIds:
    return TokenIds.of(map(ord, text))


def token_bytes(number: int) -> bytes:
    """Characters; from 0x110000 on single bytes, of which several make a character."""
    return bytes([number - 0x110000]) if number >= 0x110000 else chr(number).encode("utf-8", "surrogatepass")


def branch(
    number: int,
    branches: int,
    turns: Iterable[Turn],
    *,
    trained: Collection[str] | None = None,
    rewards: tuple[float | None, ...] = (),
    **changes: Any,
) -> Sample:
    """A sample. `trained`: the calls whose tokens it trains; None: all."""
    ids: list[int] = []
    spans: list[TurnSpan] = []
    mask: list[int] = []
    for turn, (call_id, prompt, reply) in enumerate(turns):
        is_trained = trained is None or call_id in trained
        ids += map(ord, prompt + reply)
        mask += [0] * len(prompt) + [int(is_trained)] * len(reply)
        spans.append(
            TurnSpan(
                start=len(ids) - len(reply),
                end=len(ids),
                turn=turn,
                call_id=call_id,
                trained=is_trained,
                scenario=changes.get("scenario", "main"),
                reward=rewards[turn] if turn < len(rewards) else None,
            )
        )
    sampled = [any(span.start <= at < span.end for span in spans) for at in range(len(ids))]
    fields: dict[str, Any] = {
        "sample_id": f"s{number:023d}",
        "run": "demo",
        "task_id": "mend",
        "group_id": "mend",
        "rollout_id": ROLLOUT,
        "index": 0,
        "attempt": 1,
        "branch": number,
        "branches": branches,
        "scenario": "main",
        "status": "completed",
        "token_ids": TokenIds.of(ids),
        "loss_mask": LossMask.of(mask),
        "logprobs": Logprobs.of(
            logprob if is_trained else 0.0 for logprob, is_trained in zip(cycle(LOGPROBS), mask, strict=False)
        ),
        "policy_versions": Versions.of(7 if each else -1 for each in sampled),
        "reward": 1.0,
        "logprob_kind": "raw",
        "calls": tuple(span.call_id for span in spans),
        "turns": tuple(spans),
    }
    return Sample(**(fields | changes))


ASK = "<system>You mend bugs, one at a time.<user>A test fails.<assistant>"
FIRST: Turn = ("c1", ASK, "Let me look.<end>")
SECOND: Turn = ("c2", "<tool>return sum(xs) + 1<assistant>", "The + 1 is wrong.\nRemove it.<end>")
THIRD: Turn = ("c3", "<tool>ok<assistant>", "Done.<end>")
REWRITTEN: Turn = ("c5", "<tool>return sum(xs) + 1<assistant>The +1 is wrong.<end><tool>ok<assistant>", "Mended.<end>")
AFTER: Turn = ("c6", "<user>Thanks.<assistant>", "Gladly.<end>")
EXPLORE: Turn = ("c4", "<system>You explore.<user>Who calls it?<assistant>", "Nobody.<end>")
CONDENSED: Turn = ("c7", "<system>You mend bugs, one at a time.<user>So far: mended.<assistant>", "Fine.<end>")

BREAK_AT = len(ASK + FIRST[2] + SECOND[1] + "The +")
RE_TOKENISED = DriftPoint(
    call_id="c5",
    reason="re_tokenised",
    continues="c2",
    position=BREAK_AT,
    expected=ids_of(" 1 is wrong.\nRem"),
    found=ids_of("1 is wrong.<end>"),
    message=3,
    detail="'The + 1' became\n'The +1'",
)


def forest() -> tuple[Sample, ...]:
    """Two branches that part where a reply was written anew, a sub-agent, and what came after a compaction."""
    sub_agent = DriftPoint(
        call_id="c4",
        reason="sub_agent",
        continues="c2",
        position=12,
        expected=ids_of("mend bugs, one a"),
        found=ids_of("explore.<user>Wh"),
    )
    return (
        branch(0, 4, (FIRST, SECOND, THIRD), rewards=(0.1, None, 0.5)),
        branch(1, 4, (FIRST, REWRITTEN, AFTER), trained=("c5", "c6"), drift=(RE_TOKENISED,), cut_tokens=120),
        branch(
            2,
            4,
            (EXPLORE,),
            scenario="sub_agent",
            drift=(sub_agent,),
            links=(Link(kind="sub_agent", call_id="c4", to="c2"),),
            reward=0.25,
            rollout_reward=1.0,
        ),
        branch(3, 4, (CONDENSED,), links=(Link(kind="compaction", call_id="c7", to="c6"),), incomplete=True),
    )


def write(folder: Path, *deliveries: Delivery) -> None:
    """Deliveries as the sink would write them."""
    cuts = Cuts(folder, "now", lambda _: None)
    cuts.open()
    cuts.write(1, len(deliveries), [Received(seq, seq, each) for seq, each in enumerate(deliveries, 1)])


def delivery(samples: tuple[Sample, ...], **changes: Any) -> Delivery:
    """The delivery of a rollout."""
    fields: dict[str, Any] = {
        "run": "demo",
        "task_id": "mend",
        "group_id": "mend",
        "group_size": 2,
        "rollout_id": ROLLOUT,
        "index": 0,
        "attempt": 1,
        "status": "completed",
        "reward": 1.0,
        "calls": 9,
        "samples": samples,
    }
    return Delivery(**(fields | changes))
