"""INIT: a sandbox with everything in it that the agent needs, or a failure as data and nothing left behind."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from rollyard.pipeline.codec import decode
from rollyard.pipeline.consumer import Ack
from rollyard.pipeline.handover import Held
from rollyard.pipeline.kv import Bucket
from rollyard.schemas import subjects
from rollyard.schemas.errors import SandboxError
from rollyard.schemas.fleet import Cancel
from rollyard.schemas.rollout import RolloutState, StageMessage
from rollyard.schemas.sandbox import ImageBuild, Repository, SandboxSpec, SetupStep
from rollyard.schemas.task import AgentSpec, Task, Timeouts
from rollyard.stages import setup
from rollyard.stages.builds import ImageBuilds
from rollyard.stages.init import Init
from rollyard.stages.plugin_check import check_task
from rollyard.stages.stage import StageHandler

COMMAND = AgentSpec(harness="command", args={"command": ["true"]})


async def initialize(crew: Any, task: Task, **changes: Any) -> RolloutState:
    """What becomes of a rollout's INIT message; the state after it."""
    state = await crew.start(task, **changes)
    (held,) = await crew.take("init", task.sandbox.backend)
    assert await StageHandler(crew.context, Init(crew.context))(held) == Ack()
    after: RolloutState = await crew.state(state.rollout)
    return after


async def owned(crew: Any) -> list[Any]:
    return [ref for ref, _ in await crew.context.backends["local"].list_owned()]


async def test_files_commands_and_the_agents_program_are_there(crew: Any) -> None:
    task = Task(
        prompt="What?",
        id="t",
        agent=AgentSpec(harness="ask"),
        sandbox=SandboxSpec(
            files={"src/a.txt": "content"},
            setup=("cat src/a.txt > b.txt", 'echo "$WORD $PWD" > c.txt'),
            env={"WORD": "hello"},
        ),
    )
    state = await initialize(crew, task)
    assert (state.position, state.step, state.attempt, state.effects) == ("run", 1, 1, ())
    sandbox = await crew.context.backends["local"].open(state.sandbox)
    work = Path(sandbox.workdir)
    assert (work / "b.txt").read_text() == "content"
    assert (work / "c.txt").read_text() == f"hello {work}\n"
    assert "What?" in (Path(sandbox.home) / ".rollyard" / "config.json").read_text()
    ((_, labels),) = await crew.context.backends["local"].list_owned()
    assert (labels.run, labels.rollout_id, labels.attempt, labels.owner) == ("r", state.rollout.rollout_id, 1, "w1")
    (event,) = await crew.life(state.rollout)
    assert (event.kind, event.attempt, event.worker, event.place) == ("initialized", 1, "w1", state.place)
    assert 0 < event.started_ms <= event.at_ms
    assert f"stage.run.{state.place}.r" in await crew.due()


@pytest.mark.parametrize(
    ("task", "kind", "says"),
    [
        (
            Task(prompt="p", agent=COMMAND, sandbox=SandboxSpec(setup=("true", "echo oh no >&2; exit 3"))),
            "init",
            "setup command 2 ended with 3: oh no",
        ),
        (
            Task(prompt="p", agent=COMMAND, sandbox=SandboxSpec(setup=("sleep 60",)), timeouts=Timeouts(init_s=0.3)),
            "init",
            "0.3 s",
        ),
        (
            Task(prompt="p", agent=COMMAND, sandbox=SandboxSpec(backend="moon")),
            "infra",
            "has no sandbox backend 'moon'",
        ),
        (
            Task(prompt="p", agent=AgentSpec(harness="ask"), sandbox=SandboxSpec(backend="none")),
            "init",
            "the sandbox backend 'none' has no place for",
        ),
    ],
    ids=["setup", "timeout", "backend", "files"],
)
async def test_a_failure_is_data_that_may_be_retried_and_leaves_no_sandbox(
    crew: Any, task: Task, kind: str, says: str
) -> None:
    state = await initialize(crew, task)
    assert (state.position, state.attempt, state.failure) == ("init", 2, None)
    (event,) = await crew.life(state.rollout)
    assert event.failure is not None
    assert (event.kind, event.failure.kind, event.failure.retryable) == ("failed", kind, True)
    assert says in event.failure.message
    assert await owned(crew) == []


async def test_the_last_attempt_goes_on_to_aggregate(crew: Any) -> None:
    task = Task(prompt="p", agent=COMMAND, sandbox=SandboxSpec(setup=("exit 3",)), max_attempts=2)
    state = await initialize(crew, task, attempt=2)
    assert (state.position, state.attempt, state.status) == ("aggregate", 2, "failed")
    assert state.failure is not None
    assert state.failure.hint == "see sandbox.setup"


