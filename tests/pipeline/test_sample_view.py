from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from branches import (
    AFTER,
    BREAK_AT,
    CONDENSED,
    EXPLORE,
    FIRST,
    RE_TOKENISED,
    REWRITTEN,
    ROLLOUT,
    SECOND,
    THIRD,
    branch,
    forest,
    ids_of,
    token_bytes,
)
from msgspec import structs

from rollyard.pipeline.viewer.rollout import view_of
from rollyard.pipeline.viewer.terminal import PLAIN, RAMP, SAMPLED, TRAINED, render, render_rollout
from rollyard.pipeline.viewer.text import pieces, quoted, segments
from rollyard.pipeline.viewer.tree import Tree, TreeCall
from rollyard.schemas.packed import Logprobs, LossMask, TokenIds, Versions
from rollyard.schemas.sample import Link, Sample

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
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def shown(samples: tuple[Sample, ...], **changes: Any) -> str:
    return "\n".join(render_rollout(view_of(samples), changes.pop("token_bytes", token_bytes), **changes))


def drawing(samples: tuple[Sample, ...]) -> list[str]:
    """The tree without its columns: graph, and what stands there."""
    found = []
    for row in Tree(samples).rows():
        what = row.shows.call_id if isinstance(row.shows, TreeCall) else type(row.shows).__name__
        found.append(f"{row.graph} {what}".replace(" NoneType", ""))
    return found


# --- text ---


def test_trained_tokens_stand_in_brackets_or_are_coloured() -> None:
    plain = render(SAMPLE, token_bytes)
    assert "hi?⟦yo!⟧h" in plain
    assert "\x1b" not in plain
    assert "3 of 7 tokens are trained" in plain
    assert "policy   4, 5" in plain
    assert "mean -2.000" in plain
    coloured = render(SAMPLE, token_bytes, colour=True)
    assert "⟦" not in coloured
    # The probabilities of -1, -2 and -3 are 0.37, 0.14 and 0.0498.
    assert f"{RAMP[2]}y{PLAIN}{RAMP[3]}o{PLAIN}{RAMP[4]}!{PLAIN}" in coloured
    assert COLOURS.sub("", coloured).split("\n\n")[1] == "hi?yo!h"


@pytest.mark.parametrize(
    ("logprob", "style"),
    [(0.0, 0), (-0.1, 0), (-0.11, 1), (-0.69, 1), (-0.7, 2), (-1.7, 3), (-3.1, 4), (-4.7, 5), (-100.0, 5)],
)
def test_the_shade_tells_the_probability(logprob: float, style: int) -> None:
    sample = structs.replace(SAMPLE, logprobs=Logprobs.of([0, 0, 0, logprob, logprob, logprob, 0]))
    assert f"{RAMP[style]}yo!{PLAIN}" in render(sample, token_bytes, colour=True)


def test_a_logprob_that_is_not_known_has_a_colour_of_its_own() -> None:
    sample = structs.replace(SAMPLE, logprobs=Logprobs.of([0, 0, 0, float("nan"), -0.1, float("nan"), 0]))
    coloured = render(sample, token_bytes, colour=True)
    assert f"{TRAINED}y{PLAIN}{RAMP[0]}o{PLAIN}{TRAINED}!{PLAIN}" in coloured
    assert "mean -0.100" in coloured


def test_colours_end_with_the_line() -> None:
    lines = shown(forest(), colour=True).splitlines()
    assert [line for line in lines if line.count(PLAIN) * 2 != len(COLOURS.findall(line))] == []


def test_a_character_of_several_tokens_is_shown_whole() -> None:
    euro = [0x110000 + byte for byte in "€".encode()]
    ids = [104, *euro, 0x110000 + 0xE2, 105, 33]
    sample = structs.replace(SAMPLE, token_ids=TokenIds.of(ids), loss_mask=LossMask.of([0, 1, 1, 1, 1, 1, 1]))
    (_, trained) = segments(sample)
    assert list(pieces(sample, trained, token_bytes)) == [(1, 4, "€"), (4, 6, "\ufffdi"), (6, 7, "!")]
    assert "h⟦€\ufffdi!⟧" in render(sample, token_bytes)
    assert "€" in render(sample, token_bytes, colour=True)


def test_without_a_tokenizer_messages_and_ids_are_shown() -> None:
    text = render(SAMPLE)
    assert "[user]\nhi?" in text
    assert "-> ls({})" in text
    assert "104 105 63 ⟦121 111 33⟧ 104" in text


