"""What the sandboxes' network reaches: a few hosts of the server's own little internet, if the rules allow it.

The rules are those of E2B: what `allowOut` names is allowed, else what `denyOut` names is refused, else it is allowed.
A host name counts only on port 80, by the Host header; E2B also looks at TLS names on port 443, which is not done here.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from e2b_server.jail import Jail

ALL: Final = "0.0.0.0/0"
_HOST: Final = re.compile(rb"\r\nhost:[ \t]*([^\r:]+)", re.IGNORECASE)


@dataclass(frozen=True)
class Rules:
    """One sandbox's."""

    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()

    def allows(self, address: str, host: str = "") -> bool:
        """Whether a connection may go out."""
        if any(_is_network(rule) and _within(address, rule) for rule in self.allow):
            return True
        if host and any(_matches(host, rule) for rule in self.allow if not _is_network(rule)):
            return True
        return not any(_within(address, rule) for rule in self.deny)

    @staticmethod
    def problem(allow: Sequence[str], deny: Sequence[str]) -> str:
        """Why E2B would refuse such rules; empty: it would not."""
        for rule in deny:
            if not _is_network(rule):
                return f"invalid denied CIDR {rule}"
        if any(not _is_network(rule) for rule in allow) and ALL not in deny:
            return (
                "When specifying allowed domains in allow out, you must include 'ALL_TRAFFIC' in deny out "
                "to block all other traffic."
            )
        return ""


def _is_network(rule: str) -> bool:
    with suppress(ValueError):
        ipaddress.ip_network(rule, strict=False)
        return True
    return False


def _within(address: str, rule: str) -> bool:
    return ipaddress.ip_address(address) in ipaddress.ip_network(rule, strict=False)


def _matches(host: str, pattern: str) -> bool:
    host, pattern = host.lower(), pattern.lower()
    return pattern in (host, "*") or (pattern.startswith("*.") and host.endswith(pattern[1:]))


class Egress:
    """The listening sockets inside one jail, and the connections that went out through them."""

    def __init__(self, rules: Callable[[], Rules], log: list[tuple[str, bool]]) -> None:
        self._rules = rules
        self._log = log
        self._servers: list[asyncio.Server] = []

    async def open(self, jail: Jail, internet: Mapping[tuple[str, int], tuple[str, int]]) -> None:
        """Listen inside at each address of the internet (address inside -> real address)."""
        for (host, port), real in internet.items():
            _, fds = await jail.ask("listen", host=host, port=port)
            listening = socket.socket(fileno=fds[0])
            handler = self._handler(host, port, real)
            self._servers.append(await asyncio.start_server(handler, sock=listening))

    def close(self) -> None:
        """Nothing goes out any more."""
        for server in self._servers:
            server.close()

    def _handler(self, host: str, port: int, real: tuple[str, int]) -> Callable[..., object]:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                head, name = b"", ""
                if port == 80:
                    with suppress(asyncio.IncompleteReadError):
                        head = await reader.readuntil(b"\r\n\r\n")
                    if found := _HOST.search(head):
                        name = found[1].decode()
                allowed = self._rules().allows(host, name)
                self._log.append((f"{name or host}:{port}", allowed))
                if allowed:
                    await _join(reader, writer, real, head)
            except OSError:
                pass
            finally:
                # A reset, not an orderly end: the connection was refused.
                with suppress(OSError):
                    writer.transport.abort()

        return handle


async def _join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, real: tuple[str, int], head: bytes) -> None:
    out_reader, out_writer = await asyncio.open_connection(*real)
    try:
        out_writer.write(head)
        async with asyncio.TaskGroup() as group:
            group.create_task(_pump(reader, out_writer))
            group.create_task(_pump(out_reader, writer))
    finally:
        out_writer.close()


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await source.read(1 << 16):
            sink.write(data)
            await sink.drain()
        if sink.can_write_eof():
            sink.write_eof()
