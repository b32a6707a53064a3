"""Claude Code beyond a plain task: sub-agents, compaction, a stream that breaks, a context that is too long."""

from __future__ import annotations

from typing import Any

import pytest
from rig import Session
from scenes import FIRST, SECOND, Scene, say, scenes, shell, task, write_first

AGENT = "claude"
PARTS = ("Please make first.txt, alone.", "Please make second.txt, alone.")
SUMMARY = "So far first.txt is written, and second.txt is not."


def part(prompt: str) -> dict[str, Any]:
    arguments = {"description": "Make a file", "prompt": prompt, "subagent_type": "general-purpose"}
    return {"name": "Agent", "arguments": arguments}


SUB_AGENTS = [
    {"match": PARTS[0], "turns": [say("", write_first(AGENT)), say("The first is there.")]},
    {"match": PARTS[1], "turns": [say("", shell(AGENT, "echo two > second.txt")), say("The second is there.")]},
    {"match": "", "turns": [say("I share the work.", *map(part, PARTS)), say("Both files are there.")]},
]


def compacted(*turns: dict[str, Any]) -> list[dict[str, Any]]:
    """The work until there is too much of it, the summary, and the rest. The last turn before is kept beside it."""
    rest = [say("It was cut off."), say("", shell(AGENT, "echo two > second.txt")), say("Both files are there.")]
    return [
        {"match": SUMMARY, "turns": rest},
        {"match": "detailed summary", "turns": [say(SUMMARY)]},
        {"match": "", "turns": [say("I write the first file.", write_first(AGENT)), *turns]},
    ]


LOOK = say("I look at it.", shell(AGENT, "cat first.txt"))
COUNT = [shell(AGENT, f"seq {start} {start + 4500}") for start in (10_000, 20_000, 30_000)]
# Claude takes four characters for a token when it decides what to drop: of digits that is wrong, of words it is right.
READ = shell(AGENT, "yes 'the answer to the question is in the other file' | head -n 580")
SCENES = {
    "sub-agents": Scene(agent=AGENT, conversations=SUB_AGENTS),
    "compaction": Scene(
        agent=AGENT,
        conversations=compacted(say("I count.", *COUNT), LOOK, LOOK),
        options={"env": {"CLAUDE_CODE_AUTO_COMPACT_WINDOW": "100000"}},
    ),
    "broken": Scene(agent=AGENT, conversations=task(AGENT, break_after_tokens=3), tokens=True),
    "overflow": Scene(
        agent=AGENT,
        conversations=compacted(LOOK, *(say("I read.", READ) for _ in range(3))),
        script={"max_model_len": 48_000},
    ),
    "early-overflow": Scene(
        agent=AGENT,
        conversations=[{"match": "", "turns": [say("I count.", write_first(AGENT), COUNT[0])]}],
        script={"max_model_len": 40_000},
    ),
}


@scenes("sub-agents", "compaction", "broken", "overflow")
def test_the_files_are_there(name: str, session: Session) -> None:
    assert session.done.exit_code == 0, session.table()
    assert (session.done.work / "first.txt").read_text() == FIRST, session.table()
    assert (session.done.work / "second.txt").read_text() == SECOND, session.table()


@pytest.mark.scene("sub-agents")
def test_sub_agents_at_work_together_are_chains_of_their_own(session: Session) -> None:
    session.assert_exact()
    session.assert_chain(session.calls("main"))
    sub_agents = session.calls("sub_agent")
    threads = sorted({call.intent.agent.sub_agent for call in sub_agents})
    assert len(threads) == 2, session.table()
    for thread in threads:
        session.assert_chain([call for call in sub_agents if call.intent.agent.sub_agent == thread])
    assert [len(chain) for chain in session.chains()] == [2, 2, 2]
    begun = [(call, session.calls("main")[0]) for call in sub_agents if call.intent.parent is None]
    assert session.links("sub_agent") == begun
    assert session.drift() == {"sub_agent": 2}
    assert len({call.intent.agent.session for call in session.records}) == 1


@pytest.mark.scene("compaction")
def test_a_compaction_follows_from_the_usage_that_is_reported_and_begins_another_chain(session: Session) -> None:
    session.assert_exact()
    [compaction] = session.calls("compaction")
    before = [call for call in session.calls("main") if call.intent_seq < compaction.intent_seq]
    after = [call for call in session.calls("main") if call.intent_seq > compaction.intent_seq]
    assert (len(before), len(after)) == (3, 2), session.table()
    session.assert_chain(before)
    # The last turn is not summed up: its reply is kept, behind the summary.
    session.assert_chain([*before[:-1], compaction])
    assert (after[0].intent.parent, after[0].intent.drift) == (before[-1].intent.call_id, "history_edited")
    assert after[1].intent.parent == after[0].intent.call_id
    assert session.chains() == [before, [*before[:-1], compaction], after]
    assert session.drift() == {"compaction": 1}
    assert session.links("compaction") == [(after[0], before[-2])]


@pytest.mark.scene("broken")
def test_a_broken_stream_is_asked_for_again_without_a_stream(session: Session) -> None:
    session.assert_exact(unfinished=1)
    dead, *living = session.records
    assert dead.end is not None and (dead.end.status, len(dead.end.completion_ids)) == ("error", 3), session.table()
    assert [call.intent.stream for call in session.records] == [True, False, True, True]
    assert living[0].intent.supersedes == dead.intent.call_id
    session.assert_chain(living)
    assert len(session.chains()) == 1, session.table()
    assert session.links("retry") == [(living[0], dead)]


@pytest.mark.scene("overflow")
def test_a_context_that_is_too_long_is_compacted(session: Session) -> None:
    session.assert_exact(unfinished=1)
    [refused] = [call for call in session.records if call.end and call.end.status == "error"]
    assert refused.end is not None and refused.end.http_status == 400
    [compaction] = session.calls("compaction")
    before = [call for call in session.calls("main") if call.intent_seq < refused.intent_seq]
    after = [call for call in session.calls("main") if call.intent_seq > compaction.intent_seq]
    assert refused.intent_seq < compaction.intent_seq
    assert session.chains() == [before, [*before[:-1], compaction], after], session.table()
    assert session.drift() == {"compaction": 1}
    assert session.links("compaction") == [(after[0], before[-2])]


@pytest.mark.scene("early-overflow")
def test_a_context_that_is_too_long_at_once_is_told_to_the_user(session: Session) -> None:
    assert session.done.exit_code == 1
    last = session.done.events()[-1]
    assert (last["type"], last["api_error_status"], last["result"]) == ("result", 400, "Prompt is too long")
    session.assert_exact(unfinished=1)
    assert len(session.records) == 2, session.table()
