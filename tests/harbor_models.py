"""Harbor's own models, in an environment of their own: a second opinion on what a task folder says.

Harbor needs Python 3.12, Rollyard 3.11. `python tests/harbor_models.py install` makes the environment (430 MB).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

VERSION: Final = "0.25.0"
OLDEST: Final = (3, 12)
FOLDER: Final = Path("~/.cache/rollyard/tools").expanduser() / f"harbor-{VERSION}"
INTERPRETERS: Final = ("python3.14", "python3.13", "python3.12", "python3")
_READ: Final = """
import json, sys, warnings
warnings.simplefilter("ignore")
from harbor.models.task.task import Task
for path in sys.argv[1:]:
    try:
        task = Task(path)
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        continue
    config = task.config
    print(json.dumps({
        "name": task.name, "instruction": task.instruction, "agent_s": config.agent.timeout_sec,
        "verifier_s": config.verifier.timeout_sec, "image": config.environment.docker_image,
        "network": config.environment.network_mode.value, "cpus": config.environment.cpus,
        "memory_mb": config.environment.memory_mb, "env": config.environment.env, "workdir": config.environment.workdir,
        "verifier_env": config.verifier.env, "user": config.agent.user,
    }))
"""


def missing() -> str:
    """Why the models cannot be asked; empty when they can."""
    return "" if (FOLDER / "installed").is_file() else f"no Harbor in {FOLDER}: python tests/harbor_models.py install"


def read(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """What Harbor reads in each folder, or `error`."""
    command = [str(FOLDER / "bin" / "python"), "-c", _READ, *map(str, folders)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return [json.loads(line) for line in ended.stdout.splitlines()]


def interpreter() -> str:
    """A Python that is new enough: on PATH, of pyenv, or one that uv finds or brings. Raises SystemExit."""
    versions = Path("~/.pyenv/versions").expanduser()
    found = [path for name in INTERPRETERS if (path := shutil.which(name))]
    found += [str(path) for path in sorted(versions.glob("3.*/bin/python"), reverse=True)]
    for path in found:
        code = f"import sys, venv, ensurepip; sys.exit(sys.version_info < {OLDEST})"
        if subprocess.run([path, "-c", code], capture_output=True, check=False).returncode == 0:
            return path
    if uv := shutil.which("uv"):
        subprocess.run([uv, "python", "install", "3.12"], check=True)
        return subprocess.run([uv, "python", "find", "3.12"], capture_output=True, text=True, check=True).stdout.strip()
    raise SystemExit("harbor_models: there is no Python 3.12 or newer; install one, for example with pyenv or uv")


def install() -> None:
    """Make the environment, unless it is there."""
    if not missing():
        return
    shutil.rmtree(FOLDER, ignore_errors=True)
    subprocess.run([interpreter(), "-m", "venv", str(FOLDER)], check=True)
    pip = [str(FOLDER / "bin" / "python"), "-m", "pip", "install", "--quiet", f"harbor=={VERSION}"]
    subprocess.run(pip, check=True)
    (FOLDER / "installed").touch()


if __name__ == "__main__":
    if sys.argv[1:] != ["install"]:
        raise SystemExit("usage: python tests/harbor_models.py install")
    install()
