"""A harness of somebody's own, from a package that is installed beside Rollyard."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

CODE = """
from rollyard.harnesses.harness import Command, agent_environment, read_result


class Mine:
    name = "mine"
    in_process = False

    def validate_args(self, args): pass
    def files(self, context): return {"a.txt": "a"}
    def command(self, context): return Command(("true",), agent_environment(context))
    def progress(self, stdout, stderr): return {"lines": float(stdout.count(b"\\n"))}
    async def result(self, context, exit_code, stdout, stderr, read): return read_result(exit_code, stdout, stderr)
"""
USE = """
import json
from rollyard.harnesses.harness import Needs, needs_of, open_harness, progress_of

found = [open_harness(name) for name in ("mine", "own_agent:Mine")]
assert all(needs_of(harness, {}) == Needs() for harness in found)
print(json.dumps([harness.name for harness in found] + [progress_of(found[0], b"a\\n", b"")]))
"""


def test_it_is_found_by_its_entry_point_and_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "own_agent.py").write_text(CODE)
    info = tmp_path / "own_agent-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-agent\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rollyard.harnesses]\nmine = own_agent:Mine\n")
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    said = subprocess.check_output([sys.executable, "-c", USE], env=env)
    assert json.loads(said) == ["mine", "mine", {"lines": 1.0}]
