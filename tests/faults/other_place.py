"""A sandbox backend of the tests: local sandboxes at a place that has the name which an environment variable says."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Self

from rollyard.stages.sandboxes.local import LocalBackend, LocalSettings


class OtherPlace(LocalBackend):
    """Two of these on one machine are as far apart as two machines."""

    name = "other_place:OtherPlace"

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Self:
        """Everything comes from the environment."""
        backend = cls(LocalSettings(root=os.environ["TEST_SANDBOXES"], lease_s=4.0))
        backend.place = os.environ["TEST_PLACE"]
        return backend
