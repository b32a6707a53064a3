from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rollyard.gateway.history import ROOT, Canonical
from rollyard.gateway.keys import SessionGrant
from rollyard.gateway.sessions import KnownCall, Session, Sessions
from rollyard.schemas.call import CallEnd, CallIntent
from rollyard.schemas.packed import TokenIds

GRANT = SessionGrant(run="run", rollout_id="r", attempt=1)
USER = {"role": "user", "content": "hello"}


def call(number: str, parent: str | None, said: str, **end: Any) -> tuple[CallIntent, CallEnd]:
    who: dict[str, Any] = {"call_id": number, "run": "run", "rollout_id": "r", "attempt": 1, "at_ms": 0}
    intent = CallIntent(**who, gateway="g", latest_end_ms=0, parent=parent, messages=[USER])
    reply = {"role": "assistant", "content": said}
    return intent, CallEnd(**{**who, "status": "ok", "reply": reply, "completion_ids": TokenIds.of([1]), **end})


def chains(*said: str) -> list[bytes]:
    messages: list[dict[str, Any]] = [USER]
    for text in said:
        messages += [{"role": "assistant", "content": text}, USER]
    return Canonical().fold(ROOT, messages)


@given(st.lists(st.tuples(st.integers(0, 50), st.lists(st.integers(0, 9)), st.lists(st.integers(0, 9), min_size=1))))
def test_ids_are_put_together_from_deltas(steps: list[tuple[int, list[int], list[int]]]) -> None:
    parent, whole = None, []
    for number, (wanted, prompt, sampled) in enumerate(steps):
        shared = min(wanted, len(whole)) if parent else 0
        parent = KnownCall(
            call_id=str(number),
            parent=parent,
            chain=b"",
            tools=ROOT,
            shared_ids=shared,
            prompt_ids=TokenIds.of(prompt),
            completion_ids=TokenIds.of(sampled),
            exact=True,
            seq=number,
        )
        whole = whole[:shared] + prompt + sampled
        assert parent.ids() == TokenIds.of(whole)


def test_only_a_call_that_ended_well_is_a_parent() -> None:
    session = Session(GRANT, Canonical())
    session.add(*call("a", None, "one"), 1)
    session.add(*call("b", None, "two", status="aborted"), 2)
    session.add(*call("c", None, "three", status="error"), 3)
    assert [session.match(chains(said))[1] for said in ("one", "two", "three")] == [2, 0, 0]


def test_of_equal_calls_the_latest_is_the_parent_in_whatever_order_they_come() -> None:
    for order in ((1, 2), (2, 1)):
        session = Session(GRANT, Canonical())
        for seq in order:
            session.add(*call(f"call{seq}", None, "same"), seq)
        parent, shared = session.match(chains("same"))
        assert parent is not None
        assert (parent.call_id, shared) == ("call2", 2)


def test_the_first_end_of_a_call_counts() -> None:
    session = Session(GRANT, Canonical())
    session.add(*call("a", None, "one"), 1)
    session.add(*call("a", None, "other"), 2)
    assert session.match(chains("other")) == (None, 0)


def test_the_longest_chain_is_found() -> None:
    session = Session(GRANT, Canonical())
    session.add(*call("a", None, "one"), 1)
    session.add(*call("b", "a", "two"), 2)
    parent, shared = session.match(chains("one", "two"))
    assert parent is not None
    assert (parent.call_id, shared) == ("b", 4)
    assert session.match(chains("one", "else"))[1] == 2


def test_the_least_used_sessions_are_forgotten_but_not_those_at_work() -> None:
    sessions = Sessions(Canonical(), max_bytes=2500)
    grants = [SessionGrant(run="run", rollout_id=f"r{n}", attempt=1) for n in range(4)]
    for grant in grants:
        sessions.get(grant).add(*call("a", None, "one"), 1)
    sessions.get(grants[0])
    sessions.get(grants[1]).in_flight = 1
    sessions.trim()
    assert len(sessions) == 2
    known = [bool(sessions.get(grant).size_bytes) for grant in grants]
    assert known == [True, True, False, False]
