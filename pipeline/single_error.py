"""One error out of a task group: callers catch our classes, not groups of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def single_error() -> Iterator[None]:
    """Raise the first error of a task group inside the block by itself."""
    try:
        yield
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
