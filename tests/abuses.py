"""Agents that behave badly, and what must become of each: one `Abuse` a way of doing harm.

Every process that they start carries the word TAG, in its environment or in its command line, by which it is found.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rollyard.schemas.sandbox import ImageBuild, Limits, Repository, SetupStep
from rollyard.schemas.task import AgentSpec, EvaluationSpec, Timeouts

ALL = ("local", "bubblewrap", "docker")
JAILED = ("bubblewrap", "docker")
PROCESSES = 48
MEBIBYTE = 1 << 20

HARD_PROMPT = (
    "-n 'single' \"double\" `id` $(id) ${HOME} {home} \\\n\n\ttab; a && b | c > d"
    " & %s \\0 \\n ! # * ? [x] \u2713 \U0001f600 \\"
)


@dataclass(frozen=True, kw_only=True)
class Abuse:
    """One bad task. `failure` is the class that it must end as, None: it completes."""

    name: str
    script: str = "true"
    words: tuple[str, ...] = ()  # further arguments of the script
    prompt: str = "p"
    backends: Sequence[str] = ALL
    failure: str | None = None
    says: str = ""  # what the message holds
    reward: float | None = None
    sandbox: dict[str, Any] = field(default_factory=dict)
    evaluation: EvaluationSpec = EvaluationSpec()
    run_s: float = 120.0
    group_size: int = 1
    python: bool = False

    def agent(self, tag: str) -> AgentSpec:
        """The agent: its script by sh, or by python3, with the tag and the further words as arguments."""
        argv = ("python3", "-c", self.script) if self.python else ("sh", "-c", self.script)
        return AgentSpec(harness="command", args={"command": [*argv, tag, *self.words]})

    def timeouts(self) -> Timeouts:
        """Limits of the stages: RUN's own one, and generous ones for the others: machines are slow."""
        return Timeouts(run_s=self.run_s, init_s=120, eval_s=120)


def _exact(answer: str) -> EvaluationSpec:
    return EvaluationSpec(rule="exact", args={"answer": answer})


def _limits(**limits: Any) -> dict[str, Any]:
    return {"limits": Limits(**limits)}


# --- before the agent ---

_BEFORE = (
    Abuse(
        name="missing image",
        backends=JAILED,
        sandbox={"image": "nothing/of-that-name:1"},
        failure="init",
        says="nothing/of-that-name",
    ),
    Abuse(
        name="dockerfile that fails",
        backends=("docker",),
        sandbox={
            "image": "",
            "build": ImageBuild(dockerfile="FROM IMAGE\nLABEL abuse=TAG\nRUN echo 'no such luck' >&2; exit 7\n"),
        },
        failure="init",
        says="no such luck",
    ),
    Abuse(
        name="dockerfile that is none",
        backends=("docker",),
        sandbox={"image": "", "build": ImageBuild(dockerfile="FRUM TAG\n")},
        failure="init",
    ),
    Abuse(
        name="repository that is not there",
        sandbox={"repository": Repository(url="file:///nowhere/TAG.git", commit="main")},
        failure="init",
        says="/nowhere/",
    ),
    Abuse(
        name="setup that hangs",
        sandbox={
            "setup": (
                SetupStep(
                    run="echo begun; trap '' TERM; setsid sh -c 'while :; do sleep 1; done' TAG & sleep 600",
                    timeout_s=2,
                ),
            )
        },
        failure="init",
        says="setup command 1",
    ),
    Abuse(
        name="setup that fails",
        sandbox={"setup": ("echo wrong >&2; exit 3",)},
        failure="init",
        says="wrong",
        group_size=2,
    ),
)

# --- the agent itself ---

_FORKS = """
import os, sys, time
count = 0
for _ in range(int(sys.argv[2])):
    try:
        pid = os.fork()
    except OSError:
        break
    if pid == 0:
        os.setsid()
        time.sleep(600)
        os._exit(0)
    count += 1
print("bounded" if count < int(sys.argv[3]) else count, flush=True)
os._exit(0)
"""

_BOMB = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""

_HOPS = """
import os
print("off", flush=True)
for _ in range(10**9):
    if os.fork():
        os._exit(0)
"""

_DAEMONS = """
(setsid sh -c '(while :; do sleep 1; done) & exit' "$0" &)
setsid setsid sh -c 'cd /; exec >/dev/null 2>&1; (trap "" TERM HUP; while :; do sleep 1; done) & exit' "$0" &
env -i sh -c 'while :; do sleep 1; done' "$0" &
nohup sh -c 'while :; do sleep 1; done' "$0" >/dev/null 2>&1 &
"""
_HIDDEN = """
env -i setsid sh -c '(while :; do sleep 1; done) & exit' "$0" &
(setsid env -i setsid sh -c 'exec >/dev/null 2>&1; while :; do sleep 1; done' "$0" &)
sleep 0.3
"""

