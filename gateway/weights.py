"""Weight updates: servers are taken out of service, load other weights, and serve again under their new version.

The entry of a server in the `llm_servers` bucket tells where its update stands; every gateway follows it. An update
that dies leaves its servers out of service, which `rollyard llm ls` shows, and the same update once more mends them.

drain: no new calls; those that run end by themselves. pause: new calls wait, the server finishes those that run.
abort: the server ends those that run with what they have, and gateways continue them on the new weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import structlog
from msgspec import structs

from rollyard.gateway.engines.control import ServerControl
from rollyard.pipeline.gateways import Gateways
from rollyard.pipeline.llm_servers import LlmServers
from rollyard.schemas.errors import BusError, ConfigError, Conflict, ModelError, WaitTimeout
from rollyard.schemas.fleet import LlmServer
from rollyard.schemas.weights import Step, WeightProgress, WeightReport, WeightUpdate

log = structlog.get_logger(__name__)

Tell = Callable[[WeightProgress], None]


@dataclass(frozen=True, slots=True)
class WeightUpdater:
    """What an update needs: the pool as it is written down, control of servers by engine, the gateways to be asked."""

    servers: LlmServers
    controls: Mapping[str, ServerControl]
    gateways: Gateways

    async def run(self, update: WeightUpdate, tell: Tell) -> WeightReport:
        """Carry an update out. What fails at one server is told and reported, and the others go on.

        Raises BusError when the pool cannot be read, ConfigError when no server is meant.
        """
        ids = update.servers or [one.server_id for one in await self.servers.all() if one.model == update.model]
        if not ids:
            raise ConfigError(
                f"no server of model {update.model!r} is in the pool", hint="`rollyard llm ls` lists them"
            )
        turns = [_Turn(self, update, tell, server_id) for server_id in dict.fromkeys(ids)]
        if update.rolling:
            for turn in turns:
                await turn.run()
        else:
            async with asyncio.TaskGroup() as group:
                for turn in turns:
                    group.create_task(turn.run())
        return WeightReport(servers=tuple(turn.progress for turn in turns))


class _Turn:
    """The update of one server."""

    def __init__(self, updater: WeightUpdater, update: WeightUpdate, tell: Tell, server_id: str) -> None:
        self._servers = updater.servers
        self._controls = updater.controls
        self._gateways = updater.gateways
        self._update = update
        self._tell = tell
        self._id = server_id
        self._held = self._paused = self._loading = self._loaded = False
        self.progress = WeightProgress(server_id=server_id, step="waiting")

    async def run(self) -> None:
        """Never raises for what goes wrong at the server: `progress` says it."""
        try:
            await self._run()
        except (BusError, ConfigError, ModelError, WaitTimeout) as error:
            log.warning("weight_update_failed", server=self._id, version=self._update.version, error=str(error))
            detail = error.message
            try:
                detail += await self._give_up(error)
            except (BusError, ConfigError) as second:
                detail += f"; its entry could not be written: {second.message}"
            self._say("failed", detail=detail, hint=error.hint)

    async def _run(self) -> None:
        update = self._update
        server, _ = await self._servers.get(self._id)
        self._seen(server)
        if server.state == "serving" and server.policy_version == update.version:
            self._say("done", detail="it serves this version already")
            return
        control = self._controls.get(server.engine)
        if control is None:
            raise ModelError(f"weights of an {server.engine} server cannot be updated", hint="swap it for another one")
        state = "draining" if update.how == "drain" else "paused"
        server, revision = await self._servers.change(
            self._id, state=state, update=update.update_id, note=f"update to version {update.version}"
        )
        self._held = True
        self._seen(server)
        await self._settled(revision, idle=update.how == "drain")
        if update.how != "drain":
            await self._pause(control, server, revision)
        await self._load(control, server)
        await self._change(state="serving", update="", note="", policy_version=update.version)
        self._say("done")

    async def _settled(self, revision: int, *, idle: bool) -> None:
        def heard(calls: int, what: str) -> None:
            self._say(self.progress.step, calls=calls, detail=what)

        self._say(self.progress.step)
        await self._gateways.settled(self._id, revision, idle=idle, timeout_s=self._update.timeout_s, heard=heard)

    async def _pause(self, control: ServerControl, server: LlmServer, revision: int) -> None:
        abort = self._update.how == "abort"
        self._say("pausing", detail="the server ends its calls" if abort else "the server finishes its calls")
        self._paused = True
        async with _limit(self._update.timeout_s, f"server {self._id} did not pause"):
            await control.pause(server, abort=abort)
        if abort:
            # What was sampled must have come back before other weights sample on.
            await self._settled(revision, idle=True)

    async def _load(self, control: ServerControl, server: LlmServer) -> None:
        update = self._update
        await self._change(state="swapping", note=f"loads version {update.version}")
        self._loading = True
        async with _limit(update.timeout_s, f"server {self._id} did not load"):
            if update.checkpoint is None:
                self._say("loading", detail="its weights are there")
                await control.mark(server, update.version)
            else:
                self._say("loading", detail=update.checkpoint)
                await control.load(server, update.checkpoint, update.version)
            found = await control.version(server)
            if found is not None and found != str(update.version):
                raise ModelError(
                    f"server {self._id} says that it serves version {found!r}, not {update.version}",
                    hint="does somebody else update it too?",
                    retryable=True,
                )
            self._loaded = True
            if self._paused:
                self._say("resuming")
                await control.resume(server)

    async def _give_up(self, error: Exception) -> str:
        """Leave the server as is honest: serving its old weights where it has them for certain, else out of service.

        Returns what is to be added to the message.
        """
        if not self._held or isinstance(error, Conflict):
            return ""
        note = f"the update to version {self._update.version} failed: {error}"[:2000]
        if self._loaded:
            await self._change(update="", note=note, policy_version=self._update.version)
            return "; it has the new weights, and stays out of service"
        # A refusal, also one by our own adapter, says that the server did not begin to load.
        refused = isinstance(error, ModelError) and not error.retryable and error.status < 500
        if self._loading and not refused:
            await self._change(update="", note=note, policy_version=None)
            return "; which weights it has is not known, so it stays out of service"
        if self._paused:
            server, _ = await self._servers.get(self._id)
            try:
                async with _limit(self._update.timeout_s, f"server {self._id} did not resume"):
                    await self._controls[server.engine].resume(server)
            except ModelError as second:
                await self._change(note=f"it could not be resumed: {second}"[:2000])
                return f"; it could not be resumed either, and stays out of service: {second.message}"
        await self._change(state="serving", update="", note="")
        return "; it goes on with the weights that it had"

    async def _change(self, **fields: Any) -> None:
        server, _ = await self._servers.change(self._id, held_by=self._update.update_id, **fields)
        self._seen(server)

    def _seen(self, server: LlmServer) -> None:
        self.progress = structs.replace(
            self.progress, policy_version=server.policy_version, serving=server.state == "serving"
        )

    def _say(self, step: Step, *, detail: str = "", hint: str = "", calls: int = 0) -> None:
        self.progress = structs.replace(self.progress, step=step, detail=detail, hint=hint, calls=calls)
        self._tell(self.progress)


@asynccontextmanager
async def _limit(timeout_s: float, what: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        raise ModelError(
            f"{what} within {timeout_s:g} s", hint="its own log tells why; give it more time", retryable=True
        ) from None
