from __future__ import annotations

from msgspec import structs

from rollyard.pipeline.sample_view import render
from rollyard.schemas.packed import Logprobs, LossMask, TokenIds, Versions
from rollyard.schemas.sample import Sample

SAMPLE = Sample(
    sample_id="s1",
    run="r",
    task_id="t",
    group_id="t",
    rollout_id="r1",
    index=0,
    attempt=1,
    branch=0,
    branches=2,
    scenario="main",
    status="completed",
    token_ids=TokenIds.of([104, 105, 63, 121, 111, 33, 104]),
    loss_mask=LossMask.of([0, 0, 0, 1, 1, 1, 0]),
    logprobs=Logprobs.of([0, 0, 0, -1, -2, -3, 0]),
    policy_versions=Versions.of([-1, -1, -1, 4, 4, 5, -1]),
    reward=0.5,
    messages=[
        {"role": "user", "content": "hi?"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "ls", "arguments": "{}"}}]},
    ],
)


def as_text(ids: list[int]) -> str:
    return "".join(map(chr, ids))


def test_trained_tokens_stand_in_brackets_or_are_green() -> None:
    plain = render(SAMPLE, as_text)
    assert "hi?⟦yo!⟧h" in plain
    assert "\x1b" not in plain
    assert "3 of 7 tokens are trained" in plain
    assert "policy   4, 5" in plain
    assert "mean -2.000" in plain
    coloured = render(SAMPLE, as_text, colour=True)
    assert "\x1b[1;32myo!\x1b[0m" in coloured
    assert "⟦" not in coloured


def test_without_a_tokenizer_messages_and_ids_are_shown() -> None:
    text = render(SAMPLE)
    assert "[user]\nhi?" in text
    assert "-> ls({})" in text
    assert "104 105 63 ⟦121 111 33⟧ 104" in text


def test_what_a_model_wrote_cannot_drive_the_terminal() -> None:
    text = render(structs.replace(SAMPLE, token_ids=TokenIds.of([27, 93, 48, 7, 10, 233, 104])), as_text)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "\\x1b]0⟦\\x07\n\xe9⟧" in text


def test_a_missing_reward_is_not_zero() -> None:
    assert "reward   none" in render(structs.replace(SAMPLE, reward=None))
