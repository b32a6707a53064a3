"""Bad input as a user meets it: by `rollyard submit`, by the client, by plain NATS. What, where, how to mend it."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import zstandard

import rollyard
from rollyard.pipeline import codec
from rollyard.pipeline.bus import Bus
from rollyard.pipeline.embedded import EmbeddedNats, free_port, nats_server
from rollyard.schemas import subjects
from rollyard.schemas.errors import SetupError, TaskError
from rollyard.schemas.task import MAX_PROMPT_BYTES
from rollyard.stages.plugin_check import check_task

GOOD = {"prompt": "p", "id": "good", "agent": {"harness": "noop"}, "sandbox": {"backend": "none"}}


def but(**changes: Any) -> dict[str, Any]:
    return {key: value for key, value in {**GOOD, "id": "bad", **changes}.items() if value is not None}


BAD: dict[str, tuple[Any, str, str]] = {
    "malformed": (
        '{"prompt": "a"',
        "malformed JSON: Expecting ',' delimiter at column 15",
        "one whole JSON object on one line",
    ),
    "no prompt": (but(prompt=None), "prompt: is missing", "it is required"),
    "unknown field": (but(colour=1), "colour: unknown field", "known here are prompt, id, agent,"),
    "misspelt field": (but(group_sise=2), "group_sise: unknown field", "did you mean `group_size`?"),
    "unknown harness": (
        but(agent={"harness": "aks"}),
        "agent.harness: no harness is called 'aks'",
        "did you mean 'ask'?",
    ),
    "unknown rule": (
        but(evaluation={"rule": "exakt"}),
        "evaluation.rule: no evaluation rule is called 'exakt'",
        "did you mean 'exact'?",
    ),
    "unknown backend": (
        but(sandbox={"backend": "locl"}),
        "sandbox.backend: no sandbox backend is called 'locl'",
        "did you mean 'local'?",
    ),
    "wrong argument": (
        but(agent={"harness": "noop", "args": {"sleep": 1}}),
        "agent.args",
        "arguments of the harness noop are: sleep_s, answer",
    ),
    "negative timeout": (but(timeouts={"run_s": -1}), "timeouts.run_s: must be a number > 0, is -1", "> 0"),
    "path above": (
        but(sandbox={"files": {"../x": ""}}),
        "sandbox.files: '../x' leaves the sandbox",
        "use a path inside the working directory",
    ),
    "absolute path": (
        but(sandbox={"files": {"/etc/x": ""}}),
        "sandbox.files: '/etc/x' leaves the sandbox",
        "use a path inside the working directory",
    ),
    "long prompt": (
        but(prompt="x" * (MAX_PROMPT_BYTES + 1)),
        "prompt: has 10,000,001 bytes, the limit is 10,000,000 bytes (10 MB)",
        "put large inputs into sandbox.files",
    ),
    "group of none": (but(group_size=0), "group_size: must be an integer >= 1, is 0", ">= 1"),
    "newer": (but(schema_version=9), "schema_version: 9 is newer than 1", "upgrade Rollyard"),
    "network": (
        but(sandbox={"network": "none"}),
        "sandbox.network: the backend 'local' cannot keep to 'none'",
        "it can do open",
    ),
}


def as_line(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def command(
    *arguments: str, url: str = "nats://127.0.0.1:1", folder: Path, limit_bytes: int = 0, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run `rollyard` as a process of its own in `folder`; its files may have at most `limit_bytes`."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))

    return subprocess.run(
        [sys.executable, "-m", "rollyard", *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"ROLLYARD__NATS__URL": url} | env,
        preexec_fn=limit if limit_bytes else None,
        check=False,
        timeout=120,
    )


async def rollyard_command(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(command, *arguments, **options)


def refused(done: subprocess.CompletedProcess[str], code: int = 2) -> str:
    """What a refused command said: to standard error, and nothing else but a message."""
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert done.stderr.startswith("rollyard: ")
    assert "Traceback" not in done.stderr
    return done.stderr


async def waiting(bus: Bus) -> int:
    return int((await bus.stream_info(subjects.TASKS))["state"]["messages"])


# --- tasks ---


async def test_submit_names_every_bad_line_and_publishes_none(bus: Bus, nats: EmbeddedNats, tmp_path: Path) -> None:
    lines = [as_line(GOOD), *(as_line(value) for value, _, _ in BAD.values())]
    (tmp_path / "tasks.jsonl").write_text("\n".join(lines))
    said = refused(await rollyard_command("submit", "tasks.jsonl", "--run", "r", url=nats.url, folder=tmp_path))
    assert said.startswith(f"rollyard: {len(BAD)} lines are not acceptable, so nothing was submitted:")
    for number, (name, (_, what, mend)) in enumerate(BAD.items(), 2):
        (line,) = [line for line in said.splitlines() if line.startswith(f"  tasks.jsonl:{number}: ")]
        assert what in line, name
        assert mend in line, name
    assert "tasks.jsonl:1:" not in said
    assert await waiting(bus) == 0


async def test_the_client_says_the_same_and_publishes_none(bus: Bus, nats: EmbeddedNats, tmp_path: Path) -> None:
    async with rollyard.connect(nats.url, run="r", blobs=tmp_path) as client:
        for name, (value, what, mend) in BAD.items():
            (tmp_path / "tasks.jsonl").write_text(f"{as_line(GOOD)}\n{as_line(value)}\n")
            with pytest.raises(TaskError) as of_file:
                await client.submit(tmp_path / "tasks.jsonl", check=check_task)
            assert "tasks.jsonl:2: " in str(of_file.value)
            told = [str(of_file.value)]
            if not isinstance(value, str):
                with pytest.raises(TaskError) as of_values:
                    await client.submit([GOOD, value], check=check_task)
                assert "task 2: " in str(of_values.value)
                told.append(str(of_values.value))
            for text in told:
                assert what in text, name
                assert mend in text, name
    assert await waiting(bus) == 0


async def test_what_comes_by_plain_nats_is_put_aside_with_the_same_words(crew: Any) -> None:
    for value, _, _ in BAD.values():
        # A prompt over the limit fits into a message when it is compressed.
        body = value.encode() if isinstance(value, str) else codec.encode(value)
        await crew.bus.publish("task.r", body)
    await crew.bus.publish("task.r", json.dumps(GOOD).encode())
    async with crew.at_work("admit", "init", "run", "eval", "aggregate"):
        (delivery,) = await crew.until(crew.deliveries)
    assert (delivery.task_id, delivery.status) == ("good", "completed")
    reasons = {bytes(letter.body[:2000]): letter.reason for letter in await crew.letters("r")}
    assert len(reasons) == len(BAD)
    for name, (value, what, mend) in BAD.items():
        body = value.encode() if isinstance(value, str) else codec.encode(value)
        assert what in reasons[body[:2000]], name
        assert mend in reasons[body[:2000]], name


async def test_a_small_message_that_unpacks_to_gigabytes_is_put_aside(crew: Any) -> None:
    with zstandard.ZstdCompressor().stream_writer(packed := io.BytesIO(), size=2 << 30, closefd=False) as frame:
        for _ in range(2048):
            frame.write(bytes(1 << 20))
    await crew.bus.publish("task.r", packed.getvalue())
    async with crew.at_work("admit"):
        (letter,) = await crew.until(crew.letters)
    assert "it unpacks to more than 1,073,741,824 bytes" in letter.reason


async def test_dead_letters_are_shown_to_the_user(crew: Any, nats: EmbeddedNats, tmp_path: Path) -> None:
    for body in (b'{"prompt": "p", "group_size": 0}', json.dumps(GOOD).encode()):
        await crew.bus.publish("task.r", body)
    async with crew.at_work("admit"):
        await crew.until(crew.letters)
        await crew.until(crew.due)
    shown = await rollyard_command("dead", "ls", "--run", "r", url=nats.url, folder=tmp_path)
    assert "group_size: must be an integer >= 1, is 0" in shown.stdout
    status = await rollyard_command("status", "--run", "r", url=nats.url, folder=tmp_path)
    assert "1 in DEAD" in status.stdout


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "tasks.jsonl").write_text(content)
    said = refused(command("submit", "tasks.jsonl", "--run", "r", folder=tmp_path))
    assert said == ('rollyard: tasks.jsonl: the file is empty (write one task a line, at least {"prompt": "..."})\n')


# --- one id, two tasks ---


async def test_an_id_twice_in_a_file(bus: Bus, nats: EmbeddedNats, tmp_path: Path) -> None:
    async def submit(*tasks: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, tasks)))
        return await rollyard_command("submit", "tasks.jsonl", "--run", "r", url=nats.url, folder=tmp_path)

    said = refused(await submit(GOOD, GOOD | {"prompt": "other"}))
    assert "tasks.jsonl:2: id: 'good' is used by line 1 with other content; give one of them another id" in said
    assert await waiting(bus) == 0
    done = await submit(GOOD, GOOD)
    assert (done.returncode, done.stdout.startswith("1 task published to run r")) == (0, True), done
    assert await waiting(bus) == 1


async def test_an_id_that_the_run_has_already(crew: Any, nats: EmbeddedNats, tmp_path: Path) -> None:
    async def submit(task: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        (tmp_path / "tasks.jsonl").write_text(json.dumps(task))
        return await rollyard_command("submit", "tasks.jsonl", "--run", "r", url=nats.url, folder=tmp_path)

    other = GOOD | {"prompt": "other"}
    async with crew.at_work("admit", "init", "run", "eval", "aggregate"):
        assert (await submit(GOOD)).returncode == 0
        await crew.until(crew.deliveries)
        assert "0 tasks published to run r, 1 were there already." in (await submit(GOOD)).stdout
        said = refused(await submit(other))
        assert "run 'r' has other content under 'good'; nothing was submitted (give the tasks other ids" in said
        # By plain NATS nobody is there to tell: it is put aside.
        for body in (json.dumps(GOOD), json.dumps(other)):
            await crew.bus.publish("task.r", body.encode())
        (letter,) = await crew.until(crew.letters)
    assert letter.reason == (
        "task id 'good' is taken in run 'r' by a task with other content (give the new task an id of its own)"
    )
    assert len(await crew.deliveries()) == 1


# --- things that are in the way ---


async def test_a_busy_port(nats: EmbeddedNats, bus: Bus, tmp_path: Path) -> None:
    taken = str(nats.port)
    (tmp_path / ".rollyard").mkdir()
    (tmp_path / ".rollyard" / "secret").write_text("the secret of the tests")
    (tmp_path / "script.json").write_text('{"conversations": [{"turns": [{"content": "hi"}]}]}')
    said = refused(await rollyard_command("gateway", "--port", taken, url=nats.url, folder=tmp_path), 3)
    assert f"the gateway cannot listen on 127.0.0.1:{taken}: Address already in use (stop what uses the port" in said
    with pytest.raises(SetupError, match=rf"port {taken} for nats-server is taken: Address already in use .stop what"):
        async with nats_server(tmp_path / "second", nats.port):
            pass
    done = await rollyard_command("up", "--nats-port", taken, "--scripted", "script.json", folder=tmp_path)
    assert done.returncode == 3
    assert re.search(rf"port {taken} .*Address already in use \(stop .*choose another", done.stderr)


@pytest.mark.parametrize(
    "arguments", [["status"], ["submit", "tasks.jsonl", "--run", "r"], ["worker"], ["samples", "ls"], ["doctor"]]
)
def test_a_data_folder_of_a_newer_version(tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "version").write_text("99\n")
    (tmp_path / "tasks.jsonl").write_text(json.dumps(GOOD))
    said = refused(command(*arguments, "--data", "data", folder=tmp_path))
    assert "data has version 99, this Rollyard reads up to version 1 (update Rollyard, or choose another folder" in said


def test_no_bus(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text(json.dumps(GOOD))
    url = f"nats://127.0.0.1:{free_port()}"
    said = refused(command("submit", "tasks.jsonl", "--run", "r", url=url, folder=tmp_path), 4)
    assert f"cannot reach NATS at {url}" in said
    assert "(start one with `rollyard up`, or set [nats] url)" in said
