"""Rule `python`: a function of yours makes the reward."""

from __future__ import annotations

import asyncio
import inspect
import re
import threading
from collections.abc import Awaitable, Callable, Mapping
from importlib import import_module
from typing import Annotated, Any, Final, cast

from msgspec import Meta

from rollyard.schemas.errors import EvaluationError, RollyardError
from rollyard.stages.evaluator import EvalContext, RuleArgs, Verdict, finite, scalar

_ENTRY: Final = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*:[^\W\d]\w*(?:\.[^\W\d]\w*)*\Z")


class PythonRule(RuleArgs, frozen=True, kw_only=True):
    """Calls `entry(task, result, workdir)`, plain or async, in the worker's process.

    It returns a number or None, the reward, or (reward, {name: number}), or (reward, {name: number}, turn rewards): a
    list with a number or None for each call of the main agent. Instead of the reward may stand named ones, {name:
    number}: that called `reward` counts, else their mean. `workdir` is None without a sandbox.
    """

    entry: Annotated[str, Meta(description="package.module:function, importable by EVAL workers")]

    def __post_init__(self) -> None:
        if not _ENTRY.match(self.entry):
            raise ValueError("`entry` is no package.module:function")

    async def reward(self, context: EvalContext) -> Verdict:
        """Raises EvaluationError when the function cannot be imported, fails, is late or returns something else."""
        sandbox = context.agent or context.sandbox
        workdir = sandbox.workdir if sandbox is not None else None
        try:
            function = self._load()
            async with asyncio.timeout(context.timeout_s):
                if inspect.iscoroutinefunction(function):
                    value = await function(context.task, context.result, workdir)
                else:
                    value = await _in_thread(lambda: function(context.task, context.result, workdir))
        except TimeoutError as error:
            raise EvaluationError(
                f"{self.entry} did not return within {context.timeout_s:g} s", hint="raise timeouts.eval_s"
            ) from error
        except RollyardError:
            raise
        except Exception as error:  # the boundary to the user's code
            raise EvaluationError(f"{self.entry} failed: {type(error).__name__}: {error}") from error
        return self._verdict(value)

    def _load(self) -> Callable[..., Any]:
        module, _, path = self.entry.partition(":")
        try:
            found: Any = import_module(module)
            for name in path.split("."):
                found = getattr(found, name)
        except (ImportError, AttributeError) as error:
            raise EvaluationError(
                f"evaluation.args.entry: {self.entry} cannot be loaded: {error}",
                hint="install the package where EVAL workers run",
            ) from error
        return cast(Callable[..., Any], found)

    def _verdict(self, value: object) -> Verdict:
        parts = value if isinstance(value, tuple) and len(value) in (2, 3) else (value, {})
        reward, metrics, turn_rewards = parts if len(parts) == 3 else (*parts, None)
        try:
            if not isinstance(metrics, Mapping):
                raise TypeError("metrics are no mapping")
            numbers = {str(name): finite(number) for name, number in metrics.items()}
            turns = () if turn_rewards is None else turn_rewards
            if isinstance(reward, Mapping):
                named = {str(name): finite(number) for name, number in reward.items()}
                return Verdict(scalar(named), numbers, turns, named)
            return Verdict(None if reward is None else finite(reward), numbers, turns)
        except (TypeError, EvaluationError) as error:
            what = error.message if isinstance(error, EvaluationError) else error
            raise EvaluationError(
                f"{self.entry} returned {value!r:.200}: {what}",
                hint="return a finite number, {name: number} or None; or (that, {name: number}); or these and a list "
                "of turn rewards",
            ) from error


def _in_thread(function: Callable[[], Any]) -> Awaitable[Any]:
    """Run `function` in a thread of its own, which nobody waits for at the end of the process if it hangs."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(value)
        else:
            done.set_exception(error)

    def work() -> None:
        value, error = None, None
        try:
            value = function()
        except Exception as failed:  # noqa: BLE001 - handed to whoever awaits
            error = failed
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=work, name="evaluation", daemon=True).start()
    return done
