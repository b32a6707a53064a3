"""The folder of a relay: one relay at a time, sockets that replace those of a dead one, paths of any length."""

from __future__ import annotations

import asyncio
import os
import stat
import sys
from pathlib import Path

import pytest
from relays import client, named, relay_to, web_server

from rollyard.gateway.relay import folder as relay_folder
from rollyard.gateway.relay.control import Request, ask
from rollyard.gateway.relay.folder import RelayFolder, keep, kept
from rollyard.schemas.errors import ConfigError, SandboxError, SetupError


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


async def test_agents_of_any_user_get_through_and_only_the_owner_commands(folder: Path) -> None:
    before = os.umask(0o077)
    try:
        async with relay_to(folder):
            assert [path.name for path in (folder / "shared").iterdir()] == ["gateway.sock"]
            assert mode(folder / "shared/gateway.sock") == 0o666
            assert mode(folder / "control.sock") == 0o600
            assert (mode(folder), mode(folder / "shared")) == (0o755, 0o755)
    finally:
        os.umask(before)
    assert not (folder / "control.sock").exists()
    assert not (folder / "shared/gateway.sock").exists()


async def test_a_second_relay_does_not_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_folder, "LOCK_WAIT_S", 0.1)
    async with relay_to(folder) as first:
        with pytest.raises(SetupError) as caught:
            async with relay_to(folder):
                pass
        assert f"pid {os.getpid()}" in caught.value.message
        answer = await asyncio.to_thread(ask, folder, Request(do="hello"))
        assert answer.incarnation == first.incarnation, "the first one goes on"


async def test_one_that_is_about_to_end_is_waited_for(folder: Path) -> None:
    async with relay_to(folder) as first:
        second = relay_to(folder)
        starting = asyncio.create_task(second.__aenter__())
        await asyncio.sleep(0.2)
        assert not starting.done()
    assert (await starting).incarnation != first.incarnation
    await second.__aexit__(None, None, None)


async def test_sockets_of_a_killed_relay_are_replaced(folder: Path) -> None:
    program = (
        "import asyncio, sys; from pathlib import Path; from rollyard.gateway.relay.service import fixed_relay\n"
        "async def main():\n"
        "    async with fixed_relay(Path(sys.argv[1]), []): print('up', flush=True); await asyncio.sleep(60)\n"
        "asyncio.run(main())"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, str(folder), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    while await process.stdout.readline() != b"up\n":
        pass
    process.kill()
    await process.wait()
    with pytest.raises(SandboxError):
        await asyncio.to_thread(ask, folder, Request(do="hello"))
    async with web_server(named("a")) as url, relay_to(folder, url), client(folder) as http, http.get("/") as reply:
        assert reply.status == 200


async def test_a_path_longer_than_the_kernel_takes(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30) / ("longer" * 20)
    async with relay_to(folder) as relay:
        assert (await asyncio.to_thread(ask, folder, Request(do="hello"))).incarnation == relay.incarnation
        directory = os.open(folder / "shared", os.O_PATH)
        try:
            reader, writer = await asyncio.open_unix_connection(f"/proc/self/fd/{directory}/gateway.sock")
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 503")
            writer.close()
        finally:
            os.close(directory)


async def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as caught:
        async with relay_to(tmp_path / "file" / "relay"):
            pass
    assert "[relay] folder" in caught.value.hint


def test_no_relay_is_an_error_that_tells_how_to_get_one(folder: Path) -> None:
    with pytest.raises(SandboxError) as caught:
        ask(folder, Request(do="hello"))
    assert str(folder) in caught.value.message
    assert "rollyard relay" in caught.value.hint


def test_what_is_kept_is_read_back_and_what_is_broken_is_nothing(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    assert kept(path, list[str]) is None
    keep(path, ["a"])
    assert kept(path, list[str]) == ["a"]
    assert kept(path, dict[str, int]) is None
    path.write_text("{")
    assert kept(path, list[str]) is None


async def test_what_is_no_request_is_answered_with_an_error(folder: Path) -> None:
    async with relay_to(folder):
        sock = RelayFolder(folder).connect(5.0)
        with sock:
            sock.sendall(b'{"do":"dance"}\n')
            answer = await asyncio.to_thread(sock.recv, 65_536)
        assert b"not asked properly" in answer
