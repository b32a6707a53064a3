"""The gateways that live and where they are, from their leases on the bus; while the bus is away, as known last."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import structlog

from rollyard.gateway.relay.folder import keep, kept
from rollyard.pipeline.bus import Bus
from rollyard.pipeline.leases import LeaseView
from rollyard.pipeline.streams import Limits, ensure
from rollyard.schemas import subjects
from rollyard.schemas.errors import BusError, ConfigError

log = structlog.get_logger(__name__)

RETRY_S: Final = 1.0
_HINT: Final = "set [gateway] url to http://HOST:PORT or https://HOST, without a path"


@dataclass(frozen=True, slots=True)
class GatewayAddress:
    """Where to connect to."""

    url: str
    host: str
    port: int
    tls: bool


def parse_address(url: str) -> GatewayAddress:
    """The address in a gateway's URL. Raises ConfigError for one that a relay cannot serve.

    A relay carries bytes and reads no requests, so it cannot put a path before theirs.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"the gateway's URL {url!r} cannot be read: {error}", hint=_HINT) from error
    if parts.scheme not in ("http", "https") or not host:
        raise ConfigError(f"the gateway's URL {url!r} is no http or https URL", hint=_HINT)
    if parts.path.rstrip("/") or parts.query or parts.username:
        raise ConfigError(f"the gateway's URL {url!r} has more than a host and a port", hint=_HINT)
    tls = parts.scheme == "https"
    return GatewayAddress(url=url, host=host, port=port or (443 if tls else 80), tls=tls)


class KnownGateways:
    """`urls`, or what `follow` has learnt since. `path` keeps that for a relay that starts while the bus is away."""

    def __init__(self, path: Path, urls: Sequence[str] = ()) -> None:
        self._path = path
        self._view: LeaseView | None = None
        self._urls: tuple[str, ...] = tuple(urls or kept(path, list[str]) or ())
        self._living: dict[str, str] = {}
        self._parsed: dict[str, GatewayAddress | str] = {}

    @cached_property
    def tls(self) -> ssl.SSLContext:
        """For gateways behind https; made when the first one is met."""
        return ssl.create_default_context()

    def addresses(self) -> list[GatewayAddress]:
        """Of every gateway that lives, each address once."""
        return [each for each in self._all() if isinstance(each, GatewayAddress)]

    def refused(self) -> list[str]:
        """Why gateways that live cannot be used."""
        return [each for each in self._all() if isinstance(each, str)]

    def _all(self) -> Iterable[GatewayAddress | str]:
        if self._view is not None:
            self._learn(self._view)
        for url in self._urls:
            if url not in self._parsed:
                try:
                    self._parsed[url] = parse_address(url)
                except ConfigError as error:
                    self._parsed[url] = str(error)
                    log.error("gateway_not_usable", url=url, error=str(error))
        return [self._parsed[url] for url in self._urls]

    def _learn(self, view: LeaseView) -> None:
        living = {lease.owner: lease.url for lease in view.living() if lease.url}
        if not living:
            # All silent at once, and none said good-bye: rather the bus hangs. Whether they live, a connection tells.
            owners = set(view.owners())
            living = {owner: url for owner, url in self._living.items() if owner in owners}
        self._living = living
        urls = tuple(sorted(set(living.values())))
        if urls == self._urls:
            return
        log.info("gateways_known", urls=urls)
        self._urls = urls
        self._parsed = {}
        with suppress(OSError):
            # Only for a start without the bus.
            keep(self._path, urls)

    async def follow(self, url: str, limits: Limits) -> None:
        """Learn from the bus at `url` until cancelled. A bus that is away, even at the start, changes nothing."""
        told = ""
        while True:
            try:
                async with _leases(url, limits) as (bus, view):
                    told = ""
                    self._view = view
                    await bus.closed.wait()
            except BusError as error:
                if str(error) != told:
                    log.warning("relay_without_bus", error=str(error), gateways=self._urls)
                told = str(error)
            finally:
                if self._view is not None:
                    self._learn(self._view)
                self._view = None
            await asyncio.sleep(RETRY_S)


@asynccontextmanager
async def _leases(url: str, limits: Limits) -> AsyncIterator[tuple[Bus, LeaseView]]:
    async with Bus.connect(url, name="relay") as bus:
        # A relay may be the first of all.
        await ensure(bus, limits)
        async with LeaseView.following(bus, subjects.GATEWAYS) as view:
            yield bus, view
