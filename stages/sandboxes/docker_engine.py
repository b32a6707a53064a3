"""The Docker engine through docker-py: calls run in threads, each with a client of its own, since one client used by
many threads fails now and then. The library's exceptions end here."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

import docker
import requests
from docker.errors import APIError, DockerException, NotFound
from docker.tls import TLSConfig

from rollyard.schemas.errors import SandboxError
from rollyard.stages.sandboxes.docker_wire import EngineAddress, EngineRefused, Wire, away

DEFAULT_URL: Final = "unix:///var/run/docker.sock"
THREADS: Final = 8

T = TypeVar("T")


class EngineGone(SandboxError):
    """What was asked for is not there: a container or an image."""


class Engine:
    """One engine. `call` runs a function with a client; `wire` is for programs and builds."""

    def __init__(self, base_url: str, timeout_s: float) -> None:
        verified = os.environ.get("DOCKER_TLS_VERIFY", "") != ""
        certificates = os.environ.get("DOCKER_CERT_PATH", "") if verified else ""
        self.address = EngineAddress(base_url or os.environ.get("DOCKER_HOST", "") or DEFAULT_URL, certificates)
        self.address.check()
        self._timeout_s = timeout_s
        self._local = threading.local()
        self._clients: list[docker.APIClient] = []
        self._threads: ThreadPoolExecutor | None = None
        self._wire: Wire | None = None
        self.identity = ""

    async def open(self) -> None:
        """Ask who it is. Raises SandboxError when it cannot be reached."""
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="docker")
        try:
            info = await self.call(lambda client: client.info())
            self._wire = Wire(self.address, await self.call(lambda client: client.api_version))
        except BaseException:
            await asyncio.shield(self.close())
            raise
        self.identity = str(info.get("ID") or info.get("Name"))

    async def close(self) -> None:
        """Wait for the calls that are under way, and close all connections."""
        if self._wire is not None:
            self._wire.close()
        threads, self._threads = self._threads, None
        if threads is not None:
            await asyncio.to_thread(threads.shutdown, cancel_futures=True)
        while self._clients:
            self._clients.pop().close()

    @property
    def wire(self) -> Wire:
        """Connections of our own. Raises SandboxError when the engine was not opened."""
        if self._wire is None:
            raise SandboxError("the docker backend is not open", hint="enter it with `async with`")
        return self._wire

    async def call(self, work: Callable[[Any], T]) -> T:
        """Do `work` in a thread. Raises EngineGone, EngineRefused, SandboxError."""
        if self._threads is None:
            raise SandboxError("the docker backend is not open", hint="enter it with `async with`")
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._work, work)

    def _work(self, work: Callable[[Any], T]) -> T:
        try:
            return work(self._client())
        except NotFound as error:
            raise EngineGone(_said(error)) from error
        except APIError as error:
            raise EngineRefused(error.status_code or 500, _said(error)) from error
        except (DockerException, requests.RequestException, OSError) as error:
            raise away(self.address.url, error) from error

    def _client(self) -> Any:
        client = getattr(self._local, "client", None)
        if client is None:
            tls: Any = False
            if folder := self.address.certificates:
                tls = TLSConfig(
                    client_cert=(f"{folder}/cert.pem", f"{folder}/key.pem"), ca_cert=f"{folder}/ca.pem", verify=True
                )
            client = docker.APIClient(self.address.url, version="auto", timeout=max(1, round(self._timeout_s)), tls=tls)
            self._local.client = client
            self._clients.append(client)
        return client


def _said(error: APIError) -> str:
    return str(error.explanation or error)
