"""Watching an agent that runs: ending it early for a reason of ours, and knowing afterwards why it ended."""

from __future__ import annotations

import asyncio
import time
from typing import Final

import msgspec
import structlog

from rollyard.pipeline.bus import Bus
from rollyard.pipeline.codec import decode
from rollyard.pipeline.log import read_rollout
from rollyard.schemas import subjects
from rollyard.schemas.call import CallEnd, CallEvent, CallIntent
from rollyard.schemas.errors import BusError, DecodeError, SandboxError
from rollyard.schemas.failure import Failure
from rollyard.schemas.rollout import Rollout
from rollyard.schemas.task import AgentSpec, Task
from rollyard.stages.sandbox import ProcessEnd, Sandbox
from rollyard.stages.stage import now_ms

log = structlog.get_logger(__name__)

AGENT: Final = "agent"
ENDED_FILE: Final = ".rollyard/ended"
LOOKS: Final = 4
"""How often in the idle time it is looked whether an agent is idle."""
LEAST_LOOK_S: Final = 0.2
MOST_LOOK_S: Final = 60.0
OUTPUT_LOOKED_AT_BYTES: Final = 64 * 1024
MAX_REASON_BYTES: Final = 4_000


class Watch:
    """One agent in its sandbox."""

    def __init__(self, bus: Bus, sandbox: Sandbox, rollout: Rollout, *, keeps_ends: bool = False) -> None:
        self._bus = bus
        self._keeps_ends = keeps_ends
        self._sandbox = sandbox
        self._subject = subjects.log_subject(rollout.run, rollout.rollout_id, "call")
        self._reason: Failure | None = None

    async def end(self, message: str, hint: str = "") -> None:
        """Kill the agent; its rollout is truncated for that reason, also when this worker dies before it says so."""
        self._reason = Failure.of("agent_budget", message, hint)
        try:
            await self._sandbox.put_files({ENDED_FILE: msgspec.json.encode(self._reason)}, base="home")
        except SandboxError as error:
            log.warning("reason_not_kept", error=str(error))  # a full disk must not keep the agent alive
        await self._sandbox.kill(AGENT)

    async def why(self, end: ProcessEnd, task: Task) -> Failure | None:
        """What the way in which the process ended says, before anybody looks at its output."""
        match end.reason:
            case "exited":
                return None
            case "deadline":
                return too_late(task)
            case "lease":
                return Failure.of("infra", "no worker renewed the lease of the agent's sandbox")
            case "killed":
                return await self._known_reason() or Failure.of("infra", "the agent was killed from outside")
            case "memory":
                return Failure.of(
                    "agent_budget",
                    "out of memory: the agent's sandbox used more than it may",
                    "raise sandbox.limits.memory_bytes",
                )
            case "lost":
                message = "the agent's end was not seen: its shim died"
                if self._keeps_ends:
                    return Failure.of("infra", message)
                # Else an agent that does badly could kill its shim, and get another attempt.
                return Failure.of(
                    "agent", message, "on this backend the agent itself can do that; see the kernel's log"
                )

    async def _known_reason(self) -> Failure | None:
        """The reason for which this worker, or one before it, killed the agent."""
        if self._reason is not None:
            return self._reason
        try:
            data = await self._sandbox.read_file(f"{self._sandbox.home}/{ENDED_FILE}", MAX_REASON_BYTES)
            found = msgspec.json.decode(data, type=Failure) if data else None
        except (SandboxError, msgspec.MsgspecError):
            return None
        # An agent may write the file too: it can only say what a budget says.
        return found if found is not None and found.kind == "agent_budget" else None

    async def end_when_idle(self, max_idle_s: float) -> None:
        """End the agent when for so long it neither asked the model nor wrote any output. For ever, else."""
        seen: tuple[int, bytes, bytes] | None = None
        since_s = time.monotonic()
        while True:
            await asyncio.sleep(min(max(max_idle_s / LOOKS, LEAST_LOOK_S), MOST_LOOK_S))
            try:
                asked, busy = await self._last_call()
                output = await self._sandbox.output(AGENT, OUTPUT_LOOKED_AT_BYTES)
            except (BusError, DecodeError, SandboxError) as error:
                log.warning("idle_not_known", error=str(error))
                since_s = time.monotonic()
                continue
            now = (asked, *output)
            if busy or now != seen:
                seen, since_s = now, time.monotonic()
            elif time.monotonic() - since_s >= max_idle_s:
                await self.end(
                    f"idle: no model call and no output for {max_idle_s:g} s", "raise agent.max_idle_s, or see its logs"
                )
                return

    async def _last_call(self) -> tuple[int, bool]:
        """Sequence of the newest event of the rollout's calls, and whether it is a call that has no end yet."""
        stored = await self._bus.get_direct(self._subject)
        if stored is None:
            return 0, False
        event: CallEvent = decode(stored.data, CallEvent)
        return stored.seq, isinstance(event, CallIntent) and now_ms() < event.latest_end_ms


def too_late(task: Task) -> Failure:
    """The failure of an agent that RUN's time limit ended."""
    limit_s = task.timeouts.run_s
    return Failure.of("agent_budget", f"the agent was still running after {limit_s:g} s", "raise timeouts.run_s")


async def read_calls(bus: Bus, rollout: Rollout, attempt: int) -> list[CallIntent | CallEnd]:
    """The events of the attempt's model calls, in log order. Raises BusError, DecodeError."""
    events = await read_rollout(bus, rollout.run, rollout.rollout_id, kinds=("call",))
    calls = [event for _, event in events if isinstance(event, CallIntent | CallEnd)]
    return [event for event in calls if event.attempt == attempt]


async def used_up(bus: Bus, agent: AgentSpec, rollout: Rollout, attempt: int, started_ms: int) -> Failure | None:
    """The failure of an agent that stopped since the gateway refused it further calls; None: it had some left.

    What an agent says of its own end does not tell that apart from a broken model server. Raises BusError, DecodeError.
    """
    if agent.max_wall_s is not None and now_ms() >= started_ms + agent.max_wall_s * 1000:
        return Failure.of("agent_budget", f"the agent used up its {agent.max_wall_s:g} s", "raise agent.max_wall_s")
    if agent.max_calls is None and agent.max_tokens is None:
        return None
    calls = await read_calls(bus, rollout, attempt)
    asked = sum(isinstance(event, CallIntent) for event in calls)
    sampled = sum(len(event.completion_ids) for event in calls if isinstance(event, CallEnd))
    if agent.max_calls is not None and asked >= agent.max_calls:
        return Failure.of("agent_budget", f"the agent used up its {agent.max_calls} calls", "raise agent.max_calls")
    if agent.max_tokens is not None and sampled >= agent.max_tokens:
        return Failure.of("agent_budget", f"the agent used up its {agent.max_tokens} tokens", "raise agent.max_tokens")
    return None
