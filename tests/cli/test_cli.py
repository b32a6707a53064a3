"""The command line as a user sees it: what it prints, and its exit codes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rollyard import __version__
from rollyard.cli import main, parser
from rollyard.cli.up import model_of
from rollyard.pipeline.bus import Bus
from rollyard.pipeline.codec import encode
from rollyard.pipeline.embedded import EmbeddedNats
from rollyard.pipeline.kv import Bucket
from rollyard.schemas import subjects
from rollyard.schemas.fleet import DeadLetter, Run
from rollyard.schemas.policy import SamplePolicy

ROOT = Path(__file__).resolve().parents[2]
NOWHERE = {"ROLLYARD__NATS__URL": "nats://127.0.0.1:1"}


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def rollyard(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the program in a process of its own, in the current folder."""
    return subprocess.run(
        [sys.executable, "-m", "rollyard", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | (env or {}),
        check=False,
    )


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"rollyard {__version__}\n"
    assert main([]) == 2
    assert "commands:" in capsys.readouterr().out


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys; from rollyard.cli import parser; parser().format_help();"
        "heavy = {'nats', 'aiohttp', 'duckdb', 'pyarrow', 'numpy', 'msgspec', 'structlog', 'docker', 'e2b'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_manual_lists_every_command() -> None:
    manual = (ROOT / "docs/cli.md").read_text()
    listed = set(re.findall(r"^\| `(rollyard [^`]*)`", manual, re.MULTILINE))
    commands = _commands(parser(), "rollyard")
    assert {" ".join(re.findall(r"^[a-z][a-z-]*(?: [a-z][a-z-]*)*", line)[0].split()) for line in listed} == commands


def _commands(of: object, name: str) -> set[str]:
    groups = [action for action in of._actions if hasattr(action, "_name_parser_map")]  # type: ignore[attr-defined]
    if not groups:
        return {name}
    return {found for sub, inner in groups[0].choices.items() for found in _commands(inner, f"{name} {sub}")}


def test_a_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "Task"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["$defs"]["Task"]["properties"]["group_size"]["default"] == 1
    assert main(["schema"]) == 0
    assert "Delivery" in capsys.readouterr().out.split()
    assert main(["schema", "Tusk"]) == 2
    assert "no record is called 'Tusk' (choose one of" in capsys.readouterr().err


def test_the_configuration_in_effect(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLYARD__WORKER__SLOTS", "7")
    assert main(["config", "show"]) == 0
    assert "slots = 7" in capsys.readouterr().out
    assert main(["config", "show", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["worker"]["slots"] == 7


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["worker", "--stages", "init,ruin"], "choose from admit, init, run, eval, aggregate"),
        (["worker", "--slots", "0"], "'0' is not a number from 1"),
        (["up", "--nats-port", "70000"], "'70000' is not a port, 0 to 65535"),
        (["up", "--llm", "http://x", "--scripted", "y"], "not allowed with argument"),
        (["frobnicate"], "invalid choice: 'frobnicate'"),
    ],
)
def test_wrong_usage_ends_with_2(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["submit", "none.jsonl", "--run", "r"], 2, "cannot read the task file none.jsonl: No such file"),
        (["config", "show", "--config", "none.toml"], 2, "the configuration none.toml cannot be read"),
        (["up", "--llm", "127.0.0.1:8000"], 2, "is not a URL (for example http://127.0.0.1:8000)"),
        (["up", "--scripted", "none.json"], 2, "cannot read the script none.json"),
        (["samples", "sql", "drop table samples"], 2, "one SELECT is allowed here"),
        (["samples", "show", "abc"], 2, "has an id that begins with 'abc' (`rollyard samples ls` lists them"),
    ],
)
def test_one_line_says_what_is_wrong_and_what_mends_it(
    arguments: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == code
    said = capsys.readouterr().err
    assert said.startswith("rollyard: ")
    assert says in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    "arguments", [["status"], ["dead", "ls"], ["replay", "--run", "r"], ["llm", "ls"], ["cancel", "--run", "r"]]
)
def test_without_a_bus_the_exit_code_is_4(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(*next(iter(NOWHERE.items())))
    assert main(arguments) == 4
    said = capsys.readouterr().err
    assert said.startswith("rollyard: cannot reach NATS at nats://127.0.0.1:1")
    assert "start one with `rollyard up`" in said


def test_a_data_folder_of_a_newer_version(capsys: pytest.CaptureFixture[str]) -> None:
    Path("data").mkdir()
    Path("data/version").write_text("99\n")
    for arguments in (["samples", "ls"], ["up", "--scripted", "s.json"], ["status"]):
        if arguments[0] == "up":
            Path("s.json").write_text('{"conversations": [{"turns": [{"content": "hi"}]}]}')
        assert main([*arguments, "--data", "data"]) == 2
        assert "has version 99, this Rollyard reads up to version 1 (update Rollyard" in capsys.readouterr().err


def test_submit_checks_the_whole_file_before_it_publishes(capsys: pytest.CaptureFixture[str]) -> None:
    Path("tasks.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b", "group_size": 0}\n{"prompt": "c", "colour": 1}\n')
    assert main(["submit", "tasks.jsonl", "--run", "r"]) == 2
    said = capsys.readouterr().err
    assert "tasks.jsonl:2:" in said
    assert "tasks.jsonl:3:" in said
    assert "colour" in said


@pytest.mark.parametrize(
    ("arguments", "goes_with"),
    [
        (["--engine", "vllm"], "--llm URL"),
        (["--api-key-env", "KEY"], "--llm URL"),
        (["--model", "m"], "--llm URL or --scripted SCRIPT"),
        (["--journal", "j"], "--scripted SCRIPT"),
        (["--journal", "j", "--llm", "http://127.0.0.1:1"], "--scripted SCRIPT"),
    ],
)
def test_an_argument_that_would_be_without_effect_is_refused(
    arguments: list[str], goes_with: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["up", *arguments]) == 2
    assert capsys.readouterr().err == f"rollyard: {arguments[0]} means nothing here (it goes with {goes_with})\n"


def test_the_key_of_a_given_model_server_reaches_the_pool() -> None:
    arguments = parser().parse_args(["up", "--llm", "https://models.test/v1", "--api-key-env", "KEY", "--model", "m"])
    entry = model_of(arguments).entry
    assert (entry.url, entry.engine, entry.api_key_env) == ("https://models.test", "openai", "KEY")


def test_without_samples_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["samples", "ls", "--run", "r"]) == 0
    assert capsys.readouterr().out == "There are no samples of run r in .rollyard/samples.\n"


