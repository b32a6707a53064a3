"""Real parts for every test: a nats-server for the session, a bus on streams of its own for each test."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import settings

from rollyard.gateway.local_model import demo_model_path
from rollyard.harnesses import mini_swe_agent
from rollyard.pipeline.blobs import BlobStore
from rollyard.pipeline.bus import Bus
from rollyard.pipeline.embedded import EmbeddedNats, nats_server
from rollyard.pipeline.streams import ensure
from rollyard.schemas.errors import SetupError

# The machines of CI are shared: how long an example takes says nothing.
settings.register_profile("rollyard", deadline=None)
settings.load_profile("rollyard")


@pytest.fixture
async def nats(tmp_path: Path) -> AsyncIterator[EmbeddedNats]:
    """A nats-server with an empty store."""
    async with nats_server(tmp_path / "nats") as server:
        yield server


@pytest.fixture
async def bus(nats: EmbeddedNats, tmp_path: Path) -> AsyncIterator[Bus]:
    """A connection to it, with every stream made and a blob store."""
    async with Bus.connect(nats.url, name="test", blobs=BlobStore(tmp_path / "blobs")) as connection:
        assert await ensure(connection) == []
        yield connection


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test where what its marker asks for is missing; fail it in CI, where it must be there."""
    missing = ""
    if item.get_closest_marker("model"):
        try:
            demo_model_path()
        except SetupError as error:
            missing = str(error)
    if item.get_closest_marker("agent") and not (mini_swe_agent.tool_folder() / "bin" / "mini").exists():
        missing = "mini-swe-agent is not installed (run: make agents)"
    if missing:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(missing)
