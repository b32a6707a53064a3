"""Agent `ask`: one question, one answer. Prints the answer.

usage: ask_agent.py CONFIG.json with {prompt, system, examples, stream, patience_s}
Exit status: 0 answered, 1 error, 2 a limit of the session was reached, 3 no reply from the model.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollyard.harnesses.programs.model_client import AgentError, Model, chat, read_config
else:
    from model_client import AgentError, Model, chat, read_config


def main() -> int:
    """Ask and answer; returns the exit status."""
    config = read_config()
    try:
        model = Model(config["patience_s"])
        answer = model.reply(chat(config["system"], config["examples"], config["prompt"]), stream=config["stream"])
    except AgentError as error:
        sys.stderr.write(f"ask: {error}\n")
        return error.exit_code
    sys.stdout.buffer.write(answer.encode(errors="replace") + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
