"""The boundary to code of the user's own: rules and harnesses. Whatever it raises becomes an error of ours that says
whose it was; a cancel, and errors that are ours already, pass."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import structlog

from rollyard.schemas.errors import RollyardError
from rollyard.stages.bounded import TooSlow, call
from rollyard.stages.stage import StageFailed

log = structlog.get_logger(__name__)

MAX_SAID_CHARS: Final = 1_500


@contextmanager
def boundary(what: str, kind: type[RollyardError], hint: str) -> Iterator[None]:
    """Within it, whatever is raised becomes `kind`, with the exception's type and text; its traceback is logged."""
    try:
        yield
    except (RollyardError, StageFailed, TooSlow):
        raise
    except (Exception, SystemExit) as error:  # no plug-in may end the worker
        log.warning("own_code_failed", what=what, exc_info=True)
        raise kind(f"{what} raised {type(error).__name__}: {error}"[:MAX_SAID_CHARS], hint=hint) from error


async def outcome(function: Callable[..., Any], *arguments: Any, timeout_s: float | None) -> Any:
    """What `function` of the user's gives: async, plain, or plain and returning something to await.

    Raises TooSlow after `timeout_s`, None: never; see `bounded.call`.
    """
    value = await call(function, *arguments, timeout_s=timeout_s)
    if not inspect.isawaitable(value):
        return value

    async def awaited() -> Any:
        return await value

    return await call(awaited, timeout_s=timeout_s)
