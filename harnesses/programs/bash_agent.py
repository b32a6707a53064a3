"""Agent `bash`: the model proposes a shell command, sees what it wrote, and goes on until it says done.

A reply's code block, else its first line, is the command. Prints the output of the last command; what happened goes to
standard error.

usage: bash_agent.py CONFIG.json with {prompt, system, examples, stream, patience_s, max_turns, command_timeout_s,
programs}
Exit status: 0 done, 1 error, 2 too many turns or a limit of the session, 3 no reply from the model.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollyard.harnesses.programs.model_client import EXIT_LIMIT, AgentError, Model, chat, read_config
else:
    from model_client import EXIT_LIMIT, AgentError, Model, chat, read_config

SHOWN_BYTES = 2000
FENCE = "```"


def main() -> int:
    """Work until done; returns the exit status."""
    config = read_config()
    messages = chat(config["system"], config["examples"], config["prompt"])
    model, output = Model(config["patience_s"]), ""
    try:
        for turn in range(1, config["max_turns"] + 1):
            reply = model.reply(messages, stream=config["stream"])
            command = command_of(reply)
            sys.stderr.write(f"turn {turn}: {command}\n")
            if command.lower().strip(" .!") in ("done", ""):
                break
            output = refusal(command, config["programs"]) or run(command, config["command_timeout_s"])
            sys.stderr.write(output + "\n")
            messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": output}]
        else:
            sys.stderr.write(f"bash: not done after {config['max_turns']} turns\n")
            return EXIT_LIMIT
    except AgentError as error:
        sys.stderr.write(f"bash: {error}\n")
        return error.exit_code
    finally:
        sys.stdout.buffer.write(output.encode(errors="replace") + b"\n")
    return 0


def command_of(reply: str) -> str:
    """The command in a reply: its first code block, else its first line that is not empty."""
    before, fence, rest = reply.partition(FENCE)
    if fence:
        _language, _, block = rest.partition("\n")
        return block.partition(FENCE)[0].strip()
    lines = [line.strip() for line in before.splitlines() if line.strip()]
    return lines[0].removeprefix("$ ").strip("`") if lines else ""


def refusal(command: str, programs: list[str]) -> str:
    """Why a command may not run; empty: it may. Without `programs` every command may.

    It keeps a clumsy model from accidents, not a clever one from mischief.
    """
    if not programs:
        return ""
    used = [part.split()[0] for part in re.split(r"[;&|\n()]+", command) if part.strip()]
    outside = re.search(r"""(^|[\s"'=<>:])/|\.\.|[~$`\\]""", command)
    if outside is None and all(program in programs for program in used):
        return ""
    return f"(refused: use only {', '.join(programs)}, inside this folder)"


def run(command: str, timeout_s: float) -> str:
    """Run a command; returns what it wrote, both streams in order, and its exit status when that is not 0."""
    # A file, not a pipe: a background process may hold a pipe open for ever.
    path = os.path.join(os.environ.get("TMPDIR", "/tmp"), f"output.{os.getpid()}")  # noqa: PTH118 - see read_config
    env = {name: value for name, value in os.environ.items() if not name.startswith("OPENAI_")}
    with open(path, "w+b") as file:  # noqa: PTH123
        process = subprocess.Popen(
            ["sh", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )
        try:
            status = f"(exit status {process.wait(timeout_s)})"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = f"(killed after {timeout_s:g} s)"
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - SHOWN_BYTES))
        text = file.read(SHOWN_BYTES).decode(errors="replace").strip()
    os.unlink(path)  # noqa: PTH108
    return text if status == "(exit status 0)" and text else f"{text}\n{status}".strip()


if __name__ == "__main__":
    sys.exit(main())
