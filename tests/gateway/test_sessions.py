from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from rollyard.gateway.history import ROOT, Canonical, fold
from rollyard.gateway.keys import SessionGrant
from rollyard.gateway.sessions import KnownCall, Session, Sessions, asked_digest
from rollyard.schemas.call import AgentIds, CallEnd, CallIntent
from rollyard.schemas.packed import TokenIds

GRANT = SessionGrant(run="run", rollout_id="r", attempt=1)
USER = {"role": "user", "content": "hello"}
# Calls of these names follow each other, each with one message and one reply.
SHARED: defaultdict[str | None, int] = defaultdict(int, {"a": 2, "b": 4, "c": 6})


def call(number: str, parent: str | None, said: str, **end: Any) -> tuple[CallIntent, CallEnd]:
    who: dict[str, Any] = {"call_id": number, "run": "run", "rollout_id": "r", "attempt": 1, "at_ms": 0}
    intent = CallIntent(
        **who, gateway="g", latest_end_ms=0, parent=parent, shared_messages=SHARED[parent], messages=[USER]
    )
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


@pytest.mark.parametrize("order", [("x", "y"), ("y", "x")])
def test_of_twins_that_say_the_same_each_goes_on_from_its_own_call(order: tuple[str, str]) -> None:
    """Two sub-agents with one task may get one reply; what they thought before it is not the same."""
    session = Session(GRANT, Canonical())
    for seq, thread in enumerate(order, 1):
        intent, end = call(thread, None, "same")
        session.add(structs.replace(intent, agent=AgentIds(thread=thread)), end, seq)
    digests = session.digests([USER, {"role": "assistant", "content": "same"}])
    for thread, wanted in (("x", "x"), ("y", "y"), ("z", order[1]), ("", order[1])):
        found, shared = session.match(fold(ROOT, digests), AgentIds(thread=thread))
        assert found is not None and (found.call_id, shared) == (wanted, 2)
        found, _, until = session.nearest(digests, fold(ROOT, digests), AgentIds(thread=thread))
        assert found is not None and (found.call_id, until) == (wanted, 2)


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


def session_of(*calls: tuple[CallIntent, CallEnd]) -> Session:
    session = Session(GRANT, Canonical())
    for seq, (intent, end) in enumerate(calls, start=1):
        session.add(intent, end, seq)
    return session


def nearest(session: Session, messages: list[dict[str, Any]]) -> tuple[str | None, int]:
    digests = Canonical().digests(messages)
    found, shared, _ = session.nearest(digests, fold(ROOT, digests))
    return (found.call_id if found else None), shared


def test_a_rewritten_history_is_still_a_later_turn_of_the_call_whose_reply_it_holds() -> None:
    session = session_of(call("a", None, "one"), call("b", "a", "two"))
    floating = {"role": "user", "content": "context"}
    one, two = {"role": "assistant", "content": "one"}, {"role": "assistant", "content": "two"}
    assert nearest(session, [USER, floating, one, USER]) == ("a", 1)
    assert nearest(session, [USER, one, floating, USER, two, USER]) == ("b", 2)
    assert nearest(session, [floating, one, USER, two]) == ("b", 0)
    assert nearest(session, [USER, {"role": "assistant", "content": "unheard"}]) == (None, 0)


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 3)), min_size=1, max_size=12))
def test_any_chain_of_deltas_is_one_conversation(steps: list[tuple[int, int]]) -> None:
    """Also where a call shares only a part of its parent."""
    session, messages = Session(GRANT, Canonical()), list[dict[str, Any]]()
    for number, (wanted, count) in enumerate(steps):
        shared = min(wanted, len(messages))
        own = [{"role": "user", "content": f"{number}.{index}"} for index in range(count)]
        intent, end = call(str(number), str(number - 1) if number else None, f"reply {number}")
        session.add(structs.replace(intent, messages=own, shared_messages=shared), end, number + 1)
        messages = [*messages[:shared], *own, end.reply or {}]
        chains_now = Canonical().fold(ROOT, messages)
        found, length = session.match(chains_now)
        assert found is not None
        assert (found.call_id, length, found.length) == (str(number), len(messages), len(messages))
        assert [found.chain(n) for n in range(len(messages) + 1)] == [ROOT, *chains_now]