def test_submit_check_publishes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    Path("tasks.jsonl").write_text('{"prompt": "a", "group_size": 4}\n{"prompt": "b"}\n')
    assert main(["submit", "tasks.jsonl", "--check"]) == 0
    assert capsys.readouterr().out == "tasks.jsonl: 2 tasks, 5 rollouts, no errors\n"
    assert main(["submit", "tasks.jsonl"]) == 2
    assert "add --run NAME" in capsys.readouterr().err


def test_submit_checks_the_sample_policy_too(capsys: pytest.CaptureFixture[str]) -> None:
    Path("tasks.jsonl").write_text('{"prompt": "a"}\n')
    Path("policy.toml").write_text('max_tokens = 512\ntoo_long = "drop"\n')
    assert main(["submit", "tasks.jsonl", "--check", "--samples", "policy.toml"]) == 0
    Path("bad.json").write_text('{"lenience_off": ["trailing"]}')
    assert main(["submit", "tasks.jsonl", "--check", "--samples", "bad.json"]) == 2
    assert "bad.json: lenience_off: 'trailing' is no rule of lenient matching" in capsys.readouterr().err
    assert main(["submit", "tasks.jsonl", "--run", "r", "--samples", "none.toml"]) == 2
    assert "cannot read none.toml: No such file" in capsys.readouterr().err


