"""F10 to F13: how agents that speak Responses go on with a conversation, each way with its verdict."""

from __future__ import annotations

from kit import Story
from kit_agents import BASH, Responses, item, output, runs, tool
from kit_checks import MODES, calls_of, one_chain
from kit_template import Reply

SUMMARY = "The user wants a parser; the lexer is done, its tests pass, the parser is missing."


@MODES
def test_f10_items_are_appended(mode: str) -> None:
    story = Story(mode=mode)
    agent = Responses(story, tools=BASH)
    agent.history = [item("developer", "You may do all."), item("user", "cwd: /w", "1")]
    first = agent.ask(item("user", "list it", "2"), reply=runs("ls", thinks="I list."))
    assert [each["type"] for each in agent.history[-2:]] == ["reasoning", "function_call"]
    one, other = runs("cat a"), runs("cat b")
    both = Reply(text="I read both.", thinks="two files", calls=one.calls + other.calls)
    second = agent.ask(output(first, "a b"), reply=both)
    assert [each["type"] for each in agent.history[-4:]] == ["reasoning", "message", "function_call", "function_call"]
    agent.ask(output(second, "A", 0), output(second, "B", 1))
    one_chain(story, 3)


@MODES
def test_f11_a_stream_that_breaks_after_its_items_was_answered(mode: str) -> None:
    """The items go out once the end of the call is in the log: for the log it came whole, and the agent had it."""
    story = Story(mode=mode)
    agent = Responses(story, tools=BASH)
    first = agent.ask(item("user", "list it", "1"), reply=runs("ls"))
    agent.ask(output(first, "a.txt"))
    one_chain(story, 2)


@MODES
def test_f11_a_text_that_broke_off_is_kept(mode: str) -> None:
    """What had gone out of the reply when the server failed: the agent goes on from it."""
    story = Story(mode=mode)
    agent = Responses(story, tools=BASH)
    broken = agent.begin(item("user", "list it", "1"))
    broken.finish(Reply(text="I list"), status="aborted", why="the agent went away")
    agent.history.append(item("assistant", "I list", f"{broken.call_id}n0"))
    agent.ask(item("user", "go on", "2"))
    forest = story.grown()
    assert (forest.branches, forest.continues) == ([[1]], {1: 0})
    assert (forest.excluded, forest.links) == ({0: "aborted"}, [("resume", 1, 0)])
    assert forest.reasons == {1: "dead_reply_kept"}


@MODES
def test_f12_a_compaction_of_a_window(mode: str) -> None:
    story = Story(mode=mode)
    agent = Responses(story, tools=BASH, headers={"session-id": "s", "thread-id": "t", "x-codex-window-id": "t:0"})
    agent.history = [item("developer", "You may do all.", "1"), item("user", "cwd: /w", "2")]
    first = agent.ask(item("user", "write a parser", "3"), reply=runs("ls"))
    second = agent.ask(output(first, "a.txt"), reply=runs("cat a.txt"))
    agent.tools = None
    agent.metadata = {"x-codex-turn-metadata": '{"request_kind": "compaction"}'}
    agent.ask(output(second, "A"), item("user", "Sum it up."), reply=Reply(text=SUMMARY))
    agent.tools, agent.metadata = BASH, {}
    agent.headers = {**agent.headers, "x-codex-window-id": "t:1"}
    agent.history = [item("developer", "You may do all.", "7"), item("user", "cwd: /w", "8")]
    third = agent.ask(item("user", "write a parser", "9"), item("user", f"So far: {SUMMARY}"), reply=runs("vi p"))
    agent.ask(output(third, "done"))
    assert [call.request.scenario for call in story.calls] == ["main", "main", "compaction", "main", "main"]
    forest = story.grown()
    assert forest.branches == [[0, 1], [2], [3, 4]]
    assert forest.continues[2] == 1
    assert forest.reasons == {2: "tools_changed", 3: "compaction"}
    assert forest.links == [("compaction", 3, 1), ("resume", 2, 1)]
    outcome = story.outcome()
    assert calls_of(outcome.samples) == [[0, 1], [3, 4]]
    assert outcome.excluded == {"scenario_compaction": 1}


@MODES
def test_f13_a_sub_agent_runs_beside_its_parent(mode: str) -> None:
    story = Story(mode=mode)
    main = Responses(story, tools=[*BASH, tool("spawn_agent")], headers={"session-id": "s", "thread-id": "t1"})
    spawn = main.ask(item("user", "look into it", "1"), reply=runs("read the notes", name="spawn_agent"))
    ids = {"session-id": "s", "thread-id": "t2", "x-codex-parent-thread-id": "t1", "x-openai-subagent": "collab_spawn"}
    sub = Responses(story, tools=BASH, headers=ids)
    main_call = main.begin(output(spawn, "it runs"))
    sub_call = sub.begin(item("user", "read the notes", "2"))
    main.take(main_call.finish(runs("sleep 1")))
    sub.take(sub_call.finish(runs("cat notes")))
    last_of_sub = sub.begin(output(sub_call, "they are empty"))
    last_of_main = main.begin(output(main_call, "slept"))
    last_of_sub.finish(Reply(text="Nothing."))
    last_of_main.finish(Reply(text="All is done."))
    forest = story.grown()
    assert (forest.branches, forest.continues) == ([[0, 1, 4], [2, 3]], {1: 0, 4: 1, 3: 2})
    assert forest.links == [("sub_agent", 2, 0)]
    assert forest.reasons == {2: "sub_agent"}
    assert {each.scenario for each in story.outcome().samples} == {"main", "sub_agent"}
