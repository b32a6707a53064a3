"""Behaviours: what can be reached from inside is what was asked for."""

from __future__ import annotations

from typing import Final

from rollyard.stages.conformance.behaviour import Group, flag, network
from rollyard.stages.conformance.bench import Bench, NotTold, expect, run
from rollyard.stages.sandbox import ANY_PLACE, Sandbox

networks: Final = Group("network")

_GET: Final = r"""
if command -v bash >/dev/null; then
  bash -c 'exec 3<>"/dev/tcp/$0/$1" && printf "GET / HTTP/1.0\r\nHost: x\r\n\r\n" >&3 && cat <&3' "$1" "$2"
elif command -v python3 >/dev/null; then
  python3 -c 'import sys, urllib.request as u; print(u.urlopen(sys.argv[1]).read().decode())' "http://$1:$2/"
elif command -v wget >/dev/null; then
  wget -q -O - "http://$1:$2/"
else
  exit 99
fi
"""


async def _answer(sandbox: Sandbox, host: str, port: str) -> str:
    """What a web server answers as seen from inside; empty when it cannot be reached."""
    result = await sandbox.exec(("sh", "-c", _GET, "sh", host, port), timeout_s=10)
    if result.exit_code == 99:
        raise NotTold("the image has neither bash nor python3 nor wget")
    return result.stdout.decode(errors="replace")


async def _reaches_machine(bench: Bench, sandbox: Sandbox) -> bool:
    host, port, text = bench.setting.canary.split()
    return text in await _answer(sandbox, host, port)


async def _routes(sandbox: Sandbox) -> int:
    """Routes that lead out of the sandbox."""
    result = await run(sandbox, "cat /proc/net/route 2>/dev/null | tail -n +2 | wc -l")
    return int(result.stdout)


async def _loopback_works(sandbox: Sandbox) -> None:
    result = await run(sandbox, "grep -c . /proc/net/dev && cat /proc/net/dev")
    expect(b"lo:" in result.stdout, "there is no loopback device")


@networks(network("none"))
async def none(bench: Bench) -> None:
    """With `none`, nothing of this machine is reached and no route leads out"""
    async with bench.fresh(network="none") as sandbox:
        await _loopback_works(sandbox)
        expect(not await _reaches_machine(bench, sandbox), "a server on this machine was reached")
        expect(not await _routes(sandbox), "a route leads out of it")


@networks(network("gateway"))
async def gateway(bench: Bench) -> None:
    """With `gateway`, the gateway answers at the sandbox's own address for it, and nothing else does"""
    if not bench.setting.gateway:
        raise NotTold("no relay was started")
    async with bench.fresh(network="gateway") as sandbox:
        expect(sandbox.gateway_url, "it names no address of the gateway")
        host, _, port = (sandbox.gateway_url or "").removeprefix("http://").partition(":")
        for who in (sandbox, await bench.backend.open(sandbox.ref)):
            got = await _answer(who, host, port)
            expect(bench.setting.gateway in got, f"{sandbox.gateway_url} does not answer: {got[:100]!r}")
        expect(not await _reaches_machine(bench, sandbox), "another server on this machine was reached")


@networks(network("open"), name="open")
async def opened(bench: Bench) -> None:
    """With `open`, there is a way out"""
    async with bench.fresh(network="open") as sandbox:
        if await _reaches_machine(bench, sandbox) or await _routes(sandbox):
            return
        if bench.backend.place == ANY_PLACE:
            raise NotTold("nothing that can be reached from there is known")
        expect(False, "no server of this machine is reached, and no route leads out")


@networks(flag("set_network", "it cannot change the network"))
async def changed(bench: Bench) -> None:
    """The network can be taken away while the sandbox lives"""
    async with bench.fresh(network="open") as sandbox:
        if not await _reaches_machine(bench, sandbox):
            raise NotTold("this machine cannot be reached from there")
        await sandbox.set_network("none")
        expect(not await _reaches_machine(bench, sandbox), "a server on this machine was reached")
