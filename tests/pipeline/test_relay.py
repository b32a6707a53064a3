"""The relay that workers start beside themselves: a real process, nobody's child."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollyard.pipeline.config import Config, NatsConfig, RelayConfig, StoreConfig, WorkerConfig, load_config
from rollyard.pipeline.relay import answers_relay, needs_relay, relay_beside
from rollyard.schemas.errors import SetupError


def config_for(folder: Path, *backends: str, start: bool = True, lease_s: float = 30.0) -> Config:
    return Config(
        nats=NatsConfig(url="nats://127.0.0.1:1"),
        store=StoreConfig(data=str(folder)),
        worker=WorkerConfig(backends=backends, lease_s=lease_s),
        relay=RelayConfig(start=start),
    )


def relay_pid(config: Config) -> int:
    return int((config.relay_dir() / "lock").read_text().split()[1])


@pytest.fixture
async def jailed(tmp_path: Path) -> AsyncIterator[Config]:
    config = config_for(tmp_path, "local", "bubblewrap", lease_s=0.2)
    yield config
    if await answers_relay(config.relay_dir())():
        os.kill(relay_pid(config), signal.SIGKILL)


async def until(condition: bool, config: Config) -> None:
    probe = answers_relay(config.relay_dir())
    while await probe() is not condition:  # noqa: ASYNC110 - another process
        await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("backends", "needs"),
    [
        (("local", "none", "e2b"), False),
        (("local", "docker"), True),
        (("apptainer",), True),
        (("their.own:One",), True),
    ],
)
def test_which_backends_need_one(tmp_path: Path, backends: tuple[str, ...], needs: bool) -> None:
    assert needs_relay(config_for(tmp_path, *backends)) is needs


@pytest.mark.parametrize("config", [("local",), ("docker",)], ids=["not needed", "somebody else's"])
async def test_none_is_started_where_none_is_wanted(tmp_path: Path, config: tuple[str, ...]) -> None:
    given = config_for(tmp_path, *config, start="docker" not in config)
    async with relay_beside(given):
        assert not given.relay_dir().exists()


async def test_it_outlives_the_worker_and_ends_when_nobody_needs_it(jailed: Config) -> None:
    async with relay_beside(jailed):
        first = relay_pid(jailed)
        async with relay_beside(jailed):
            assert relay_pid(jailed) == first, "one a machine"
    assert await answers_relay(jailed.relay_dir())()
    assert Path(f"/proc/{first}/stat").read_text().rpartition(")")[2].split()[1] != str(os.getpid())
    while Path(f"/proc/{first}").exists():  # noqa: ASYNC110 - to ask it would be a use
        await asyncio.sleep(0.05)


async def test_one_that_dies_is_started_again(jailed: Config) -> None:
    async with relay_beside(jailed):
        first = relay_pid(jailed)
        os.kill(first, signal.SIGKILL)
        await until(False, jailed)
        await until(True, jailed)
        assert relay_pid(jailed) != first


async def test_it_gets_the_configuration_of_the_worker(jailed: Config) -> None:
    async with relay_beside(jailed):
        given = load_config(jailed.relay_dir() / "config.toml", {})
    assert given.nats == jailed.nats
    assert given.relay.folder == str(jailed.relay_dir())


async def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "relay").write_text("a file")
    with pytest.raises(SetupError) as caught:
        async with relay_beside(config_for(tmp_path, "docker")):
            pass
    assert "[relay] folder" in caught.value.hint
