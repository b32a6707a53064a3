"""The third-party agents that tests run: as bundles, in the versions that the harnesses name.

python tests/agents/agent_tools.py lock NAME   resolve a bundle's dependencies anew, and write its lock file
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rollyard.harnesses.bundles.bundle import BUNDLES, PYTHON, find_bundle, recipe
from rollyard.harnesses.bundles.npm import NpmRecipe
from rollyard.harnesses.bundles.python import PythonRecipe
from rollyard.schemas.errors import HarnessError

HARNESSES = {"claude": "claude_code", "mini-swe-agent": "mini_swe_agent"}
"""Names of agents that differ from those of their harnesses."""


def missing(name: str) -> str:
    """What stands in the way of running an agent; empty: nothing."""
    try:
        find_bundle(HARNESSES.get(name, name))
    except HarnessError as error:
        return f"{error} (`make agents` makes all)"
    return ""


def make_lock(name: str) -> None:
    """Needs `uv` for what comes from PyPI, npm for the others."""
    made = recipe(name)
    if isinstance(made, PythonRecipe):
        uv = ("uv", "pip", "compile", "-", "--generate-hashes", "--universal", "--python-version", "3.11")
        words = [*uv, "--no-header", "--no-annotate"]
        done = subprocess.run(words, input=made.requirement, text=True, capture_output=True, check=True)
        made.lock.write_text(done.stdout)
        return
    assert isinstance(made, NpmRecipe)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "package.json").write_text(made.package())
        only = ("--package-lock-only", "--omit-lockfile-registry-resolved", "--ignore-scripts", "--no-audit")
        subprocess.run(["npm", "install", *only], cwd=folder, check=True)
        shutil.move(Path(folder, "package-lock.json"), made.lock)


def main(arguments: list[str]) -> int:
    match arguments:
        case ["lock", name] if name in BUNDLES.shipped and name != PYTHON:
            make_lock(name)
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
