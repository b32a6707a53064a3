"""Dead letters: messages that cannot be worked on, kept for people."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import structlog

from rollyard.pipeline.bus import Bus
from rollyard.pipeline.codec import decode, encode
from rollyard.pipeline.pull import Delivered
from rollyard.schemas import subjects
from rollyard.schemas.fleet import DeadLetter

log = structlog.get_logger(__name__)


async def bury(bus: Bus, stage: str, message: Delivered, reason: str, *, rollout_id: str = "") -> None:
    """Keep a message in DEAD, then take it out of its queue. Raises BusError when DEAD cannot be written."""
    name = stage.partition("-")[0]
    # A subject that somebody else made up may be longer than any name of ours.
    run = message.subject.rpartition(".")[2][: subjects.MAX_ID_CHARS]
    letter = DeadLetter(
        stage=name,
        run=run,
        subject=message.subject,
        reason=reason,
        body=await message.body(),
        rollout_id=rollout_id,
        at_ms=time.time_ns() // 1_000_000,
    )
    await bury_body(bus, letter, msg_id=f"dead.{message.raw.stream}.{message.seq}")
    await message.terminate(reason)


async def bury_body(bus: Bus, letter: DeadLetter, *, msg_id: str) -> None:
    """Keep a letter in DEAD; `msg_id` makes a repetition harmless. Raises BusError."""
    await bus.publish(subjects.dead_subject(letter.stage, letter.run), encode(letter), msg_id=msg_id)
    log.error("dead_letter", stage=letter.stage, subject=letter.subject, reason=letter.reason)


async def letters(bus: Bus, run: str | None = None) -> AsyncIterator[tuple[int, DeadLetter]]:
    """(sequence, letter) of every dead letter, of one run or of all."""
    name = subjects.token(run) if run is not None else "*"
    async for stored in bus.read(subjects.DEAD, f"dead.*.{name}"):
        yield stored.seq, decode(stored.data, DeadLetter)


async def letter_at(bus: Bus, seq: int) -> DeadLetter | None:
    """The dead letter with that sequence, or None."""
    stored = await bus.get(subjects.DEAD, seq)
    return decode(stored.data, DeadLetter) if stored and stored.subject.startswith("dead.") else None
