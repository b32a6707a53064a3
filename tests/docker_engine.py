"""The Docker engine that tests use, if this machine has one, and images that are made without a registry."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import tarfile
from functools import cache
from pathlib import Path
from typing import Any

import docker
import images
import pytest
from docker.errors import DockerException

REPOSITORY = "rollyard-test"


@cache
def missing() -> str:
    """Why no test can use an engine; empty when it can."""
    try:
        client = docker.from_env(timeout=20)
    except DockerException as error:
        return f"no Docker engine: {error}"
    try:
        client.ping()
    except (DockerException, OSError) as error:
        return f"no Docker engine: {error}"
    finally:
        client.close()
    return images.missing()


def require() -> None:
    """Skip the test where there is no engine; fail it in CI, where there must be one."""
    if why := missing():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(why)


@cache
def root_image() -> str:
    """An image with sh, bash, coreutils, git, tar and python3."""
    archive = images.root_tar()
    return _imported("root", archive.stem.rpartition("-")[2], archive)


@cache
def busybox_image() -> str:
    """An image with nothing but busybox."""
    busybox = Path(shutil.which("busybox") or "/bin/busybox").read_bytes()
    applets = subprocess.run(["busybox", "--list"], capture_output=True, text=True, check=True).stdout.split()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        program = tarfile.TarInfo("bin/busybox")
        program.mode, program.size = 0o755, len(busybox)
        tar.addfile(program, io.BytesIO(busybox))
        for applet in applets:
            if applet != "busybox":
                link = tarfile.TarInfo(f"bin/{applet}")
                link.type, link.linkname = tarfile.SYMTYPE, "busybox"
                tar.addfile(link)
    return _imported("busybox", hashlib.sha256(busybox).hexdigest()[:16], buffer.getvalue())


@cache
def bare_image() -> str:
    """An image without a shell."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("file"), io.BytesIO())
    return _imported("bare", "1", buffer.getvalue())


def _imported(name: str, tag: str, source: Path | bytes) -> str:
    client: Any = docker.APIClient(version="auto", timeout=120)
    try:
        if not client.images(f"{REPOSITORY}/{name}:{tag}"):
            if isinstance(source, Path):
                client.import_image_from_file(str(source), repository=f"{REPOSITORY}/{name}", tag=tag)
            else:
                client.import_image_from_data(source, repository=f"{REPOSITORY}/{name}", tag=tag)
    finally:
        client.close()
    return f"{REPOSITORY}/{name}:{tag}"
