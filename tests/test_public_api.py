"""`import rollyard`: what is public, and that it costs little."""

from __future__ import annotations

import subprocess
import sys
import typing

import pytest

import rollyard

HEAVY = ("duckdb", "docker", "pyarrow", "e2b", "numpy", "tokenizers", "rollyard.stages", "rollyard.gateway")


def loaded_after(program: str) -> set[str]:
    script = f"{program}\nimport sys\nprint('\\n'.join(sys.modules))"
    output = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    return set(output.split())


def test_the_bare_import_loads_nothing_of_ours() -> None:
    assert {name for name in loaded_after("import rollyard") if name.startswith("rollyard")} == {"rollyard"}


def test_the_whole_public_api_loads_nothing_heavy() -> None:
    loaded = loaded_after("from rollyard import *\nassert connect and connect_sync and Task")
    assert "rollyard.pipeline.client" in loaded
    assert loaded.isdisjoint(HEAVY)


def test_every_public_name_is_there_and_sorted() -> None:
    assert rollyard.__all__ == sorted(rollyard.__all__)
    assert dir(rollyard) == rollyard.__all__
    for name in rollyard.__all__:
        assert getattr(rollyard, name) is not None
    assert rollyard.Task(prompt="a").group_size == 1


def test_public_classes_have_annotations_that_resolve() -> None:
    for name in ("Task", "Sample", "Delivery", "Group", "RunStatus"):
        assert typing.get_type_hints(getattr(rollyard, name))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        rollyard.nope  # type: ignore[attr-defined]  # noqa: B018
