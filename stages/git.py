"""Running git on the worker's machine: without questions, hooks or remote helpers, and killed when nobody waits."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from contextlib import suppress
from pathlib import Path
from typing import Final

from rollyard.schemas.errors import SandboxError

PROTOCOLS: Final = "file:git:http:https:ssh"
_TAIL_BYTES: Final = 2_000
_CREDENTIALS: Final = re.compile(r"(?<=://)[^/@\s]+@")
_OWN: Final = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_ALTERNATE_OBJECT_DIRECTORIES")


class GitFailed(SandboxError):
    """A git command failed; the message is the end of what it said."""


async def git(*arguments: str, remote: bool = False, stdin: bytes = b"") -> str:
    """What git writes to its standard output. `remote`: it may ask other machines, with the worker's own git settings.

    Raises GitFailed; kills git and its helpers when the caller is cancelled.
    """
    return await run(("git", *arguments), env=_environment(remote), stdin=stdin)


async def run(argv: tuple[str, ...], *, env: dict[str, str] | None = None, stdin: bytes = b"") -> str:
    """Run a program of the worker's machine in a process group of its own. Raises GitFailed."""
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE if stdin else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=env,
            start_new_session=True,
        )
    except FileNotFoundError:
        raise GitFailed(f"{argv[0]} is not installed where INIT works", hint=f"install {argv[0]} there") from None
    except (OSError, ValueError) as error:
        raise GitFailed(f"{argv[0]} cannot be started: {error}") from error
    try:
        stdout, stderr = await process.communicate(stdin or None)
    except BaseException:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await asyncio.shield(process.wait())
        raise
    if process.returncode:
        said = hidden(stderr[-_TAIL_BYTES:].decode(errors="replace").strip())
        raise GitFailed(said or f"{argv[0]} ended with {process.returncode}")
    return stdout.decode(errors="replace")


def hidden(text: str) -> str:
    """The text without user names and passwords in its URLs."""
    return _CREDENTIALS.sub("", text)


def _environment(remote: bool) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in _OWN}
    settings = {
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_ALLOW_PROTOCOL": PROTOCOLS,
        "GIT_LFS_SKIP_SMUDGE": "1",
        "GIT_OPTIONAL_LOCKS": "0",
        "LC_ALL": "C.UTF-8",
    }
    if remote:
        settings["GIT_SSH_COMMAND"] = os.environ.get("GIT_SSH_COMMAND", "ssh -o BatchMode=yes")
    else:
        settings |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    return kept | settings


def file_url(folder: Path) -> str:
    """The URL of a repository on this disk."""
    return folder.absolute().as_uri()
