"""Files of the sandbox for hooks that keep some: found by patterns, links aside, within the hook's room."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence

from rollyard.stages.collection import MAX_FILES, find_files
from rollyard.stages.hook import HookContext
from rollyard.stages.patterns import check_pattern
from rollyard.stages.sandbox import Base


def check_patterns(patterns: Sequence[str]) -> None:
    """Raises ValueError for one that is no pattern."""
    for pattern in patterns:
        if problem := check_pattern(pattern):
            raise ValueError(problem)


async def add_found(
    context: HookContext, patterns: Sequence[str], base: Base, prefix: str, max_file_bytes: int
) -> None:
    """Add the files that patterns name, at most 256 for each. Raises SandboxError, ValueError when there is no room."""
    sandbox = context.sandbox
    if sandbox is None:
        return
    top = sandbox.workdir if base == "work" else sandbox.home
    for pattern in patterns:
        for path in (await find_files(sandbox, top, pattern))[:MAX_FILES]:
            data = await sandbox.read_file(posixpath.join(top, path), max_file_bytes)
            if data is not None:
                context.add_file(prefix + path, data)
