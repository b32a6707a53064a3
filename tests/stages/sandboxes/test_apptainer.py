"""What of the backend `apptainer` can be tried without the program: its command lines, its keeper, what users are told.

Nothing here shows that a sandbox works. The program could not be had.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time
from pathlib import Path

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from rollyard.schemas.errors import SandboxError
from rollyard.schemas.sandbox import NetworkMode
from rollyard.stages.sandbox import Labels, Mount, Plan, open_backend
from rollyard.stages.sandboxes.apptainer import KEEPER, ApptainerBackend, run_checked
from rollyard.stages.sandboxes.apptainer_command import (
    HOME,
    RELAY,
    WORKDIR,
    Instance,
    exec_argv,
    image_of,
    list_argv,
    listed,
    start_argv,
    stop_argv,
)
from rollyard.stages.sandboxes.apptainer_stream import ProcessStream
from rollyard.stages.sandboxes.shim import Children

LABELS = Labels(run="r", rollout_id="ro1", attempt=1, owner="w", created_ms=5)
parts = st.text(st.characters(codec="utf-8", exclude_characters=":,\n\0/", exclude_categories=["Cs"]), min_size=1)
folders = parts.filter(lambda part: part not in (".", "..")).map(lambda part: Path("/data", part))
instances = st.builds(
    Instance,
    program=st.just("apptainer"),
    name=st.just("ro1.1.0123456789abcdef"),
    image=st.just("/images/python.sif"),
    home=folders,
    tmp=folders,
    network=st.sampled_from(["gateway", "none", "open"]),
    work=st.none() | folders,
    overlay=st.none() | folders,
    relay=st.none() | folders,
    mounts=st.lists(st.builds(Mount, folders, folders.map(str)), max_size=3).map(tuple),
)


def options(argv: list[str], name: str) -> list[str]:
    """The values of an option that may be given several times."""
    return [argv[place + 1] for place, word in enumerate(argv) if word == name]


@given(instances)
def test_an_instance_sees_what_it_is_given_and_nothing_else(instance: Instance) -> None:
    argv = start_argv(instance)
    assert argv[:3] == ["apptainer", "instance", "start"] and argv[-2:] == [instance.image, instance.name]
    assert {"--containall", "--cleanenv", "--no-privs"} <= set(argv)
    assert options(argv, "--no-mount") == ["hostfs,bind-paths,cwd"]
    binds = [tuple(value.split(":")) for value in options(argv, "--bind")]
    wanted = [(str(instance.tmp), "/tmp")]
    wanted += [(str(instance.work), WORKDIR)] if instance.work else []
    wanted += [(str(instance.relay), RELAY, "ro")] if instance.relay else []
    assert binds == wanted + [(str(mount.source), mount.target, "ro") for mount in instance.mounts]
    assert options(argv, "--home") == [f"{instance.home}:{HOME}"]
    assert options(argv, "--overlay") == ([str(instance.overlay)] if instance.overlay else [])


@given(instances)
def test_a_network_is_shared_only_when_it_is_open(instance: Instance) -> None:
    argv = start_argv(instance)
    alone = options(argv, "--network") == ["none"] and "--net" in argv
    assert alone == (instance.network != "open")


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0")), min_size=1))
def test_a_command_is_handed_over_as_it_is(command: list[str]) -> None:
    argv = exec_argv("singularity", "ro1.1.x", command)
    assert (
        argv[:2] == ["singularity", "exec"] and argv[argv.index("instance://ro1.1.x") + 1 :][-len(command) :] == command
    )


@pytest.mark.parametrize("path", ["/a:b", "/a,b", "relative", "/a\nb"])
def test_a_path_that_apptainer_cannot_be_told_is_refused(path: str, tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="cannot be told"):
        start_argv(Instance(program="a", name="n", image="/i", home=Path(path), tmp=tmp_path, network="none"))


def test_an_image_is_a_path_a_uri_or_a_name() -> None:
    images = Path("/images")
    assert image_of("/x/y.sif", images) == "/x/y.sif"
    assert image_of("docker://python:3.12", images) == "docker://python:3.12"
    assert image_of("python.sif", images) == "/images/python.sif"
    for image in ("", "-x", "../x", "a/../../b"):
        with pytest.raises(SandboxError):
            image_of(image, images)


def test_instances_are_read_from_the_list() -> None:
    said = b'{"instances": [{"instance": "ro1.1.x", "pid": 7, "img": "/i.sif", "ip": "", "logErrPath": "/e"}]}'
    assert listed(said) == {"ro1.1.x": 7}
    assert listed(b'{"instances": []}') == {}
    with pytest.raises(SandboxError):
        listed(b"INSTANCE NAME    PID")
    assert stop_argv("apptainer", "n") == ["apptainer", "instance", "stop", "--force", "n"]
    assert list_argv("apptainer") == ["apptainer", "instance", "list", "--json"]


async def test_without_the_program_a_worker_is_told_so(tmp_path: Path) -> None:
    backend = open_backend("apptainer", {"root": str(tmp_path), "program": "no-such-apptainer"})
    with pytest.raises(SandboxError, match="not installed"):
        async with backend:
            pass


async def test_users_are_told_that_nobody_ran_it(tmp_path: Path) -> None:
    assert "never run" in ApptainerBackend.capabilities.tested
    assert not ApptainerBackend.capabilities.isolated
    # Any program that is there will do for opening: nothing is run then.
    with structlog.testing.capture_logs() as logs:
        async with open_backend("apptainer", {"root": str(tmp_path), "program": "sh"}):
            pass
    assert [(entry["log_level"], entry["event"]) for entry in logs] == [("warning", "backend_never_run")]


@pytest.mark.parametrize("network", ["gateway", "none"])
async def test_what_fails_leaves_nothing_behind(tmp_path: Path, network: NetworkMode) -> None:
    async with open_backend("apptainer", {"root": str(tmp_path), "program": "false", "image": "/x.sif"}) as backend:
        with pytest.raises(SandboxError):
            await backend.create(LABELS, Plan(network=network))
        # The folder is still listed, since `false` could not even list instances: a sweeper tries again.
        for ref, found in await backend.list_owned():
            assert found == LABELS and ref.place == backend.place


def keeper(folder: Path, lease: Path, lease_s: int, deadline_s: int, *stop: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sh", str(KEEPER), str(folder), str(lease), str(lease_s), str(deadline_s), *stop])


@pytest.mark.parametrize(("renewed", "deadline_s"), [(False, 60), (True, 2)])
async def test_the_keeper_stops_what_nobody_renews_or_is_past_its_deadline(
    tmp_path: Path, renewed: bool, deadline_s: int
) -> None:
    lease = tmp_path / "lease"
    lease.touch()
    victim = subprocess.Popen(["sleep", "60"])  # noqa: ASYNC220 - it starts at once
    keeping = keeper(tmp_path, lease, 1, deadline_s, "kill", "-s", "KILL", str(victim.pid))
    began = time.monotonic()
    while victim.poll() is None and time.monotonic() < began + 20:
        if renewed:
            lease.touch()
        await asyncio.sleep(0.1)
    assert victim.wait() == -signal.SIGKILL
    assert await asyncio.to_thread(keeping.wait) == 0


async def test_the_keeper_leaves_what_is_renewed_and_ends_with_the_folder(tmp_path: Path) -> None:
    folder, lease = tmp_path / "sandbox", tmp_path / "lease"
    folder.mkdir()
    victim = subprocess.Popen(["sleep", "60"])  # noqa: ASYNC220 - it starts at once
    keeping = keeper(folder, lease, 1, 60, "kill", "-s", "KILL", str(victim.pid))
    try:
        for _ in range(25):
            lease.touch()
            await asyncio.sleep(0.1)
        assert victim.poll() is None and keeping.poll() is None
        (folder / "tick").unlink()
        folder.rmdir()
        assert await asyncio.to_thread(keeping.wait) == 0
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


async def test_a_stream_is_a_program_with_input_and_both_outputs() -> None:
    children = Children()
    stream = await ProcessStream.spawn(["sh", "-c", "echo err >&2; cat"], children)
    await stream.write(b"in\0put\n")
    got: dict[str, bytes] = {"stdout": b"", "stderr": b""}
    while len(got["stdout"]) < 7:
        piece = await stream.read()
        assert piece is not None
        got[piece[0]] += piece[1]
    assert got["stdout"] == b"in\0put\n"
    await stream.close()
    assert await stream.read() is None
    with pytest.raises(SandboxError, match="takes no input"):
        await stream.write(b"x")
    with pytest.raises(SandboxError, match="cannot be run"):
        await ProcessStream.spawn(["/no/such/apptainer"], children)
    children.close()


async def test_a_command_that_fails_or_hangs_is_told_of() -> None:
    assert await run_checked(["echo", "x"], 10) == b"x\n"
    with pytest.raises(SandboxError, match="ended with 3: why"):
        await run_checked(["sh", "-c", "echo why >&2; exit 3"], 10)
    with pytest.raises(SandboxError, match="did not end within"):
        await run_checked(["sleep", "60"], 0.2)
