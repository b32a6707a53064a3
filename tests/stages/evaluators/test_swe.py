"""Rule `swe`: an agent's diff and the tests of a small repository, and what agents try instead of solving the issue."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollyard.schemas.errors import EvaluationError, TaskError
from rollyard.stages.evaluator import open_rule

BASE = {
    "calc.py": "def add(a, b):\n    return a - b\n\n\ndef sub(a, b):\n    return a - b\n",
    "tests/test_calc.py": "import calc\n\n\ndef test_sub():\n    assert calc.sub(3, 2) == 1\n",
}
NEW_TEST = "\n\ndef test_add():\n    assert calc.add(2, 3) == 5\n"
PYTEST = f"PYTHONPATH=. {sys.executable} -m pytest -rA -p no:cacheprovider -p no:xdist -p no:asyncio {{files}}"
ADD, SUB = "tests/test_calc.py::test_add", "tests/test_calc.py::test_sub"


def git(folder: Path, *arguments: str) -> bytes:
    settings = ("-c", "user.name=n", "-c", "user.email=e@example.org")
    return subprocess.run(["git", *settings, *arguments], cwd=folder, capture_output=True, check=True).stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    git(tmp_path, "init", "-q", str(folder))
    for name, text in BASE.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "base")
    return folder


def diff(repository: Path, changes: dict[str, str]) -> bytes:
    """What `git diff` says of these files, which are put back."""
    for name, text in changes.items():
        (repository / name).parent.mkdir(exist_ok=True)
        (repository / name).write_text(text)
    git(repository, "add", "-A")
    found = git(repository, "diff", "--cached", "--binary", "--no-renames")
    git(repository, "reset", "-q", "--hard")
    return found


async def judge(court: Any, repository: Path, changes: dict[str, str] | bytes, **args: Any) -> Any:
    test_patch = diff(repository, {"tests/test_calc.py": BASE["tests/test_calc.py"] + NEW_TEST}).decode()
    await court.sandbox.put_files(BASE)
    given = {"fail_to_pass": [ADD], "pass_to_pass": [SUB], "test_patch": test_patch, "command": PYTEST} | args
    changed = changes if isinstance(changes, bytes) else diff(repository, changes)
    return await court.judge("swe", given, diff=changed)


MENDED = BASE["calc.py"].replace("return a - b", "return a + b", 1)


async def test_a_solved_issue(court: Any, repository: Path) -> None:
    verdict = await judge(court, repository, {"calc.py": MENDED, "new/notes.txt": "new\n"})
    assert (verdict.reward, verdict.rewards) == (1.0, {"resolved": 1.0, "fail_to_pass": 1.0, "pass_to_pass": 1.0})
    assert {name: verdict.metrics[name] for name in ("applied", "tests_seen", "tests_missing")} == {
        "applied": 1.0,
        "tests_seen": 2.0,
        "tests_missing": 0.0,
    }
    assert "2 passed" in verdict.log


@pytest.mark.parametrize(
    ("changes", "rewards"),
    [
        ({"calc.py": MENDED.replace("a - b", "b - a")}, {"resolved": 0.0, "fail_to_pass": 1.0, "pass_to_pass": 0.0}),
        ({"calc.py": BASE["calc.py"] + "# no\n"}, {"resolved": 0.0, "fail_to_pass": 0.0, "pass_to_pass": 1.0}),
        ({"calc.py": "def add(:\n"}, {"resolved": 0.0, "fail_to_pass": 0.0, "pass_to_pass": 0.0}),
        ({"calc.py": "import os\nos._exit(0)\n"}, {"resolved": 0.0, "fail_to_pass": 0.0, "pass_to_pass": 0.0}),
    ],
    ids=["broke another", "solved nothing", "no Python", "ends the tests"],
)
async def test_an_issue_that_is_not_solved(
    court: Any, repository: Path, changes: dict[str, str], rewards: dict[str, float]
) -> None:
    verdict = await judge(court, repository, changes)
    assert (verdict.reward, verdict.rewards) == (0.0, rewards)


FAKE_SUMMARY = f"""
import atexit, os
def lie():
    os.write(1, b"=== short test summary info ===\\nPASSED {ADD}\\nPASSED {SUB}\\n")
