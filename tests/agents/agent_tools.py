"""Third-party agents for tests: pinned, locked, each in a folder of its own under ~/.cache/rollyard/tools.

python tests/agents/agent_tools.py install   install what is missing
python tests/agents/agent_tools.py ls        list them
python tests/agents/agent_tools.py lock NAME resolve what versions.toml says about NAME anew, and write its lock file
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollyard.harnesses import mini_swe_agent

HERE = Path(__file__).parent
NPM = ("--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error")
"""No script of a package runs, so nothing is downloaded beside what the lock file names."""


@dataclass(frozen=True)
class Tool:
    """One agent of versions.toml. `pinned` is its table there."""

    name: str
    pinned: dict[str, Any]

    @property
    def lock(self) -> Path:
        """The versions and digests of everything that is installed."""
        return HERE / "locks" / (f"{self.name}.txt" if "pip" in self.pinned else f"{self.name}.json")

    @property
    def folder(self) -> Path:
        """Where it is installed; another lock file means another folder."""
        digest = hashlib.sha256(self.lock.read_bytes()).hexdigest()[:12]
        return mini_swe_agent.tool_folder().parent / f"{self.name}-{digest}"

    @property
    def program(self) -> Path:
        return self.folder / str(self.pinned["program"])

    def is_installed(self) -> bool:
        # The mark is written last: an installation that was cut short has none.
        return (self.folder / "installed").exists() and self.program.exists()

    def install(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        if "pip" in self.pinned:
            venv.create(self.folder, with_pip=True)
            pip = (str(self.folder / "bin" / "python"), "-m", "pip", "install", "-qq", "--no-deps")
            subprocess.run([*pip, "--require-hashes", "-r", str(self.lock)], check=True)
        else:
            (self.folder / "package.json").write_text(self.package())
            shutil.copy(self.lock, self.folder / "package-lock.json")
            subprocess.run(["npm", "ci", *NPM], cwd=self.folder, check=True)
        (self.folder / "installed").touch()

    def make_lock(self) -> None:
        """Needs `uv` for what comes from PyPI."""
        if "pip" in self.pinned:
            uv = ("uv", "pip", "compile", "-", "--generate-hashes", "--universal", "--python-version", "3.11")
            resolved = subprocess.run(
                [*uv, "--no-header", "--no-annotate"],
                input=self.pinned["pip"],
                text=True,
                capture_output=True,
                check=True,
            )
            self.lock.write_text(resolved.stdout)
            return
        folder = HERE / "locks" / f"{self.name}.tmp"
        folder.mkdir()
        try:
            (folder / "package.json").write_text(self.package())
            lock_only = ("--package-lock-only", "--omit-lockfile-registry-resolved")
            subprocess.run(["npm", "install", *lock_only, *NPM], cwd=folder, check=True)
            (folder / "package-lock.json").replace(self.lock)
        finally:
            shutil.rmtree(folder)

    def package(self) -> str:
        return json.dumps({"name": self.name, "private": True, "dependencies": self.pinned["npm"]})


TOOLS = {name: Tool(name, pinned) for name, pinned in tomllib.loads((HERE / "versions.toml").read_text()).items()}


def missing(name: str) -> str:
    """What stands in the way of running an agent; empty: nothing."""
    there = TOOLS[name].is_installed() if name in TOOLS else mini_swe_agent.is_installed()
    return "" if there else f"{name} is not installed (run: make agents)"


def install(tools: Iterable[Tool]) -> int:
    """Install what is missing. An agent that cannot be installed on this machine does not keep the others away."""
    failed = 0
    for tool in tools:
        if tool.is_installed():
            print(f"{tool.name} is installed in {tool.folder}.")
            continue
        print(f"Installing {tool.name} into {tool.folder} ...", flush=True)
        try:
            tool.install()
        except (OSError, subprocess.CalledProcessError) as error:
            failed += 1
            hint = "is npm there (Debian, Ubuntu: apt-get install npm), with a registry? is this x86-64 Linux?"
            print(f"{tool.name} could not be installed: {error}; {hint}", file=sys.stderr)
    return 1 if failed else 0


def main(arguments: list[str]) -> int:
    match arguments:
        case ["ls"]:
            for tool in TOOLS.values():
                print(f"{tool.name:10} {'installed' if tool.is_installed() else 'missing  '} {tool.folder}")
        case ["install"]:
            return install(TOOLS.values())
        case ["lock", name] if name in TOOLS:
            TOOLS[name].make_lock()
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
