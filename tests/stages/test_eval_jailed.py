"""EVAL against agents that would rather have a reward than earn it, and verifiers that misbehave, in real jails."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import images
import pytest

from rollyard.pipeline.consumer import Ack
from rollyard.schemas.errors import SandboxError
from rollyard.schemas.rollout import AgentResult, Rollout, RolloutEvent
from rollyard.schemas.sandbox import SandboxSpec
from rollyard.schemas.task import EvaluationSpec, Task, Timeouts
from rollyard.stages import eval as eval_stage
from rollyard.stages.eval import Eval
from rollyard.stages.sandbox import Labels, Plan, SandboxBackend, open_backend
from rollyard.stages.stage import StageHandler
from rollyard.stages.worker import backend_settings

JAIL_UID = 64_042
TEST = "#!/bin/sh\nif python3 /tests/check.py; then echo 1; else echo 0; fi >/logs/verifier/reward.txt\n"
HARBOR = {"test.sh": TEST, "check.py": "import sys\nsys.exit(open('answer').read() != 'right')\n"}
COMMAND = {"command": "python3 check.py", "files": {"check.py": HARBOR["check.py"]}}


@dataclass
class Jails:
    """Rollouts whose agents did something in a jail."""

    crew: Any
    backend: SandboxBackend
    image: str

    async def judged(
        self, did: str, rule: str = "harbor", args: dict[str, Any] | None = None, **spec: Any
    ) -> RolloutEvent:
        """The last event of a rollout whose agent left a wrong answer, and ran the script `did`."""
        eval_s = spec.pop("eval_s", 60.0)
        arguments = args or (COMMAND if rule == "command" else {"tests": HARBOR})
        task = Task(
            prompt="p",
            id="t",
            sandbox=SandboxSpec(backend="bubblewrap", image=self.image, network="none"),
            evaluation=EvaluationSpec(rule=rule, args=arguments, max_tries=1, **spec),
            timeouts=Timeouts(eval_s=eval_s),
            max_attempts=1,
        )
        rollout = Rollout.of("r", "t", 0, 1)
        labels = Labels(run="r", rollout_id=rollout.rollout_id, attempt=1, owner="w", created_ms=0)
        sandbox = await self.backend.create(labels, Plan(image=self.image, network="none"))
        await sandbox.put_files({"answer": "wrong"})
        ended = await sandbox.exec(did, timeout_s=30)
        assert ended.exit_code == 0, ended.stderr
        event = RolloutEvent(kind="ran", rollout=rollout, attempt=1, at_ms=1, result=AgentResult(exit_code=0))
        closed_seq = await self.crew.context.record(event)
        facts = {"position": "eval", "place": self.backend.place, "sandbox": sandbox.ref, "step": 2}
        await self.crew.start(task, closed_seq=closed_seq, status="completed", **facts)
        (held,) = await self.crew.take("eval", self.backend.place)
        assert await StageHandler(self.crew.context, Eval(self.crew.context))(held) == Ack()
        assert await self.backend.list_owned() == [], "a sandbox is left"
        last: RolloutEvent = (await self.crew.life(rollout))[-1]
        return last


@pytest.fixture
async def jails(crew: Any, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Jails]:
    missing = images.missing()
    if not missing:
        image = str(await asyncio.to_thread(images.root_tree, JAIL_UID if os.getuid() == 0 else None))
        try:
            async with open_backend("bubblewrap", backend_settings(crew.config, "bubblewrap")) as backend:
                crew.context.backends = {**crew.context.backends, "bubblewrap": backend}
                monkeypatch.setattr(eval_stage, "FIRST_PAUSE_S", 0.01)
                yield Jails(crew, backend, image)
                return
        except SandboxError as error:
            missing = str(error)
    (pytest.fail if os.environ.get("CI") else pytest.skip)(missing)


TAMPERED = r"""
for place in /usr/bin/python3 /usr/local/bin/python3 "$HOME/bin/python3" /bin/python3; do
  mkdir -p "$(dirname "$place")"; rm -f "$place"; printf '#!/bin/sh\nexit 0\n' >"$place"; chmod +x "$place"
