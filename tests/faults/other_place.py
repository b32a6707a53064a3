"""A sandbox backend of the tests: local sandboxes at a place that has the name which an environment variable says."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from rollyard.stages.sandboxes.local import LocalBackend, LocalSettings


class OtherPlace(LocalBackend):
    """Two of these on one machine are as far apart as two machines."""

    name = "other_place:OtherPlace"

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Self:
        """Everything comes from the environment."""
        place = os.environ["TEST_PLACE"]
        backend = cls(LocalSettings(root=str(Path(os.environ["TEST_FOLDER"], "sandboxes", place)), lease_s=4.0))
        backend.place = place
        return backend
