"""Bundles of agents from npm: locked versions, none of whose scripts runs, and only what is needed of them."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from rollyard.harnesses.bundles import closure, contents
from rollyard.harnesses.bundles.bundle import Say
from rollyard.schemas.errors import HarnessError

LOCKS: Final = Path(__file__).parents[1] / "locks"
MACHINE: Final = "x86_64"
RIPGREP: Final = {"@vscode/ripgrep-linux-x64": "1.18.0"}
"""For agents that search by `rg`, which they would fetch from the network where the image has none."""
RIPGREP_PATH: Final = {"@vscode/ripgrep-linux-x64/bin/rg": "path/rg"}
NPM: Final = ("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error")
HINT: Final = "is npm there (Debian, Ubuntu: apt-get install npm), and does it reach a registry?"


@dataclass(frozen=True, kw_only=True)
class NpmRecipe:
    """An agent from npm.

    `take` maps paths below node_modules to paths below app/; nothing else is kept, and of that nothing that matches
    `drop`. `kind` says how it is started: `static`, `native` (a dynamic program) or `node`, with `main` below app/.
    """

    name: str
    version: str
    program: str
    packages: Mapping[str, str]
    take: Mapping[str, str]
    kind: Literal["static", "native", "node"]
    main: str
    drop: tuple[str, ...] = ()
    trial: tuple[str, ...] = ("--version",)

    @property
    def lock(self) -> Path:
        """The versions and digests of everything that is installed."""
        return LOCKS / f"{self.name}.json"

    def package(self) -> str:
        """The package.json that belongs to the lock file."""
        return json.dumps({"name": self.name, "private": True, "dependencies": dict(self.packages)})

    def digest(self) -> str:
        """Of the lock, of what is taken of it, and of the scripts."""
        names = {"native": ("native.sh", "bash.sh"), "node": ("node.sh", "exec_path.cjs"), "static": ("static.sh",)}
        scripts = [(contents.HERE / name).read_text() for name in names[self.kind]]
        said = [self.lock.read_text(), scripts, self.package(), dict(self.take), self.main, self.drop]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()

    def fill(self, folder: Path, say: Say) -> None:
        """Install, take what is needed, add libraries and the program in bin/. Raises HarnessError."""
        if closure.machine() != MACHINE:
            raise HarnessError(f"the agent bundle {self.name} is made for {MACHINE} only, not for {closure.machine()}")
        aside = folder / "npm"
        aside.mkdir()
        (aside / "package.json").write_text(self.package())
        shutil.copy(self.lock, aside / "package-lock.json")
        say(f"npm ci of {', '.join(f'{name}@{version}' for name, version in self.packages.items())}")
        contents.run(NPM, cwd=aside, hint=HINT)
        app = folder / "app"
        app.mkdir()
        for source, target in self.take.items():
            (app / target).parent.mkdir(parents=True, exist_ok=True)
            shutil.move(aside / "node_modules" / source, app / target)
        shutil.rmtree(aside)
        contents.leave_out(app, self.drop)
        self._add_programs(folder)

    def _add_programs(self, folder: Path) -> None:
        app = folder / "app"
        if self.kind == "node":
            closure.copy_libraries(folder / "lib", closure.libraries_below(app))
            shutil.copy(contents.HERE / "exec_path.cjs", app)
            contents.write_program(folder, "node", contents.wrapper("node", "node", ""))
            contents.write_program(folder, self.program, contents.wrapper("node", "", f'"$root/app/{self.main}" '))
            return
        if self.kind == "native":
            shutil.copy(contents.program("bash"), app / "bash")
            contents.write_program(folder, "bash", contents.wrapper("bash", "bash", ""))
            closure.copy_libraries(folder / "lib", [app / self.main, app / "bash"])
        contents.write_program(folder, self.program, contents.wrapper(self.kind, self.program, self.main))
