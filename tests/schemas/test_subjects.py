from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.schemas import subjects

names = st.text(min_size=1, max_size=256)


@given(names)
def test_tokens_are_safe_and_stable(name: str) -> None:
    token = subjects.token(name)
    assert re.fullmatch(r"[A-Za-z0-9_=-]{1,48}", token)
    assert subjects.token(token) == token


@given(names, names)
def test_different_names_have_different_tokens(left: str, right: str) -> None:
    if left != right:
        assert subjects.token(left) != subjects.token(right)


def test_plain_names_stand_as_they_are() -> None:
    assert subjects.token("grpo-7b_v2") == "grpo-7b_v2"
    assert subjects.token("a.b").startswith("=")
    with pytest.raises(ValueError, match="256"):
        subjects.token("x" * 257)
    with pytest.raises(ValueError, match="1 to 256"):
        subjects.token("")


@given(names, names, st.integers(0, 5), st.integers(0, 5))
def test_rollout_ids_are_a_function_of_run_task_index(run: str, task: str, one: int, two: int) -> None:
    same = subjects.rollout_id(run, task, one) == subjects.rollout_id(run, task, two)
    assert same == (one == two)
    assert subjects.rollout_id(subjects.token(run), task, one) == subjects.rollout_id(run, task, one)


@pytest.mark.parametrize(
    ("subject", "stream"),
    [
        ("task.r", "TASKS"),
        ("stage.init.local.r", "STAGES"),
        ("log.r.x.call", "LOG"),
        ("sample.r.g.0", "SAMPLES"),
        ("group.r.g", "SAMPLES"),
        ("dead.init.r", "DEAD"),
        ("alarm.r.drift", "ALARMS"),
        ("$KV.rollouts.r.x", "KV_rollouts"),
    ],
)
def test_every_subject_has_its_stream(subject: str, stream: str) -> None:
    assert subjects.stream_of(subject) == stream


def test_unknown_subject() -> None:
    with pytest.raises(ValueError, match="no stream holds"):
        subjects.stream_of("other.x")
