"""Bundles that are a Python: a copy of this machine's interpreter, with the packages of an agent from PyPI or none."""

from __future__ import annotations

import compileall
import hashlib
import importlib.util
import json
import os
import platform
import py_compile
import shutil
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rollyard.harnesses.bundles import closure, contents
from rollyard.harnesses.bundles.bundle import PYTHON, Say

LOCKS: Final = Path(__file__).parents[1] / "locks"
HINT: Final = "does pip reach a package index? is python3-venv installed?"
PARTS: Final = (
    *("test", "ensurepip", "idlelib", "lib2to3", "tkinter", "turtledemo", "pydoc_data", "config-*", "site-packages"),
    *(
        "dist-packages",
        "turtle.py",
        "sitecustomize.py",
        "**/__pycache__",
        "lib-dynload/_tkinter*",
        "**/test",
        "**/tests",
    ),
    *("lib-dynload/_test*", "lib-dynload/xxlimited*", "unittest/test", "venv", "LICENSE.txt"),
)
"""What is left out of the standard library."""
PACKAGE_PARTS: Final = ("bin", "**/__pycache__", "**/*.pyi", "**/*.pyx", "**/*.c", "**/*.h", "*/tests", "*/test")


@dataclass(frozen=True, kw_only=True)
class PythonRecipe:
    """An agent from PyPI, started as the function `main` ("package.module:function"); without `main` Python alone.

    The lock file holds every version with its digests. Nothing of the packages that matches `drop` is kept.
    """

    name: str
    version: str
    program: str
    requirement: str = ""
    main: str = ""
    drop: tuple[str, ...] = ()
    trial: tuple[str, ...] = ("--version",)

    @property
    def lock(self) -> Path:
        """The versions and digests of everything that is installed."""
        return LOCKS / f"{self.name}.txt"

    def digest(self) -> str:
        """Of the lock, of what is left out, of the scripts, and of the interpreter that is copied."""
        scripts = [(contents.HERE / name).read_text() for name in ("python.sh", "sitecustomize.py")]
        lock = self.lock.read_text() if self.main else ""
        said = [lock, scripts, self.main, self.drop, PARTS, PACKAGE_PARTS, platform.python_version()]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()

    def fill(self, folder: Path, say: Say) -> None:
        """Copy the interpreter, install packages, compile, add libraries and programs. Raises HarnessError."""
        say(f"copying Python {platform.python_version()}")
        library = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}"
        copy_interpreter(folder, library)
        packages = folder / "packages"
        packages.mkdir()
        if self.main:
            say(f"pip install of {self.requirement} and what it needs")
            self._install(folder, packages)
            contents.leave_out(packages, (*PACKAGE_PARTS, *self.drop))
        say("compiling")
        # Unchecked: the times of files change when a bundle is copied, and nobody may write beside them.
        mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
        compileall.compile_dir(
            folder, quiet=2, invalidation_mode=mode, stripdir=str(folder), workers=os.cpu_count() or 1
        )
        closure.copy_libraries(folder / "lib", closure.libraries_below(folder))
        for name in ("python3", "python"):
            contents.write_program(folder, name, contents.wrapper("python", name, ""))
        if self.main:
            module, _, function = self.main.partition(":")
            start = f"import sys\nfrom {module} import {function}\n\nsys.exit({function}())\n"
            (folder / "main.py").write_text(start)
            # -E: variables for the task's own Python are not for this one.
            main = contents.wrapper("python", self.program, '-E -s -B -X utf8 "$root/main.py" ')
            contents.write_program(folder, self.program, main)

    def _install(self, folder: Path, packages: Path) -> None:
        aside = folder / "pip"
        python = sys.executable
        if importlib.util.find_spec("pip") is None:
            venv.create(aside, with_pip=True)
            python = str(aside / "bin" / "python")
        pip = (python, "-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes", "--no-compile")
        contents.run((*pip, "--target", str(packages), "-r", str(self.lock)), hint=HINT)
        shutil.rmtree(aside, ignore_errors=True)


def copy_interpreter(folder: Path, library: Path) -> None:
    """The running interpreter with its standard library, as bin/.python and `library`."""
    (folder / "bin").mkdir()
    base = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    shutil.copy(base, folder / "bin" / ".python")
    shutil.copytree(
        sysconfig.get_path("stdlib"), library, symlinks=False, ignore_dangling_symlinks=True, ignore=_ignored
    )
    contents.leave_out(library, PARTS)
    shutil.copy(contents.HERE / "sitecustomize.py", library)


def _ignored(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name in ("site-packages", "dist-packages", "test", "__pycache__")]


BUNDLE: Final = PythonRecipe(name=PYTHON, version=platform.python_version(), program="python3")
