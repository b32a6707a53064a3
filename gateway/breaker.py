"""A circuit breaker: a server that answers its probes and still fails calls is left alone for a while.

Pure: whoever asks says what time it is.
"""

from __future__ import annotations

from typing import Final

FAILURES_TO_OPEN: Final = 5
FIRST_OPEN_S: Final = 1.0
MAX_OPEN_S: Final = 60.0


class CircuitBreaker:
    """Closed until `FAILURES_TO_OPEN` calls in a row failed. Then open; then half open, when one call may try.

    If that one succeeds it closes, else it opens for twice as long. Times are seconds of any clock that goes forward.
    """

    def __init__(self) -> None:
        self._failures = 0
        self._opened = 0
        self._open_until_s = 0.0
        self._trying = False

    @property
    def is_open(self) -> bool:
        """Whether it has opened and not closed since."""
        return self._opened > 0

    def allows(self, now_s: float) -> bool:
        """Whether a call may go."""
        return not self.is_open or (now_s >= self._open_until_s and not self._trying)

    def wait_s(self, now_s: float) -> float:
        """How long until a call may go, unless another one is on trial."""
        return max(0.0, self._open_until_s - now_s) if self.is_open else 0.0

    def begin(self) -> bool:
        """A call goes that was allowed. True when it is on trial: it must end in `succeeded`, `failed` or `gave_up`."""
        self._trying = self.is_open
        return self._trying

    def succeeded(self) -> None:
        """A call was answered: close."""
        self._failures = self._opened = 0
        self._trying = False

    def failed(self, now_s: float) -> None:
        """A call failed by the server's fault."""
        self._failures += 1
        if self._trying or (not self.is_open and self._failures >= FAILURES_TO_OPEN):
            self._open_until_s = now_s + min(FIRST_OPEN_S * 2 ** min(self._opened, 16), MAX_OPEN_S)
            self._opened += 1
            self._trying = False

    def gave_up(self) -> None:
        """The call on trial ended without telling anything: another one may try."""
        self._trying = False
