"""The agents of the Chat protocol beyond a plain task: a sub-agent, broken streams, a context that is too long."""

from __future__ import annotations

import pytest
from rig import Session
from scenes import FIRST, SECOND, Scene, say, scenes, shell, task, write_first

PART = "Please make second.txt, alone."
SUMMARY = "So far first.txt is written, and second.txt is not."
TWO = shell("opencode", "echo two > second.txt")

HERMES_BROKEN = [
    say("I write the first file.", break_after_tokens=3),
    say("I write both.", write_first("hermes"), shell("hermes", "echo two > second.txt")),
    say("Both files are there."),
]
# opencode may count the broken reply as a turn: see its test. So the second of these turns may come twice, or once.
OPENCODE_BROKEN = [
    say("I write the first file.", write_first("opencode"), break_after_tokens=3),
    say("", shell("opencode", "cat first.txt"), TWO),
    say("", shell("opencode", "cat first.txt"), TWO),
    say("Both files are there."),
]
SUB_AGENT = [
    {"match": PART, "turns": [say("", TWO), say("It is there.")]},
    {
        "match": "",
        "turns": [
            say(
                "I share the work.",
                write_first("opencode"),
                {"name": "task", "arguments": {"description": "Make", "prompt": PART, "subagent_type": "general"}},
            ),
            say("Both files are there."),
        ],
    },
]
OVERFLOW = [
    {"match": "did we do", "turns": [say("It was cut off."), say("", TWO), say("Both files are there.")]},
    {"match": "summary", "turns": [say(SUMMARY)]},
    {
        "match": "",
        "turns": [say("I write.", write_first("opencode")), say("I count.", shell("opencode", "seq 4000"))],
    },
]
SCENES = {
    "hermes-broken": Scene(agent="hermes", conversations=[{"match": "", "turns": HERMES_BROKEN}]),
    "mini-broken": Scene(agent="mini-swe-agent", conversations=task("mini-swe-agent", break_after_tokens=3)),
    "opencode-broken": Scene(agent="opencode", conversations=[{"match": "", "turns": OPENCODE_BROKEN}]),
    "opencode-sub-agent": Scene(agent="opencode", conversations=SUB_AGENT),
    "opencode-overflow": Scene(agent="opencode", conversations=OVERFLOW, script={"max_model_len": 18_000}),
}


@scenes(*SCENES)
def test_the_files_are_there(name: str, session: Session) -> None:
    # opencode says so at the end if anything failed on the way.
    assert session.done.exit_code == (1 if name == "opencode-overflow" else 0), session.table()
    assert (session.done.work / "first.txt").read_text() == FIRST, session.table()
    assert (session.done.work / "second.txt").read_text() == SECOND, session.table()


@pytest.mark.scene("hermes-broken")
def test_hermes_keeps_an_empty_reply_for_one_that_broke(session: Session) -> None:
    session.assert_exact(unfinished=1)
    dead, *living = session.records
    assert dead.end is not None and (dead.end.status, len(dead.end.completion_ids)) == ("error", 3), session.table()
    assert living[0].messages[: len(dead.messages)] == dead.messages
    assert [message["role"] for message in living[0].messages[len(dead.messages) :]] == ["assistant", "user"]
    assert session.chains() == [living], session.table()


@pytest.mark.scene("mini-broken")
def test_mini_swe_agent_asks_again_for_a_reply_that_broke(session: Session) -> None:
    session.assert_exact(unfinished=1)
    dead, *living = session.records
    assert dead.end is not None and dead.end.status == "error", session.table()
    assert living[0].intent.supersedes == dead.intent.call_id
    session.assert_chain(living)
    assert len(session.chains()) == 1, session.table()


@pytest.mark.scene("opencode-broken")
def test_opencode_asks_again_and_may_keep_an_empty_reply_for_the_one_that_broke(session: Session) -> None:
    dead = [call for call in session.records if call.end and call.end.status == "error"]
    session.assert_exact(unfinished=len(dead))
    # Its title breaks as well, and is not always asked for again.
    [broken] = [call for call in dead if call.intent.scenario == "main"]
    main = [call for call in session.calls("main") if call is not broken]
    assert main[0].intent.supersedes == broken.intent.call_id, session.table()
    roles = [message["role"] for message in main[1].messages]
    if roles == ["system", "user", "assistant", "tool"]:
        session.assert_chain(main)
        return
    # Whether the beginning of the text had reached its store when the stream broke is a matter of milliseconds.
    assert roles == ["system", "user", "assistant", "assistant", "tool"], session.table()
    assert not main[1].messages[2]["content"]
    assert (main[1].intent.parent, main[1].intent.drift) == (main[0].intent.call_id, "history_edited")
    assert [chain for chain in session.chains() if chain[0] in main] == [main[:1], main[1:]], session.table()


@pytest.mark.scene("opencode-sub-agent")
def test_a_sub_agent_of_opencode_is_a_chain_of_its_own(session: Session) -> None:
    session.assert_exact()
    for scenario, length in (("title", 1), ("main", 2), ("sub_agent", 2)):
        calls = session.calls(scenario)
        assert len(calls) == length, session.table()
        session.assert_chain(calls)


@pytest.mark.scene("opencode-overflow")
def test_opencode_compacts_a_context_that_is_too_long(session: Session) -> None:
    session.assert_exact(unfinished=1)
    [compaction] = session.calls("compaction")
    main = session.calls("main")
    assert [call.end and call.end.http_status for call in main] == [200, 200, 400, 200, 200], session.table()
    # The summary stands in the new history as if it were a reply in it.
    assert (main[3].intent.parent, main[3].intent.drift) == (compaction.intent.call_id, "system_changed")
    assert session.chains() == [session.calls("title"), main[:2], [compaction], main[3:]], session.table()
