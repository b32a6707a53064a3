"""AGGREGATE: one message in, the session's events read from the log, one commit and one delivery out.

Stateless. Contract: docs/architecture.md sections 5.7 and 5.8. Every step may be repeated by anybody.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Any, Final

import structlog
from msgspec import structs

from rollyard.pipeline.codec import decode, encode
from rollyard.pipeline.crash import checkpoint
from rollyard.pipeline.dead import bury_body
from rollyard.pipeline.delivery_headers import DeliveryFacts
from rollyard.pipeline.digest import sample_digest
from rollyard.pipeline.groups import GroupCloser
from rollyard.pipeline.handover import MAX_DELIVERIES, Held
from rollyard.pipeline.kv import Bucket
from rollyard.pipeline.leases import LeaseView
from rollyard.pipeline.log import LogEvent, read_rollout
from rollyard.schemas import subjects
from rollyard.schemas.call import CallIntent
from rollyard.schemas.errors import BlobError, DecodeError, ReplayError, RollyardError, TaskError
from rollyard.schemas.failure import Failure
from rollyard.schemas.fleet import DeadLetter
from rollyard.schemas.rollout import RolloutState, StageName
from rollyard.schemas.sample import Commit, SampleDigest
from rollyard.stages.calls import open_calls
from rollyard.stages.delivery import delivery_of
from rollyard.stages.policies import Policies, may_have_samples
from rollyard.stages.stage import StageContext, gave_up, now_ms
from rollyard.stages.stitchers.outcome import Outcome
from rollyard.stages.stitching import STITCHER_VERSION, STITCHERS, outcome_of

log = structlog.get_logger(__name__)

Events = list[tuple[int, LogEvent]]

FAILED: Final = ("failed", "cancelled")
FIRST_WAIT_S: Final = 0.05
MOST_WAIT_S: Final = 2.0


class Aggregate:
    """The stage that commits a rollout and delivers it."""

    name: StageName = "aggregate"

    def __init__(self, context: StageContext, gateways: LeaseView) -> None:
        self._context = context
        self._bus = context.bus
        self._gateways = gateways
        self._groups = GroupCloser(context.bus)
        self._policies = Policies(context.bus, context.tasks)
        self._states: Bucket[RolloutState] = Bucket(context.bus, subjects.ROLLOUTS, RolloutState)

    async def work(self, held: Held) -> RolloutState:
        """Commit, deliver, close the group if this was its last rollout; the next state is the end."""
        events: Events = []
        if held.deliveries <= MAX_DELIVERIES:
            events = await self._complete_session(held.state)
        elif await self._bus.last(_commit_subject(held.state)) is None:
            held.state = await self._give_up(held)
        if held.state.position != "committing":
            await self._commit_to(held)
        checkpoint("aggregate.committing")
        commit, outcome, events = await self._commit(held.state, events)
        checkpoint("aggregate.committed")
        await self._deliver(commit, outcome, events)
        checkpoint("aggregate.delivered")
        await self._groups.close_if_complete(commit.run, commit.task_id, commit.group_size)
        checkpoint("aggregate.group_checked")
        state = held.state
        return RolloutState(
            rollout=state.rollout,
            position="ended",
            step=state.step + 1,
            attempt=state.attempt,
            status=commit.status,
            admitted_ms=state.admitted_ms,
        )

    def failure(self, error: RollyardError) -> Failure | None:
        """Nothing that goes wrong here is the rollout's fault: the message comes again."""
        return None

    async def abandon(self, state: RolloutState) -> None:
        """Nothing to undo: commit and delivery were created once, whoever did it."""

    async def _complete_session(self, state: RolloutState) -> Events:
        """The rollout's events, once every call that counts has its end or can get none any more."""
        rollout = state.rollout
        wait_s = FIRST_WAIT_S
        newest = max(state.closed_seq, state.evaluated_seq)
        policy = await self._policies.policy_of(state)
        while True:
            events = await read_rollout(
                self._bus, rollout.run, rollout.rollout_id, at_least=newest, kinds=("call", "life")
            )
            if not may_have_samples(state.status, policy):
                return events
            open_now = open_calls(events, state.attempt, state.closed_seq)
            if not [intent for intent in open_now if await self._may_still_end(intent)]:
                return events
            await asyncio.sleep(wait_s)
            wait_s = min(MOST_WAIT_S, wait_s * 2)

    async def _give_up(self, held: Held) -> RolloutState:
        """After too many tries: fail without samples, and keep the message in DEAD, from where replay can make them."""
        rollout = held.state.rollout
        failure = Failure.of(
            "infra",
            gave_up(self.name, held),
            f"the samples can be made later: rollyard replay --run {rollout.run} --recover --out DIR",
        )
        await bury_body(
            self._bus,
            DeadLetter(
                stage=self.name,
                run=rollout.run,
                subject=subjects.stage_subject(self.name, None, rollout.run),
                reason=failure.message,
                body=encode(held.message),
                rollout_id=rollout.rollout_id,
                at_ms=now_ms(),
            ),
            msg_id=f"dead.{rollout.rollout_id}.{held.message.step}",
        )
        return structs.replace(held.state, status="failed", failure=failure)

    async def _may_still_end(self, intent: CallIntent) -> bool:
        return now_ms() < intent.latest_end_ms and not await self._gateways.is_dead(intent.gateway)

    async def _commit_to(self, held: Held) -> None:
        """From here on no takeover, cancel or retry leads out. Raises Conflict when one came first."""
        state = structs.replace(held.state, position="committing", effects=(), writer=secrets.token_hex(4))
        key = subjects.rollout_key(state.rollout.run, state.rollout.rollout_id)
        held.revision = await self._states.update(key, state, held.revision)
        held.state = state

    async def _commit(self, state: RolloutState, events: Events) -> tuple[Commit, Outcome, Events]:
        """Create the commit, or obey the one that stands there. Returns it, its outcome and the events behind that."""
        rollout, subject = state.rollout, _commit_subject(state)
        commit = await self._draft(state, events)
        outcome = outcome_of(events, commit)
        digests = tuple(SampleDigest(sample_id=s.sample_id, digest=sample_digest(s)) for s in outcome.samples)
        commit = structs.replace(commit, samples=digests)
        _, created = await self._bus.create(subject, encode(commit))
        if created:
            return commit, outcome, events
        stored = await self._bus.last(subject)
        assert stored is not None
        standing: Commit = decode(stored.data, Commit)
        if standing.stitcher not in STITCHERS:
            log.error("stitcher_missing", wanted=standing.stitcher, here=list(STITCHERS), rollout=rollout.rollout_id)
            raise ReplayError(
                f"the commit of {rollout.rollout_id} names stitcher {standing.stitcher!r}, which this release lacks",
                hint="run an aggregator of the release that has it",
            )
        if not standing.cut_seq or not may_have_samples(standing.status, standing.policy):
            return standing, Outcome(), events
        events = await read_rollout(self._bus, rollout.run, rollout.rollout_id, at_least=standing.cut_seq)
        return standing, outcome_of(events, standing), events

    async def _draft(self, state: RolloutState, events: Events) -> Commit:
        """The commit without its digests."""
        rollout = state.rollout
        counted = [seq for seq, event in events if getattr(event, "attempt", 0) == state.attempt]
        lost = open_calls(events, state.attempt, state.closed_seq)
        return Commit(
            run=rollout.run,
            task_id=rollout.task_id,
            group_id=rollout.task_id,
            group_size=rollout.group_size,
            rollout_id=rollout.rollout_id,
            index=rollout.index,
            attempt=state.attempt,
            status=state.status or "completed",
            failure=state.failure,
            cut_seq=max(counted, default=0),
            closed_seq=state.closed_seq,
            evaluated_seq=state.evaluated_seq,
            lost_calls=tuple(intent.call_id for intent in lost),
            stitcher=STITCHER_VERSION,
            policy=await self._policies.policy_of(state),
            metadata=await self._metadata(state),
        )

    async def _metadata(self, state: RolloutState) -> dict[str, Any]:
        try:
            return (await self._context.tasks.get(state.rollout.run, state.rollout.task_id)).metadata
        except (TaskError, DecodeError, BlobError) as error:
            # A task that cannot be read must not keep the rollout that failed for it from its end.
            if state.status not in FAILED:
                raise
            log.error("delivered_without_metadata", rollout=state.rollout.rollout_id, error=str(error))
            return {}

    async def _deliver(self, commit: Commit, outcome: Outcome, events: Events) -> None:
        delivery = delivery_of(commit, outcome, events)
        subject = subjects.sample_subject(commit.run, commit.group_id, commit.index)
        await self._bus.create(subject, encode(delivery), headers=DeliveryFacts.of(delivery).headers())


def _commit_subject(state: RolloutState) -> str:
    return subjects.log_subject(state.rollout.run, state.rollout.rollout_id, "commit")