_AGENTS = (
    Abuse(
        name="prompt with everything in it",
        prompt=HARD_PROMPT,
        words=("{prompt}", "{prompt_file}"),
        script='printf %s "$1" | cmp - "$2" && set -- $(sha256sum <"$2") && echo "$1"',
        evaluation=_exact(hashlib.sha256(HARD_PROMPT.encode()).hexdigest()),
        reward=1.0,
    ),
    Abuse(
        name="10,000 processes",
        backends=JAILED,
        python=True,
        script=_FORKS,
        words=("10000", str(PROCESSES + 1)),
        sandbox=_limits(max_processes=PROCESSES),
        evaluation=_exact("bounded"),
        reward=1.0,
    ),
    # Nothing bounds processes there, and the machine is needed for the other tests.
    Abuse(
        name="many processes",
        backends=("local",),
        python=True,
        script=_FORKS,
        words=("200", "0"),
        evaluation=_exact("200"),
        reward=1.0,
    ),
    Abuse(
        name="forks endlessly",
        backends=JAILED,
        python=True,
        script=_BOMB,
        sandbox=_limits(max_processes=PROCESSES),
        run_s=3,
        failure="agent_budget",
        says="still running",
        evaluation=_exact("x"),
        reward=0.0,
    ),
    Abuse(name="forks and ends, for ever", python=True, script=_HOPS, evaluation=_exact("off"), reward=1.0),
    Abuse(
        name="fills the disk",
        backends=("bubblewrap",),
        script="trap '' TERM; cat /dev/zero >fill; cat /dev/zero >\"$HOME/fill\"; sleep 600",
        sandbox=_limits(disk_bytes=16 * MEBIBYTE),
        run_s=5,
        failure="agent_budget",
        says="still running",
        evaluation=_exact("x"),
        reward=0.0,
    ),
    Abuse(
        name="fills the disk and is judged by its files",
        backends=("bubblewrap",),
        script='cat /dev/zero >fill; cat /dev/zero >"$HOME/fill"; exit 0',
        sandbox=_limits(disk_bytes=16 * MEBIBYTE),
        evaluation=EvaluationSpec(rule="command", args={"command": "test -s right"}),
        reward=0.0,
    ),
    Abuse(
        name="writes a file without end",
        script="cat /dev/zero >fill; wc -c <fill",
        sandbox=_limits(max_file_bytes=MEBIBYTE),
        evaluation=_exact(str(MEBIBYTE)),
        reward=1.0,
    ),
    Abuse(
        name="prints 1 GB",
        script="exec head -c 1073741824 /dev/zero",
        sandbox=_limits(max_file_bytes=4 * MEBIBYTE),
        failure="agent",
        says="killed by signal 25",
    ),
    Abuse(
        name="prints 1 GB to both and goes on",
        script="trap '' XFSZ; yes | head -c 1073741824; yes | head -c 1073741824 >&2; exit 0",
        sandbox=_limits(max_file_bytes=4 * MEBIBYTE),
        evaluation=EvaluationSpec(rule="contains", args={"answer": "y"}),
        reward=1.0,
    ),
    Abuse(
        name="ignores SIGTERM",
        script="trap '' TERM INT HUP QUIT; echo said; while :; do sleep 1; done",
        run_s=3,
        failure="agent_budget",
        says="still running after 3 s",
        evaluation=_exact("x"),
        reward=0.0,
        group_size=2,
    ),
    Abuse(
        name="deletes its HOME",
        script='rm -rf "${HOME:?}" 2>/dev/null; test ! -e "$HOME/.rollyard" && echo done',
        evaluation=EvaluationSpec(rule="command", args={"command": "test ! -e right"}),
        reward=1.0,
    ),
    Abuse(
        name="deletes everything it can",
        script='rm -rf "${HOME:?}" "${PWD:?}" "${TMPDIR:-$HOME}" 2>/dev/null; echo done',
        evaluation=_exact("done"),
        reward=1.0,
    ),
    Abuse(
        name="deletes what is judged",
        script='rm -rf "${PWD:?}" 2>/dev/null; echo done',
        evaluation=EvaluationSpec(rule="command", args={"command": "test -e right"}),
        reward=0.0,
    ),
    Abuse(
        name="leaves a file for a working directory",
        backends=("local",),
        script='rm -rf "${PWD:?}" && echo 42 >"$PWD"; echo done',
        evaluation=EvaluationSpec(rule="command", args={"command": "test -e right"}),
        reward=0.0,
    ),
    Abuse(name="daemonises", script=_DAEMONS + "echo done", evaluation=_exact("done"), reward=1.0),
    Abuse(
        name="hides its daemons", backends=JAILED, script=_HIDDEN + "echo done", evaluation=_exact("done"), reward=1.0
    ),
    Abuse(
        name="kills all it sees",
        backends=("bubblewrap",),
        script="kill -9 -1; sh -c 'kill -9 -1'; echo survived",
        failure="agent",
        says="killed by signal 9",
    ),
    # The shim runs as the same user there: nobody saw the end of the agent.
    Abuse(name="kills everything in its container", backends=("docker",), script="sh -c 'kill -9 -1'", failure="agent"),
    Abuse(
        name="kills its parent",
        backends=("local", "docker"),
        script="kill -9 $PPID; while :; do sleep 1; done",
        failure="agent",
        run_s=15,  # what of the shim is left sleeps until then
        says="shim died",
    ),
)

