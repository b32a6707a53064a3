"""Reports of test runners, from what the real ones print."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.stages.evaluators.reports import Format, has_begun, outcomes

PYTEST = """
import pytest, sys
class TestBox:
    def test_in(self): pass
    @pytest.mark.parametrize("x", ["a - b", "[c]"])
    def test_each(self, x): assert x
def test_bad(): print("PASSED test_it.py::test_bad"); assert 0
@pytest.fixture
def broken(): raise ValueError("no - way")
def test_fixture(broken): pass
@pytest.mark.xfail
def test_expected(): assert 0
@pytest.mark.skip(reason="not now")
def test_skipped(): pass
"""
UNITTEST = '''
import sys, unittest
class Box(unittest.TestCase):
    def test_ok(self): pass
    def test_said(self):
        """Says what it does."""
    def test_noisy(self): print("noise", file=sys.stderr)
    def test_bad(self): self.fail("no")
    def test_error(self): raise ValueError
    @unittest.skip("not now")
    def test_skipped(self): pass
    @unittest.expectedFailure
    def test_expected(self): self.fail("as expected")
unittest.main(verbosity=2)
'''


def run(folder: Path, *command: str) -> str:
    ended = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, check=False)
    return ended.stdout + ended.stderr


@pytest.mark.parametrize("flags", [["-rA"], ["-v", "-rN"], ["-rA", "--color=yes"], ["-v", "-n1", "-rN"]])
def test_pytest_prints_what_is_read(tmp_path: Path, flags: list[str]) -> None:
    (tmp_path / "test_it.py").write_text(PYTEST)
    text = run(tmp_path, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:asyncio", *flags, "test_it.py")
    found = outcomes(text, "pytest")
    assert has_begun(text, "pytest")
    assert {name: found.get(f"test_it.py::{name}") for name in ("TestBox::test_in", "test_bad", "test_fixture")} == {
        "TestBox::test_in": "passed",
        "test_bad": "failed",
        "test_fixture": "failed",
    }
    assert found["test_it.py::TestBox::test_each[a - b]"] == found["test_it.py::TestBox::test_each[[c]]"] == "passed"
    assert found["test_it.py::test_expected"] == "passed"
    assert found.get("test_it.py::test_skipped", "skipped") == "skipped"


def test_unittest_prints_what_is_read(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(UNITTEST)
    text = run(tmp_path, "test_it.py")
    found = outcomes(text, "unittest")
    assert has_begun(text, "unittest")
    want = {"ok": "passed", "said": "passed", "noisy": "passed", "bad": "failed", "error": "failed"}
    want |= {"skipped": "skipped", "expected": "passed"}
    for form in ("test_{} (__main__.Box)", "__main__.Box.test_{}"):
        assert {name: found.get(form.format(name)) for name in want} == want


def test_junit_says_what_is_read(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "test_it.py").write_text(PYTEST)
    run(tmp_path, "-m", "pytest", "-p", "no:asyncio", "--junit-xml=r.xml", "sub/test_it.py")
    text = (tmp_path / "r.xml").read_text()
    found = outcomes(text, "junit")
    assert has_begun(text, "junit")
    assert found["sub/test_it.py::TestBox::test_in"] == found["sub.test_it.TestBox::test_in"] == "passed"
    assert found["sub/test_it.py::test_bad"] == found["sub/test_it.py::test_fixture"] == "failed"
    assert found["sub/test_it.py::test_skipped"] == "skipped"
    with pytest.raises(ValueError, match="is no XML"):
        outcomes("<testsuite>", "junit")


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("pytest", "No module named pytest"),
        ("unittest", "ImportError: no module"),
        ("junit", ""),
    ],
)
def test_a_runner_that_did_not_come_to_work(form: Format, text: str) -> None:
    assert not has_begun(text, form)


def test_of_several_outcomes_the_worst_counts() -> None:
    real = "=== short test summary info ===\nFAILED a.py::b - assert 0\n"
    fake = "=== short test summary info ===\nPASSED a.py::b\n"
    assert outcomes(real + fake, "pytest") == outcomes(fake + real, "pytest") == {"a.py::b": "failed"}
    assert outcomes("PASSED a.py::b\n" + real, "pytest") == {"a.py::b": "failed"}


@given(st.text(alphabet="PASSEDFIL ERO:=x-[]()\n. ok", max_size=300), st.sampled_from(["pytest", "unittest"]))
def test_any_text_can_be_read(text: str, form: Format) -> None:
    assert set(outcomes(text, form).values()) <= {"passed", "failed", "skipped"}
