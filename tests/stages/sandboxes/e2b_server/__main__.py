"""`python -m e2b_server`: see the package."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import signal
from typing import Final

from aiohttp import web

from e2b_server.control import Server

_PR_SET_PDEATHSIG: Final = 1


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


async def serve(options: argparse.Namespace) -> None:
    """Serve until SIGTERM."""
    internet = {}
    for pair in options.internet:
        inside, _, real = pair.partition("=")
        internet[_address(inside)] = _address(real)
    server = Server(options.key, internet, dict(name.split("=") for name in options.name), options.max_create)
    runner = web.AppRunner(server.app(), access_log=None, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", options.port)
    await site.start()
    port = runner.addresses[0][1]
    print(json.dumps({"port": port}), flush=True)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()


def main() -> None:
    """Read the options and serve. Linux kills this process when its parent dies, so that no test leaves it behind."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parser = argparse.ArgumentParser()
    parser.add_argument("--key", required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--internet", action="append", default=[], metavar="IP:PORT=HOST:PORT")
    parser.add_argument("--name", action="append", default=[], metavar="NAME=IP")
    parser.add_argument("--max-create", type=int, default=8)
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
