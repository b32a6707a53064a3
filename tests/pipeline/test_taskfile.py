from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.pipeline import codec
from rollyard.pipeline.taskfile import SHOWN_PROBLEMS, check_tasks, decode_task, read_task_file
from rollyard.schemas.errors import TaskError
from rollyard.schemas.task import MAX_PROMPT_BYTES, AgentSpec, Task, Timeouts


def written(folder: Path, *lines: str | bytes | dict[str, Any]) -> Path:
    path = folder / "tasks.jsonl"
    encoded = [
        line if isinstance(line, bytes) else (json.dumps(line) if isinstance(line, dict) else line).encode()
        for line in lines
    ]
    path.write_bytes(b"\n".join(encoded) + b"\n")
    return path


def refusal(path: Path) -> str:
    with pytest.raises(TaskError) as caught:
        read_task_file(path)
    return str(caught.value)


def with_sandbox(**sandbox: Any) -> dict[str, Any]:
    return {"prompt": "a", "sandbox": sandbox}


BAD_LINES: list[tuple[str, str | bytes | dict[str, Any], str]] = [
    ("missing prompt", {}, "prompt: is missing; it is required"),
    ("empty prompt", {"prompt": ""}, "prompt: must not be empty"),
    ("wrong type", {"prompt": 1}, "prompt: must be a string, is 1"),
    ("id null", {"prompt": "a", "id": None}, "id: must be a string, is null"),
    ("id too long", {"prompt": "a", "id": "x" * 300}, "id: must be a string of length <= 256, has 300"),
    ("group of none", {"prompt": "a", "group_size": 0}, "group_size: must be an integer >= 1, is 0"),
    ("group too large", {"prompt": "a", "group_size": 5000}, "group_size: must be an integer <= 4096, is 5000"),
    ("negative timeout", {"prompt": "a", "timeouts": {"run_s": -1}}, "timeouts.run_s: must be a number > 0, is -1"),
    ("list item", {"prompt": "a", "agent": {"sampling": {"stop": [1]}}}, "agent.sampling.stop[0]: must be a string"),
    ("optional number", {"prompt": "a", "agent": {"max_calls": "x"}}, 'must be an integer or null, is "x"'),
    ("file content", with_sandbox(files={"a": 1}), 'sandbox.files["a"]: must be a string, is 1'),
    ("misspelt field", {"prompt": "a", "agent": {"modle": "m"}}, "unknown field; did you mean `agent.model`?"),
    (
        "field at another place",
        {"prompt": "a", "harness": "ask"},
        "harness: unknown field; did you mean `agent.harness`?",
    ),
    (
        "unknown field in a list",
        {"prompt": "a", "hooks": [{"hook": "h"}, {"zzz": 1}]},
        "hooks[1].zzz: unknown field; known here are hook, args, on_failure",
    ),
    (
        "misspelt field in a list",
        {"prompt": "a", "sandbox": {"setup": [{"timeout": 1}]}},
        "sandbox.setup[0].timeout: unknown field; did you mean `sandbox.setup[0].timeout_s`?",
    ),
    ("unknown field", {"prompt": "a", "zzz": 1}, "zzz: unknown field; known here are prompt, id, agent,"),
    ("not an object", "[]", "a task must be an object, is []"),
    ("cut JSON", '{"prompt": "a"', "malformed JSON: Expecting ',' delimiter at column 15; a task is one whole JSON"),
    ("two objects", '{"prompt": "a"} {}', "malformed JSON: Extra data at column 17"),
    ("no number", '{"prompt": NaN}', "malformed JSON: NaN is no JSON number"),
    ("half a pair", '{"prompt": "\\ud800"}', "half of a surrogate pair"),
    ("too deep", '{"prompt": "a", "metadata": ' + "[" * 50_000, "nested too deeply"),
    ("not UTF-8", b'{"prompt": "\xff"}', "not UTF-8: byte 0xff at position 12; save it as UTF-8"),
    ("newer", {"prompt": "a", "schema_version": 99, "new": 1}, "schema_version: 99 is newer than 1"),
    ("setup", with_sandbox(setup=["a\0"]), "sandbox.setup: a command holds a NUL character"),
    ("path above", with_sandbox(files={"../x": ""}), "sandbox.files: '../x' leaves the sandbox"),
    ("path above, hidden", with_sandbox(files={"a/../../x": ""}), "leaves the sandbox"),
    ("absolute path", with_sandbox(files={"/etc/passwd": ""}), "sandbox.files: '/etc/passwd' leaves the sandbox"),
    ("no file", with_sandbox(files={"a/": ""}), "sandbox.files: 'a/' names no file"),
    ("same file", with_sandbox(files={"a": "", "./a": ""}), "'./a' and 'a' are the same file"),
    ("file and folder", with_sandbox(files={"a": "", "a/b": ""}), "'a' is a file and the folder of 'a/b'"),
    ("variable", with_sandbox(env={"A=": "1"}), "sandbox.env: 'A=' cannot be set"),
    ("command", with_sandbox(setup=["echo \0"]), "sandbox.setup: a command holds a NUL character"),
]