async def test_submit_gives_a_new_run_its_sample_policy(bus: Bus, nats: EmbeddedNats) -> None:
    Path("tasks.jsonl").write_text('{"prompt": "a"}\n')
    Path("policy.toml").write_text('max_tokens = 512\ntoo_long = "drop"\n')
    Path("other.toml").write_text("max_tokens = 256\n")

    async def submit(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ("submit", "tasks.jsonl", "--run", "r", *arguments)
        return await asyncio.to_thread(rollyard, *command, env={"ROLLYARD__NATS__URL": nats.url})

    assert (await submit("--samples", "policy.toml")).returncode == 0
    found = await Bucket[Run](bus, subjects.RUNS, Run).get("r")
    assert found is not None
    assert found[0].samples == SamplePolicy(max_tokens=512, too_long="drop")
    assert (await submit()).returncode == 0
    refused = await submit("--samples", "other.toml")
    assert (refused.returncode, "max_tokens is 512 and not 256" in refused.stderr) == (2, True)


async def test_submit_status_and_dead_over_a_real_bus(bus: Bus, nats: EmbeddedNats, tmp_path: Path) -> None:
    env = {"ROLLYARD__NATS__URL": nats.url}
    Path("tasks.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')

    async def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return await asyncio.to_thread(rollyard, *arguments, env=env)

    assert (await run("status")).stdout.startswith("There are no runs.")
    for arguments in (["status", "--follow"], ["replay"], ["cancel"]):
        unknown = await run(*arguments, "--run", "r")
        assert (unknown.returncode, unknown.stderr.split(" (")[0]) == (2, "rollyard: there is no run 'r'")

    done = await run("submit", "tasks.jsonl", "--run", "r", "--json")
    assert json.loads(done.stdout) == {"run": "r", "accepted": 2, "repeated": 0}
    assert await bus.subjects(subjects.TASKS, ">") == {"task.r": 2}

    status = json.loads((await run("status", "--run", "r", "--json")).stdout)
    assert (status["run"], status["tasks_waiting"]) == ("r", 2)
    assert (await run("status", "--run", "r")).stdout.startswith("r: 0/0+ rollouts")

    assert (await run("dead", "ls")).stdout == "There are no dead letters.\n"
    letter = DeadLetter(stage="run", run="r", subject="stage.run.x.r", reason="seen six times", body=b"\x81body")
    seq = await bus.publish(subjects.dead_subject("run", "r"), encode(letter))
    assert "seen six times" in (await run("dead", "ls", "--run", "r")).stdout
    shown = await run("dead", "show", str(seq))
    assert "seen six times" in shown.stdout
    assert "\\x81body" in shown.stdout
    missing = await run("dead", "show", "999")
    assert (missing.returncode, "there is no dead letter 999" in missing.stderr) == (2, True)


async def test_the_pool_of_model_servers(bus: Bus, nats: EmbeddedNats) -> None:
    env = {"ROLLYARD__NATS__URL": nats.url}

    async def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return await asyncio.to_thread(rollyard, "llm", *arguments, env=env)

    added = await run("add", "http://10.0.0.7:8000/v1", "--engine", "sglang", "--model", "qwen", "--alias", "student")
    assert added.stdout == "10-0-0-7-8000 serves 'default' from http://10.0.0.7:8000.\n"
    assert (await run("pause", "10-0-0-7-8000")).stdout == "10-0-0-7-8000 gets no new calls.\n"
    (server,) = json.loads((await run("ls", "--json")).stdout)
    assert (server["engine"], server["upstream_model"], server["aliases"]) == ("sglang", "qwen", ["student"])
    assert (server["state"], server["gateways"]) == ("paused", {})
    assert (await run("drain", "10-0-0-7-8000")).stdout == "10-0-0-7-8000 is drained: no call runs there.\n"
    listed = (await run("ls")).stdout
    assert re.search(r"^10-0-0-7-8000 +default +sglang +capture .* draining +no gateway$", listed, re.MULTILINE)
    assert "10-0-0-7-8000: drained by hand\n" in listed
    assert (await run("resume", "10-0-0-7-8000")).returncode == 0
    updated = await run("update", "--version", "3")
    assert (updated.returncode, updated.stdout) == (4, "")
    assert "no gateway runs that could update weights (start one" in updated.stderr
    assert (await run("rm", "10-0-0-7-8000")).returncode == 0
    assert json.loads((await run("ls", "--json")).stdout) == []
    for command in ("rm", "pause", "drain", "resume"):
        assert (await run(command, "10-0-0-7-8000")).returncode == 2


def test_doctor_says_what_mends_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(*next(iter(NOWHERE.items())))
    assert main(["doctor", "--json"]) == 0
    findings = {one["check"]: one for one in json.loads(capsys.readouterr().out)}
    assert findings["nats server"]["status"] == "ok"
    assert findings["bus"]["status"] == "warn"
    assert "rollyard up" in findings["bus"]["mend"]

    Path("blocked").write_text("")
    monkeypatch.setenv("ROLLYARD__STORE__BLOBS", "blocked/blobs")
    assert main(["doctor"]) == 3
    said = capsys.readouterr().out
    assert re.search(r"^missing +blobs +blocked/blobs cannot be written: Not a directory$", said, re.MULTILINE)
    assert "mend: set [store] blobs" in said


def test_a_reader_that_goes_away_is_no_error() -> None:
    done = subprocess.run(
        f"{sys.executable} -m rollyard schema Delivery | head -c 10; echo ${{PIPESTATUS[0]}}",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.endswith("0\n")
    assert done.stderr == ""
