"""Sandbox backend `e2b`: sandboxes in E2B's cloud, or in another that speaks its protocol, through E2B's own SDK.

Tested with the real SDK against a server of that protocol, not against E2B's cloud.

Every sandbox is made with a time limit, which living workers extend; when they are gone it ends. `renew_lease` extends
all sandboxes of this installation whose time is half over, whoever made them, so that the work divides itself among the
workers. None is extended past its deadline. A rollout's sandbox is reached from every worker with the same API key.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import socket
import time
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Annotated, Any, Final, Self

import structlog
from e2b import AsyncSandbox, SandboxQuery
from e2b.sandbox.sandbox_api import SandboxInfo, SandboxNetworkOpts, SandboxNetworkUpdate
from msgspec import Meta

from rollyard.schemas.errors import ConfigError, SandboxError
from rollyard.schemas.rollout import SandboxRef
from rollyard.schemas.sandbox import NetworkMode
from rollyard.schemas.subjects import digest
from rollyard.stages.capabilities import Capabilities
from rollyard.stages.sandbox import DEFAULT_PLAN, Labels, Plan
from rollyard.stages.sandboxes.e2b_clients import Clients, Connection
from rollyard.stages.sandboxes.e2b_errors import is_gone
from rollyard.stages.sandboxes.e2b_identity import (
    INSTALLATION_KEY,
    Handle,
    Placing,
    is_due,
    metadata_of,
    read_metadata,
    timeout_of,
)
from rollyard.stages.sandboxes.e2b_network import GatewayAddress, Rules, rules_for
from rollyard.stages.sandboxes.e2b_sandbox import E2bSandbox
from rollyard.stages.sandboxes.settings import BackendSettings

log = structlog.get_logger(__name__)

PAGE: Final = 100
RENEW_PARTS: Final = 8
"""How many times in a time limit the list of sandboxes is looked at."""
RENEWALS: Final = 16
TESTED: Final = "with the real SDK against a protocol server; never on E2B's cloud"


class E2bSettings(BackendSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the backend `e2b`."""

    api_key_env: Annotated[str, Meta(min_length=1, description="environment variable with the API key")] = "E2B_API_KEY"
    domain: Annotated[str, Meta(description="domain of the service; empty: E2B_DOMAIN, else e2b.app")] = ""
    api_url: Annotated[str, Meta(description="URL of the API; empty: https://api.<domain>")] = ""
    sandbox_url: Annotated[str, Meta(description="URL of the sandboxes' daemon; empty: by domain")] = ""
    template: Annotated[str, Meta(min_length=1, description="template of tasks that name no image")] = "base"
    clients: Annotated[int, Meta(ge=1, le=64, description="SDK clients with connections of their own, in turn")] = 4
    max_creates: Annotated[int, Meta(ge=1, description="sandboxes that one worker makes at a time")] = 16
    max_tries: Annotated[int, Meta(ge=1, le=20, description="tries of a request that the service is too busy for")] = 8
    timeout_s: Annotated[
        float, Meta(ge=2, le=86_400, description="sandboxes end so long after the last worker was gone, at the latest")
    ] = 600.0
    request_timeout_s: Annotated[float, Meta(gt=0, description="time limit of one request")] = 60.0