done
"""
TRICKS = {
    "a reward of its own": "mkdir -p /logs/verifier; cd /logs/verifier; echo 1 >reward.txt; echo 1 >reward.json",
    "tests of its own": "mkdir -p /tests; printf '#!/bin/sh\\necho 1 >/logs/verifier/reward.txt' >/tests/test.sh; "
    "chmod a+x /tests/test.sh; echo 'import sys; sys.exit(0)' >/tests/check.py",
    "another python": TAMPERED,
    "a start file of python": "echo 'import os; os._exit(0)' >sitecustomize.py; cp sitecustomize.py usercustomize.py; "
    "for site in /usr/lib/python3*/ /usr/local/lib/python3*/ /usr/lib/python3*/site-packages/; do "
    "mkdir -p $site; cp sitecustomize.py $site; done; echo 'export PYTHONPATH=$PWD' >~/.profile",
    "a home full of settings": "mkdir -p ~/.local/lib/python3.11/site-packages; "
    "echo 'import os; os._exit(0)' >~/.local/lib/python3.11/site-packages/usercustomize.py; echo exit 0 >/etc/profile",
    "a library in the way": "cp /bin/true /lib/libc.so.6 || true; echo /nowhere.so >/etc/ld.so.preload",
}


@pytest.mark.parametrize("rule", ["harbor", "command"])
@pytest.mark.parametrize("trick", TRICKS)
async def test_a_trick_outside_of_the_work_is_worth_nothing(jails: Jails, trick: str, rule: str) -> None:
    event = await jails.judged(TRICKS[trick], rule)
    assert (event.kind, event.reward) == ("evaluated", 0.0), event.failure


async def test_in_the_agents_own_sandbox_such_a_trick_works(jails: Jails) -> None:
    event = await jails.judged(TAMPERED, "command", sandbox="same")
    assert event.reward == 1.0, "the tests above show nothing"


async def test_a_right_answer_is_found_through_all_of_it(jails: Jails) -> None:
    event = await jails.judged("printf right >answer;" + "".join(TRICKS[each] for each in ("another python",)))
    assert event.reward == 1.0


PLANTED = TRICKS["a reward of its own"] + ";" + TRICKS["tests of its own"]


async def test_a_planted_reward_does_not_count_in_the_agents_own_sandbox_either(jails: Jails) -> None:
    assert (await jails.judged(PLANTED, sandbox="same")).reward == 0.0


async def test_where_the_verifier_writes_no_reward_a_planted_one_is_none(jails: Jails) -> None:
    event = await jails.judged(PLANTED, args={"tests": {"test.sh": "#!/bin/sh\ntrue\n"}}, sandbox="same")
    assert event.failure is not None
    assert (event.failure.kind, "has written neither" in event.failure.message) == ("eval", True)


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("trap '' TERM INT HUP; (setsid sleep 1000 &) ; while :; do sleep 1; done", "did not end within 2 s"),
        ('rm -rf /tests /logs "$HOME" 2>/dev/null; echo 1 >/logs/verifier/reward.txt', "has written neither"),
        ("kill -9 -1", "has written neither"),
        ("rm -rf --no-preserve-root / 2>/dev/null", "the sandbox of the evaluation failed"),
        (":(){ :|:& };:; sleep 100", "did not end within 2 s"),
    ],
    ids=["hangs", "deletes itself", "kills everything", "deletes everything", "forks without end"],
)
async def test_a_verifier_that_destroys_itself_is_a_failure_and_no_zero(jails: Jails, script: str, says: str) -> None:
    tests = {"test.sh": f"#!/bin/bash\n{script}\n"}
    event = await jails.judged("true", args={"tests": tests, "timeout_s": 2.0})
    assert event.failure is not None, event.reward
    assert (event.failure.kind, says in event.failure.message) == ("eval", True), event.failure.message


async def test_a_verifier_that_prints_a_gigabyte_ends_with_its_reward_or_without_one(jails: Jails) -> None:
    flood = {"test.sh": "#!/bin/sh\nhead -c 1000000000 /dev/zero | tr '\\0' x\necho 1 >/logs/verifier/reward.txt\n"}
    event = await jails.judged("true", args={"tests": flood})
    if event.kind == "evaluated":
        assert event.reward == 1.0
    else:
        assert event.failure is not None
        assert event.failure.kind == "eval"
    assert len(event.log) <= 16_384


async def test_a_working_directory_that_cannot_be_carried_is_a_failure_and_no_zero(
    jails: Jails, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollyard.stages.eval_sandbox.MAX_TREE_BYTES", 1_000_000)
    event = await jails.judged("head -c 2000000 /dev/urandom >big")
    assert event.failure is not None
    assert (event.failure.kind, "cannot be copied into a fresh sandbox" in event.failure.message) == ("eval", True)