def test_a_call_that_nothing_continues_is_superseded_by_the_same_request() -> None:
    dead = call("a", None, "", status="aborted", reply=None)
    asked = asked_digest(Canonical().fold(ROOT, [USER])[-1], ROOT, AgentIds())
    assert session_of(dead).superseded_by(asked) == "a"
    assert session_of(dead, call("b", None, "one")).superseded_by(asked) == "b"
    assert session_of(call("a", None, "one"), call("b", "a", "two")).superseded_by(asked) is None
    other_thread = asked_digest(Canonical().fold(ROOT, [USER])[-1], ROOT, AgentIds(thread="t2"))
    assert session_of(dead).superseded_by(other_thread) is None


@pytest.mark.parametrize(
    ("sent", "echoed"),
    [
        ('{"path": "a", "old": "one"}', '{"replace_all":false,"path":"a","old":"one"}'),
        ('{"command": "cd /w && cat a"}', '{"command":"cat a"}'),
        ('{"content": "one  \\n"}', '{"content":"one\\n"}'),
        ('{"timeout": "5000"}', '{"timeout":5000}'),
        ('{"timeout": 5000.0}', '{"timeout":5000}'),
        ("", "{}"),
        ('{"command": "' + "e" * 3000, '{"command": "' + "e" * 2035),
    ],
)
def test_a_reply_is_known_by_the_ids_of_its_calls_whatever_became_of_their_arguments(sent: str, echoed: str) -> None:
    intent, end = call("a", None, "")
    reply = {"role": "assistant", "content": "I try.", "tool_calls": [a_call("c1_0", sent), a_call("c1_1", "{}")]}
    session = session_of((intent, structs.replace(end, reply=reply)))
    echo = {"role": "assistant", "content": "I try.", "tool_calls": [a_call("c10", echoed), a_call("c11", "{}")]}
    found, shared = session.match(fold(ROOT, session.digests([USER, echo, USER])))
    assert found is not None
    assert (found.call_id, shared) == ("a", 2)
    assert session.match(fold(ROOT, session.digests([USER, {**echo, "tool_calls": [a_call("c9", echoed)]}])))[1] == 0


def a_call(number: str, arguments: str) -> dict[str, Any]:
    return {"id": number, "type": "function", "function": {"name": "bash", "arguments": arguments}}


def test_a_session_tells_by_which_rules_an_echo_is_its_reply_and_counts_what_it_holds_for_that() -> None:
    intent, end = call("a", None, "", reply={"role": "assistant", "content": "one", "reasoning_content": "x" * 5000})
    session = session_of((intent, end))
    assert session.size_bytes > 5000
    [found] = [found for found, _ in [session.match(chains("one"))] if found is not None]
    assert session.lenience(found, {"reasoning_content": "x" * 5000, "content": "one", "role": "assistant"}) == ()
    assert session.lenience(found, {"role": "assistant", "content": "one"}) == ("foreign_reply_keys_dropped",)
    strict = Session(GRANT, Canonical(off=["foreign_reply_keys_dropped"]))
    assert strict.lenience(found, {"role": "assistant", "content": "one"}) == ()


def test_the_nearest_reply_is_named_with_its_place() -> None:
    session = session_of(call("a", None, "one"))
    messages = [{"role": "user", "content": "rewritten"}, {"role": "assistant", "content": "one"}, USER]
    digests = Canonical().digests(messages)
    found, shared, until = session.nearest(digests, fold(ROOT, digests))
    assert found is not None
    assert (found.call_id, shared, until) == ("a", 0, 2)
    assert session.nearest(digests[:1], fold(ROOT, digests[:1])) == (None, 0, 0)
