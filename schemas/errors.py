"""The error tree. One class for each boundary that an error can cross; each says what happened and how to mend it.

An exception of another library is converted in one place, at the boundary, into the class of that boundary. A failed
rollout is not an exception but data: see `Failure` in schemas/failure.py.
"""

from __future__ import annotations


class RollyardError(Exception):
    """Base of every error that Rollyard raises on purpose. `hint` says how to mend it."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class ConfigError(RollyardError, ValueError):
    """The configuration, an environment variable or a command-line argument is wrong."""

    exit_code = 2


class TaskError(RollyardError, ValueError):
    """A task or a task file is not acceptable."""

    exit_code = 2


class SetupError(RollyardError, RuntimeError):
    """Something that Rollyard needs on this machine is missing or in the way."""

    exit_code = 3


class BusError(RollyardError, ConnectionError):
    """The bus did not do what was asked: not reachable, timed out, refused."""

    exit_code = 4


class BusAway(BusError):
    """The bus gives no answer: it cannot be reached, or it hangs."""


class BusFull(BusError):
    """A stream or its store has no room."""


class Conflict(BusError):
    """A compare-and-set found another value, or a create found that the subject exists."""


class TooLarge(BusError):
    """A message is larger than the bus takes."""


class WaitTimeout(RollyardError, TimeoutError):
    """What was waited for did not happen in time."""

    exit_code = 4


class DecodeError(RollyardError, ValueError):
    """A stored record cannot be read: broken, or written by a newer version."""


class TooNew(DecodeError):
    """A stored record was written by a newer release."""


class BlobError(RollyardError, OSError):
    """A blob is missing, damaged or cannot be written."""


class BlobRefused(BlobError):
    """The disk takes no blob."""


class SandboxError(RollyardError, RuntimeError):
    """A sandbox could not be made, reached or used."""


class HarnessError(RollyardError, RuntimeError):
    """An agent could not be prepared or its result not be read."""


class ModelError(RollyardError, RuntimeError):
    """A model server failed. `status` is its HTTP status, or 0 when there was none; `said` its own words, if any."""

    def __init__(
        self, message: str, *, hint: str = "", status: int = 0, retryable: bool = False, said: str = ""
    ) -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.retryable = retryable
        self.said = said


class PromptTooLong(ModelError):
    """Prompt and reply do not fit the model's context: `limit` and `prompt_tokens` as the server told, else 0."""

    limit = 0
    prompt_tokens = 0


class EvaluationError(RollyardError, RuntimeError):
    """An evaluation rule could not produce a reward."""


class ReplayError(RollyardError, RuntimeError):
    """The log does not reproduce what was committed."""

    exit_code = 5


class ArchiveError(RollyardError, RuntimeError):
    """An archive cannot be read, does not hold what the log holds, or may not take its place yet."""
