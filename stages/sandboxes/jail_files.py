"""Files of a bubblewrap sandbox, written and read by programs inside the jail: whatever an agent planted there, a link
leads nowhere but inside."""

from __future__ import annotations

import asyncio
import io
import os
import posixpath
import secrets
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

from rollyard.harnesses.harness import Command
from rollyard.schemas.errors import SandboxError
from rollyard.stages.images.packer import without
from rollyard.stages.sandbox import check_path
from rollyard.stages.sandboxes.census import VARIABLE
from rollyard.stages.sandboxes.inside_archive import checked_archive
from rollyard.stages.sandboxes.marked import MarkedProcesses
from rollyard.stages.sandboxes.shim import Launch, data_file

TRANSFER_S: Final = 600.0
SAID_BYTES: Final = 2000
CHUNK_BYTES: Final = 1 << 20
MISSING: Final = 3
OUTSIDE: Final = 4
ARGUMENTS: Final = 500

# TOP FOLDER...: makes the folders, none of which may be outside of TOP.
_PUT: Final = f"""mkdir -p -- "$1" && cd -P -- "$1" || exit
top=${{PWD%/}}
shift
for folder; do
  mkdir -p -- "$folder" || exit
  case $(cd -P -- "$folder" && pwd -P)/ in
    "$top"/*) ;;
    *) printf '%s\\n' "$folder" >&2; exit {OUTSIDE} ;;
  esac
done
[ -n "$unpack" ] || exit 0
exec tar -x -o -f -"""
_UNPACK: Final = """mkdir -p -- "$1" && cd -- "$1" && exec tar -x -o -f -"""
_PACK: Final = f"""cd -- "$1" 2>/dev/null || exit {MISSING}
name=$2
shift 2
[ -e "$name" ] || [ -L "$name" ] || exit {MISSING}
exec tar -c -f - "$@" -- "$name" """
_READ: Final = f"""[ -f "$1" ] || exit {MISSING}
exec head -c "$2" <"$1" """


class MakeLaunch(Protocol):
    """Turns a command into a program of this machine."""

    def __call__(self, command: Command, cwd: str | None, mark: str, *, data_fd: int) -> Launch:
        """Raises SandboxError when the sandbox is gone."""
        ...


