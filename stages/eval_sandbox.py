"""The fresh sandboxes of an evaluation: made as the task says, with the agent's work in the place of the task's own.

What could have been tampered with outside of the working directory, programs, libraries, the home, the shell's own
files, running processes, is not there. Tests arrive afterwards, by the rule.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Sequence
from typing import Final

import structlog

from rollyard.schemas.errors import EvaluationError, SandboxError
from rollyard.schemas.rollout import RolloutState, SandboxRef
from rollyard.schemas.task import Task
from rollyard.stages.evaluator import Rule
from rollyard.stages.evaluators.carried import plain
from rollyard.stages.preparation import fill_sandbox, let_go, make_sandbox
from rollyard.stages.sandbox import MAX_TREE_BYTES, Sandbox
from rollyard.stages.stage import StageContext, StageFailed

log = structlog.get_logger(__name__)

MARKER: Final = ".rollyard-evaluation"
"""In the home of a fresh sandbox: the number of the try for which it is ready. The agent's work cannot hold it."""
SHORT_S: Final = 60.0
_MAX_MARKER_BYTES: Final = 32


class FreshSandboxes:
    """The fresh sandboxes of one rollout's evaluation: one at a time, and after a worker's death the same again."""

    def __init__(self, context: StageContext, state: RolloutState, task: Task, agent: Sandbox) -> None:
        self._context = context
        self._state = state
        self._task = task
        self._agent = agent
        self._now: Sandbox | None = None

    def standing(self) -> list[SandboxRef]:
        """What is to be removed when the evaluation is over."""
        return [] if self._now is None else [self._now.ref]

    async def find(self) -> int:
        """Take up what a worker that died has left: returns the number of the try that its sandbox was ready for.

        Without one that is 1. Half-made sandboxes are removed. Raises SandboxError.
        """
        backend = self._context.backend(self._task.sandbox.backend)
        number = 1
        for ref, labels in await backend.list_owned():
            if (labels.role, labels.rollout_id) != ("eval", self._state.rollout.rollout_id):
                continue
            if labels.attempt != self._state.attempt:
                continue
            found = await backend.open(ref)
            tried = await _marked(found)
            if tried and self._now is None:
                self._now, number = found, tried
            else:
                await found.destroy()
        return number

    async def ready(self, rule: Rule, number: int) -> Sandbox:
        """The sandbox for the try `number`, filled. Raises SandboxError, EvaluationError."""
        if self._now is not None:
            return self._now
        self._now = await make_sandbox(self._context, self._state, self._task, "eval")
        sandbox, limit_s = self._now, self._task.timeouts.init_s
        try:
            async with asyncio.timeout(limit_s):
                await fill_sandbox(self._context, sandbox, self._task)
                if getattr(rule, "carry", "work") == "work":
                    await self._carry(sandbox, tuple(getattr(rule, "drop", ())))
                for path in getattr(rule, "copy", ()):
                    await self._copy(sandbox, path)
        except TimeoutError:
            raise EvaluationError(
                f"the fresh sandbox was not ready within {limit_s:g} s", hint="raise timeouts.init_s"
            ) from None
        except StageFailed as failed:
            raise EvaluationError(
                f"the fresh sandbox could not be set up: {failed.failure.message}", hint=failed.failure.hint
            ) from failed
        await sandbox.put_files({MARKER: str(number)}, base="home")
        return sandbox

    async def destroy(self) -> None:
        """Remove what stands. Never raises: the sweeper takes what is left."""
        sandbox, self._now = self._now, None
        if sandbox is None:
            return
        try:
            await sandbox.destroy()
        except SandboxError as error:
            log.warning("fresh_sandbox_not_removed", handle=sandbox.ref.handle, error=str(error))

    async def let_go(self) -> None:
        """Give up this process's hold of what stands; the sandbox stays."""
        if self._now is not None:
            await let_go(self._now)

    async def _carry(self, sandbox: Sandbox, drop: Sequence[str]) -> None:
        """Put the agent's working directory in the place of the fresh one; files named in `drop` stay as they are."""
        tree = await self._work(drop)
        cleared = await sandbox.exec(_clear(drop), timeout_s=SHORT_S)
        if cleared.exit_code != 0:
            said = cleared.stderr.decode(errors="replace")[-300:]
            raise SandboxError(f"the fresh working directory could not be cleared: {said}")
        if tree is not None:
            await sandbox.put_tree(tree, ".")

    async def _work(self, drop: Sequence[str]) -> bytes | None:
        """The agent's working directory; None: it removed that, so an empty one is judged."""
        try:
            return await self._tree(".", drop)
        except EvaluationError:
            look = f"test -d {shlex.quote(self._agent.workdir)}"
            there = await self._agent.exec(look, cwd="/", timeout_s=SHORT_S)
            if there.timed_out or there.exit_code != 1:
                raise
            return None

    async def _copy(self, sandbox: Sandbox, path: str) -> None:
        """A further path of the agent's, absolute; nothing where there is none, or the backend isolates nothing."""
        if not self._context.backend(self._task.sandbox.backend).capabilities.isolated:
            return
        there = await self._agent.exec(("test", "-e", path), timeout_s=SHORT_S)
        if there.exit_code == 0:
            parent = path.rstrip("/").rpartition("/")[0] or "/"
            await sandbox.put_tree(await self._tree(path, ()), parent)

    async def _tree(self, path: str, drop: Sequence[str]) -> bytes:
        try:
            return await asyncio.to_thread(
                plain, await self._agent.get_tree(path, max_bytes=MAX_TREE_BYTES, exclude=drop)
            )
        except ValueError as error:
            raise SandboxError(f"the archive of {path} of the agent {error}") from error
        except SandboxError as error:
            what = "the working directory" if path == "." else path
            raise EvaluationError(
                f"{what} of the agent cannot be copied into a fresh sandbox: {error.message}",
                hint=error.hint or f"at most {MAX_TREE_BYTES:,} bytes can; or set evaluation.sandbox to 'same'",
            ) from error


def _clear(keep: Sequence[str]) -> str:
    """A script that empties the working directory, but for files of these names."""
    kept = " ".join(f"! -name {shlex.quote(name)}" for name in keep)
    return (
        f"find . -mindepth 1 ! -type d {kept} -exec rm -f -- {{}} + || exit 1; "
        "find . -mindepth 1 -depth -type d -exec rmdir -- {} + 2>/dev/null; :"
    )


async def _marked(sandbox: Sandbox) -> int:
    """The number of the try that a sandbox is ready for; 0: for none."""
    try:
        text = await sandbox.read_file(f"{sandbox.home}/{MARKER}", _MAX_MARKER_BYTES)
    except SandboxError:
        return 0
    return int(text) if text is not None and text.strip().isdigit() else 0