@pytest.mark.parametrize(("line", "message"), [case[1:] for case in BAD_LINES], ids=[case[0] for case in BAD_LINES])
def test_a_bad_line_is_named_by_file_line_and_field(
    tmp_path: Path, line: str | bytes | dict[str, Any], message: str
) -> None:
    path = written(tmp_path, {"prompt": "fine"}, line)
    text = refusal(path)
    assert f"{path}:2: " in text
    assert message in text
    assert f"{path}:1: " not in text


def test_every_bad_line_is_listed_up_to_a_limit_and_the_rest_counted(tmp_path: Path) -> None:
    path = written(tmp_path, {"prompt": "fine"}, *[{"prompt": 1}] * (SHOWN_PROBLEMS + 5))
    text = refusal(path)
    assert text.startswith(f"{SHOWN_PROBLEMS + 5} lines are not acceptable, so nothing was submitted:")
    assert text.count("prompt: must be a string") == SHOWN_PROBLEMS
    assert text.endswith("... and 5 more")


def test_all_problems_of_one_line_are_listed(tmp_path: Path) -> None:
    text = refusal(written(tmp_path, with_sandbox(files={"/a": ""}, setup=["\0"])))
    assert "'/a' leaves" in text
    assert "setup: a command holds a NUL" in text


def test_a_prompt_over_the_limit_is_refused_with_the_limit(tmp_path: Path) -> None:
    path = written(tmp_path, {"prompt": "é" * (MAX_PROMPT_BYTES // 2) + "x"})
    assert "prompt: has 10,000,001 bytes, the limit is 10,000,000 bytes (10 MB)" in refusal(path)
    accepted = read_task_file(written(tmp_path, {"prompt": "é" * (MAX_PROMPT_BYTES // 2)}))
    assert len(accepted.tasks) == 1


@pytest.mark.parametrize("content", [b"", b"\n  \n", b"\xef\xbb\xbf"])
def test_an_empty_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(content)
    assert f"{path}: the file is empty" in refusal(path)


def test_a_file_in_utf_16_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes('{"prompt": "a"}\n'.encode("utf-16"))
    assert "the file is UTF-16 (save it as UTF-8)" in refusal(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    assert "cannot read the task file" in refusal(tmp_path / "absent.jsonl")
    assert "Is a directory" in refusal(tmp_path)
    with pytest.raises(TaskError, match="null byte"):
        read_task_file("a\0b")


def test_a_byte_order_mark_blank_lines_and_windows_line_ends_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n  \n{"prompt": "b"}')
    assert [task.prompt for task in read_task_file(path).tasks] == ["a", "b"]


def test_line_separators_inside_a_text_do_not_end_a_line(tmp_path: Path) -> None:
    path = written(tmp_path, '{"prompt": "a\u2028b\u0085c"}')
    assert read_task_file(path).tasks[0].prompt == "a\u2028b\u0085c"


def test_the_same_task_twice_is_accepted_once(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {"prompt": "a", "id": "t", "group_size": 2},
        '{"group_size": 2, "prompt": "a", "id": "t", "max_attempts": 3}',
        {"prompt": "b"},
        {"prompt": "b"},
    )
    accepted = read_task_file(path)
    assert [task.prompt for task in accepted.tasks] == ["a", "b"]
    assert accepted.repeated == 2


def test_an_id_with_other_content_is_refused_naming_both_lines(tmp_path: Path) -> None:
    path = written(tmp_path, {"prompt": "a", "id": "t"}, {"prompt": "b"}, {"prompt": "c", "id": "t"})
    assert f"{path}:3: id: 't' is used by line 1 with other content" in refusal(path)


def test_the_injected_check_finds_what_types_cannot(tmp_path: Path) -> None:
    def known_harness(task: Task) -> list[str]:
        return [] if task.agent.harness == "ask" else [f"agent.harness: {task.agent.harness!r} is unknown"]

    path = written(tmp_path, {"prompt": "a"}, {"prompt": "b", "agent": {"harness": "aks"}})
    with pytest.raises(TaskError, match=r"tasks.jsonl:2: agent.harness: 'aks' is unknown"):
        read_task_file(path, known_harness)
    with pytest.raises(TaskError, match=r"agent.harness: 'aks' is unknown"):
        decode_task(b'{"prompt": "b", "agent": {"harness": "aks"}}', known_harness)


def test_tasks_made_in_python_are_checked_as_strictly() -> None:
    bad = [
        Task(prompt="fine"),
        Task(prompt="", timeouts=Timeouts(run_s=-1)),
        {"prompt": "a", "metadata": {"x": object()}},
        Task(prompt="\ud800"),
        Task(prompt="a", metadata={"x": "\ud800"}),
        3,
    ]
    with pytest.raises(TaskError) as caught:
        check_tasks(bad)  # type: ignore[arg-type]
    lines = str(caught.value).split("\n  ")
    assert lines[0] == "5 tasks are not acceptable, so nothing was submitted:"
    assert [line.partition(": ")[0] for line in lines[1:]] == ["task 2", "task 3", "task 4", "task 5", "task 6"]
    assert "use plain values" in lines[2]
    assert "half of a surrogate pair" in lines[3]


def test_a_dictionary_may_hold_parts_that_are_structs() -> None:
    accepted = check_tasks([{"prompt": "a", "agent": AgentSpec(harness="bash")}])
    assert accepted.tasks[0].agent.harness == "bash"


@pytest.mark.parametrize("encode", [codec.encode, codec.encode_json, msgspec.msgpack.encode])
@pytest.mark.parametrize("prompt", ["short", "long " * 2000])
def test_a_task_is_read_from_every_encoding(encode: Any, prompt: str) -> None:
    task = Task(prompt=prompt, id="t", group_size=3)
    assert decode_task(encode(task)) == task


def test_a_task_of_plain_nats_gets_an_id_and_the_same_messages() -> None:
    assert decode_task('\ufeff {"prompt": "a"}\n').id == Task(prompt="a").with_id().id
    for body in (b'{"prompt": 7}', msgspec.msgpack.encode({"prompt": 7})):
        with pytest.raises(TaskError) as caught:
            decode_task(body)
        assert str(caught.value) == "prompt: must be a string, is 7"


@pytest.mark.parametrize("body", [b"", b"hello", b"\x81\xa6prom", b"\x28\xb5\x2f\xfdxx", b"\x00", b"\xc1", b"{"])
def test_a_body_that_is_no_task_is_refused(body: bytes) -> None:
    with pytest.raises(TaskError):
        decode_task(body)


@given(st.binary(max_size=40))
def test_no_body_raises_anything_but_task_error(body: bytes) -> None:
    try:
        assert decode_task(body).id
    except TaskError as error:
        assert str(error)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
fields = st.sampled_from([*Task.__struct_fields__, "promt", "files"])


@given(st.dictionaries(fields, json_values, max_size=5), st.dictionaries(st.text(max_size=5), json_values, max_size=3))
def test_no_value_raises_anything_but_task_error(values: dict[str, Any], free: dict[str, Any]) -> None:
    for value in (values, {"prompt": "a", "agent": free}, {"prompt": "a", "metadata": free}, [free]):
        try:
            accepted = check_tasks([value])  # type: ignore[list-item]
        except TaskError as error:
            assert "task 1: " in str(error)
        else:
            task = accepted.tasks[0]
            assert decode_task(codec.encode_json(task)) == decode_task(codec.encode(task)) == task


def test_a_compressed_task_that_ends_in_what_looks_like_a_blank_is_read_whole() -> None:
    tasks = (Task(prompt=random.Random(number).randbytes(4000).hex(), id="t") for number in range(2000))
    task, body = next((task, body) for task in tasks if (body := codec.encode(task))[-1:].isspace())
    assert decode_task(body) == task