class JailFiles:
    """Reads and writes by short-lived jails that are children of this process, and die with it."""

    def __init__(self, launch: MakeLaunch, marked: MarkedProcesses, mark: Callable[[str], str]) -> None:
        self._launch = launch
        self._marked = marked
        self._mark = mark

    async def put(self, files: Mapping[str, str | bytes], top: str) -> None:
        """Write files below `top`. Raises SandboxError that names a path."""
        checked = {check_path(path): content for path, content in files.items()}
        if not checked:
            return
        folders = sorted({posixpath.dirname(path) or "." for path in checked})
        later = [folders[start : start + ARGUMENTS] for start in range(0, len(folders), ARGUMENTS)]
        for number, some in enumerate(later):
            last = number == len(later) - 1
            archive = await asyncio.to_thread(_archive, checked) if last else b""
            env = {"unpack": "yes"} if last else {}
            status, _, said = await self._run(_PUT, (top, *some), stdin=archive, env=env)
            if status == OUTSIDE:
                raise SandboxError(f"the path {said.strip()!r} leaves the sandbox through a link")
            if status:
                raise SandboxError(f"the files {', '.join(map(repr, list(checked)[:5]))} cannot be written: {said}")

    async def put_tree(self, archive: bytes | Path, workdir: str, target: str) -> None:
        """Unpack an archive. Raises SandboxError."""
        data = await asyncio.to_thread(checked_archive, archive)
        folder = posixpath.join(workdir, target)
        status, _, said = await self._run(_UNPACK, (folder,), stdin=data)
        if status:
            raise SandboxError(f"the archive cannot be unpacked in {folder!r}: {said}")

    async def get_tree(self, workdir: str, path: str, max_bytes: int, exclude: Sequence[str]) -> bytes:
        """Pack a file or folder. Raises SandboxError."""
        whole = posixpath.join(workdir, path)
        own_content = path in ("", ".") or path.endswith(("/.", "/"))
        folder, name = (whole, ".") if own_content else posixpath.split(whole)
        patterns = [f"--exclude={pattern}" for pattern in exclude]
        status, data, said = await self._run(_PACK, (folder, name, *patterns), max_bytes=max_bytes)
        if status == MISSING:
            raise SandboxError(f"there is no {path!r} in the sandbox")
        if status == 1 and not data and patterns:
            # A busybox whose tar leaves nothing out.
            return await asyncio.to_thread(without, await self.get_tree(workdir, path, max_bytes, ()), exclude)
        if len(data) > max_bytes:
            raise SandboxError(f"{path!r} has over {max_bytes} bytes", hint="leave parts out, or allow more")
        # 1: a file changed meanwhile, which tar says of folders that somebody works in.
        if status not in (0, 1) or not data:
            raise SandboxError(f"{path!r} cannot be read from the sandbox: {said}")
        return data

    async def read(self, workdir: str, path: str, max_bytes: int) -> bytes | None:
        """The start of a regular file; None: there is none."""
        if "\0" in path:
            raise SandboxError(f"the path {path!r} names no file")
        status, data, said = await self._run(
            _READ, (posixpath.join(workdir, path), str(max_bytes)), max_bytes=max_bytes
        )
        if status == MISSING:
            return None
        if status:
            raise SandboxError(f"the file {path!r} cannot be read: {said}")
        return data

    async def _run(
        self,
        script: str,
        arguments: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        max_bytes: int = 0,
    ) -> tuple[int, bytes, str]:
        """Exit status, the first bytes of standard output (one more than `max_bytes` if there are more), and what it
        said. Raises SandboxError when it takes too long."""
        mark = self._mark(f"file-{secrets.token_hex(8)}")
        command = Command(("sh", "-c", script, "sh", *arguments), env or {})
        # The number of the descriptor stands in the command line, and its content does not depend on that.
        launch = self._launch(command, "/", mark, data_fd=0)
        data = data_file(launch)
        assert data is not None
        try:
            argv = self._launch(command, "/", mark, data_fd=data).argv
            child = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={**launch.env, VARIABLE: mark},
                cwd="/",
                pass_fds=(data,),
                start_new_session=True,
            )
        except OSError as error:
            raise SandboxError(f"nothing can be started in the sandbox: {error}") from error
        finally:
            os.close(data)
        try:
            async with asyncio.timeout(TRANSFER_S), asyncio.TaskGroup() as group:
                group.create_task(_write(child, stdin))
                said = group.create_task(_first(child.stderr, SAID_BYTES))
                output = group.create_task(_first(child.stdout, max_bytes + 1, child))
            status = await child.wait()
        except TimeoutError as error:
            raise SandboxError(
                f"files of the sandbox took over {TRANSFER_S:g} s", hint="did the agent replace tar?"
            ) from error
        finally:
            if child.returncode is None:
                with suppress(ProcessLookupError):
                    child.kill()
                await asyncio.shield(child.wait())
                await asyncio.shield(self._marked.kill(mark))
        return status, output.result(), said.result().decode(errors="replace").strip()


async def _write(child: asyncio.subprocess.Process, data: bytes) -> None:
    assert child.stdin is not None
    # uvloop says RuntimeError of a pipe whose reader has gone.
    with suppress(ConnectionError, RuntimeError):
        if data:
            child.stdin.write(data)
            await child.stdin.drain()
        child.stdin.close()


async def _first(
    stream: asyncio.StreamReader | None, max_bytes: int, child: asyncio.subprocess.Process | None = None
) -> bytes:
    """The first bytes of a stream, which is read to its end. `child` is killed when there is more."""
    assert stream is not None
    data = bytearray()
    while chunk := await stream.read(CHUNK_BYTES):
        data += chunk[: max_bytes - len(data)]
        if len(data) >= max_bytes and child is not None:
            with suppress(ProcessLookupError):
                child.kill()
    return bytes(data)


def _archive(files: Mapping[str, str | bytes]) -> bytes:
    buffer = io.BytesIO()
    now_s = int(time.time())
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for path, content in files.items():
            data = content.encode() if isinstance(content, str) else bytes(content)
            member = tarfile.TarInfo(path)
            member.size, member.mode, member.mtime = len(data), 0o644, now_s
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()