async def test_a_cancel_ends_it_and_removes_the_sandbox(crew: Any) -> None:
    task = Task(prompt="p", id="t", agent=COMMAND, sandbox=SandboxSpec(setup=("touch started; sleep 60",)))
    state = await crew.start(task)
    (held,) = await crew.take("init", "local")
    working = asyncio.create_task(StageHandler(crew.context, Init(crew.context))(held))
    root = crew.config.sandboxes_dir()

    async def started() -> bool:
        return any(root.glob("*/work/started"))

    await crew.until(started)
    await Bucket(crew.bus, subjects.CANCEL, Cancel).put(subjects.cancel_key("r", "t"), Cancel(reason="enough"))
    assert await working == Ack()
    after = await crew.state(state.rollout)
    assert (after.position, after.status, after.attempt) == ("aggregate", "cancelled", 1)
    assert after.failure.message == "enough"
    assert await owned(crew) == []


async def test_a_worker_that_stops_gives_the_work_back(crew: Any) -> None:
    task = Task(prompt="p", id="t", agent=COMMAND, sandbox=SandboxSpec(setup=("sleep 60",)))
    state = await crew.start(task)
    (held,) = await crew.take("init", "local")
    working = asyncio.create_task(StageHandler(crew.context, Init(crew.context))(held))
    await crew.until(lambda: owned(crew))
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    after = await crew.state(state.rollout)
    assert (after.position, after.step) == ("init", 0)
    assert await owned(crew) == []


async def test_a_sandbox_that_the_state_names_after_all_stays(crew: Any) -> None:
    """A write can be stored though its writer was told that another one won: others have moved the rollout on since."""
    await crew.submit(Task(id="t", prompt="x", agent=AgentSpec(harness="ask")))
    async with crew.at_work("admit"):
        (held,) = await crew.take("init", "local")
    message = decode(await held.body(), StageMessage)
    assert message.state is not None
    init = Init(crew.context)
    state = await init.work(Held(message.state, message.revision, message))
    assert state.sandbox is not None
    states = Bucket(crew.bus, subjects.ROLLOUTS, RolloutState)
    key = subjects.rollout_key(state.rollout.run, state.rollout.rollout_id)
    await states.update(key, structs.replace(state, position="eval", step=state.step + 1), message.revision)
    await init.abandon(state)
    assert Path(state.sandbox.handle).exists()
    other = structs.replace(state, sandbox=structs.replace(state.sandbox, handle=state.sandbox.handle + "x"))
    await states.put(key, other)
    await init.abandon(state)
    assert not Path(state.sandbox.handle).exists()


# --- repositories ---


@pytest.fixture
def upstream(tmp_path: Path) -> str:
    """A repository of two commits; its URL. The wanted one is tagged `wanted`."""
    folder = tmp_path / "upstream"
    script = f"""
        git init -q -b main {folder} && cd {folder} && mkdir src && echo one > src/a && ln -s /etc/passwd link
        git add -A && git commit -qm one && git tag wanted && echo two > src/a && git commit -qam two
    """
    identity = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    subprocess.run(["sh", "-ec", script], check=True, env=os.environ | identity)
    return folder.as_uri()


def cloning(url: str, commit: str = "wanted", path: str = "", **sandbox: Any) -> Task:
    repository = Repository(url=url, commit=commit, path=path)
    return Task(prompt="p", id="t", agent=COMMAND, sandbox=SandboxSpec(repository=repository, **sandbox))


async def test_a_repository_comes_before_files_and_setup(crew: Any, upstream: str) -> None:
    setup = ("cat src/a extra > seen; git log --oneline | wc -l > count; git status --porcelain > status",)
    state = await initialize(crew, cloning(upstream, files={"extra": "file"}, setup=setup))
    assert state.position == "run", state.failure
    assert state.sandbox is not None
    work = Path(state.sandbox.handle) / "work"
    assert (work / "seen").read_text() == "one\nfile"
    assert (work / "count").read_text().strip() == "1"
    assert (work / "status").read_text().splitlines() == ["?? count", "?? extra", "?? seen", "?? status"]
    assert (work / "link").readlink() == Path("/etc/passwd")


async def test_a_repository_below_the_working_directory(crew: Any, upstream: str) -> None:
    state = await initialize(crew, cloning(upstream, path="deep/down"))
    assert state.sandbox is not None
    assert (Path(state.sandbox.handle) / "work/deep/down/src/a").read_text() == "one\n"


@pytest.mark.parametrize(
    ("commit", "says"),
    [("no-such-tag", "has no commit, branch or tag 'no-such-tag'"), ("", "cannot be fetched")],
    ids=["commit", "repository"],
)
async def test_what_is_not_there_is_named(crew: Any, upstream: str, commit: str, says: str) -> None:
    state = await initialize(crew, cloning(upstream if commit else "file:///no/where", commit))
    (event,) = await crew.life(state.rollout)
    assert (event.failure.kind, event.failure.retryable) == ("init", True)
    assert says in event.failure.message
    assert await owned(crew) == []


