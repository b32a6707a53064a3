"""What holds of any session: by random agents before the kit's gateway, and by the generator of tests/stages.

Shuffled, doubled and interleaved, the same comes out; what is dropped leaves a mark. Every sampled token of a call that
an agent had is trained once, and what stands before it is what the model saw.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import Call, Seen, Story, common, number, seen
from kit_agents import Chat, user
from kit_play import PLAIN, WILD, Player, shuffled
from kit_template import Reply, Template

from rollyard.pipeline.digest import sample_digest
from rollyard.schemas.call import CallEnd, CallIntent
from rollyard.schemas.policy import SamplePolicy
from rollyard.schemas.sample import Sample
from rollyard.stages.stitchers.forest import grow
from rollyard.stages.stitchers.outcome import Outcome
from rollyard.stages.stitching import outcome_of

RANDOMS = st.randoms(use_true_random=False)
SEEDS = st.integers(0, 1 << 32)
"""In place of RANDOMS where an example is long: they are not made simpler when they fail."""
CALLS = st.integers(1, 24)
MODE = st.sampled_from(["tokens", "capture"])
TEMPLATES = st.builds(
    Template, drops_reasoning=st.booleans(), shows_tools=st.booleans(), splits=st.booleans(), counts=st.booleans()
)
NO_FORK = tuple(move for move in PLAIN if move != "fork")
"""Nobody can tell which of two twins one with a thread of its own was forked from."""
REASONS = {
    *("lost", "error", "aborted", "superseded", "untrainable", "empty", "bad_logprobs", "nonfinite_logprobs"),
    *("no_intent", "broken", "dead"),
}
EVERYTHING = SamplePolicy(
    scenarios=("main", "sub_agent", "compaction", "summary", "title", "heartbeat", "count"), min_trained_tokens=1
)


def played(rng: random.Random, mode: str, template: Template, calls: int, moves: tuple[str, ...]) -> Player:
    return Player(Story(mode=mode, template=template), rng).play(calls, moves)


def check_sample(story: Story, sample: Sample) -> Counter[int]:
    """Everything in a sample, id by id; returns how many ids of each call it trains."""
    ids, mask = sample.token_ids.tolist(), sample.loss_mask.tolist()
    logprobs, versions = sample.logprobs.tolist(), sample.policy_versions.tolist()
    assert len(ids) == len(mask) == len(logprobs) == len(versions)
    assert [span.call_id for span in sample.turns] == list(sample.calls)
    last = story.calls[number(sample.calls[-1])]
    assert ids == last.prompt + last.sampled
    assert last.end is not None
    assert sample.messages[-1] == last.end.reply
    trained: Counter[int] = Counter()
    sampled: set[int] = set()
    for span in sample.turns:
        call = story.calls[number(span.call_id)]
        assert (span.start, span.end) == (len(call.prompt), len(call.ids))
        assert ids[: span.end] == call.ids, "the model saw something else before it"
        places = range(span.start, span.end)
        assert not sampled & set(places)
        sampled |= set(places)
        assert {versions[at] for at in places} == {1}
        assert {mask[at] for at in places} == {int(span.trained)}
        if span.trained:
            trained[call.number] += len(call.sampled)
            assert logprobs[span.start : span.end] == story.logprobs(call)
    assert all(mask[at] == 0 and versions[at] == -1 for at in range(len(ids)) if at not in sampled)
    assert all(logprobs[at] == 0.0 for at in range(len(ids)) if not mask[at])
    assert trained, "a sample that trains nothing"
    return trained


def check_trained(player: Player, outcome: Outcome, policy: SamplePolicy) -> None:
    """Every sampled id of a call that an agent had, of a trained scenario, is trained once, and no other one."""
    trained: Counter[int] = Counter()
    for sample in outcome.samples:
        here = check_sample(player.story, sample)
        assert not here.keys() & trained.keys()
        trained += here
    wanted = {call.number: len(call.sampled) for call in player.good() if call.request.scenario in policy.scenarios}
    assert trained == wanted
    assert sum(sum(sample.loss_mask) for sample in outcome.samples) == sum(wanted.values())
    assert [sample.branch for sample in outcome.samples] == list(range(len(outcome.samples)))
    assert {sample.branches for sample in outcome.samples} <= {len(outcome.samples)}


def check_forest(story: Story, forest: Seen) -> None:
    """What holds of every forest, whatever the agents did."""
    in_branches = {at for branch in forest.branches for at in branch}
    assert in_branches | forest.excluded.keys() == {call.number for call in story.calls}
    assert not in_branches & forest.excluded.keys()
    assert set(forest.excluded.values()) <= REASONS
    for branch in forest.branches:
        for above, below in pairwise(branch):
            ids = story.calls[above].ids
            assert story.calls[below].prompt[: len(ids)] == ids
    assert all(to < at for at, to in forest.continues.items()), "a call goes on from a later one"
    assert all(to < at for _, at, to in forest.links)
    assert forest.incomplete == [call.number for call in story.calls if call.end is None]
    for at in in_branches:
        check_break(story, forest, at)


def check_break(story: Story, forest: Seen, at: int) -> None:
    """A call drifts where it leaves the ids of what it goes on from, or begins as something that is linked."""
    point, to = forest.drift.get(at), forest.continues.get(at)
    if to is not None and story.calls[to].good:
        earlier, prompt = story.calls[to].ids, story.calls[at].prompt
        if prompt[: len(earlier)] != earlier:
            assert point is not None, "it leaves the ids of what it goes on from, and nothing says so"
        elif point is not None:
            assert point.reason in ("retry", "compaction", "sub_agent")
    if point is not None:
        continues = None if point.continues is None else number(point.continues)
        earlier = [] if continues is None else story.calls[continues].logged
        where = common(story.calls[at].prompt, earlier)
        assert point.position == where
        assert point.expected.tolist() == earlier[where : where + 16]
        assert point.found.tolist() == story.calls[at].prompt[where : where + 16]


# --- agents that keep to their history ---


@settings(max_examples=120, deadline=None)
@given(rng=RANDOMS, mode=MODE, calls=CALLS)
def test_branches_are_those_of_the_agents(rng: random.Random, mode: str, calls: int) -> None:
    player = played(rng, mode, Template(), calls, PLAIN)
    forest = player.story.grown()
    check_forest(player.story, forest)
    assert forest.branches == player.branches()
    missed = {call.number: "dead" for call in player.story.calls if call.good and call.number not in player.had}
    assert {at: why for at, why in forest.excluded.items() if why == "dead"} == missed
    assert set(forest.reasons.values()) <= {"retry"}, "nothing was rewritten"
    check_trained(player, player.story.outcome(), SamplePolicy())


@settings(max_examples=60, deadline=None)
@given(rng=RANDOMS, calls=CALLS)
def test_what_the_gateway_keeps_is_never_lost_by_template_or_tokeniser(rng: random.Random, calls: int) -> None:
    """In tokens mode a template that is append-only breaks no chain, whatever else it does."""
    template = Template(drops_reasoning=True, splits=True)
    player = played(rng, "tokens", template, calls, (*PLAIN, "forget"))
    forest = player.story.grown()
    assert forest.branches == player.branches()
    assert set(forest.reasons.values()) <= {"retry"}


@settings(max_examples=120, deadline=None)
@given(rng=RANDOMS, mode=MODE, calls=CALLS, curt=st.booleans())
def test_a_call_goes_on_from_what_its_agent_had_last(rng: random.Random, mode: str, calls: int, curt: bool) -> None:
    """Also where all replies are the same words, so that a reply says nothing of whose it was."""
    player = Player(Story(mode=mode), rng, curt=curt).play(calls, PLAIN)
    assert player.story.grown().continues == player.after


@settings(max_examples=150, deadline=None)
@given(rng=RANDOMS, mode=MODE, calls=CALLS)
def test_twins_that_say_who_they_are_are_told_apart(rng: random.Random, mode: str, calls: int) -> None:
    """They ask the same and may be answered the same: no reply that one of them had is taken for one it had not."""
    player = Player(Story(mode=mode), rng, twins=True, threads=True).play(calls, NO_FORK)
    forest = player.story.grown()
    check_forest(player.story, forest)
    assert forest.continues == player.after
    missed = {call.number for call in player.story.calls if call.good and call.number not in player.had}
    assert {at for at, why in forest.excluded.items() if why == "dead"} == missed
    check_trained(player, player.story.outcome(), SamplePolicy())


@settings(max_examples=100, deadline=None)
@given(rng=RANDOMS, mode=MODE, calls=CALLS)
def test_twins_that_do_not_are_trained_right_or_not_at_all(rng: random.Random, mode: str, calls: int) -> None:
    """Nobody can tell whose reply it was; what is trained was sampled, once, after what the model saw."""
    player = Player(Story(mode=mode), rng, twins=True).play(calls, PLAIN)
    forest = player.story.grown()
    check_forest(player.story, forest)
    trained: Counter[int] = Counter()
    for sample in player.story.outcome().samples:
        here = check_sample(player.story, sample)
        assert not here.keys() & trained.keys()
        trained += here
    assert trained.keys() | {at for at, why in forest.excluded.items() if why == "dead"} == {
        call.number for call in player.story.calls if call.good
    }


# --- agents that do whatever they like ---


@settings(max_examples=150, deadline=None)
@given(rng=RANDOMS, mode=MODE, template=TEMPLATES, calls=CALLS)
def test_every_token_that_an_agent_had_is_trained_once(
    rng: random.Random, mode: str, template: Template, calls: int
) -> None:
    player = played(rng, mode, template, calls, WILD)
    forest = player.story.grown()
    check_forest(player.story, forest)
    assert forest.branches == player.branches()
    for policy in (SamplePolicy(), EVERYTHING):
        check_trained(player, player.story.outcome(policy=policy), policy)


@settings(max_examples=80, deadline=None)
@given(rng=RANDOMS, mode=MODE, template=TEMPLATES, calls=CALLS)
def test_order_and_doubles_do_not_matter(rng: random.Random, mode: str, template: Template, calls: int) -> None:
    story = played(rng, mode, template, calls, WILD).story
    commit = story.close()
    expected = outcome_of(story.events, commit)
    again = outcome_of(shuffled(story.events, rng), commit)
    assert again == expected
    assert list(map(sample_digest, again.samples)) == list(map(sample_digest, expected.samples))
    assert seen(grow(shuffled(story.call_events(), rng))) == story.grown()


@settings(max_examples=40, deadline=None)
@given(rng=RANDOMS, mode=MODE, calls=CALLS)
def test_stitching_changes_nothing_of_what_it_reads(rng: random.Random, mode: str, calls: int) -> None:
    story = played(rng, mode, Template(), calls, WILD).story
    before = deepcopy(story.events)
    first = story.outcome()
    assert story.events == before
    assert story.outcome() == first


@settings(max_examples=100, deadline=None)
@given(rng=RANDOMS, mode=MODE, calls=CALLS, whole=st.booleans())
def test_what_is_dropped_is_marked_and_never_guessed(rng: random.Random, mode: str, calls: int, whole: bool) -> None:
    """Ends or intents are missing: their calls say so, and every call that is still trained is trained right."""
    player = played(rng, mode, Template(), calls, PLAIN if whole else WILD)
    story = player.story
    events = story.call_events()
    missing = rng.sample(events, rng.randint(1, max(1, len(events) // 4)))
    kept = [each for each in events if each not in missing]
    gone_intents = {number(each.call_id) for _, each in missing if isinstance(each, CallIntent)}
    gone_ends = {number(each.call_id) for _, each in missing if isinstance(each, CallEnd)}
    forest = seen(grow(kept))
    commit = story.close()
    life = [(seq, each) for seq, each in story.events if not isinstance(each, CallIntent | CallEnd)]
    outcome = outcome_of([*kept, *life], commit)
    for at in gone_ends - gone_intents:
        assert at in forest.incomplete
        assert forest.excluded[at] in ("lost", "broken")
    for at in gone_intents - gone_ends:
        if story.calls[at].end is not None:
            assert forest.excluded[at] == "no_intent"
    trained: Counter[int] = Counter()
    for sample in outcome.samples:
        here = check_sample(story, sample)
        assert not here.keys() & trained.keys()
        trained += here
    assert not trained.keys() & (gone_ends | gone_intents)


@settings(max_examples=60, deadline=None)
@given(rng=RANDOMS, mode=MODE, agents=st.integers(2, 4), turns=st.integers(1, 6), threads=st.booleans())
def test_how_agents_interleave_does_not_matter(
    rng: random.Random, mode: str, agents: int, turns: int, threads: bool
) -> None:
    """One after the other, turn by turn, or all at once: the same samples."""

    def play(order: Sequence[int], *, at_once: bool) -> list[tuple[list[int], list[int]]]:
        story = Story(mode=mode)
        chats = [
            Chat(story, system=f"You are {at}.", headers={"thread-id": f"t{at}"} if threads else {})
            for at in range(agents)
        ]
        waiting: dict[int, Call] = {}
        done = Counter[int]()

        def settle(at: int) -> None:
            if (call := waiting.pop(at, None)) is not None:
                chats[at].take(call.finish(Reply(text=f"answer {done[at]} of {at}")))

        for at in order:
            settle(at)
            done[at] += 1
            waiting[at] = chats[at].begin(user(f"question {done[at]} of {at}"))
            if not at_once:
                settle(at)
        for at in range(agents):
            settle(at)
        assert sorted(story.grown().excluded) == []
        samples = story.outcome().samples
        return sorted((sample.token_ids.tolist(), sample.loss_mask.tolist()) for sample in samples)

    in_turn = [at for at in range(agents) for _ in range(turns)]
    mixed = rng.sample(in_turn, len(in_turn))
    expected = play(in_turn, at_once=False)
    assert len(expected) == agents
    assert play(mixed, at_once=False) == expected
    assert play(mixed, at_once=True) == expected


# --- length ---


@pytest.mark.parametrize("mode", ["tokens", "capture"])
@pytest.mark.parametrize("turns", [1, 2, 3, 63, 64, 65, 66, 129, 200])
def test_pieces_join_to_the_last_prompt_and_reply(mode: str, turns: int) -> None:
    """Also where the gateway writes a record whole now and then, so that no reader walks far."""
    story = Story(mode=mode)
    agent = Chat(story)
    for turn in range(turns):
        agent.ask(user(f"question {turn}"))
    assert sum(not call.plan.intent.shared_messages for call in story.calls) == 1 + (turns > 64) + (turns > 128)
    forest = story.grown()
    assert forest.branches == [list(range(turns))]
    assert (forest.drift, forest.links, forest.excluded) == ({}, [], {})
    (sample,) = story.outcome().samples
    assert check_sample(story, sample) == {call.number: len(call.sampled) for call in story.calls}


@settings(max_examples=4, deadline=None)
@given(seed=SEEDS, mode=MODE, calls=st.integers(150, 250))
def test_long_sessions_with_few_words_are_no_other(seed: int, mode: str, calls: int) -> None:
    """Two agents, long enough for records that are whole."""
    player = Player(Story(mode=mode), random.Random(seed), curt=True)
    player.play(2, ("start",)).play(calls, (*PLAIN[5:], *("turn",) * 60))
    check_forest(player.story, player.story.grown())
    assert player.story.grown().continues == player.after
    assert player.story.grown().branches == player.branches()


@settings(max_examples=6, deadline=None)
@given(seed=SEEDS, mode=MODE, calls=st.integers(100, 200))
def test_long_sessions_are_no_other(seed: int, mode: str, calls: int) -> None:
    moves = (*PLAIN, *("turn",) * 30, "sub_agent", "edit")
    player = played(random.Random(seed), mode, Template(), calls, moves)
    check_forest(player.story, player.story.grown())
    assert player.story.grown().branches == player.branches()
    check_trained(player, player.story.outcome(), SamplePolicy())
