"""What a builder of sequences does as a process: it runs sessions when told to, and says what that cost.

It imports the standard library only, since it also runs in the environments of others. Orders and answers are JSON, a
line each: {"turns": 10, "repeat": 3} is answered with the processor seconds of a session, {"turns": 10, "memory": true}
with the peak of what was allocated for each session and what came out of it.
"""

from __future__ import annotations

import gc
import hashlib
import json
import pickle
import sys
import time
import tracemalloc
from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

Columns = tuple[Any, Any, Any]
"""Ids, mask and logprobs of a sequence: packed bytes, or lists of numbers."""


def serve(
    prepare: Callable[[Any], Any], run: Callable[[Any], Any], columns: Callable[[Any], Iterable[Columns]] = iter
) -> None:
    """Obey orders until there are none. `sys.argv[1]` names the file with the sessions by their turns.

    `prepare` and `columns` (the sequences of a result) are outside of what is measured.
    """
    sessions: dict[int, list[Any]] = pickle.loads(Path(sys.argv[1]).read_bytes())
    out, sys.stdout = sys.stdout, sys.stderr
    answer(out, {"ready": True})
    for line in sys.stdin:
        order = json.loads(line)
        chosen = sessions[order["turns"]]
        if order.get("memory"):
            answer(out, _remember(chosen, prepare, run, columns))
        else:
            answer(out, {"cpu_s": _measure(chosen, prepare, run, order["repeat"])})


def answer(out: Any, value: Any) -> None:
    """A line of JSON."""
    out.write(json.dumps(value) + "\n")
    out.flush()


def _measure(chosen: Sequence[Any], prepare: Callable[[Any], Any], run: Callable[[Any], Any], repeat: int) -> float:
    total = 0.0
    for _ in range(repeat):
        # Anew each time: some builders keep or change what they were given.
        prepared = [prepare(session) for session in chosen]
        gc.collect()
        # Collections of garbage count, but not that they look at what stood here before.
        gc.freeze()
        before = time.process_time()
        for each in prepared:
            run(each)
        total += time.process_time() - before
        gc.unfreeze()
    return total / repeat / len(chosen)


def _remember(
    chosen: Sequence[Any],
    prepare: Callable[[Any], Any],
    run: Callable[[Any], Any],
    columns: Callable[[Any], Iterable[Columns]],
) -> dict[str, Any]:
    """The peak above what stood before, and the result, of each session."""
    peaks, results = [], []
    for session in chosen:
        prepared = prepare(session)
        gc.collect()
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        result = run(prepared)
        peaks.append(tracemalloc.get_traced_memory()[1] - before)
        tracemalloc.stop()
        results.append(summary(columns(result)))
    return {"peaks": peaks, "results": results}


def summary(sequences: Iterable[Columns]) -> dict[str, Any]:
    """How many sequences, tokens and trained tokens there are, and a digest that knows no order of sequences."""
    each = [(_packed(ids, "I"), _packed(mask, "B"), _packed(logprobs, "f")) for ids, mask, logprobs in sequences]
    digest = hashlib.sha256()
    for parts in sorted(each):
        for part in parts:
            digest.update(hashlib.sha256(part).digest())
    tokens, trained = sum(len(mask) for _, mask, _ in each), sum(sum(mask) for _, mask, _ in each)
    return {"sequences": len(each), "tokens": tokens, "trained": trained, "digest": digest.hexdigest()}


def _packed(values: Any, typecode: str) -> bytes:
    if isinstance(values, bytes):
        return values
    packed: bytes = values.tobytes() if hasattr(values, "tobytes") else array(typecode, values).tobytes()
    return packed
