"""What the kit does from another process of this machine, as another worker would, or one that is about to die."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from dataclasses import asdict
from typing import Any, Final

import msgspec

from rollyard.schemas.rollout import SandboxRef
from rollyard.stages.conformance.bench import Setting, Unmet, script_command
from rollyard.stages.sandbox import open_backend

START_S: Final = 40.0


async def elsewhere(setting: Setting, ref: SandboxRef, action: str, name: str, script: str = "") -> dict[str, Any]:
    """Run this module as a program. `wait`: what it saw. `start`: it starts `script` as `name` and is killed, -9."""
    asked = {
        "setting": asdict(setting),
        "ref": msgspec.to_builtins(ref),
        "action": action,
        "name": name,
        "script": script,
    }
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", __spec__.name),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(START_S):
        told, errors = await child.communicate(json.dumps(asked).encode())
    wanted = -signal.SIGKILL if action == "start" else 0
    if child.returncode != wanted:
        raise Unmet(f"another process ended with {child.returncode}: {errors.decode(errors='replace').strip()[-300:]}")
    answer: dict[str, Any] = json.loads(told) if told else {}
    return answer


async def _act(asked: dict[str, Any]) -> dict[str, Any]:
    setting, name = Setting(**asked["setting"]), asked["name"]
    ref = msgspec.convert(asked["ref"], SandboxRef)
    async with open_backend(setting.backend, setting.settings) as backend:
        sandbox = await backend.open(ref)
        if asked["action"] == "start":
            await sandbox.start(name, script_command(asked["script"]), deadline_s=60.0)
            os.kill(os.getpid(), signal.SIGKILL)
        end = await sandbox.wait(name)
        stdout, _ = await sandbox.output(name, 1000)
        file = await sandbox.read_file(name, 1000) or b""
        return {"end": [end.exit_code, end.reason], "stdout": stdout.decode(), "file": file.decode()}


if __name__ == "__main__":
    json.dump(asyncio.run(_act(json.load(sys.stdin))), sys.stdout)
    sys.stdout.flush()
    # The threads of E2B's SDK abort an interpreter that is ending, now and then (before Python 3.13).
    os._exit(0)
