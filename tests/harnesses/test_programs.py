"""The shipped agents as real processes against a server with faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollyard.schemas.failure import Failure

FAULTS = [503, "drop", 429, 500]


@pytest.mark.parametrize("stream", [True, False])
async def test_ask_answers_in_spite_of_faults(agents: Any, upstream: Any, stream: bool) -> None:
    upstream.script = [*FAULTS, *(["break"] if stream else []), "Grüße"]
    upstream.headers = {"Retry-After": "0"}
    result = await agents.run("ask", "Hello?", stream=stream, system="Be kind.", examples=[["a", "b"]])
    assert (result.exit_code, result.answer, result.failure) == (0, "Grüße", None)
    assert len(upstream.requests) == len(FAULTS) + 1 + stream
    assert upstream.requests[-1] == {
        "model": "m",
        "stream": stream,
        "messages": [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "Hello?"},
        ],
    }


@pytest.mark.parametrize("harness", ["ask", "bash"])
@pytest.mark.parametrize(
    "refusal",
    [
        (401, "invalid_api_key", 1, "agent"),
        (410, "session_closed", 1, "agent"),
        (400, "session_limit_exceeded", 2, "agent_budget"),
        (400, "context_length_exceeded", 2, "agent_budget"),
    ],
)
async def test_a_refusal_ends_the_agent_at_once(
    agents: Any, upstream: Any, harness: str, refusal: tuple[int, str, int, str]
) -> None:
    status, code, exit_code, kind = refusal
    upstream.script, upstream.refusal = [status], {"message": "no", "code": code}
    result = await agents.run(harness, "Hello?")
    assert (result.exit_code, result.failure.kind, len(upstream.requests)) == (exit_code, kind, 1)
    assert f"HTTP {status}" in result.output_tail
    assert code in result.failure.message


def test_an_agent_gives_up_on_a_model_that_stays_away(
    program_path: None, monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int
) -> None:
    import model_client  # type: ignore[import-not-found]  # noqa: PLC0415

    monkeypatch.setenv("OPENAI_BASE_URL", f"http://127.0.0.1:{unused_tcp_port}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    with pytest.raises(model_client.AgentError, match="no reply from the model: ConnectionRefusedError") as given_up:
        model_client.Model(patience_s=0.3).reply([], stream=False)
    assert given_up.value.exit_code == 3


async def test_exit_status_3_is_a_failure_of_the_model(agents: Any) -> None:
    result = await agents.run("command", "p", command=["sh", "-c", "exit 3"])
    assert result.failure == Failure.of(
        "agent", "the agent ended with exit status 3: it wrote nothing to its standard error"
    )
    from rollyard.harnesses.harness import NO_MODEL_HINT, read_result  # noqa: PLC0415

    assert read_result(3, b"", b"gone\n", llm_codes=(3,)).failure == Failure.of(
        "llm", "the agent got no answer from the model: gone", NO_MODEL_HINT
    )


@pytest.mark.parametrize("stream", [True, False])
async def test_bash_works_until_done(agents: Any, upstream: Any, stream: bool) -> None:
    upstream.script = [503, "ls", "drop", "```sh\ntouch a.txt\necho $OPENAI_API_KEY$WHO\n```", "Done."]
    result = await agents.run("bash", "Make a.txt", files={"b": ""}, env={"WHO": "me"}, stream=stream, examples=[])
    assert (result.exit_code, result.answer, result.failure) == (0, "me", None)
    assert result.metrics == {"turns": 3.0}
    assert (Path(agents.sandbox.workdir) / "a.txt").exists()
    assert [message["content"] for message in upstream.requests[-1]["messages"][1:]] == [
        "Make a.txt",
        "ls",
        "b",
        "```sh\ntouch a.txt\necho $OPENAI_API_KEY$WHO\n```",
        "me",
    ]


async def test_bash_reports_failures_and_floods_and_gives_up(agents: Any, upstream: Any) -> None:
    upstream.script = ["false", "yes", "sleep 1000", "sleep 1000 & echo started", "seq 1000"]
    result = await agents.run("bash", "x", max_turns=5, command_timeout_s=0.5)
    assert (result.exit_code, result.failure.kind) == (2, "agent_budget")
    assert "not done after 5 turns" in result.failure.message
    outputs = [message["content"] for message in upstream.requests[-1]["messages"] if message["role"] == "user"][-4:]
    assert outputs[0] == "(exit status 1)"
    assert outputs[1].endswith("y\n(exit status -25)")
    assert len(outputs[1]) < 2100
    assert outputs[2:] == ["(killed after 0.5 s)", "started"]
    assert result.answer.endswith("999\n1000")


@pytest.mark.parametrize(
    ("reply", "command"),
    [
        ("ls -la", "ls -la"),
        ("\n $ ls\nThis lists files", "ls"),
        ("`pwd`", "pwd"),
        ("Sure:\n```bash\ncd a\nls\n```\nthat is it", "cd a\nls"),
        ("```\nls\n", "ls"),
        ("", ""),
        ("done", "done"),
    ],
)
def test_the_command_of_a_reply(program_path: None, reply: str, command: str) -> None:
    import bash_agent  # type: ignore[import-not-found]  # noqa: PLC0415

    assert bash_agent.command_of(reply) == command


PROGRAMS = ["ls", "rm", "echo", "cat"]


@pytest.mark.parametrize(
    "command", ["ls -la a/b", "rm old.log", "echo a > b; cat b | cat && ls", "cat a.txt\nls", "echo 'it is 1/2'"]
)
def test_commands_inside_the_folder_may_run(program_path: None, command: str) -> None:
    import bash_agent  # noqa: PLC0415

    assert bash_agent.refusal(command, PROGRAMS) == ""


@pytest.mark.parametrize(
    "command",
    ["rm -rf /", "rm -rf ~", "rm ../x", "cat $HOME/x", "echo `id`", "ls; kill -9 -1", "echo a >/etc/x", "rm '/x'",
     "sudo ls", "(reboot)", "ls & dd if=x", "cat <(kill 1)", "ls\nreboot", "X=1 reboot", "rm \\/x"],
)  # fmt: skip
def test_commands_that_reach_outside_are_refused(program_path: None, command: str) -> None:
    import bash_agent  # noqa: PLC0415

    assert bash_agent.refusal(command, PROGRAMS) == "(refused: use only ls, rm, echo, cat, inside this folder)"
    assert bash_agent.refusal(command, []) == ""