class E2bBackend:
    """Makes sandboxes in the cloud. Raises ConfigError when there is no API key."""

    name = "e2b"
    capabilities = Capabilities(
        isolated=True,
        images=True,
        users=True,
        workdirs=True,
        networks=frozenset({"gateway", "none", "allow", "open"}),
        set_network=True,
        limits=(("max_file_bytes", "hard"),),
        snapshots=True,
        mounts="copy",
        tested=TESTED,
    )

    def __init__(self, settings: E2bSettings, api_key: str) -> None:
        self.settings = settings
        address = settings.api_url or settings.domain or os.environ.get("E2B_DOMAIN", "")
        self.place = "e2b-" + digest(address, api_key, settings.installation, chars=16)
        connection = Connection(
            api_key=api_key,
            domain=settings.domain,
            api_url=settings.api_url,
            sandbox_url=settings.sandbox_url,
            request_timeout_s=settings.request_timeout_s,
        )
        self.clients = Clients(connection, settings.clients, settings.max_tries)
        self._creating = asyncio.Semaphore(settings.max_creates)
        self._next_look_s = 0.0
        self._opened: weakref.WeakSet[E2bSandbox] = weakref.WeakSet()

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Self:
        """Settings are those of `E2bSettings`. Raises ConfigError."""
        converted_settings = E2bSettings.of(cls.name, settings)
        api_key = os.environ.get(converted_settings.api_key_env, "")
        if not api_key:
            raise ConfigError(
                f"sandbox backend e2b: the environment variable {converted_settings.api_key_env} holds no API key",
                hint="set it, or name another one in [backends.e2b] api_key_env",
            )
        return cls(converted_settings, api_key)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for sandbox in list(self._opened):
            await sandbox.close_channels()

    def reaches(self, place: str) -> bool:
        """Every worker with the same key, service and installation does."""
        return place == self.place

    async def create(self, labels: Labels, plan: Plan = DEFAULT_PLAN) -> E2bSandbox:
        """Make a sandbox and let the gateway be reached from inside. Raises SandboxError."""
        if plan.mounts:
            raise SandboxError("sandboxes of E2B see no folder of the worker", hint="copy what is needed")
        placing = Placing(
            deadline_ms=_now_ms() + round(plan.deadline_s * 1000),
            workdir=plan.workdir,
            user=plan.user,
            max_file_bytes=plan.limits.max_file_bytes or 0,
            gateway=plan.network != "none",
        )
        network = _network(await self.rules(plan.network, plan.allow_hosts))
        client, key = self.clients.next(), secrets.token_hex(16)

        async def make() -> AsyncSandbox:
            return await client.create(
                plan.image or self.settings.template,
                timeout=timeout_of(placing, self.settings.timeout_s, _now_ms()),
                metadata=metadata_of(self.settings.installation, labels, placing),
                network=network,
                lifecycle={"on_timeout": "kill"},
                idempotency_key=key,  # a try whose answer was lost makes no second sandbox
            )

        async with self._creating:
            made = await self.clients.patiently("a sandbox could not be made", make)
        sandbox = self._sandbox(Handle.of(made.sandbox_id, placing), made)
        try:
            await sandbox.prepare()
        except BaseException:
            await asyncio.shield(sandbox.destroy())
            raise
        return sandbox

    async def open(self, ref: SandboxRef) -> E2bSandbox:
        """A sandbox of this place. Asks the service nothing yet. Raises SandboxError."""
        if ref.backend != self.name or not self.reaches(ref.place):
            raise SandboxError(
                f"the sandbox {ref.handle} is at {ref.place}, this worker at {self.place}",
                hint="all workers need the same API key, service and [backends.e2b] installation",
            )
        return self._sandbox(Handle.parse(ref.handle))

    async def list_owned(self) -> list[tuple[SandboxRef, Labels]]:
        """Every sandbox of this installation that the service knows. Raises SandboxError."""
        owned = []
        async for info in self._listing():
            labels, placing = read_metadata(info.metadata)
            owned.append((self.ref(Handle.of(info.sandbox_id, placing)), labels))
        return owned

    async def renew_lease(self) -> None:
        """Extend the sandboxes whose time is half over. Looks only now and then. Raises SandboxError."""
        if time.monotonic() < self._next_look_s:
            return
        # By chance, so that several workers do not look at the same time and all extend the same ones.
        self._next_look_s = time.monotonic() + self.settings.timeout_s / RENEW_PARTS * random.uniform(0.5, 1.0)
        due = []
        async for info in self._listing():
            _, placing = read_metadata(info.metadata)
            if is_due(placing, self.settings.timeout_s, _now_ms(), round(info.end_at.timestamp() * 1000)):
                due.append((info.sandbox_id, placing))
        slots = asyncio.Semaphore(RENEWALS)
        async with asyncio.TaskGroup() as group:
            for sandbox_id, placing in due:
                group.create_task(self._extend(sandbox_id, placing, slots))

    def ref(self, handle: Handle) -> SandboxRef:
        """What names a sandbox to other processes."""
        return SandboxRef(backend=self.name, place=self.place, handle=handle.text())

    async def rules(self, mode: NetworkMode, allow_hosts: Sequence[str]) -> Rules:
        """The rules of a network mode. Raises SandboxError when the gateway's address cannot be found."""
        names: list[str] = []
        if mode == "gateway" or (mode == "allow" and self.settings.gateway_url):
            gateway = GatewayAddress.of(self.settings.gateway_url)
            names = [gateway.host]
            if not gateway.known_by_name():
                names += await _addresses(gateway)
        return rules_for(mode, allow_hosts, names)

    async def set_network(self, handle: Handle, mode: NetworkMode, allow_hosts: Sequence[str]) -> None:
        """Replace the rules of a sandbox. Raises SandboxError."""
        rules = await self.rules(mode, allow_hosts)
        client = self.clients.of(handle.id)
        what = f"the network of the sandbox {handle.id} could not be changed"
        await self.clients.patiently(what, lambda: client.update_network(handle.id, _update(rules)))

    def _sandbox(self, handle: Handle, connected: AsyncSandbox | None = None) -> E2bSandbox:
        sandbox = E2bSandbox(self, handle, connected)
        self._opened.add(sandbox)
        return sandbox

    async def _listing(self) -> AsyncIterator[SandboxInfo]:
        client = self.clients.next()
        query = SandboxQuery(metadata={INSTALLATION_KEY: self.settings.installation})
        pages = client.list(query=query, limit=PAGE)
        while pages.has_next:
            for info in await self.clients.patiently("the sandboxes could not be listed", pages.next_items):
                yield info

    async def _extend(self, sandbox_id: str, placing: Placing, slots: asyncio.Semaphore) -> None:
        client = self.clients.of(sandbox_id)
        timeout = timeout_of(placing, self.settings.timeout_s, _now_ms())
        async with slots:
            try:
                await self.clients.patiently(
                    f"the sandbox {sandbox_id} could not be kept", lambda: client.set_timeout(sandbox_id, timeout)
                )
            except SandboxError as error:
                if not (error.__cause__ and is_gone(error.__cause__)):
                    log.warning("sandbox_not_renewed", sandbox=sandbox_id, error=str(error))


def _network(rules: Rules) -> SandboxNetworkOpts | None:
    if not rules.deny:
        return None
    network: SandboxNetworkOpts = {"deny_out": list(rules.deny)}
    if rules.allow:
        network["allow_out"] = list(rules.allow)
    return network


def _update(rules: Rules) -> SandboxNetworkUpdate:
    """What is left out of an update is cleared."""
    update: SandboxNetworkUpdate = {}
    if rules.deny:
        update["deny_out"] = list(rules.deny)
    if rules.allow:
        update["allow_out"] = list(rules.allow)
    return update


async def _addresses(gateway: GatewayAddress) -> list[str]:
    """The addresses of the gateway, for a firewall that cannot see its name."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(gateway.host, gateway.port, family=socket.AF_INET, type=socket.SOCK_STREAM)
    except OSError as error:
        raise SandboxError(
            f"the gateway's host {gateway.host!r} has no address: {error}", hint="correct [gateway] url"
        ) from error
    return sorted({str(address[0]) for *_, address in found} - {gateway.host})


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
