"""Command lines of `apptainer`. Pure. Written from its manual (1.2 and later); never run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from rollyard.schemas.errors import SandboxError
from rollyard.schemas.sandbox import NetworkMode
from rollyard.stages.sandbox import Mount

HOME: Final = "/home/agent"
WORKDIR: Final = "/work"
RELAY: Final = "/run/rollyard"
_OWN_SESSION: Final = 'command -v setsid >/dev/null && exec setsid "$@"; exec "$@"'
_NOT_IN_A_BIND: Final = (":", ",", "\n", "\0")
_URI: Final = ("docker://", "oras://", "library://", "docker-daemon://", "oci://", "oci-archive://")


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One instance as it is to be started. Folders are those of this machine."""

    program: str
    name: str
    image: str
    home: Path
    tmp: Path
    network: NetworkMode
    work: Path | None = None  # None: the image's own directory is used
    overlay: Path | None = None  # None: nothing besides the folders above can be written
    relay: Path | None = None
    mounts: tuple[Mount, ...] = ()


class Listed(msgspec.Struct, frozen=True):
    """One instance in a list."""

    instance: str
    pid: int


class Listing(msgspec.Struct, frozen=True):
    """What `list_argv` gives."""

    instances: list[Listed]


def start_argv(instance: Instance) -> list[str]:
    """Start an instance, which goes on by itself. Raises SandboxError for a path that apptainer cannot be told."""
    argv = [instance.program, "instance", "start", "--containall", "--cleanenv", "--no-privs", "--no-umask"]
    argv += ["--no-mount", "hostfs,bind-paths,cwd", "--hostname", "sandbox"]
    argv += ["--home", _bind(instance.home, HOME), "--bind", _bind(instance.tmp, "/tmp")]
    if instance.network in ("gateway", "none"):
        argv += ["--net", "--network", "none"]
    if instance.overlay is not None:
        argv += ["--overlay", _part(str(instance.overlay))]
    if instance.work is not None:
        argv += ["--bind", _bind(instance.work, WORKDIR)]
    if instance.relay is not None:
        argv += ["--bind", _bind(instance.relay, RELAY, read_only=True)]
    for mount in instance.mounts:
        argv += ["--bind", _bind(mount.source, mount.target, read_only=True)]
    return [*argv, instance.image, instance.name]


def exec_argv(program: str, name: str, argv: Sequence[str]) -> list[str]:
    """Run a program in an instance, in a session of its own."""
    head = [program, "exec", "--cleanenv", "--no-umask", "--pwd", "/", f"instance://{name}"]
    return [*head, "sh", "-c", _OWN_SESSION, "sh", *argv]


def stop_argv(program: str, name: str) -> list[str]:
    """Kill an instance and all that runs in it."""
    return [program, "instance", "stop", "--force", name]


def list_argv(program: str, name: str = "") -> list[str]:
    """The user's instances, or those of a name, as JSON."""
    return [program, "instance", "list", "--json", *([name] if name else [])]


def listed(output: bytes) -> dict[str, int]:
    """Instances and their pids, as `list_argv` tells them. Raises SandboxError for what is no such list."""
    try:
        return {entry.instance: entry.pid for entry in msgspec.json.decode(output, type=Listing).instances}
    except msgspec.MsgspecError as error:
        raise SandboxError(f"apptainer's list of instances cannot be read: {error}") from error


def image_of(image: str, folder: Path) -> str:
    """What apptainer is told: an absolute path, a URI such as docker://, or a file or folder below `folder`."""
    if not image:
        raise SandboxError("no image is named", hint="set sandbox.image, or [backends.apptainer] image")
    if image.startswith(_URI) or Path(image).is_absolute():
        return image
    if image.startswith("-") or ".." in Path(image).parts:
        raise SandboxError(f"{image!r} is no name of an image")
    return str(folder / image)


def _bind(source: Path, target: str, *, read_only: bool = False) -> str:
    return f"{_part(str(source))}:{_part(target)}" + (":ro" if read_only else "")


def _part(path: str) -> str:
    if not path.startswith("/") or any(sign in path for sign in _NOT_IN_A_BIND):
        raise SandboxError(
            f"apptainer cannot be told to bind {path!r}", hint="use an absolute path without colon, comma or newline"
        )
    return path
