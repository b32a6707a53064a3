"""What is installed is what is in the tree, and it stands beside a trainer that has modules of the same names."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("schemas", "pipeline", "gateway", "harnesses", "stages")
NOT_SOURCE = {".git", ".venv", ".rollyard", "build", "dist", "tests", "__pycache__"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built through the source distribution, in a copy of the tree as a fresh clone would be."""
    tree, out = tmp_path_factory.mktemp("tree") / "rollyard", tmp_path_factory.mktemp("dist")

    def ignore(_: str, names: list[str]) -> set[str]:
        return {name for name in names if name in NOT_SOURCE or name.endswith(("_cache", ".egg-info"))}

    shutil.copytree(ROOT, tree, symlinks=True, ignore=ignore)
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(tree)],
        check=True,
        capture_output=True,
        env=os.environ | {"PYTHONWARNINGS": ""},
    )
    (found,) = out.glob("*.whl")
    return found


def _files(folder: Path, prefix: str) -> set[str]:
    return {
        f"{prefix}/{path.relative_to(folder)}"
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_holds_every_file_of_the_tree_and_one_top_level_name(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    package = ROOT / "src/rollyard"
    expected = {f"rollyard/{path.name}" for path in package.iterdir() if path.is_file()} | _files(
        package / "cli", "rollyard/cli"
    )
    for folder in FOLDERS:
        expected |= _files(ROOT / folder, f"rollyard/{folder}")
    assert held == expected
    assert {name.partition("/")[0] for name in held} == {"rollyard"}


def test_it_stands_beside_a_trainer_with_its_own_schemas(wheel: Path, tmp_path: Path) -> None:
    site, trainer = tmp_path / "site", tmp_path / "trainer"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), str(wheel)],
        check=True,
        capture_output=True,
    )
    trainer.mkdir()
    (trainer / "schemas.py").write_text("MINE = True\n")
    (trainer / "gateway").mkdir()
    (trainer / "gateway/__init__.py").write_text("MINE = True\n")
    program = (
        "import schemas, gateway, rollyard, rollyard.schemas.task, rollyard.gateway\n"
        "assert schemas.MINE and gateway.MINE\n"
        "print(rollyard.__file__, rollyard.schemas.task.Task(prompt='x').group_size)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=trainer,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == f"{site}/rollyard/__init__.py 1\n", done.stderr
