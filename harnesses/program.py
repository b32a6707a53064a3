"""What harnesses of the shipped programs share: the program lies in the sandbox's home beside its configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from rollyard.harnesses.harness import AgentContext, Command, agent_environment

FOLDER: Final = ".rollyard"
CLIENT: Final = "model_client.py"
BUDGET_CODES: Final = (2,)
LLM_CODES: Final = (3,)
PATIENCE: Final = "seconds for which a lost connection or a refusal that may pass is tried again"
PATIENCE_S: Final = 60.0

_PROGRAMS: Final = Path(__file__).with_name("programs")


def program_files(program: str, config: dict[str, Any]) -> dict[str, str | bytes]:
    """The program, its client and its configuration, to put into the home."""
    return {
        f"{FOLDER}/{program}": (_PROGRAMS / program).read_bytes(),
        f"{FOLDER}/{CLIENT}": (_PROGRAMS / CLIENT).read_bytes(),
        f"{FOLDER}/config.json": json.dumps(config),
    }


def program_command(context: AgentContext, program: str) -> Command:
    """How to start it: without site packages, which would double the time to start."""
    folder = f"{context.home}/{FOLDER}"
    argv = (context.python, "-E", "-s", "-S", f"{folder}/{program}", f"{folder}/config.json")
    return Command(argv, agent_environment(context))
