"""Codex beyond a plain task: sub-agents, compaction, a stream that breaks, a context that is too long."""

from __future__ import annotations

import pytest
from rig import Session
from scenes import FIRST, SECOND, Scene, say, scenes, shell, task, write_first

AGENT = "codex"
PART = "Please make second.txt, alone."
SUMMARY = "So far first.txt is written, and second.txt is not."

SUB_AGENT = Scene(
    agent=AGENT,
    conversations=[
        {"match": PART, "turns": [say("", shell(AGENT, "echo two > second.txt")), say("It is there.")]},
        {
            "match": "",
            "turns": [
                say(
                    "I share the work.",
                    write_first(AGENT),
                    {"name": "multi_agent_v1__spawn_agent", "arguments": {"message": PART}},
                ),
                say("", {"name": "multi_agent_v1__wait_agent", "arguments": {"targets": ["{last.agent_id}"]}}),
                say("Both files are there."),
            ],
        },
    ],
)
COMPACTION = Scene(
    agent=AGENT,
    conversations=[
        {"match": SUMMARY, "turns": [say("", shell(AGENT, "echo two > second.txt")), say("Both files are there.")]},
        {
            "match": "",
            "turns": [
                say("I write the first file.", write_first(AGENT), shell(AGENT, "seq 3000")),
                say("That was long.", shell(AGENT, "cat first.txt")),
                say(SUMMARY),
            ],
        },
    ],
    options={"config": {"model_auto_compact_token_limit": 18_000}},
)
SCENES = {
    "sub-agent": SUB_AGENT,
    "compaction": COMPACTION,
    "broken": Scene(agent=AGENT, conversations=task(AGENT, break_after_tokens=3), tokens=True),
    "overflow": Scene(
        agent=AGENT,
        conversations=[{"match": "", "turns": [say("I count.", write_first(AGENT), shell(AGENT, "seq 3000"))]}],
        script={"max_model_len": 18_000},
    ),
}


def errors(session: Session) -> list[str]:
    """What Codex says went wrong. That it does not know the model is an item, and no error."""
    return [event["message"] for event in session.done.events() if event["type"] == "error"]


@scenes("sub-agent", "compaction", "broken")
def test_the_files_are_there(name: str, session: Session) -> None:
    assert session.done.exit_code == 0, session.table()
    assert (session.done.work / "first.txt").read_text() == FIRST, session.table()
    assert (session.done.work / "second.txt").read_text() == SECOND, session.table()


@pytest.mark.scene("sub-agent")
def test_a_sub_agent_is_a_chain_of_its_own_that_names_the_thread_of_its_parent(session: Session) -> None:
    session.assert_exact()
    main, sub_agent = session.calls("main"), session.calls("sub_agent")
    assert (len(main), len(sub_agent)) == (3, 2), session.table()
    session.assert_chain(main)
    session.assert_chain(sub_agent)
    [thread] = {call.intent.agent.thread for call in main}
    assert {call.intent.agent.parent_thread for call in sub_agent} == {thread}
    assert len({call.intent.agent.session for call in session.records}) == 1
    assert session.links("sub_agent") == [(sub_agent[0], main[0])]
    assert session.drift() == {"sub_agent": 1}


@pytest.mark.scene("compaction")
def test_a_compaction_continues_the_chain_without_tools_and_begins_another(session: Session) -> None:
    session.assert_exact()
    [compaction] = session.calls("compaction")
    before = [call for call in session.calls("main") if call.intent_seq < compaction.intent_seq]
    after = [call for call in session.calls("main") if call.intent_seq > compaction.intent_seq]
    assert (len(before), len(after)) == (2, 2), session.table()
    session.assert_chain(before)
    session.assert_chain(after)
    assert [len(chain) for chain in session.chains()] == [2, 1, 2]
    # It asks without tools, which stand at the start of the prompt.
    assert (compaction.intent.parent, compaction.intent.drift) == (before[-1].intent.call_id, "tools_changed")
    assert session.drift() == {"tools_changed": 1, "compaction": 1}
    assert session.links("compaction") == [(after[0], before[-1])]
    assert session.links("resume") == [(compaction, before[-1])]
    assert [call.intent.agent.window for call in (*before, compaction, *after)] == ["0", "0", "0", "1", "1"]


@pytest.mark.scene("broken")
def test_a_broken_stream_is_asked_for_again_and_the_dead_call_is_left_out(session: Session) -> None:
    session.assert_exact(unfinished=1)
    dead, *living = session.records
    assert dead.end is not None and (dead.end.status, len(dead.end.completion_ids)) == ("error", 3), session.table()
    assert living[0].intent.supersedes == dead.intent.call_id
    session.assert_chain(living)
    assert session.forest.excluded == {dead.intent.call_id: "error"}
    assert session.links("retry") == [(living[0], dead)]
    assert len(errors(session)) == 1, session.table()


@pytest.mark.scene("overflow")
def test_codex_knows_a_context_that_is_too_long(session: Session) -> None:
    assert session.done.exit_code == 1
    assert [("ran out of room" in error) for error in errors(session)] == [True], session.table()
    session.assert_exact(unfinished=1)
    [before, refused] = session.records
    assert refused.end is not None and (refused.end.status, refused.end.http_status) == ("error", 400)
    assert refused.intent.parent == before.intent.call_id
