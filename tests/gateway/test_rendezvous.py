from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rollyard.gateway.rendezvous import LOAD_BOUND, choose, ranking

SESSIONS = st.text(max_size=10)
LOADS = st.dictionaries(st.text(min_size=1, max_size=6), st.integers(0, 200_000), min_size=1, max_size=8)


def idle(count: int) -> dict[str, int]:
    return {f"s{number}": 0 for number in range(count)}


@given(LOADS, SESSIONS, st.integers(0, 200_000))
def test_the_choice_depends_on_nothing_but_session_and_loads(loads: dict[str, int], session: str, cost: int) -> None:
    turned = dict(reversed(loads.items()))
    assert choose(session, loads, cost) == choose(session, turned, cost)


@given(LOADS, SESSIONS, st.integers(1, 200_000))
def test_nobody_above_the_bound_gets_a_call(loads: dict[str, int], session: str, cost: int) -> None:
    chosen = choose(session, loads, cost)
    assert loads[chosen] < LOAD_BOUND * (sum(loads.values()) + cost) / len(loads)
    for preferred in ranking(session, loads):
        if preferred == chosen:
            break
        assert loads[preferred] >= LOAD_BOUND * (sum(loads.values()) + cost) / len(loads)


@given(st.integers(1, 6), st.lists(st.tuples(SESSIONS, st.integers(1, 50_000)), min_size=1, max_size=60))
def test_no_server_gets_much_more_than_its_share_of_tokens(count: int, calls: list[tuple[str, int]]) -> None:
    loads = idle(count)
    for session, cost in calls:
        loads[choose(session, loads, cost)] += cost
    total, largest = sum(loads.values()), max(cost for _, cost in calls)
    assert max(loads.values()) <= LOAD_BOUND * total / count + largest


@given(st.integers(2, 6), st.lists(SESSIONS, min_size=1, unique=True))
def test_a_server_that_goes_moves_only_its_own_sessions(count: int, sessions: list[str]) -> None:
    before = {session: choose(session, idle(count)) for session in sessions}
    for session, server in before.items():
        if server != f"s{count - 1}":
            assert choose(session, idle(count - 1)) == server


@given(st.integers(1, 6), SESSIONS)
def test_a_session_comes_back_to_its_server_when_the_load_is_gone(count: int, session: str) -> None:
    home = choose(session, idle(count))
    crowded = idle(count) | {home: 1_000}
    if count > 1:
        assert choose(session, crowded) == ranking(session, crowded)[1]
    assert choose(session, idle(count)) == home


def test_sessions_spread_over_servers() -> None:
    counts = Counter(choose(f"session {number}", idle(4)) for number in range(400))
    assert min(counts.values()) > 50