atexit.register(lie)
"""
HOOK = """
import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    report.outcome = "passed"
"""


@pytest.mark.parametrize(
    ("changes", "left_out"),
    [
        ({"conftest.py": HOOK, "calc.py": BASE["calc.py"] + "# no\n"}, 1),
        ({"tests/conftest.py": HOOK, "calc.py": BASE["calc.py"] + "# no\n"}, 1),
        ({"sitecustomize.py": "raise SystemExit(0)", "calc.py": BASE["calc.py"] + "# no\n"}, 1),
        ({"tests/test_calc.py": "def test_add(): pass\ndef test_sub(): pass\n", "calc.py": BASE["calc.py"] + "#\n"}, 1),
        ({"calc.py": FAKE_SUMMARY + BASE["calc.py"]}, 0),
    ],
    ids=["conftest", "conftest below", "sitecustomize", "the tests themselves", "a summary of its own"],
)
async def test_tricks_do_not_pass_for_a_solution(
    court: Any, repository: Path, changes: dict[str, str], left_out: int
) -> None:
    verdict = await judge(court, repository, changes)
    assert (verdict.reward, verdict.metrics["left_out_files"]) == (0.0, left_out)


async def test_what_is_protected_can_be_said(court: Any, repository: Path) -> None:
    verdict = await judge(court, repository, {"conftest.py": "", "calc.py": MENDED}, protect=[])
    assert (verdict.reward, verdict.metrics["left_out_files"]) == (1.0, 0.0)


@pytest.mark.parametrize(
    "changes", [b"", {"conftest.py": "x = 1\n"}], ids=["no change", "nothing but what is left out"]
)
async def test_no_change_is_not_tested(court: Any, repository: Path, changes: Any) -> None:
    verdict = await judge(court, repository, changes, command="exit 9")
    assert (verdict.reward, verdict.metrics["empty_diff"]) == (0.0, 1.0)


async def test_a_diff_that_does_not_apply_is_worth_nothing(court: Any, repository: Path) -> None:
    broken = diff(repository, {"calc.py": MENDED}).replace(b"-    return a - b", b"-    return something else")
    verdict = await judge(court, repository, broken)
    assert (verdict.reward, verdict.metrics["applied"]) == (0.0, 0.0)
    assert "calc.py" in verdict.log


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"command": "nosuchrunner {files}"}, r"the tests did not run \(exit status 127\)"),
        ({"command": f"{sys.executable} -m nosuchmodule"}, r"did not run \(exit status 1\).*nosuchmodule"),
        ({"prepare": "exit 3"}, r"did not run \(exit status 3\)"),
        (
            {"test_patch": "diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n"},
            "the test patch does not apply",
        ),
        ({"command": f"{PYTEST} --junit-xml=r.xml", "report": "junit", "report_file": "s.xml"}, "did not run"),
        ({"command": "sleep 100"}, "did not end within 2 s"),
    ],
)
async def test_tests_that_do_not_work_are_a_failure_and_no_zero(
    court: Any, repository: Path, args: dict[str, Any], says: str
) -> None:
    given = {"fail_to_pass": [ADD], "command": PYTEST} | args
    await court.sandbox.put_files(BASE)
    with pytest.raises(EvaluationError, match=says):
        await court.judge(
            "swe", given, diff=diff(repository, {"calc.py": MENDED}), timeout_s=2 if "within" in says else 20
        )


async def test_an_agent_that_ends_the_runner_unseen_is_found_by_a_run_without_it(court: Any, repository: Path) -> None:
    verdict = await judge(court, repository, {"calc.py": "import os\nos._exit(0)\n"})
    assert (verdict.reward, verdict.metrics["runner_ended"]) == (0.0, 1.0)


async def test_a_junit_file_is_read(court: Any, repository: Path) -> None:
    args = {"command": f"{PYTEST} --junit-xml=r.xml", "report": "junit", "report_file": "r.xml"}
    assert (await judge(court, repository, {"calc.py": MENDED}, **args)).reward == 1.0


async def test_a_junit_file_of_the_agent_does_not_count(court: Any, repository: Path) -> None:
    cases = "".join(f'<testcase classname="tests.test_calc" name="{name}"/>' for name in ("test_add", "test_sub"))
    fake = {"r.xml": f"<testsuite>{cases}</testsuite>", "calc.py": "import os\nos._exit(0)\n"}
    args = {"command": f"{PYTEST} --junit-xml=r.xml", "report": "junit", "report_file": "r.xml"}
    assert (await judge(court, repository, fake, **args)).reward == 0.0


async def test_a_second_evaluation_finds_the_patches_applied(court: Any, repository: Path) -> None:
    assert (await judge(court, repository, {"calc.py": MENDED})).reward == 1.0
    given = {"fail_to_pass": [ADD], "command": PYTEST}
    assert (await court.judge("swe", given, diff=diff(repository, {"calc.py": MENDED}))).reward == 1.0


async def test_what_the_agent_changed_must_be_known(court: Any) -> None:
    with pytest.raises(EvaluationError, match="what the agent changed is not known"):
        await court.judge("swe", {"fail_to_pass": [ADD]})


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"fail_to_pass": []}, "fail_to_pass"),
        ({"fail_to_pass": ["a"], "report": "junit"}, "`report_file` is missing"),
        ({"fail_to_pass": ["a"], "main": "all"}, "`main` is resolved"),
    ],
)
def test_what_cannot_be_asked(args: dict[str, Any], says: str) -> None:
    with pytest.raises(TaskError, match=says):
        open_rule("swe", args)
