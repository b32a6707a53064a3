"""Harnesses: their arguments, their command lines, and what they read."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from rollyard.harnesses.command import shell_operator
from rollyard.harnesses.harness import HARNESSES, AgentContext, Harness, InProcessHarness, Needs, needs_of, open_harness
from rollyard.schemas.errors import HarnessError, TaskError
from rollyard.schemas.rollout import AgentResult, Rollout
from rollyard.schemas.sandbox import SandboxSpec
from rollyard.schemas.task import AgentSpec, Task


def context(
    harness: str, *, env: dict[str, str] | None = None, prompt: str = "say {home} $HOME", **args: Any
) -> AgentContext:
    task = Task(
        prompt=prompt,
        agent=AgentSpec(harness=harness, model="small", args=args, max_calls=7),
        sandbox=SandboxSpec(env=env or {}),
    )
    return AgentContext(
        rollout=Rollout.of("run", "task", 0, 1), attempt=1, task=task, base_url="http://gw/v1", api_key="key",
        home="/s/home", workdir="/s/work", bundle="/b",
    )  # fmt: skip


async def no_file(path: str, max_bytes: int) -> bytes | None:
    return None


@pytest.mark.parametrize("name", HARNESSES.shipped)
def test_every_shipped_harness_opens(name: str) -> None:
    harness = open_harness(name)
    assert isinstance(harness, Harness)
    assert harness.name == name
    assert isinstance(harness, InProcessHarness) == harness.in_process
    open_harness(HARNESSES.shipped[name])


@pytest.mark.parametrize(
    ("name", "args", "says"),
    [
        ("aks", {}, "no harness is called 'aks' .*did you mean 'ask'"),
        ("nowhere:X", {}, "cannot be loaded from nowhere:X"),
        ("collections:OrderedDict", {}, "is no harness"),
        (
            "ask",
            {"exampels": []},
            "unknown field `exampels`.*arguments of the harness ask are: system, examples, stream",
        ),
        ("ask", {"examples": [["a"]]}, r"agent.args.examples\[0\]|agent.args.examples"),
        ("bash", {"max_turns": 0}, "agent.args.max_turns"),
        ("bash", {"examples": [["a", "b", "c"]]}, "must end with a reply"),
        ("noop", {"sleep_s": -1}, "agent.args.sleep_s"),
        ("command", {}, "missing required field `command`"),
        ("command", {"command": "  "}, "`command` is empty"),
        ("command", {"command": "echo 'a"}, "No closing quotation"),
        ("command", {"command": "make && run"}, "run without a shell, so '&&' would be an argument"),
        ("command", {"command": []}, "`command` is empty"),
        ("mini_swe_agent", {"step_limit": "x"}, "agent.args.step_limit"),
        ("codex", {"config": 1}, "agent.args.config"),
        ("claude_code", {"max_turns": 0}, "agent.args.max_turns"),
        ("openclaw", {"api": "anthropic-messages"}, "agent.args.api"),
    ],
)
def test_bad_names_and_arguments_are_refused(name: str, args: dict[str, Any], says: str) -> None:
    with pytest.raises(TaskError, match=says):
        open_harness(name).validate_args(args)


def test_a_command_line_is_filled_in() -> None:
    made = open_harness("command").command(
        context("command", env={"A": "1"}, command="run '{prompt}' --url={base_url} {unknown} {model} {workdir}")
    )
    assert made.argv == ("run", "say {home} $HOME", "--url=http://gw/v1", "{unknown}", "small", "/s/work")
    openai = {"OPENAI_BASE_URL": "http://gw/v1", "OPENAI_API_KEY": "key", "OPENAI_MODEL": "small"}
    assert made.env == {"A": "1", **openai, "ANTHROPIC_BASE_URL": "http://gw", "ANTHROPIC_API_KEY": "key"}


async def test_the_users_own_agent_runs(agents: Any, upstream: Any) -> None:
    script = 'cat; cat "$1"; echo "$2|$MINE" >answer.txt; exit $3'
    stdin = "in:{model};"
    command = ["sh", "-c", script, "sh", "{prompt_file}", "{base_url}"]
    result = await agents.run("command", "péng", command=[*command, "0"], stdin=stdin)
    assert result == AgentResult(exit_code=0, answer="in:m;péng")
    result = await agents.run(
        "command", "p", env={"MINE": "x"}, command=[*command, "4"], answer_file="answer.txt", budget_codes=[4]
    )
    assert result.answer == f"{upstream.url}|x"
    assert result.failure.kind == "agent_budget"


async def test_noop_answers_without_a_process() -> None:
    noop = open_harness("noop")
    assert isinstance(noop, InProcessHarness)
    assert await noop.work(context("noop", answer="a", sleep_s=0.01)) == AgentResult(exit_code=0, answer="a")
    assert noop.files(context("noop")) == {}
    with pytest.raises(HarnessError):
        noop.command(context("noop"))


async def test_a_signal_and_an_unknown_end_are_failures_of_the_agent() -> None:
    harness = open_harness("ask")
    for exit_code, says in ((-9, "killed by signal 9"), (None, "not known"), (5, "exit status 5: last")):
        result = await harness.result(context("ask"), exit_code, b"", b"first\nlast\n", no_file)
        assert result.failure is not None
        assert (result.failure.kind, result.failure.retryable) == ("agent", False)
        assert says in result.failure.message


def trajectory(last: str = "", **info: Any) -> bytes:
    whole = {"exit_status": "Submitted", "submission": "done\n", "model_stats": {"api_calls": 3}} | info
    messages = [{"role": "user", "content": "context_length_exceeded?"}, {"role": "exit", "content": last}]
    return json.dumps({"info": whole, "messages": messages}).encode()


@pytest.mark.parametrize(
    ("text", "exit_code", "kind"),
    [
        (trajectory(), 0, None),
        (trajectory(exit_status="LimitsExceeded"), 0, "agent_budget"),
        (trajectory(exit_status="ContextWindowExceededError"), 1, "agent_budget"),
        (trajectory("this session has reached its limit", exit_status="BadRequestError"), 1, "agent_budget"),
        (trajectory("what is this", exit_status="BadRequestError"), 1, "agent"),
        (trajectory(exit_status="InternalServerError"), 1, "llm"),
        (trajectory(exit_status="RepeatedFormatError"), 0, "agent"),
        (trajectory(exit_status=""), -9, "agent"),
        (b'{"info"', -9, "agent"),
        (None, 1, "agent"),
        (None, 0, "agent"),
    ],
)
async def test_mini_swe_agents_trajectory_is_read(text: bytes | None, exit_code: int, kind: str | None) -> None:
    async def read(path: str, max_bytes: int) -> bytes | None:
        assert path == "/s/home/.rollyard/traj.json"
        return text

    result = await open_harness("mini_swe_agent").result(context("mini_swe_agent"), exit_code, b"", b"err", read)
    assert (result.failure.kind if result.failure else None) == kind
    if kind is None:
        assert result == AgentResult(exit_code=0, answer="done", output_tail="err", metrics={"calls": 3.0})


async def test_a_broken_trajectory_of_a_finished_agent_is_an_error() -> None:
    async def read(path: str, max_bytes: int) -> bytes | None:
        return b"{}"

    with pytest.raises(HarnessError, match="cannot be read"):
        await open_harness("mini_swe_agent").result(context("mini_swe_agent"), 0, b"", b"", read)


@pytest.mark.parametrize("name", ["codex", "claude_code", "hermes", "mini_swe_agent", "openclaw", "opencode"])
def test_an_agent_without_its_bundle_says_how_to_mend_it(name: str) -> None:
    harness = open_harness(name)
    assert needs_of(harness, {}) == Needs(bundle=name)
    with pytest.raises(HarnessError, match=f"rollyard agent bundle {name}"):
        harness.command(replace(context(name), bundle=""))


@pytest.mark.parametrize(
    ("line", "operator"),
    [
        ("cd a; ls", "a;"),
        ("a | b", "|"),
        ("a || b", "||"),
        ("a &", "&"),
        ("a >&2", ">&2"),
        ("a 2>&1", "2>&1"),
        ("a <in", "<in"),
        ("a >> log", ">>"),
        (r"find . -exec ls {} \;", ""),
        ("find . -exec ls {} ';'", ""),
        ("curl http://h/?a=1&b=2", ""),
        ("""say 'a && b' --m="x ; \\" | y" -> z""", ""),
        ("sh -c 'a; b > c'", ""),
    ],
)
def test_what_only_a_shell_would_understand(line: str, operator: str) -> None:
    assert shell_operator(line) == operator
