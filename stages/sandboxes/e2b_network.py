"""Network rules as E2B understands them. Pure.

What E2B's firewall makes of rules: what `allow_out` names is allowed, all that `deny_out` names besides is refused. A
host name counts only where the firewall can read one, which is the Host header on port 80 and the TLS name on port 443;
any other port is judged by its address alone.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from rollyard.schemas.errors import SandboxError
from rollyard.schemas.sandbox import NetworkMode

ALL_TRAFFIC: Final = "0.0.0.0/0"
_PORTS: Final = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class GatewayAddress:
    """The gateway as its URL names it."""

    host: str
    port: int
    tls: bool

    @classmethod
    def of(cls, url: str) -> GatewayAddress:
        """Raises SandboxError for what is no http or https URL."""
        parts = urlsplit(url)
        port = None
        with suppress(ValueError):
            port = parts.port or _PORTS.get(parts.scheme)
        if not parts.hostname or not port or parts.scheme not in _PORTS:
            raise SandboxError(
                f"E2B's sandboxes need the gateway's public address, and {url!r} is none",
                hint="set [gateway] url, or [backends.e2b] gateway_url, to an http or https URL",
            )
        return cls(parts.hostname, port, parts.scheme == "https")

    def known_by_name(self) -> bool:
        """Whether the firewall can know it by its name, so that nobody has to look up its addresses."""
        return self.tls and self.port == _PORTS["https"] and not _is_address(self.host)


@dataclass(frozen=True, slots=True)
class Rules:
    """What may go out. Both empty: everything."""

    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()


def rules_for(mode: NetworkMode, allow_hosts: Sequence[str], gateway: Sequence[str]) -> Rules:
    """The rules of a network mode. `gateway` are the names and addresses by which the gateway is allowed."""
    if mode == "open":
        return Rules()
    allow: tuple[str, ...] = ()
    if mode in ("gateway", "allow"):
        allow = tuple(gateway)
    if mode == "allow":
        allow += tuple(host for host in allow_hosts if host not in allow)
    return Rules(tuple(_rule(host) for host in allow), (ALL_TRAFFIC,))


def _rule(host: str) -> str:
    """Addresses as networks, names in lower case."""
    with suppress(ValueError):
        return str(ipaddress.ip_network(host, strict=False))
    return host.lower()


def _is_address(host: str) -> bool:
    with suppress(ValueError):
        ipaddress.ip_address(host)
        return True
    return False
