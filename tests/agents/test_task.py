"""Every agent, as its makers publish it, does the same task through the gateway: a file, then two calls in one turn."""

from __future__ import annotations

import pytest
from rig import Session
from scenes import FIRST, SECOND, Scene, scenes, task

IN_CAPTURE_MODE = {agent: Scene(agent=agent, conversations=task(agent)) for agent in ("codex", "claude", "hermes")}
IN_CAPTURE_MODE |= {agent: Scene(agent=agent, conversations=task(agent)) for agent in ("mini-swe-agent", "opencode")}
IN_TOKENS_MODE = {
    f"{agent}-tokens": Scene(agent=agent, conversations=task(agent), tokens=True)
    for agent in ("codex", "claude", "mini-swe-agent")
}
OPENCLAW = {
    "openclaw": Scene(agent="openclaw", conversations=task("openclaw")),
    "openclaw-responses": Scene(agent="openclaw", conversations=task("openclaw"), options={"api": "openai-responses"}),
}
SCENES = IN_CAPTURE_MODE | IN_TOKENS_MODE | OPENCLAW


@scenes(*SCENES)
def test_the_files_are_there(name: str, session: Session) -> None:
    assert (session.done.exit_code, session.done.result.failure) == (0, None), session.table()
    assert (session.done.work / "first.txt").read_text() == FIRST, session.table()
    assert (session.done.work / "second.txt").read_text() == SECOND, session.table()


@scenes(*SCENES)
def test_every_call_is_in_the_log_as_it_was_sampled(name: str, session: Session) -> None:
    session.assert_exact()
    protocols = {"codex": "responses", "claude": "messages", "openclaw-responses": "responses"}
    protocol = protocols.get(name.removesuffix("-tokens"), "chat")
    streams = not name.startswith("mini-swe-agent")
    assert {(call.intent.protocol, call.intent.stream) for call in session.records} == {(protocol, streams)}


@scenes(*IN_CAPTURE_MODE, *IN_TOKENS_MODE, "openclaw-responses")
def test_the_work_is_one_chain(name: str, session: Session) -> None:
    main = session.calls("main")
    assert len(main) == 3, session.table()
    session.assert_chain(main)
    assert session.forest.drift == ()


@pytest.mark.scene("opencode")
def test_opencode_asks_for_a_title_beside_its_work(session: Session) -> None:
    assert [call.intent.scenario for call in session.records].count("title") == 1, session.table()
    assert sorted(len(chain) for chain in session.chains()) == [1, 3], session.table()


@pytest.mark.scene("openclaw")
def test_openclaw_over_chat_moves_its_last_message_so_that_each_call_is_a_branch(session: Session) -> None:
    first, *later = session.records
    assert first.intent.drift is None
    assert [call.intent.parent for call in later] == [call.intent.call_id for call in session.records[:-1]]
    assert {call.intent.drift for call in later} == {"history_edited"}, session.table()
    assert [len(chain) for chain in session.chains()] == [1] * len(session.records), session.table()
    assert session.drift() == {"history_edited": len(later)}
    assert session.forest.lenience["floating_user_message"] == len(later)
    assert session.links("resume") == list(zip(later, session.records, strict=False))
