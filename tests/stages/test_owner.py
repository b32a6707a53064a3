"""A worker lives as long as its process, and the kernel says so."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollyard.schemas.errors import SandboxError
from rollyard.stages.owner import FOLDER, KEPT_S, Owners


def test_one_lives_within_the_block_and_is_known_afterwards(tmp_path: Path) -> None:
    owners = Owners(tmp_path)
    assert owners.alive("w") is None
    with owners.held("w"):
        assert owners.alive("w") is True
        assert Owners(tmp_path).alive("w") is True
    assert owners.alive("w") is False


@pytest.mark.parametrize("name", ["", "../etc/passwd", "a/b", "x" * 300])
def test_a_name_that_is_none_is_not_known(tmp_path: Path, name: str) -> None:
    assert Owners(tmp_path).alive(name) is None


def test_a_killed_process_does_not_live(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from rollyard.stages.owner import Owners\n"
        "with Owners(Path(sys.argv[1])).held('w'): print('held', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == b"held\n"
        assert Owners(tmp_path).alive("w") is True
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert Owners(tmp_path).alive("w") is False


def test_old_names_are_forgotten(tmp_path: Path) -> None:
    owners = Owners(tmp_path)
    with owners.held("old"), owners.held("old-but-alive"):
        pass
    long_ago = time.time() - KEPT_S - 1
    for name in ("old", "old-but-alive"):
        os.utime(tmp_path / FOLDER / name, (long_ago, long_ago))
    with owners.held("old-but-alive"), owners.held("new"):
        assert owners.alive("old") is None
        assert owners.alive("old-but-alive") is True


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("in the way")
    with pytest.raises(SandboxError, match="cannot be written"), Owners(tmp_path).held("w"):
        pass