# --- fake rewards ---

_PLANT_REWARD = """
mkdir -p out; echo 1 >out/reward; chmod 444 out/reward
(setsid sh -c 'while :; do echo 1 >out/reward; sleep 0.05; done' "$0" >/dev/null 2>&1 &)
"""
_PLANT_PYTHON = r"""
cat >sitecustomize.py <<'END'
import os
os._exit(0)
END
cp sitecustomize.py usercustomize.py
cp sitecustomize.py check.py
site="$HOME/.local/lib/python3.11/site-packages"
mkdir -p "$site" && cp check.py "$site/usercustomize.py"
printf 'exit 0\n' >"$HOME/.profile"; printf 'exit 0\n' >"$HOME/.bashrc"
"""
_CHECK = "import pathlib, sys\nsys.exit(pathlib.Path('answer').read_text() != '42')\n"
_PLANT_HARBOR = r"""
root=; [ -n "$ISOLATED" ] || root="$HOME/harbor"
mkdir -p "$root/logs/verifier" "$root/tests"
echo '{"reward": 1}' >"$root/logs/verifier/reward.json"
echo 1 >"$root/logs/verifier/reward.txt"
echo "echo 1 >$root/logs/verifier/reward.txt" >"$root/tests/test.sh" && chmod 555 "$root/tests/test.sh"
test -s "$root/logs/verifier/reward.json" || exit 1
(setsid sh -c 'while :; do echo 1 >"$1/logs/verifier/reward.txt"; sleep 0.05; done' "$0" "$root" >/dev/null 2>&1 &)
echo done
"""
_RIGHT = 'if [ "$(cat answer 2>/dev/null)" = 42 ]; then echo 1; else echo 0; fi'
_TEST = f'#!/bin/sh\n{_RIGHT} >"$ROLLYARD_LOGS/verifier/reward.txt"\n'
_TO_FILE = f"mkdir -p out; {_RIGHT} >out/reward"


def _by_command(sandbox: Any = "auto", **args: Any) -> EvaluationSpec:
    return EvaluationSpec(rule="command", args=args, sandbox=sandbox)


def _by_harbor(sandbox: Any = "auto") -> EvaluationSpec:
    return EvaluationSpec(rule="harbor", args={"tests": {"test.sh": _TEST}}, sandbox=sandbox)


_FAKES = (
    Abuse(
        name="fake reward file",
        script=_PLANT_REWARD,
        evaluation=_by_command(command=_TO_FILE, reward_file="out/reward"),
        reward=0.0,
    ),
    Abuse(
        name="fake reward file in the same sandbox",
        script=_PLANT_REWARD,
        evaluation=_by_command("same", command=_TO_FILE, reward_file="out/reward"),
        reward=0.0,
    ),
    Abuse(
        name="fake python",
        script=_PLANT_PYTHON + "printf 41 >answer",
        sandbox={"env": {"PYTHONPATH": "."}},
        evaluation=_by_command(command="python3 check.py", files={"check.py": _CHECK}),
        reward=0.0,
    ),
    Abuse(
        name="the right answer beside a fake python",
        script=_PLANT_PYTHON + "printf 42 >answer",
        sandbox={"env": {"PYTHONPATH": "."}},
        evaluation=_by_command(command="python3 check.py", files={"check.py": _CHECK}),
        reward=1.0,
    ),
    Abuse(name="fake harbor reward", script=_PLANT_HARBOR, evaluation=_by_harbor(), reward=0.0),
    Abuse(
        name="fake harbor reward in the same sandbox", script=_PLANT_HARBOR, evaluation=_by_harbor("same"), reward=0.0
    ),
)

ABUSES = (*_BEFORE, *_AGENTS, *_FAKES)
