from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from rollyard.pipeline.config import Config, GatewayConfig, StoreConfig, load_config, to_toml
from rollyard.schemas.errors import ConfigError


def write(folder: Path, text: str) -> Path:
    path = folder / "rollyard.toml"
    path.write_text(text)
    return path


def test_defaults_without_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(env={})
    assert config == Config()
    assert config.blobs_dir() == Path(".rollyard/blobs")
    assert config.gateway.address() == "http://127.0.0.1:8400"


def test_the_file_of_the_folder_the_variable_and_the_argument(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "[worker]\nslots = 1\n")
    (tmp_path / "two.toml").write_text("[worker]\nslots = 2\n")
    (tmp_path / "three.toml").write_text("[worker]\nslots = 3\n")
    assert load_config(env={}).worker.slots == 1
    assert load_config(env={"ROLLYARD_CONFIG": "two.toml"}).worker.slots == 2
    assert load_config(tmp_path / "three.toml", {"ROLLYARD_CONFIG": "two.toml"}).worker.slots == 3


def test_a_variable_replaces_one_key(tmp_path: Path) -> None:
    path = write(tmp_path, "[worker]\nslots = 3\nlease_s = 9\n")
    env = {"ROLLYARD__WORKER__SLOTS": "5", "ROLLYARD__WORKER__STAGES": "admit, run", "ROLLYARD_OTHER": "x"}
    config = load_config(path, env)
    assert (config.worker.slots, config.worker.lease_s, config.worker.stages) == (5, 9.0, ("admit", "run"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[worker]\nslotz = 1\n", "unknown key worker.slotz (did you mean slots?)"),
        ("[werker]\nslots = 1\n", "unknown section [werker] (did you mean worker?)"),
        ("worker = 1\n", "worker must be a section"),
        ("[worker]\nslots = 'many'\n", "worker.slots: expected `int`, got `str`"),
        ("[worker]\nack_wait_s = -1\n", "worker.ack_wait_s: expected `float` > 0"),
        ("[worker]\nstages = ['runn']\n", "worker.stages[0]: invalid enum value 'runn'"),
        ("[worker]\nheartbeat_s = 15\n", "heartbeat_s is 15, over half of worker.ack_wait_s"),
        ("[worker\n", "is not valid TOML"),
    ],
)
def test_a_wrong_file_is_refused_with_its_name_and_the_key(tmp_path: Path, text: str, says: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, {})
    assert says in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("ROLLYARD__WORKER__SLOTZ", "5", "unknown key worker.slotz"),
        ("ROLLYARD__WORKER__SLOTS", "five", "worker.slots: expected `int`"),
        ("ROLLYARD__WORKER", "5", "unknown key worker."),
    ],
)
def test_a_wrong_variable_is_refused_with_its_name(name: str, value: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, {name: value})
    assert f"environment variable {name}" in str(caught.value)
    assert says in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_config(tmp_path / "none.toml", {})


@given(st.text(st.characters(exclude_categories=["Cs"])), st.integers(1, 10**6), st.floats(12.5, 1e6))
def test_to_toml_is_read_back(text: str, slots: int, ack_wait_s: float) -> None:
    base = Config()
    config = structs.replace(
        base,
        store=structs.replace(base.store, data=text),
        worker=structs.replace(base.worker, slots=slots, ack_wait_s=ack_wait_s),
    )
    with tempfile.TemporaryDirectory() as folder:
        assert load_config(write(Path(folder), to_toml(config)), {}) == config


def test_the_secret(tmp_path: Path) -> None:
    base = Config()
    config = structs.replace(base, store=structs.replace(base.store, data=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"no secret to sign session keys with.*ROLLYARD_SECRET"):
        config.secret({})
    (tmp_path / "secret").write_text("short\n")
    with pytest.raises(ConfigError, match="shorter than 16 bytes"):
        config.secret({})
    (tmp_path / "secret").write_text("a" * 32 + "\n")
    assert config.secret({}) == b"a" * 32
    assert config.secret({"ROLLYARD_SECRET": "b" * 32}) == b"b" * 32


def test_the_admin_token(tmp_path: Path) -> None:
    config = Config(store=StoreConfig(data=str(tmp_path)))
    assert config.admin_token({}) == b""
    (tmp_path / "admin-token").write_text("short\n")
    with pytest.raises(ConfigError, match=r"the admin token in .*admin-token is shorter than 16 bytes"):
        config.admin_token({})
    (tmp_path / "admin-token").write_text("a" * 32 + "\n")
    assert config.admin_token({}) == b"a" * 32
    assert config.admin_token({"ROLLYARD_ADMIN_TOKEN": "b" * 32}) == b"b" * 32
    with pytest.raises(ConfigError, match="the admin token in ROLLYARD_ADMIN_TOKEN is shorter"):
        config.admin_token({"ROLLYARD_ADMIN_TOKEN": "b"})
    named = structs.replace(config, gateway=GatewayConfig(admin_token_file=str(tmp_path / "none")))
    with pytest.raises(ConfigError, match=r"there is no file .*none with the admin token"):
        named.admin_token({})
