"""Which gateway a sandbox goes to: the rules, for any history."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rollyard.gateway.relay.choice import SUSPECT_S, Choice
from rollyard.gateway.rendezvous import LOAD_BOUND

URLS = st.lists(st.sampled_from([f"http://g{number}:8400" for number in range(6)]), unique=True)
STEP = st.tuples(st.sampled_from("abcdefgh"), st.sampled_from(["took", "refused", "forget"]), st.floats(0, 1))


def at(choice: Choice, key: str, urls: list[str], now_s: float = 0.0) -> str:
    """Connect, as a relay does when the first gateway takes it."""
    url = choice.order(key, urls, now_s)[0]
    choice.took(key, url)
    return url


@given(URLS, st.lists(STEP), st.sampled_from("abcdefgh"))
def test_every_gateway_is_tried_once_whatever_happened(
    urls: list[str], steps: list[tuple[str, str, float]], key: str
) -> None:
    choice, now_s = Choice(), 0.0
    for who, what, passed_s in steps:
        now_s += passed_s
        for url in choice.order(who, urls, now_s)[:1]:
            if what == "took":
                choice.took(who, url)
            elif what == "refused":
                choice.refused(url, now_s)
            else:
                choice.forget(who)
    assert sorted(choice.order(key, urls, now_s)) == sorted(urls)


@given(URLS.filter(bool), st.lists(st.text("abcdefgh", min_size=1, max_size=3)))
def test_a_sandbox_keeps_its_gateway(urls: list[str], keys: list[str]) -> None:
    choice = Choice()
    first: dict[str, str] = {}
    for key in keys:
        url = at(choice, key, urls)
        assert first.setdefault(key, url) == url


@given(URLS.filter(bool), st.integers(1, 200))
def test_no_gateway_gets_much_more_than_its_share(urls: list[str], count: int) -> None:
    choice = Choice()
    got = Counter(at(choice, f"s{number}", urls) for number in range(count))
    assert max(got.values()) <= LOAD_BOUND * (count / len(urls)) + 2


def test_a_gateway_that_goes_moves_only_its_own() -> None:
    urls = [f"http://g{number}" for number in range(4)]
    choice = Choice()
    before = {key: at(choice, key, urls) for key in map(str, range(100))}
    left = urls[1:]
    after = {key: at(choice, key, left) for key in before}
    assert {key: url for key, url in after.items() if before[key] != url} == {
        key: url for key, url in after.items() if before[key] == urls[0]
    }


def test_a_new_gateway_gets_new_sandboxes_first() -> None:
    choice = Choice()
    for number in range(40):
        at(choice, f"old{number}", ["http://a", "http://b"])
    got = Counter(at(choice, f"new{number}", ["http://a", "http://b", "http://c"]) for number in range(10))
    assert got["http://c"] >= 8


def test_one_that_refused_is_tried_last_for_a_while() -> None:
    choice, urls = Choice(), ["http://a", "http://b"]
    own = at(choice, "s", urls)
    assert choice.refused(own, 10.0)
    assert not choice.refused(own, 10.5)
    assert choice.order("s", urls, 11.0)[-1] == own
    assert choice.order("s", urls, 10.5 + SUSPECT_S)[0] == own


def test_a_sandbox_that_moved_stays_where_it_is() -> None:
    choice, urls = Choice(), ["http://a", "http://b"]
    own = at(choice, "s", urls)
    choice.refused(own, 0.0)
    other = at(choice, "s", urls, 0.1)
    assert other != own
    assert choice.order("s", urls, 100.0)[0] == other
