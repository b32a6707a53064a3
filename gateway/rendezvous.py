"""Which server a session goes to: rendezvous hashing with bounded load, a pure function.

A session ranks the servers by a hash of its own, and goes to the first of its ranking that is not overloaded. So it
keeps its server, and with it the prompt cache there; a server that comes or goes moves only the sessions that rank it
first; and no server gets much more than its share.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Final

LOAD_BOUND: Final = 1.25


def choose(session: str, loads: Mapping[str, int], cost: int = 1) -> str:
    """The server for a call of `cost`, out of those in `loads`, which is not empty. Loads and cost in tokens.

    With the call on top, no server chosen has more than LOAD_BOUND times the mean load, plus one call.
    """
    # At least one server is not above the mean, so at least one is below the bound.
    bound = LOAD_BOUND * (sum(loads.values()) + max(1, cost)) / len(loads)
    return next(server for server in ranking(session, loads) if loads[server] < bound)


def ranking(session: str, servers: Mapping[str, object]) -> list[str]:
    """The servers in the order in which this session prefers them."""
    return sorted(servers, key=lambda server: _weight(session, server), reverse=True)


def _weight(session: str, server: str) -> bytes:
    return hashlib.blake2b(f"{session}\0{server}".encode(errors="surrogatepass"), digest_size=8).digest()
