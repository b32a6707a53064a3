"""How a call ended, as a record."""

from __future__ import annotations

import time
from dataclasses import dataclass

from rollyard.gateway.collector import Collector
from rollyard.gateway.history import common_prefix
from rollyard.gateway.planning import Plan
from rollyard.schemas.call import CallEnd, CallStatus, CallTimings
from rollyard.schemas.packed import Logprobs, TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What is known of an end beside what the server sent. Times in seconds, `at` is the start in Unix seconds."""

    status: CallStatus
    why: str | None
    http_status: int
    streamed: bool
    at: float
    queue_s: float | None
    first_token_s: float | None


def make_end(plan: Plan, collector: Collector, ending: Ending) -> CallEnd:
    """The record of a call's end, its ids as a delta against those of the parent."""
    collector.end_segment(plan.entry.server.policy_version)
    inexact = collector.inexact()
    parent = plan.place.parent if not plan.snapshot else None
    parent_ids = parent.ids() if parent is not None and inexact is None else TokenIds()
    shared = common_prefix(parent_ids, collector.prompt_ids)
    intent, server, ok = plan.intent, plan.entry.server, ending.status == "ok"
    first = collector.spans[0].policy_version if collector.spans else plan.policy_version
    newest = _version_at_end(plan, collector)
    several = len({span.policy_version for span in collector.spans}) > 1
    untrainable = collector.untrainable() if ok else None
    return CallEnd(
        call_id=intent.call_id,
        run=intent.run,
        rollout_id=intent.rollout_id,
        attempt=intent.attempt,
        at_ms=int(time.time() * 1000),
        status=ending.status,
        shared_prompt_ids=shared,
        prompt_ids=collector.prompt_ids[shared:],
        completion_ids=collector.completion_ids if inexact is None else TokenIds(),
        logprobs=collector.logprobs if untrainable is None and inexact is None else Logprobs(),
        logprob_kind=plan.entry.logprob_kind,
        reply=collector.reply() if ok or ending.streamed else None,
        finish_reason=collector.finish() if ok else None,
        stop_string=collector.stop_string if ok else None,
        usage=collector.usage(),
        untrainable=untrainable,
        error=ending.why,
        http_status=ending.http_status,
        server=server.server_id,
        engine=plan.entry.probe.engine if plan.entry.probe else server.engine,
        policy_version=first,
        policy_version_end=newest if newest != first else None,
        version_spans=tuple(collector.spans) if several else (),
        timings=CallTimings(
            queue_s=ending.queue_s, first_token_s=ending.first_token_s, total_s=time.time() - ending.at
        ),
    )


def _version_at_end(plan: Plan, collector: Collector) -> int | None:
    """The weights at the end: what the server said, else what its entry says by now."""
    last = collector.spans[-1].policy_version if collector.spans else None
    now = plan.entry.server.policy_version
    return last if last is not None and last != plan.policy_version else now
