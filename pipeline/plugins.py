"""Finding a plug-in by its name: one that ships, a dotted path, or an entry point of an installed package."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from rollyard.schemas.errors import RollyardError


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The names of one kind of plug-in.

    `shipped` maps short names to `package.module:Class`, which is imported when it is chosen; `group` is the entry
    point group under which other packages add names; `error` is raised for a name that leads nowhere.
    """

    noun: str
    group: str
    shipped: Mapping[str, str]
    error: type[RollyardError]

    def load(self, name: str) -> Any:
        """The object called `name`, or at the dotted path `name`. Raises `error`."""
        path = self.shipped.get(name) or (name if ":" in name else self._entry_point(name))
        module, _, attribute = path.partition(":")
        try:
            return getattr(import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise self.error(
                f"the {self.noun} {name!r} cannot be loaded from {path}: {error}",
                hint="write it as package.module:Class, and install the package where the worker runs",
            ) from error

    def _entry_point(self, name: str) -> str:
        found = list(entry_points(group=self.group, name=name))
        if found:
            return found[0].value
        known = sorted({*self.shipped, *entry_points(group=self.group).names})
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise self.error(
            f"no {self.noun} is called {name!r}",
            hint=f"{hint}known are {', '.join(known)}; or write package.module:Class",
        )
