"""One container as a sandbox."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn, TypeVar

from rollyard.harnesses.harness import Command
from rollyard.schemas.errors import SandboxError
from rollyard.schemas.rollout import SandboxRef
from rollyard.schemas.sandbox import NetworkMode
from rollyard.stages.sandbox import Change, ExecResult, Stats
from rollyard.stages.sandboxes import docker_container
from rollyard.stages.sandboxes.docker_engine import Engine, EngineGone
from rollyard.stages.sandboxes.docker_entrance import DockerEntrance, refused
from rollyard.stages.sandboxes.docker_gateway import DockerGateway
from rollyard.stages.sandboxes.docker_labels import Facts
from rollyard.stages.sandboxes.docker_wire import EngineRefused
from rollyard.stages.sandboxes.inside import Inside, InsideSandbox
from rollyard.stages.shell import Shell

SNAPSHOTS: Final = "rollyard-snapshot"
REMOVAL_S: Final = 60.0
POLL_S: Final = 0.05
_KINDS: Final[dict[int, Any]] = {0: "modified", 1: "added", 2: "deleted"}

T = TypeVar("T")


class DockerSandbox(InsideSandbox):
    """A container of the engine. The handle is its id."""

    def __init__(self, engine: Engine, ref: SandboxRef, facts: Facts) -> None:
        inside = Inside(
            handle=facts.nonce,
            workdir=facts.workdir,
            home=docker_container.HOME,
            control=docker_container.control(facts),
            user=facts.user,
            max_file_bytes=facts.max_file_bytes,
        )
        entrance = DockerEntrance(engine.wire, ref.handle)
        super().__init__(entrance, inside)
        self.ref = ref
        self.facts = facts
        self._engine = engine
        self._keeper = InsideSandbox(entrance, docker_container.keeper(inside))
        self._gateway = DockerGateway(self._keeper) if facts.gateway else None
        self.gateway_url = self._gateway.url if self._gateway is not None else None

    async def make_ready(self) -> None:
        """Make its folders and open what is needed to work in it at once. Raises SandboxError."""
        await self._request(":")
        if self._gateway is not None:
            await self._gateway.keep_open()

    async def set_deadline(self, seconds: int, *, fixed: bool) -> None:
        """Tell the first process when it is to end, counted from now; a fixed one cannot be changed again."""
        word = "fixed" if fixed else "at"
        file = f"{self._inside.control}/deadline"
        await self._keeper.run_inside(f"echo '{word} {seconds}' >'{file}'; kill -s USR1 1")

    # --- what needs the way to the gateway

    async def start(self, name: str, command: Command, *, deadline_s: float) -> bool:
        """As every sandbox's; opens the way to the gateway again, if somebody closed it."""
        if self._gateway is not None:
            await self._gateway.keep_open()
        return await super().start(name, command, deadline_s=deadline_s)

    async def exec(self, script_or_argv: str | tuple[str, ...], **given: Any) -> ExecResult:
        """As every sandbox's; opens the way to the gateway again, if somebody closed it."""
        if self._gateway is not None:
            await self._gateway.keep_open()
        return await super().exec(script_or_argv, **given)

    async def shell(self, **given: Any) -> Shell:
        """As every sandbox's; opens the way to the gateway again, if somebody closed it."""
        if self._gateway is not None:
            await self._gateway.keep_open()
        return await super().shell(**given)

    # --- what the engine does

    async def snapshot(self) -> str:
        """Commit the container to an image. Raises SandboxError."""
        if self.facts.read_only:
            raise SandboxError(
                "a read-only sandbox has its files in memory, where docker takes no snapshot of them",
                hint="leave sandbox.read_only out, or take them with get_tree",
            )
        changes = [f"WORKDIR {self.workdir}", 'ENTRYPOINT ["sh"]', "CMD []"]
        if self.facts.user:
            changes.append(f"USER {self.facts.user}")
        name = f"{SNAPSHOTS}:{self.facts.nonce}-{secrets.token_hex(4)}"
        repository, _, tag = name.partition(":")
        await self._call(
            lambda client: client.commit(self.ref.handle, repository=repository, tag=tag, changes=changes, pause=True)
        )
        return name

    async def diff(self) -> list[Change]:
        """What the engine finds changed, without Rollyard's own files. Raises SandboxError."""
        if self.facts.read_only:
            raise SandboxError("a read-only sandbox has its files in memory, where docker tells no difference")
        found = await self._call(lambda client: client.diff(self.ref.handle)) or []
        own = docker_container.control(self.facts)
        return sorted(
            (
                Change(entry["Path"], _KINDS[entry["Kind"]])
                for entry in found
                if not (entry["Path"] + "/").startswith((own + "/", docker_container.RELAY + "/"))
                and entry["Path"] not in docker_container.MADE
            ),
            key=lambda change: change.path,
        )

    async def set_network(self, mode: NetworkMode, allow_hosts: Sequence[str] = ()) -> None:
        """Take the container off its network, or put it on another. The way to the gateway stays."""
        if mode not in docker_container.NETWORKS or allow_hosts:
            known = ", ".join(sorted(docker_container.NETWORKS))
            raise SandboxError(f"docker cannot keep to the network {mode!r}", hint=f"it can do {known}")
        if mode == "gateway" and self._gateway is None:
            raise SandboxError("the sandbox was made without a way to the gateway", hint="make it with network gateway")
        if mode == "none" and self._gateway is not None:
            raise SandboxError(
                "the relay's folder is mounted in the sandbox and cannot be taken away",
                hint="make it with network none",
            )
        wanted = docker_container.NETWORKS[mode]

        def change(client: Any) -> None:
            networks = client.inspect_container(self.ref.handle)["NetworkSettings"]["Networks"]
            for name in networks:
                if name != wanted:
                    client.disconnect_container_from_network(self.ref.handle, name, force=True)
            if wanted not in networks and wanted != "none":
                client.connect_container_to_network(self.ref.handle, wanted)

        await self._call(change)

    async def stats(self) -> Stats:
        """What the container's cgroup says, and the size of its layer."""

        def ask(client: Any) -> tuple[Any, Any]:
            listed = client.containers(all=True, size=True, filters={"id": self.ref.handle})
            return client.stats(self.ref.handle, stream=False, one_shot=True), listed

        used, listed = await self._call(ask)
        memory = used.get("memory_stats") or {}
        kept = memory.get("stats") or {}
        cache = kept.get("total_inactive_file", kept.get("inactive_file", 0))
        cpu_ns = ((used.get("cpu_stats") or {}).get("cpu_usage") or {}).get("total_usage")
        return Stats(
            memory_bytes=max(0, memory["usage"] - cache) if "usage" in memory else None,
            cpu_s=None if cpu_ns is None else cpu_ns / 1e9,
            processes=(used.get("pids_stats") or {}).get("current"),
            disk_bytes=listed[0].get("SizeRw", 0) if listed else None,
        )

    async def destroy(self) -> None:
        """Kill and remove the container. Does nothing when it is gone."""
        await self.close_channels()
        await self._keeper.close_channels()
        await remove(self._engine, self.ref.handle)

    async def close_channels(self) -> None:
        """Let go of all connections."""
        await super().close_channels()
        await self._keeper.close_channels()

    async def _kill_all(self) -> None:
        # The container's first process needs no other for it.
        await self._call(lambda client: client.kill(self.ref.handle, "SIGUSR2"))

    async def _call(self, work: Callable[[Any], T]) -> T:
        try:
            return await self._engine.call(work)
        except EngineGone as error:
            self._gone(error)
        except EngineRefused as error:
            raise refused(self.ref.handle, error) from error

    def _gone(self, error: SandboxError) -> NoReturn:
        raise SandboxError(
            f"the sandbox {self.ref.handle[:12]} is gone: {error.message}", hint="a new attempt makes another"
        ) from error


async def remove(engine: Engine, container: str) -> None:
    """Remove a container with what runs in it and its volumes. Does nothing when there is none. Raises SandboxError."""
    give_up_s = asyncio.get_running_loop().time() + REMOVAL_S
    while True:
        try:
            await engine.call(lambda client: client.remove_container(container, v=True, force=True))
        except EngineGone:
            return
        except EngineRefused as error:
            # 409: somebody else removes it just now. 500: the engine trips over a container that ends by itself.
            if asyncio.get_running_loop().time() > give_up_s:
                raise SandboxError(f"the container {container[:12]} cannot be removed: {error.said}") from error
            await asyncio.sleep(POLL_S)