@pytest.mark.parametrize("colour", [False, True])
def test_what_a_model_wrote_cannot_drive_the_terminal(colour: bool) -> None:
    text = render(structs.replace(SAMPLE, token_ids=TokenIds.of([27, 93, 48, 7, 10, 233, 104])), token_bytes)
    assert "\\x1b]0⟦\\x07\n\xe9⟧" in text
    hostile = "\x1b[2J\x07\r\x9b\x7f\u202e\u2066\ud800\U000e0041"
    sample = structs.replace(
        branch(0, 1, [("c\x1b", hostile, hostile)], drift=(structs.replace(RE_TOKENISED, call_id="c\x1b"),)),
        run=hostile,
        group_id=hostile,
        messages=[{"role": hostile, "content": [{"type": "text", "text": hostile}, hostile]}],
        drift=(structs.replace(RE_TOKENISED, expected=ids_of(hostile[:4]), detail=hostile, continues="\x1b"),),
    )
    for view in (shown((sample,), colour=colour), shown((sample,), colour=colour, token_bytes=None)):
        seen = COLOURS.sub("", view) if colour else view
        assert sorted(set(hostile) & set(seen) - set("[2J")) == []
        assert "\\x1b[2J\\x07\\x0d\\x9b\\x7f\\u202e\\u2066" in seen
        seen.encode()


def test_text_cannot_pass_for_a_mark() -> None:
    text = render(structs.replace(SAMPLE, token_ids=ids_of("a⟦b⟧c⟪⟫")), token_bytes)
    assert text.count("⟦") == 2  # the mark and the legend
    assert "a\\u27e6b⟦\\u27e7c\\u27ea⟧\\u27eb" in text


def test_a_missing_reward_is_not_zero() -> None:
    assert "reward   none" in render(structs.replace(SAMPLE, reward=None))


def test_what_became_of_a_sample_is_said() -> None:
    said = render(
        structs.replace(
            branch(1, 3, (FIRST, SECOND), rewards=(0.5, None)),
            masked="truncated",
            cut_tokens=1200,
            incomplete=True,
            reward=0.25,
            rollout_reward=0.75,
            links=(Link(kind="retry", call_id="c1", to="c0"),),
        )
    )
    assert "no token of it is trained: the rollout was truncated" in said
    assert "1,200 tokens are left out at its end" in said
    assert "has no result in the log" in said
    assert "reward   0.25 of the rollout's 0.75" in said
    assert "turns    2, with rewards 0.5, none" in said
    assert "link     retry of c0" in said


def test_a_text_is_quoted_on_one_line() -> None:
    assert quoted('a\n"b"\t\\\x1b') == '"a\\n\\"b\\"\\t\\\\\\x1b"'
    assert quoted("abcdef", limit=3) == '"abc"...'


# --- branches ---


def test_the_branches_of_a_rollout_are_a_tree() -> None:
    assert drawing(forest()) == [
        "● c1",
        "├─╮",
        "│ ● c2",
        "│ ● c3",
        "│ ■ Sample",
        "✗ DriftPoint",
        "● c5",
        "● c6",
        "■ Sample",
        "",
        "↳ DriftPoint",
        "● c4",
        "■ Sample",
        "",
        "↳ Link",
        "● c7",
        "■ Sample",
    ]


def test_the_tree_says_what_calls_and_branches_are() -> None:
    said = shown(forest())
    assert re.search(r"^● 1 +main +67 \+ 17 +-2.\d+ +0.1 +c1$", said, re.MULTILINE)
    assert re.search(r"^● 6 +sub_agent +50 \+ 12 +-2.\d+ +c4$", said, re.MULTILINE)
    assert f"✗ re_tokenised: leaves the tokens of call 2 at {BREAK_AT}, in message 3\n" in said
    assert '│   expected  " 1 is wrong.\\nRem"\n│   found     "1 is wrong.<end>"\n' in said
    assert "│   'The + 1' became 'The +1'\n" in said
    assert "↳ sub_agent of call 2: leaves its tokens at 12\n" in said
    assert "↳ compaction of call 5\n" in said
    assert "branch 2 of 4: 24 of 207 tokens trained, reward 1, cut by 120 tokens" in said
    assert "branch 3 of 4: 12 of 62 tokens trained, reward 0.25 of the rollout's 1" in said
    assert "branch 4 of 4: 10 of 79 tokens trained, reward 1, incomplete" in said


def test_what_is_linked_to_need_not_be_in_a_sample() -> None:
    retry = branch(0, 1, (FIRST,), links=(Link(kind="retry", call_id="c1", to="c0"),))
    assert "↳ retry of call c0, which is in no sample\n● 1" in shown((retry,))


