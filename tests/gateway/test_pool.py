from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rollyard.gateway.pool import PoolEntry, rendezvous
from rollyard.schemas.fleet import LlmServer


def servers(count: int) -> list[PoolEntry]:
    return [PoolEntry(LlmServer(server_id=f"s{n}", url=f"http://{n}", engine="vllm")) for n in range(count)]


@given(st.integers(1, 6), st.text(max_size=10))
def test_a_session_keeps_its_server(count: int, session: str) -> None:
    pool = servers(count)
    assert rendezvous(session, pool) is rendezvous(session, list(reversed(pool)))


@given(st.integers(2, 6), st.lists(st.text(max_size=8), min_size=1, unique=True))
def test_a_server_that_goes_moves_only_its_own_sessions(count: int, sessions: list[str]) -> None:
    pool = servers(count)
    before = {session: rendezvous(session, pool) for session in sessions}
    for session, entry in before.items():
        if entry is not pool[-1]:
            assert rendezvous(session, pool[:-1]) is entry


@given(st.integers(1, 6), st.lists(st.text(max_size=8), min_size=1, max_size=60))
def test_no_server_gets_much_more_than_its_share(count: int, sessions: list[str]) -> None:
    pool = servers(count)
    for session in sessions:
        rendezvous(session, pool).outstanding += 1
    assert max(entry.outstanding for entry in pool) <= len(sessions) * 1.25 / count + 1


def test_sessions_spread_over_servers() -> None:
    pool = servers(4)
    counts = Counter(rendezvous(f"session {n}", pool).server.server_id for n in range(400))
    assert min(counts.values()) > 50
