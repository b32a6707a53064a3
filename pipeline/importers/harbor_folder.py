"""A task folder in Harbor's format, read from disk."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

MAX_FILE_BYTES: Final = 16 << 20
MAX_PART_BYTES: Final = 64 << 20
COMPOSE: Final = (
    "docker-compose.yaml",
    "docker-compose.yml",
    "compose.yaml",
    "compose.yml",
    "singularity-compose.yaml",
)
_JUNK: Final = frozenset({".git", "__pycache__", ".DS_Store", ".pytest_cache", ".mypy_cache", ".ruff_cache"})
_CANARY: Final = re.compile(r"(<!--.*canary.*-->|#.*canary.*)\Z", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class HarborFile:
    """One file of a folder."""

    content: bytes
    executable: bool

    def text(self) -> str | None:
        """The content as text; None: it is none, or holds what JSON cannot."""
        try:
            text = self.content.decode()
        except UnicodeDecodeError:
            return None
        return None if "\0" in text else text


Files = dict[str, HarborFile]


@dataclass(slots=True)
class HarborFolder:
    """What stands in a task folder. `problems` says what could not be read."""

    path: Path
    config: dict[str, Any] = field(default_factory=dict)
    instruction: str = ""
    environment: Files = field(default_factory=dict)
    tests: Files = field(default_factory=dict)
    solution: Files = field(default_factory=dict)
    has_steps: bool = False
    problems: list[str] = field(default_factory=list)


def find_folders(paths: list[Path]) -> Iterator[Path]:
    """The task folders among `paths` and directly below them, sorted; a path without any is given back as it is."""
    for path in paths:
        if (path / "task.toml").is_file() or not path.is_dir():
            yield path
            continue
        below = sorted(child for child in path.iterdir() if (child / "task.toml").is_file())
        yield from below or [path]


def read_folder(path: Path) -> HarborFolder:
    """Read one task folder. Never raises for what is in it: see `problems`."""
    folder = HarborFolder(path)
    folder.config = _config(folder)
    folder.instruction = _instruction(folder)
    folder.has_steps = (path / "steps").is_dir()
    for part in ("environment", "tests", "solution"):
        try:
            setattr(folder, part, _files(path, part))
        except (OSError, ValueError) as error:
            folder.problems.append(f"{part}/: {error}")
    return folder


def without_canary(text: str) -> str:
    """An instruction without the leading comment lines that mark it for those who filter training data."""
    lines = text.split("\n")
    start = 0
    while start < len(lines) and _CANARY.match(lines[start].strip()):
        start += 1
    while start < len(lines) and not lines[start].strip():
        start += 1
    return "\n".join(lines[start:])


def _config(folder: HarborFolder) -> dict[str, Any]:
    try:
        return tomllib.loads((folder.path / "task.toml").read_text())
    except FileNotFoundError:
        folder.problems.append("task.toml: there is none; is this a task folder?")
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        folder.problems.append(f"task.toml: cannot be read: {error}")
    return {}


def _instruction(folder: HarborFolder) -> str:
    try:
        return without_canary((folder.path / "instruction.md").read_text())
    except FileNotFoundError:
        if "steps" not in folder.config:
            folder.problems.append("instruction.md: there is none")
    except (OSError, UnicodeDecodeError) as error:
        folder.problems.append(f"instruction.md: cannot be read: {error}")
    return ""


def _files(root: Path, part: str) -> Files:
    """The files below a part of the folder. Raises ValueError for what is too large, or leads out of the folder."""
    files: Files = {}
    total = 0
    real_root = root.resolve()
    for above, folders, names in os.walk(root / part, followlinks=True):
        folders[:] = sorted(name for name in folders if name not in _JUNK)
        for name in (*folders, *sorted(names)):
            if not (Path(above) / name).resolve().is_relative_to(real_root):
                raise ValueError(f"{name} is a link that leads out of the task's folder")
        for name in sorted(names):
            if name in _JUNK or name.endswith(".pyc"):
                continue
            path = Path(above) / name
            size = path.stat().st_size
            total += size
            if size > MAX_FILE_BYTES or total > MAX_PART_BYTES:
                raise ValueError(
                    f"{name} has {size:,} bytes; a file may have {MAX_FILE_BYTES:,}, all together {MAX_PART_BYTES:,}"
                )
            files[str(path.relative_to(root / part))] = HarborFile(path.read_bytes(), os.access(path, os.X_OK))
    return dict(sorted(files.items()))
