from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from rollyard.pipeline.datafolder import VERSION, DataFolder, find_config
from rollyard.schemas.errors import ConfigError, SetupError


def test_opening_makes_secrets_that_only_the_user_reads_and_keeps_them(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path / "data")
    folder.open()
    made = [path.read_text() for path in (folder.secret, folder.admin_token)]
    assert [len(secret.strip()) for secret in made] == [64, 64]
    assert made[0] != made[1]
    assert {stat.S_IMODE(path.stat().st_mode) for path in (folder.secret, folder.admin_token)} == {0o600}
    folder.open()
    assert [path.read_text() for path in (folder.secret, folder.admin_token)] == made
    assert folder.version.read_text() == f"{VERSION}\n"


def test_a_newer_folder_is_refused_with_both_versions(tmp_path: Path) -> None:
    (tmp_path / "version").write_text("7\n")
    with pytest.raises(ConfigError) as caught:
        DataFolder(tmp_path).open()
    assert f"has version 7, this Rollyard reads up to version {VERSION}" in str(caught.value)
    assert "update Rollyard" in caught.value.hint
    assert not (tmp_path / "secret").exists()


def test_a_folder_that_is_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "version").write_text("v1.2-beta\n")
    with pytest.raises(ConfigError, match="not a number"):
        DataFolder(tmp_path).open()


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("")
    with pytest.raises(SetupError, match=r"data.*choose another"):
        DataFolder(tmp_path / "data").open()


def test_two_on_one_folder_give_an_error_that_names_the_pid(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path)
    folder.open()
    program = (
        "from pathlib import Path; from rollyard.pipeline.datafolder import DataFolder\n"
        f"with DataFolder(Path({str(tmp_path)!r})).locked(): pass"
    )
    with folder.locked():
        other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert f"another rollyard (pid {os.getpid()}) runs on {tmp_path}" in other.stderr
    with folder.locked():
        pass


def test_state_is_read_back_and_damage_counts_as_nothing(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path)
    assert folder.read_state() is None
    folder.write_state({"pid": 7, "children": {"nats": 8}})
    assert folder.read_state() == {"pid": 7, "children": {"nats": 8}}
    folder.state.write_text("{")
    assert folder.read_state() is None


def test_which_configuration_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.toml").write_text("[worker]\nslots = 1\n")
    assert find_config(env={})[0].worker.slots == 64
    (tmp_path / ".rollyard").mkdir()
    (tmp_path / ".rollyard/config.toml").write_text("[worker]\nslots = 2\n")
    assert find_config(env={})[0].worker.slots == 2
    assert find_config(Path("own.toml"), env={})[0].worker.slots == 1
    assert find_config(env={"ROLLYARD_CONFIG": "own.toml"})[0].worker.slots == 1
    assert find_config(data=Path(".rollyard"), env={"ROLLYARD_CONFIG": "own.toml"})[0].worker.slots == 2
    config, folder = find_config(data=Path("elsewhere"), env={})
    assert (config.worker.slots, folder.root) == (64, tmp_path / "elsewhere")
