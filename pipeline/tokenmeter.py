"""How many tokens a run has sampled, counted from the log as it grows."""

from __future__ import annotations

from rollyard.pipeline.bus import Bus
from rollyard.pipeline.codec import decode
from rollyard.schemas import subjects
from rollyard.schemas.call import CallEnd, CallEvent


class TokenMeter:
    """Reads each call of the run once. For runs small enough to be watched by a person."""

    def __init__(self, bus: Bus, run: str) -> None:
        self.total = 0
        self._bus = bus
        self._filter = subjects.log_subject(run, "*", "call")
        self._next_seq = 1
        self._ended: set[str] = set()

    async def count(self) -> int:
        """Sampled tokens of all calls that have ended by now."""
        async for stored in self._bus.read(subjects.LOG, self._filter, start_seq=self._next_seq):
            self._next_seq = stored.seq + 1
            event: CallEvent = decode(stored.data, CallEvent)
            # A repeated end is a copy.
            if isinstance(event, CallEnd) and event.call_id not in self._ended:
                self._ended.add(event.call_id)
                self.total += len(event.completion_ids)
        return self.total
