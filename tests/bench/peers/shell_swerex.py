"""SWE-ReX: a session or one execution a command, timed where it runs.

python shell_swerex.py session|execute ROUNDS COMMAND

Runs in an environment that has swe-rex; prints a JSON list of milliseconds, and the bytes of the last output.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import tempfile
import time

from swerex.runtime.abstract import BashAction, Command, CreateBashSessionRequest
from swerex.runtime.local import LocalRuntime


async def main() -> None:
    how, rounds, command = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    logging.disable(logging.CRITICAL)
    os.environ["HOME"] = tempfile.mkdtemp()  # with the files of a real one its session may not start
    runtime = LocalRuntime()
    if how == "session":
        await runtime.create_session(CreateBashSessionRequest())
    took_ms, output = [], ""
    for _ in range(rounds):
        began = time.perf_counter()
        if how == "session":
            output = (await runtime.run_in_session(BashAction(command=command, timeout=60))).output
        else:
            output = (await runtime.execute(Command(command=command, shell=True, timeout=60))).stdout
        took_ms.append((time.perf_counter() - began) * 1000)
    print(json.dumps({"took_ms": took_ms, "bytes": len(output)}), flush=True)
    await runtime.close()


asyncio.run(main())
