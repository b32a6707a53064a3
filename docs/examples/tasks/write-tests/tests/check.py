"""Runs the tests against the right code, and against the code with one fault after the other."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

RIGHT = (Path(__file__).parent / "intervals.py").read_text()
FAULTS = {
    "unsorted": ("in sorted(intervals)", "in list(intervals)"),
    "touching": ("merged[-1][1] + 1", "merged[-1][1]"),
    "inside": ("max(merged[-1][1], high)", "high"),
    "no_error": ("if low > high", "if False"),
    "off_by_one": ("high - low + 1", "high - low"),
    "not_merged": ("in merge(intervals))", "in intervals)"),
}
TESTS = Path("test_intervals.py")


def passes(source):
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "intervals.py").write_text(source)
        Path(folder, TESTS.name).write_bytes(TESTS.read_bytes())
        command = [sys.executable, "-m", "unittest", "test_intervals"]
        ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=15)
    return ended.returncode == 0 and "Ran 0 tests" not in ended.stderr


rewards = {"reward": 0, "passes": 0, "caught": 0}
if TESTS.is_file() and passes(RIGHT):
    caught = {name: not passes(RIGHT.replace(*fault)) for name, fault in FAULTS.items()}
    print(*(f"{name}: {'caught' if found else 'missed'}" for name, found in caught.items()), sep="\n")
    share = sum(caught.values()) / len(caught)
    rewards = {"reward": int(share == 1), "passes": 1, "caught": share}
Path("/logs/verifier/reward.json").write_text(json.dumps(rewards))
