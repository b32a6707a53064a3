"""The journal of a scripted server: what it really sampled, one JSON line a request."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from rollyard.gateway.scripted.policy import Reply
from rollyard.schemas.errors import ConfigError


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One request. `status`: ok, failed (an HTTP error), broken (cut as the script says) or aborted.

    Who aborted it is its client, or the operator, who paused the server. `token_ids` are those that were given out.
    """

    request_id: str
    turn: int
    status: str
    http_status: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]


class Journal:
    """Appends lines to a file, or nowhere when there is no descriptor."""

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = descriptor

    def write(self, request_id: str, reply: Reply, status: str, *, tokens: int, http_status: int = 200) -> None:
        """Record that `tokens` sampled ids were given out. The line is with the operating system on return."""
        if self._descriptor is None:
            return
        entry = Entry(
            request_id=request_id,
            turn=reply.number,
            status=status,
            http_status=http_status,
            prompt_token_ids=reply.prompt_ids.tolist(),
            token_ids=reply.ids[:tokens],
            logprobs=reply.logprobs[:tokens],
        )
        # One write on a descriptor opened for appending: lines of several servers never mix.
        os.write(self._descriptor, msgspec.json.encode(entry) + b"\n")


@contextmanager
def open_journal(path: Path | None) -> Iterator[Journal]:
    """A journal on a file that is made if need be. Raises ConfigError when it cannot be opened."""
    if path is None:
        yield Journal()
        return
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError(f"cannot write the journal {path}: {error.strerror}", hint="choose another file") from error
    try:
        yield Journal(descriptor)
    finally:
        os.close(descriptor)


def read_journal(path: Path) -> list[Entry]:
    """All entries of a journal."""
    return [msgspec.json.decode(line, type=Entry) for line in path.read_bytes().splitlines()]
