from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollyard.gateway.keys import SessionGrant
from rollyard.gateway.sampling import NEUTRAL, call_seed, effective
from rollyard.schemas.task import Sampling


def grant(rollout: str = "r1", **sampling: object) -> SessionGrant:
    return SessionGrant(run="run", rollout_id=rollout, attempt=1, sampling=Sampling(**sampling))  # type: ignore[arg-type]


def test_neutral_where_nobody_says_anything() -> None:
    assert effective({}, grant(), [], None) == NEUTRAL


def test_the_agent_is_heard_and_the_task_has_the_last_word() -> None:
    asked = {"temperature": 0.2, "top_p": 0.9, "presence_penalty": 0.1}
    params = effective(asked, grant(temperature=0.0, min_p=0.1), [], None)
    assert params == {"temperature": 0.0, "top_p": 0.9, "top_k": 0, "min_p": 0.1, "presence_penalty": 0.1}


@given(st.none() | st.integers(1, 99), st.none() | st.integers(1, 99), st.none() | st.integers(1, 99))
def test_max_tokens_is_the_tasks_or_the_agents_but_never_over_the_budget(
    asked: int | None, own: int | None, left: int | None
) -> None:
    params = effective({"max_tokens": asked} if asked else {}, grant(max_tokens=own), [], left)
    allowed = [n for n in (own or asked, left) if n is not None]
    assert params.get("max_tokens") == (min(allowed) if allowed else None)


def test_stop_strings_add_up() -> None:
    assert effective({"stop": ["a", "b"]}, grant(stop=("b", "c")), [], None)["stop"] == ["a", "b", "c"]


def test_a_retry_has_the_same_seed_and_every_rollout_and_turn_another() -> None:
    messages = [{"role": "user"}, {"role": "assistant"}, {"role": "user"}]
    seeds = {
        effective({"seed": 99}, grant(rollout, seed=1), messages[:count], None)["seed"]
        for rollout in ("r1", "r2")
        for count in (1, 3)
    }
    assert len(seeds) == 4
    again = effective({}, grant("r1", seed=1), messages, None)["seed"]
    assert again == call_seed(1, "r1", 1)
    assert again in seeds
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_the_agents_seed_stands_where_the_task_has_none() -> None:
    assert effective({"seed": 5}, grant(), [], None)["seed"] == 5
