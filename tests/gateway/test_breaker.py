from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rollyard.gateway.breaker import FAILURES_TO_OPEN, FIRST_OPEN_S, MAX_OPEN_S, CircuitBreaker


def opened() -> CircuitBreaker:
    breaker = CircuitBreaker()
    for _ in range(FAILURES_TO_OPEN):
        breaker.begin()
        breaker.failed(0.0)
    return breaker


def test_a_success_in_between_keeps_it_closed() -> None:
    breaker = CircuitBreaker()
    for _ in range(3 * FAILURES_TO_OPEN):
        for _ in range(FAILURES_TO_OPEN - 1):
            breaker.failed(0.0)
        breaker.succeeded()
    assert not breaker.is_open
    assert breaker.allows(0.0)


def test_half_open_lets_one_call_through() -> None:
    breaker = opened()
    assert not breaker.allows(FIRST_OPEN_S / 2)
    assert breaker.wait_s(FIRST_OPEN_S / 4) == FIRST_OPEN_S * 3 / 4
    assert breaker.allows(FIRST_OPEN_S)
    assert breaker.begin()
    assert not breaker.allows(FIRST_OPEN_S)
    breaker.gave_up()
    assert breaker.allows(FIRST_OPEN_S)
    breaker.begin()
    breaker.succeeded()
    assert breaker.allows(FIRST_OPEN_S)
    assert not breaker.begin()


@given(st.integers(1, 3000))
def test_it_opens_for_longer_each_time_up_to_a_limit(times: int) -> None:
    breaker, now_s, last_s = opened(), 0.0, 0.0
    for _ in range(min(times, 40)):
        waited_s = breaker.wait_s(now_s)
        assert last_s <= waited_s <= MAX_OPEN_S
        now_s, last_s = now_s + waited_s, waited_s
        assert breaker.begin()
        breaker.failed(now_s)
    assert breaker.wait_s(now_s) >= min(last_s, MAX_OPEN_S)


class OneOnTrial(RuleBasedStateMachine):
    """Any order of calls: while it is open, at most one call that was allowed is under way."""

    @initialize()
    def start(self) -> None:
        self.breaker = CircuitBreaker()
        self.now_s = 0.0
        self.running: list[bool] = []

    @rule(seconds=st.floats(0, 100))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule()
    def call(self) -> None:
        if self.breaker.allows(self.now_s):
            self.running.append(self.breaker.begin())

    @precondition(lambda self: self.running)
    @rule(data=st.data(), end=st.sampled_from(["succeeded", "failed", "gave_up"]))
    def end(self, data: Any, end: str) -> None:
        on_trial = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        if end == "failed":
            self.breaker.failed(self.now_s)
        elif end == "succeeded":
            self.breaker.succeeded()
        elif on_trial:
            self.breaker.gave_up()
        if end == "succeeded":
            assert not self.breaker.is_open

    @invariant()
    def it_never_stays_shut(self) -> None:
        if not any(self.running):
            assert self.breaker.allows(self.now_s + MAX_OPEN_S)


def test_any_order_of_calls() -> None:
    run_state_machine_as_test(OneOnTrial)