def test_a_call_that_is_context_first_and_trained_later_is_trained() -> None:
    context = branch(0, 2, (FIRST, SECOND), trained=("c2",))
    found = Tree((context, branch(1, 2, (FIRST, THIRD)))).calls
    assert [found[name].trained for name in ("c1", "c2", "c3")] == [True, True, True]
    assert drawing((branch(0, 1, (FIRST, SECOND), trained=("c2",)),))[0] == "○ c1"


def test_a_branch_may_end_where_another_goes_on() -> None:
    assert drawing((branch(0, 2, (FIRST,)), branch(1, 2, (FIRST, SECOND)))) == ["● c1", "├■ Sample", "● c2", "■ Sample"]


def test_samples_without_turns_or_calls_are_shown() -> None:
    bare = structs.replace(branch(0, 2, (FIRST,)), turns=())
    assert re.search(r"^○ 1 +main +c1$", shown((bare,)), re.MULTILINE)
    assert f"{FIRST[1]}⟦{FIRST[2]}⟧" in shown((bare,))
    assert drawing((structs.replace(bare, calls=()), bare))[:3] == ["■ Sample", "", "○ c1"]


def test_a_drawing_is_narrow_however_often_it_forks() -> None:
    turns = [(f"c{number}", "p", "r") for number in range(150)]
    side = [branch(number, 150, [*turns[:number], (f"d{number}", "q", "r")]) for number in range(1, 150)]
    for samples in ((branch(0, 150, turns), *side), (*side, branch(0, 150, turns))):
        rows = drawing(samples)
        assert max(len(row.split(" ●")[0]) for row in rows if "●" in row) < 12
        assert sum("Sample" in row for row in rows) == 150


# --- text of several branches ---


def test_shared_tokens_come_once_and_trained_ones_each_once() -> None:
    said = shown(forest())
    assert said.count("You mend bugs") == 1
    assert f"⟪the first {BREAK_AT} tokens are those of branch 1⟫\n" in said
    assert '⟪re_tokenised: here stood " 1 is wrong.\\nRem"⟫1 is wrong.<end>' in said
    assert "You ⟪sub_agent: other tokens than before from here on⟫explore." in said
    texts = said.split("── branch 1")[1].replace("(in ⟦ ⟧)", "")
    trained = [turn[2] for turn in (FIRST, SECOND, THIRD, REWRITTEN, AFTER, EXPLORE, CONDENSED)]
    assert re.findall(r"⟦(.*?)⟧", texts, re.DOTALL) == trained
    assert sum(map(len, trained)) == sum(sample.loss_mask.data.count(1) for sample in forest())


def test_a_token_that_is_trained_in_two_branches_is_shown_in_both() -> None:
    prompt = "p" * 40
    twins = (branch(0, 2, [("c1", prompt, "same start, a")]), branch(1, 2, [("c2", prompt, "same start, b")]))
    said = shown(twins)
    assert "⟦same start, a⟧" in said
    assert "⟪the first 40 tokens are those of branch 1⟫\n⟦same start, b⟧" in said


def test_one_sample_is_shown_whole_beside_the_tree_of_all() -> None:
    samples = forest()
    said = "\n".join(render_rollout(view_of(samples, samples[1:2]), token_bytes))
    assert "● 1" in said and "branch 4 of 4" in said
    assert said.count("── branch") == 1
    assert "⟪the first" not in said
    assert f"{FIRST[1]}{FIRST[2]}" in said
    coloured = "\n".join(render_rollout(view_of(samples, samples[1:2]), token_bytes, colour=True))
    assert f"{SAMPLED}{FIRST[2]}{PLAIN}" in coloured
    assert "sampled, not trained" in coloured
    assert ROLLOUT in said


def test_shared_messages_come_once() -> None:
    first = [{"role": "user", "content": "once"}, {"role": "assistant", "content": "a"}]
    samples = forest()[:2]
    samples = (structs.replace(samples[0], messages=first), structs.replace(samples[1], messages=[first[0]]))
    said = shown(samples, token_bytes=None)
    assert said.count("once") == 1
    assert "⟪1 message as in branch 1⟫" in said


def test_the_document_shows_what_is_printed() -> None:
    document = (Path(__file__).resolve().parents[2] / "docs/samples.md").read_text()
    section = document.split("## Looking at samples\n")[1].split("\n## ")[0]
    said = shown(forest()).splitlines()
    examples = [line[4:] for line in section.splitlines() if line.startswith("    ") and "rollyard" not in line]
    assert len(examples) == 20
    assert [line for line in examples if line not in said] == []
