"""Agent bundles: one folder an agent, with everything that it needs to run in any Linux image, without network.

`rollyard agent bundle NAME` makes one, once; every sandbox of the machine then uses it. bundle.json is written last, so
that a folder without it was cut short and counts for nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Final, Literal, Protocol

import msgspec
from msgspec import Struct

from rollyard.pipeline.plugins import Catalogue
from rollyard.schemas.errors import HarnessError

PYTHON: Final = "python"
"""The bundle that is a Python interpreter, for agents that are one script."""
MARKER: Final = "bundle.json"
FOLDER_ENV: Final = "ROLLYARD_BUNDLES"

BUNDLES: Final = Catalogue(
    "agent bundle",
    "rollyard.bundles",
    {
        "claude_code": "rollyard.harnesses.claude_code:BUNDLE",
        "codex": "rollyard.harnesses.codex:BUNDLE",
        "hermes": "rollyard.harnesses.hermes:BUNDLE",
        "mini_swe_agent": "rollyard.harnesses.mini_swe_agent:BUNDLE",
        "openclaw": "rollyard.harnesses.openclaw:BUNDLE",
        "opencode": "rollyard.harnesses.opencode:BUNDLE",
        PYTHON: "rollyard.harnesses.bundles.python:BUNDLE",
    },
    HarnessError,
)

Say = Callable[[str], None]
State = Literal["ready", "outdated", "missing"]


class Recipe(Protocol):
    """How one bundle is made."""

    @property
    def name(self) -> str:
        """The bundle's name, also that of its folder inside."""
        ...

    @property
    def version(self) -> str:
        """Of the agent."""
        ...

    @property
    def program(self) -> str:
        """The command in the folder bin/."""
        ...

    @property
    def trial(self) -> tuple[str, ...]:
        """Words with which the command shows that it runs, such as --version."""
        ...

    def digest(self) -> str:
        """Changes with whatever changes the bundle: locked versions, what is left out, wrapper scripts."""
        ...

    def fill(self, folder: Path, say: Say) -> None:
        """Put everything into an empty folder; `say` tells the user of each step. Raises HarnessError."""
        ...


class Record(Struct, frozen=True, kw_only=True):
    """What bundle.json says."""

    name: str
    version: str
    digest: str
    size_bytes: int
    files: int


def bundles_folder() -> Path:
    """Where bundles lie: ROLLYARD_BUNDLES, else ~/.cache/rollyard/bundles."""
    chosen = os.environ.get(FOLDER_ENV)
    return Path(chosen).absolute() if chosen else Path.home() / ".cache" / "rollyard" / "bundles"


def known_bundles() -> list[str]:
    """The names of all bundles, those of other packages among them."""
    return sorted({*BUNDLES.shipped, *entry_points(group=BUNDLES.group).names})


def recipe(name: str) -> Recipe:
    """The recipe of that name or dotted path. Raises HarnessError."""
    found: Recipe = BUNDLES.load(name)
    return found


def folder_of(made: Recipe) -> Path:
    """Where the bundle of a recipe lies, whether it is there or not."""
    return bundles_folder() / f"{made.name}-{made.version}"


def read_record(folder: Path) -> Record | None:
    """What a folder's bundle.json says; None: there is no whole bundle."""
    try:
        return msgspec.json.decode((folder / MARKER).read_bytes(), type=Record)
    except (OSError, msgspec.MsgspecError):
        return None


def state_of(made: Recipe) -> State:
    """Whether the bundle is there, and made as the recipe says today."""
    record = read_record(folder_of(made))
    if record is None:
        return "missing"
    return "ready" if record.digest == made.digest() else "outdated"


def find_bundle(name: str) -> Path:
    """The folder of a bundle. Raises HarnessError that says how to make it."""
    made = recipe(name)
    state = state_of(made)
    if state != "ready":
        raise HarnessError(
            f"the agent bundle {name} {made.version} is {state}: {folder_of(made)}",
            hint=f"on the machine of the workers, run: rollyard agent bundle {name}",
        )
    return folder_of(made)