async def test_a_repository_that_hangs_is_given_up_in_time(crew: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"git://127.0.0.1:{server.getsockname()[1]}/x"
        task = structs.replace(cloning(url), timeouts=Timeouts(init_s=0.3))
        state = await initialize(crew, task)
    (event,) = await crew.life(state.rollout)
    assert event.failure.message == f"INIT took longer than 0.3 s, the last of it fetching the repository {url}"
    assert await owned(crew) == []


@pytest.mark.parametrize(
    ("repository", "says"),
    [
        (Repository(url="some/path"), "sandbox.repository.url: 'some/path' is neither a URL nor an absolute path"),
        (Repository(url="--upload-pack=x"), "sandbox.repository.url"),
        (Repository(url="ext::sh -c x"), "sandbox.repository.url"),
        (Repository(url="ssh://-oProxyCommand=x/y"), "sandbox.repository.url"),
        (Repository(url="/a", mirror="b"), "sandbox.repository.mirror"),
        (Repository(url="/a", commit="-x"), "sandbox.repository.commit"),
        (Repository(url="/a", path="../b"), "sandbox.repository.path"),
        (Repository(url="/a\0b"), "sandbox.repository: a text holds a NUL"),
    ],
)
def test_a_repository_that_cannot_be_is_refused_before(repository: Repository, says: str) -> None:
    problems = check_task(Task(prompt="p", sandbox=SandboxSpec(repository=repository)))
    assert any(problem.startswith(says) for problem in problems), problems


@pytest.mark.parametrize(
    "url",
    ["https://host/x.git", "ssh://git@host/x", "git@host:x/y.git", "file:///a/b", "/a/b.bundle", "git://host/x"],
)
def test_a_repository_that_can_be_is_not(url: str) -> None:
    assert check_task(Task(prompt="p", sandbox=SandboxSpec(repository=Repository(url=url)))) == []


# --- setup commands ---


async def test_a_step_is_tried_again_with_growing_pauses(crew: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "FIRST_PAUSE_S", 0.05)
    step = SetupStep(run="date +%s.%N >> tries; [ $(wc -l < tries) -ge 3 ]", max_tries=5)
    state = await initialize(crew, Task(prompt="p", id="t", agent=COMMAND, sandbox=SandboxSpec(setup=(step,))))
    assert state.position == "run"
    assert state.sandbox is not None
    times = [float(line) for line in (Path(state.sandbox.handle) / "work/tries").read_text().split()]
    assert len(times) == 3
    assert times[1] - times[0] >= 0.05
    assert times[2] - times[1] >= 0.1


@given(st.integers(1, 20))
def test_pauses_grow_up_to_half_a_minute(tries: int) -> None:
    assert setup.pause_s(1) <= setup.pause_s(tries) <= setup.pause_s(tries + 1) <= 30


@pytest.mark.parametrize(
    ("step", "says", "hint"),
    [
        (
            SetupStep(run="echo last words; sleep 60", timeout_s=0.3),
            "setup command 1 took longer than its 0.3 s: last words",
            "raise timeout_s of the step in sandbox.setup",
        ),
        (
            SetupStep(run="echo again >&2; exit 4", max_tries=2),
            "setup command 1 ended with 4, in 2 tries: again",
            "see sandbox.setup",
        ),
        (SetupStep(run="kill -9 $$"), "setup command 1 was killed by signal 9: it wrote nothing", "see sandbox.setup"),
        (
            SetupStep(run="trap '' TERM; echo stuck; sleep 60 & wait"),
            "setup command 1 was still running when the 2 s of INIT were over: stuck",
            "raise timeouts.init_s",
        ),
    ],
    ids=["its time", "tries", "killed", "all time"],
)
async def test_a_step_that_fails_says_how_and_what_it_wrote(crew: Any, step: SetupStep, says: str, hint: str) -> None:
    sandbox = SandboxSpec(setup=(step,))
    task = Task(prompt="p", id="t", agent=COMMAND, sandbox=sandbox, timeouts=Timeouts(init_s=2.0))
    state = await initialize(crew, task)
    (event,) = await crew.life(state.rollout)
    assert (event.failure.kind, event.failure.message, event.failure.hint) == ("init", says, hint)
    assert await owned(crew) == []


ODD = "a 'b' \"c\" $HOME `id` \\ \n\ttab \u00e4 %s {x} ;|&"


async def test_quotes_and_whatever_else_come_through_as_they_are(crew: Any) -> None:
    setup_command = "printf '%s' \"$ODD\" > env; cat <<'EOF' > here\n" + ODD + "\nEOF\n"
    task = Task(
        prompt=ODD + "\0 with NUL",
        id="t",
        agent=AgentSpec(harness="ask"),
        sandbox=SandboxSpec(files={'it\'s "a" file': ODD}, setup=(setup_command,), env={"ODD": ODD}),
    )
    state = await initialize(crew, task)
    assert state.sandbox is not None
    folder = Path(state.sandbox.handle)
    assert (folder / "work/env").read_text() == ODD
    assert (folder / "work/here").read_text() == ODD + "\n"
    assert (folder / "work" / 'it\'s "a" file').read_text() == ODD
    assert json.loads((folder / "home/.rollyard/config.json").read_text())["prompt"] == ODD + "\0 with NUL"


# --- images ---


class Builder:
    """A backend that builds, as slowly as it is told."""

    name = "builder"

    def __init__(self) -> None:
        self.builds = 0
        self.ended = 0
        self.go_on = asyncio.Event()

    async def build(self, build: ImageBuild, on_progress: Callable[[str], None]) -> str:
        self.builds += 1
        name = f"image-{self.builds}"
        try:
            on_progress("STEP 1: FROM nothing")
            await self.go_on.wait()
            if "fail" in build.dockerfile:
                raise SandboxError("no such instruction")
            return name
        finally:
            self.ended += 1


async def test_an_image_is_built_once_for_all_who_wait(crew: Any) -> None:
    builder, builds, same = Builder(), ImageBuilds(), ImageBuild(dockerfile="FROM x")
    waiting = [asyncio.create_task(builds.image(builder, same)) for _ in range(5)]
    other = asyncio.create_task(builds.image(builder, ImageBuild(dockerfile="FROM y")))
    await asyncio.sleep(0.01)
    waiting[0].cancel()
    builder.go_on.set()
    assert len({await task for task in waiting[1:]} | {await other}) == 2
    assert builder.builds == 2


async def test_a_build_for_which_nobody_waits_is_ended() -> None:
    builder, builds = Builder(), ImageBuilds()
    waiting = [asyncio.create_task(builds.image(builder, ImageBuild(dockerfile="FROM x"))) for _ in range(2)]
    await asyncio.sleep(0.01)
    for task in waiting:
        assert builder.ended == 0
        task.cancel()
        await asyncio.sleep(0.01)
    assert builder.ended == 1


async def test_a_build_that_fails_or_takes_too_long_says_what_it_said() -> None:
    builder, builds = Builder(), ImageBuilds()
    with pytest.raises(SandboxError, match=r"longer than 0\.05 s; it said last: STEP 1: FROM nothing"):
        await builds.image(builder, ImageBuild(dockerfile="FROM x", timeout_s=0.05))
    builder.go_on.set()
    with pytest.raises(SandboxError, match="no such instruction"):
        await builds.image(builder, ImageBuild(dockerfile="fail"))
    assert await builds.image(builder, ImageBuild(dockerfile="FROM x")) == "image-3"


async def test_a_backend_that_builds_nothing_is_an_init_failure(crew: Any) -> None:
    spec = SandboxSpec(build=ImageBuild(dockerfile="FROM x"))
    state = await initialize(crew, Task(prompt="p", id="t", agent=COMMAND, sandbox=spec))
    (event,) = await crew.life(state.rollout)
    assert (event.failure.kind, event.failure.message) == (
        "init",
        "sandbox.build: the sandbox backend 'local' builds no images",
    )


# --- the sandbox that is on its way ---


async def test_a_sandbox_that_is_made_after_init_was_ended_is_removed(
    crew: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = crew.context.backends["local"]
    create, go_on = backend.create, asyncio.Event()

    async def slowly(labels: Any, plan: Any) -> Any:
        sandbox = await create(labels, plan)
        await go_on.wait()
        return sandbox

    monkeypatch.setattr(backend, "create", slowly)
    task = Task(prompt="p", id="t", agent=COMMAND, timeouts=Timeouts(init_s=0.1))
    monkeypatch.setattr("rollyard.stages.init.GRACE_S", 0.1)
    state = await initialize(crew, task)
    assert "the last of it making the sandbox" in (await crew.life(state.rollout))[0].failure.message
    assert len(await owned(crew)) == 1
    go_on.set()

    async def gone() -> bool:
        return not await owned(crew)

    await crew.until(gone)


async def test_the_dead_man_switch_leaves_time_for_every_stage(crew: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[Any] = []
    backend = crew.context.backends["local"]
    create = backend.create

    async def noted(labels: Any, plan: Any) -> Any:
        plans.append(plan)
        return await create(labels, plan)

    monkeypatch.setattr(backend, "create", noted)
    limits = Timeouts(init_s=10, run_s=1000, eval_s=100)
    await initialize(crew, Task(prompt="p", id="t", agent=COMMAND, timeouts=limits))
    assert plans[0].deadline_s == 2 * 1110 + crew.config.worker.ready_s
    assert plans[0].network == "open"
