from __future__ import annotations

import math
import re
from dataclasses import replace
from html.parser import HTMLParser
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
    SECOND,
    THIRD,
    branch,
    forest,
    ids_of,
    token_bytes,
)
from msgspec import structs

from rollyard.pipeline.viewer.page import page
from rollyard.pipeline.viewer.rollout import RolloutView, view_of
from rollyard.pipeline.viewer.text import shade
from rollyard.schemas.packed import Logprobs, TokenIds, Versions
from rollyard.schemas.sample import Sample

VOID = {"meta", "br", "hr", "img", "input", "link", "base"}


class Page(HTMLParser):
    """What a page holds: elements with their attributes and text, in order. Fails where tags do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.source = text
        self.open: list[dict[str, Any]] = []
        self.elements: list[dict[str, Any]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), (tag, names)
        element = {"tag": tag, "text": "", "path": [each["tag"] for each in self.open], **dict(attrs)}
        self.elements.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()["tag"] == tag

    def handle_data(self, data: str) -> None:
        for element in self.open:
            element["text"] += data

    def of(self, tag: str, **attributes: str) -> list[dict[str, Any]]:
        wanted = {name.rstrip("_"): value for name, value in attributes.items()}
        return [
            each
            for each in self.elements
            if each["tag"] == tag and all(value in (each.get(name) or "").split() for name, value in wanted.items())
        ]

    def tokens(self) -> list[dict[str, Any]]:
        return [each for each in self.elements if "data-i" in each]


def page_of(samples: tuple[Sample, ...], **changes: Any) -> Page:
    decoded = changes.pop("token_bytes", token_bytes)
    return Page(page(replace(view_of(samples), **changes), decoded))


def check_self_contained(found: Page) -> None:
    """No script, nothing to fetch, no link but within the page."""
    assert {each["tag"] for each in found.elements} & {
        "script",
        "iframe",
        "object",
        "link",
        "img",
        "base",
        "form",
    } == set()
    ids = [each["id"] for each in found.elements if "id" in each]
    assert len(ids) == len(set(ids))
    for each in found.elements:
        assert not {"src", "srcset", "action", "style", "background"} & set(each)
        assert not [name for name in each if name.startswith("on")]
        if "href" in each:
            assert each["href"].removeprefix("#") in ids
    (style,) = found.of("style")
    assert re.search(r"url\(|@import|https?:", style["text"]) is None
    (policy,) = [each for each in found.of("meta") if "http-equiv" in each]
    assert policy["content"] == "default-src 'none'; style-src 'unsafe-inline'"


def test_each_trained_token_stands_there_once_with_its_facts() -> None:
    samples = forest()
    found = page_of(samples)
    wanted = [
        (str(number), f"{logprob:.3f}", "7", f"s{shade(logprob)}")
        for sample in samples
        for number, logprob, mask in zip(sample.token_ids, sample.logprobs, sample.loss_mask, strict=True)
        if mask
    ]
    tokens = found.tokens()
    assert [(each["data-i"], each["data-l"], each["data-v"], each["class"].split()[0]) for each in tokens] == wanted
    assert {each["class"].split()[0] for each in tokens} == {f"s{number}" for number in range(6)}
    turns = [(FIRST, 1), (SECOND, 2), (THIRD, 3), (REWRITTEN, 2), (AFTER, 3), (EXPLORE, 1), (CONDENSED, 1)]
    assert [each["data-n"] for each in tokens] == [str(number) for turn, number in turns for _ in turn[2]]
    assert "".join(each["text"] for each in tokens) == "".join(turn[2] for turn, _ in turns)
    assert [each["text"] for each in found.of("span", class_="n")] == ["\n"]


def test_turns_are_sections_and_shared_tokens_come_once() -> None:
    found = page_of(forest())
    titles = [each["text"] for each in found.of("summary") if each["text"].startswith("Turn")]
    assert [title.split("main")[0].split("sub_agent")[0] for title in titles] == [
        *("Turn 1, call 1", "Turn 2, call 2", "Turn 3, call 3", "Turn 2, call 4", "Turn 3, call 5"),
        *("Turn 1, call 6", "Turn 1, call 7"),
    ]
    assert "tokens 67 to 84 sampled" in titles[0] and "reward 0.1" in titles[0] and titles[0].endswith("c1")
    assert all("open" in each for each in found.of("details", class_="turn"))
    assert sum("You mend bugs" in each["text"] for each in found.of("span", class_="c")) == 1
    notes = [each["text"] for each in found.of("p", class_="note")]
    assert f"The first {BREAK_AT} tokens are those of branch 1." in notes


def test_the_tree_leads_to_turns_and_branches() -> None:
    found = page_of(forest())
    check_self_contained(found)
    rows = [each["text"].strip() for each in found.of("tr")]
    links = [(each["href"], each["text"]) for each in found.of("a") if "tr" in each["path"]]
    assert links[0] == ("#c1", "1")
    assert [target for target, _ in links if target.startswith("#b")] == ["#b0", "#b1", "#b2", "#b3"]
    assert any(f"re_tokenised: leaves the tokens of call 2 at {BREAK_AT}, in message 3" in row for row in rows)
    assert any("reward 0.25 of the rollout's 1" in row for row in rows)
    assert any("cut by 120 tokens" in row for row in rows)
    one = page_of(forest(), asked=forest()[2:3])
    check_self_contained(one)
    assert [each["href"] for each in one.of("a")] == ["#c6", "#b2"]


def test_a_break_stands_where_it_is_with_both_sides() -> None:
    found = page_of(forest())
    (mark,) = found.of("div", class_="break")
    assert f"re_tokenised: leaves the tokens of call 2 at {BREAK_AT}, in message 3" in mark["text"]
    at = found.elements.index(mark)
    assert [each["text"] for each in found.elements[at:] if each["tag"] == "dd"][:3] == [
        '" 1 is wrong.\\nRem"',
        '"1 is wrong.<end>"',
        "'The + 1' became 'The +1'",
    ]
    after = next(each for each in found.elements[at:] if each.get("class") == "c")
    assert after["text"].startswith("1 is wrong.<end><tool>ok")
    (linked,) = found.of("div", class_="link")
    assert "sub_agent of call 2: leaves its tokens at 12" in linked["text"]
    assert found.elements[found.elements.index(linked) - 1]["text"] == EXPLORE[1][:12]


HOSTILE = (
    "</span></div><script>alert(1)</script><img src=x onerror=alert(2)>\"'&amp;<!--\x00\x1b[2J\u202e\ud800]]>{{ 7*7 }}"
)


@pytest.mark.parametrize("decoded", [token_bytes, None])
def test_nothing_that_somebody_wrote_becomes_markup(decoded: Any) -> None:
    point = structs.replace(
        RE_TOKENISED, call_id=HOSTILE, continues=HOSTILE, detail=HOSTILE, position=3, expected=ids_of(HOSTILE)[:16]
    )
    sample = structs.replace(
        branch(0, 1, [(HOSTILE, HOSTILE, HOSTILE)]),
        sample_id=HOSTILE,
        run=HOSTILE,
        group_id=HOSTILE,
        logprob_kind=HOSTILE,
        drift=(point,),
        messages=[{"role": HOSTILE, "content": HOSTILE, "tool_calls": [{"function": {"name": HOSTILE}}, HOSTILE, 7]}],
        tools=[{"type": HOSTILE, HOSTILE: HOSTILE}],
    )
    found = page_of((sample,), token_bytes=decoded, failure=HOSTILE, answer=HOSTILE, excluded={HOSTILE: 1})
    check_self_contained(found)
    assert set("\x00\x1b\u202e\ud800") & set(found.source) == set()
    found.source.encode()
    assert "49" not in found.of("pre")[0]["text"]
    if decoded:
        trained = "".join(each["text"] for each in found.tokens())
        shown = HOSTILE.replace("\x00", "\\x00").replace("\x1b", "\\x1b").replace("\u202e", "\\u202e")
        assert trained.startswith(shown.split("\ud800")[0])


def test_without_a_tokenizer_ids_and_messages_are_shown() -> None:
    messages = [{"role": "user", "content": "Mend it."}, {"role": "assistant", "content": "Done."}]
    found = page_of((structs.replace(branch(0, 1, (FIRST,)), messages=messages),), token_bytes=None)
    assert [each["text"].strip() for each in found.tokens()] == [str(ord(char)) for char in FIRST[2]]
    assert found.of("span", class_="c")[0]["text"].split() == [str(ord(char)) for char in FIRST[1]]
    (section,) = found.of("details", class_="messages")
    assert "user\nMend it." in section["text"] and "assistant\nDone." in section["text"]
    assert "open" not in section


def test_tools_and_messages_that_branches_share_come_once() -> None:
    tools = [{"type": "function", "function": {"name": "look_around"}}]
    said = [{"role": "user", "content": "only once"}, {"role": "assistant", "content": "a"}]
    samples = tuple(structs.replace(each, tools=tools, messages=said) for each in forest())
    found = page_of(samples)
    assert found.source.count("look_around") == 1
    assert found.source.count("only once") == 1
    assert len(found.of("details", class_="tools")) == 4


def test_what_a_branch_samples_and_does_not_train_is_one_span() -> None:
    samples = forest()
    found = page_of(samples, asked=samples[1:2])
    assert [each["text"] for each in found.of("span", class_="u")] == [FIRST[2]]
    assert "not trained here" in found.source


def test_a_logprob_or_version_that_is_not_known_is_a_question_mark() -> None:
    sample = structs.replace(
        branch(0, 1, [("c1", "p", "ab")]),
        logprobs=Logprobs.of([0, math.nan, -0.5]),
        policy_versions=Versions.of([-1, -1, 3]),
    )
    first, second = page_of((sample,)).tokens()
    assert (first["class"], first["data-l"], first["data-v"]) == ("su", "?", "?")
    assert (second["class"], second["data-l"], second["data-v"]) == ("s1", "-0.500", "3")


def test_tokens_that_share_a_character_share_a_span() -> None:
    euro = [0x110000 + byte for byte in "€".encode()]
    sample = structs.replace(branch(0, 1, [("c1", "p", "abcd")]), token_ids=TokenIds.of([112, *euro, 33]))
    first, second = page_of((sample,)).tokens()
    assert (first["text"], first["data-i"], first["data-l"].count(",")) == ("€", ",".join(map(str, euro)), 2)
    assert (second["text"], second["data-i"]) == ("!", "33")


def test_a_page_of_a_big_sample_stays_small() -> None:
    turns = [(f"c{number}", "Out of a tool. " * 80, "A word " * 43) for number in range(20)]
    sample = branch(0, 1, turns)
    trained = sample.loss_mask.data.count(1)
    assert len(sample.token_ids) > 30_000 and trained > 6_000
    found = page_of((sample,))
    assert len(found.tokens()) == trained
    assert len(found.source) < len(sample.token_ids) + 90 * trained + 20_000
    assert len(found.elements) < trained + 1_000
    long = branch(0, 1, [("c1", "Out of a tool. " * 800, "r")])
    (folded,) = [each for each in page_of((long,)).of("details") if "class" not in each]
    assert folded["text"].startswith('12,000 tokens"Out of a tool. Out')
    assert "open" not in folded


def test_a_rollout_without_samples_says_why() -> None:
    view = RolloutView(run="demo", rollout_id="r1", status="failed", failure="agent: it gave up")
    found = Page(page(view))
    assert "agent: it gave up" in found.source
    assert found.of("table") == []
