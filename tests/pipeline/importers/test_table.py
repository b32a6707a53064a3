"""Tables of questions: what becomes of each row, and how bad ones are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.pipeline.importers.table import TableOptions, import_table, table_task
from rollyard.schemas.errors import TaskError
from rollyard.schemas.task import AgentSpec, EvaluationSpec
from rollyard.stages.evaluator import open_rule


def options(rule: str = "math", **more: Any) -> TableOptions:
    return TableOptions(prompt="q", answer="a", rule=rule, **more)


@pytest.mark.parametrize(
    ("row", "given", "args"),
    [
        ({"a": "\\frac12"}, options(), {"answer": "\\frac12"}),
        ({"a": 0.5}, options(), {"answer": "0.5"}),
        ({"a": ["1", "2"]}, options(), {"answers": ["1", "2"]}),
        ({"a": "so\n#### 1,234"}, options(answer_after="####"), {"answer": "1,234"}),
        ({"a": "1,234.5"}, options("numeric"), {"answer": 1234.5}),
        ({"a": 7}, options("numeric", args={"tolerance": 0.5}), {"answer": 7.0, "tolerance": 0.5}),
        ({"a": "^x+$"}, options("regex"), {"pattern": "^x+$"}),
        ({"a": "B"}, options("choice"), {"answer": "B"}),
        (
            {"a": 1, "o": ["red", "blue"]},
            options("choice", options="o"),
            {"answer": "B", "options": ["red", "blue"], "labels": "AB"},
        ),
        (
            {"a": 1, "o": ["red", "blue"]},
            options("choice", options="o", index_from=1),
            {"answer": "A", "options": ["red", "blue"], "labels": "AB"},
        ),
        (
            {"a": "2", "o": {"label": ["1", "2"], "text": ["red", "blue"]}},
            options("choice", options="o"),
            {"answer": "2", "options": ["red", "blue"], "labels": "12"},
        ),
        (
            {"a": "blue", "o": '["red", "blue"]'},
            options("choice", options="o"),
            {"answer": "blue", "options": ["red", "blue"], "labels": "AB"},
        ),
        ({"a": [{"input": "1", "output": "2"}]}, options("code"), {"cases": [{"input": "1", "output": "2"}]}),
        (
            {"a": '{"inputs": ["1"], "outputs": ["2"]}'},
            options("code"),
            {"cases": [{"input": "1", "output": "2"}]},
        ),
    ],
)
def test_the_answer_becomes_the_arguments_of_the_rule(
    row: dict[str, Any], given: TableOptions, args: dict[str, Any]
) -> None:
    converted = table_task({"q": "what?", **row}, given)
    assert converted.problems == ()
    assert converted.task is not None
    assert converted.task.evaluation == EvaluationSpec(rule=given.rule, args=args)
    open_rule(given.rule, args)


def test_the_rest_of_a_task_comes_from_columns_and_options() -> None:
    row = {"q": "red or blue?", "a": 0, "o": ["red", "blue"], "n": 12, "level": "easy"}
    given = options(
        "choice",
        options="o",
        identity="n",
        metadata=("level",),
        template="Choose. {prompt}",
        agent=AgentSpec(harness="bash", model="m"),
        group_size=4,
        data_source="quiz",
    )
    task = table_task(row, given).task
    assert task is not None
    assert (task.id, task.prompt) == ("12", "Choose. red or blue?\n\nA. red\nB. blue")
    assert (task.metadata, task.group_size, task.data_source) == ({"level": "easy"}, 4, "quiz")
    assert task.agent == AgentSpec(harness="bash", model="m")


@pytest.mark.parametrize(
    ("row", "given", "says"),
    [
        ({"q": "x"}, options(), "a: there is no such column; columns are q"),
        ({"q": "x", "a": None}, options(), "a: is null"),
        ({"q": "x", "a": ""}, options(), "a: is empty"),
        ({"q": " ", "a": "1"}, options(), "q: is empty"),
        ({"q": 5, "a": "1"}, options(), "q: is a number, not text"),
        ({"q": "x", "a": {}}, options(), "a: is an object, not text or a number"),
        ({"q": "x", "a": "5"}, options(answer_after="####"), "a: there is no '####' in it"),
        ({"q": "x", "a": "five"}, options("numeric"), "a: 'five' is no number; try the rule math"),
        ({"q": "x", "a": 2, "o": ["r", "b"]}, options("choice", options="o"), "a: 2 is none of 2 options from 0"),
        ({"q": "x", "a": "A", "o": ["r"]}, options("choice", options="o"), "o: needs at least two texts"),
        ({"q": "x", "a": "A", "o": ["r"] * 27}, options("choice", options="o"), "o: has 27 options, at most 26"),
        ({"q": "x", "a": "A", "o": {"AA": "r", "B": "b"}}, options("choice", options="o"), "o: labels are single"),
        ({"q": "x", "a": "[1"}, options("code"), "a: is text that is no JSON"),
        ({"q": "x", "a": {"inputs": [1], "outputs": []}}, options("code"), "lists `inputs` and `outputs`"),
        ({"q": "x", "a": []}, options("code"), "a: is no list of cases"),
        ({"q": "x", "a": "1", "n": 1.5}, options(identity="n"), "n: is a number, no id"),
        ({"q": "x", "a": "1"}, options(metadata=("m",)), "m: there is no such column"),
    ],
)
def test_what_is_wrong_with_a_row_is_named_by_column(row: dict[str, Any], given: TableOptions, says: str) -> None:
    converted = table_task(row, given)
    assert converted.task is None
    assert says in "; ".join(converted.problems)


ROWS = [{"q": "1 + 1?", "a": "2", "more": None}, {"q": "", "a": "x", "more": [1]}, {"q": "2 + 2?", "a": "4"}]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_every_bad_row_of_a_file_is_named_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"q.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    else:
        lines = [json.dumps(ROWS[0]), json.dumps(ROWS[1]), "", "{bad", "[1]", json.dumps(ROWS[2])]
        path.write_text("\n".join(lines))
    told: list[int] = []
    collected = import_table(path, options(), told.append)
    assert [task.prompt for task in collected.tasks] == ["1 + 1?", "2 + 2?"]
    with pytest.raises(TaskError) as failed:
        collected.result()
    assert f"{path}:2: q: is empty" in str(failed.value)
    if kind == "jsonl":
        assert f"{path}:4: is no JSON" in str(failed.value)
        assert f"{path}:5: is a list, not an object" in str(failed.value)


def test_good_files_give_tasks_with_ids_and_twins_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text('{"q": "a?", "a": "1", "n": "x"}\n{"q": "b?", "a": "2", "n": "x"}\n')
    assert len({task.id for task in import_table(path, options()).result()}) == 2
    with pytest.raises(TaskError, match=r"q.jsonl:2: id: 'x' is the id of .*q.jsonl:1 too"):
        import_table(path, options(identity="n")).result()


def test_many_problems_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text('{"q": "", "a": "1"}\n' * 50)
    with pytest.raises(TaskError, match=r"and 30 more"):
        import_table(path, options()).result()


@pytest.mark.parametrize("name", ["none.jsonl", "none.parquet", "empty.jsonl", "text.parquet"])
def test_a_file_that_cannot_be_read_or_has_no_rows(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "text.parquet").write_text("no Parquet")
    with pytest.raises(TaskError, match=r"cannot read|has no rows"):
        import_table(tmp_path / name, options()).result()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(
    st.dictionaries(st.sampled_from("qaon"), VALUES), st.sampled_from(["math", "choice", "code", "numeric", "regex"])
)
def test_any_row_gives_a_task_or_says_why_not(row: dict[str, Any], rule: str) -> None:
    converted = table_task(row, options(rule, options="o" if rule == "choice" else "", identity="n"))
    assert (converted.task is None) == bool(converted.problems)
