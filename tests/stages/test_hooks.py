"""Hooks: called in their order, bounded in time, kept apart from each other and from the worker."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect

from rollyard.pipeline.blobs import BlobStore
from rollyard.pipeline.config import Config, WorkerConfig, load_config, to_toml
from rollyard.schemas.errors import TaskError
from rollyard.schemas.failure import Failure
from rollyard.schemas.rollout import AgentResult, Rollout
from rollyard.schemas.task import HookSpec, Task
from rollyard.stages.collection import Collection
from rollyard.stages.hook import HOOKS, STEPS, HookContext, Veto, hooks_of, open_hook
from rollyard.stages.hook_chain import HookChain
from rollyard.stages.plugin_check import check_configured, check_task
from rollyard.stages.stage import StageFailed

JOURNAL: list[str] = []
GO_ON = threading.Event()
HOOK = f"{__name__}:Recorder"


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    JOURNAL.clear()
    GO_ON.clear()
    yield
    GO_ON.set()  # threads that hang end with their test


class Recorder:
    """Writes down its calls; `at` names the step at which it does `what`."""

    timeout_s = 0.05

    def __init__(self, name: str = "x", at: str = "", what: str = "", sync: bool = False) -> None:
        self.name, self.at, self.what, self.sync = name, at, what, sync
        if sync:
            for step in ("setup", "before_run", "after_run", "on_error", "cleanup"):
                setattr(self, step, self._sync(step))

    def _sync(self, step: str) -> Any:
        return lambda context, *rest: self._note(step, context)

    def _note(self, step: str, context: HookContext) -> None:
        JOURNAL.append(f"{self.name}.{step}")
        context.add_metric(f"{self.name}_{step}", 1)
        if step != self.at:
            return
        if self.what == "raise":
            raise ValueError("broken")
        if self.what == "veto":
            raise Veto("agent", f"{self.name} says no")
        if self.what == "hang" and self.sync:
            GO_ON.wait(20)

    async def _act(self, step: str, context: HookContext) -> None:
        self._note(step, context)
        if step == self.at and self.what == "hang":
            await asyncio.sleep(20)

    async def setup(self, context: HookContext) -> None:
        await self._act("setup", context)

    async def before_run(self, context: HookContext) -> None:
        await self._act("before_run", context)

    async def after_run(self, context: HookContext, result: AgentResult) -> None:
        await self._act("after_run", context)

    async def on_error(self, context: HookContext, failure: Failure) -> None:
        await self._act("on_error", context)

    async def cleanup(self, context: HookContext) -> None:
        await self._act("cleanup", context)


def spec(on_failure: Any = "ignore", hook: str = HOOK, **args: Any) -> HookSpec:
    return HookSpec(hook=hook, args=args, on_failure=on_failure)


def chain_of(*specs: HookSpec, blobs: BlobStore | None = None) -> HookChain:
    def new_context() -> HookContext:
        return HookContext(
            task=Task(prompt="p"), rollout=Rollout.of("r", "t", 0, 1), attempt=1, worker="w", sandbox=None
        )

    return HookChain.of(specs, new_context, Collection(blobs))


async def lifecycle(chain: HookChain) -> AgentResult | Failure:
    """What RUN does with a chain."""
    result = AgentResult(exit_code=0)
    try:
        try:
            await chain.setup()
            await chain.before_run()
            JOURNAL.append("run")
            await chain.after_run(result, None)
            return chain.added_to(result)
        except StageFailed as failed:
            await chain.on_error(failed.failure)
            return failed.failure
    finally:
        await chain.cleanup()


# --- order and isolation ---


async def test_they_go_in_their_order_and_clean_up_backwards() -> None:
    await lifecycle(chain_of(spec(name="a"), spec(name="b", sync=True), spec(name="c")))
    assert [
        *(f"{name}.{step}" for step in ("setup", "before_run") for name in "abc"),
        "run",
        *(f"{name}.after_run" for name in "abc"),
        *(f"{name}.cleanup" for name in "cba"),
    ] == JOURNAL


BEHAVIOUR = st.fixed_dictionaries(
    {
        "at": st.sampled_from(["setup", "before_run", "after_run", "on_error", "cleanup"]),
        "what": st.sampled_from(["", "", "raise", "veto"]),
        "sync": st.booleans(),
        "on_failure": st.sampled_from(["ignore", "ignore", "fail"]),
    }
)


@given(st.lists(BEHAVIOUR, max_size=4))
def test_whatever_one_does_the_others_are_called_as_if_it_were_not_there(behaviours: list[dict[str, Any]]) -> None:
    JOURNAL.clear()
    names = "abcd"[: len(behaviours)]
    specs = [spec(name=name, **behaviour) for name, behaviour in zip(names, behaviours, strict=True)]
    ended = asyncio.run(lifecycle(chain_of(*specs)))
    expected, stopped = expectation(names, behaviours)
    assert expected == JOURNAL
    assert isinstance(ended, Failure) == stopped
    if isinstance(ended, AgentResult):
        troubles = [
            each for each in behaviours if each["what"] and not (each["at"] == "cleanup" or each["at"] == "on_error")
        ]
        assert ended.metrics.get("hook_failures", 0) == len(troubles)


def expectation(names: str, behaviours: list[dict[str, Any]]) -> tuple[list[str], bool]:
    """The journal that the rules of docs/hooks.md give, and whether the attempt fails."""
    journal: list[str] = []
    out: set[str] = set()
    stopped = False
    for step in ("setup", "before_run", "run", "after_run"):
        if step == "run":
            journal.append("run")
            continue
        for name, each in zip(names, behaviours, strict=True):
            if name in out:
                continue
            journal.append(f"{name}.{step}")
            if each["at"] != step or not each["what"]:
                continue
            if each["on_failure"] == "fail" or (each["what"] == "veto" and step != "setup"):
                stopped = True
                break
            if step == "setup":
                out.add(name)
        if stopped:
            journal += [f"{name}.on_error" for name in names if name not in out]
            break
    return journal + [f"{name}.cleanup" for name in reversed(names)], stopped


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("step", ["setup", "before_run", "after_run", "cleanup"])
async def test_one_that_hangs_costs_its_own_time_limit(sync: bool, step: str) -> None:
    chain = chain_of(spec(name="a", at=step, what="hang", sync=sync), spec(name="b"))
    async with asyncio.timeout(5):
        ended = await lifecycle(chain)
    assert isinstance(ended, AgentResult)
    assert f"b.{step}" in JOURNAL
    assert chain.troubles == [{"hook": HOOK, "step": step, "error": "it took longer than 0.05 s"}]


async def test_a_thread_that_was_left_adds_nothing_any_more() -> None:
    chain = chain_of(spec(name="a", at="before_run", what="hang", sync=True))
    (context,) = chain.contexts()
    await lifecycle(chain)
    with pytest.raises(RuntimeError, match="longer than its time limit"):
        context.add_metric("late", 1)
    (now,) = chain.contexts()
    now.add_metric("in_time", 1)


# --- what they add ---


class Adder:
    def __init__(self, **args: Any) -> None:
        self.args = args

    def after_run(self, context: HookContext, result: AgentResult) -> None:
        assert context.result == result
        for name, value in self.args.get("metrics", {}).items():
            context.add_metric(name, value)
        for name, value in self.args.get("metadata", {}).items():
            context.add_metadata(name, value)
        for name, text in self.args.get("files", {}).items():
            context.add_file(name, text.encode())
        JOURNAL.append(",".join(sorted(result.metrics)))


async def test_a_later_one_sees_and_replaces_what_an_earlier_one_added(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path)
    adder = f"{__name__}:Adder"
    chain = chain_of(
        spec(hook=adder, metrics={"m": 1, "n": 2}, files={"f": "one"}, metadata={"who": "first"}),
        spec(hook=adder, metrics={"m": 3}, files={"f": "two", "g": "three"}),
        blobs=blobs,
    )
    ended = await lifecycle(chain)
    assert isinstance(ended, AgentResult)
    assert JOURNAL == ["run", "", "m,n"]
    assert ended.metrics == {"m": 3, "n": 2}
    assert ended.metadata == {"who": "first"}
    assert {each.name: blobs.get(each.blob) for each in ended.artifacts} == {"f": b"two", "g": b"three"}


@pytest.mark.parametrize(
    ("args", "error"),
    [
        ({"metrics": {"m": float("nan")}}, "TypeError: nan is no finite number"),
        ({"metrics": {"m": "1"}}, "TypeError: '1' is no finite number"),
        ({"metadata": {"a": "x" * 20_000}}, "ValueError: the metadata of a hook has over 16,384 bytes"),
    ],
)
async def test_what_cannot_be_added_is_the_hooks_own_failure(args: dict[str, Any], error: str) -> None:
    chain = chain_of(spec(hook=f"{__name__}:Adder", **args))
    assert isinstance(await lifecycle(chain), AgentResult)
    assert chain.troubles[0]["error"].startswith(error)


# --- policies and vetoes ---


async def test_a_hook_that_must_work_ends_the_attempt_as_infrastructure() -> None:
    ended = await lifecycle(chain_of(spec("fail", name="a", at="after_run", what="raise")))
    assert isinstance(ended, Failure)
    assert (ended.kind, ended.retryable) == ("infra", True)
    assert ended.message == f"after_run of the hook {HOOK!r} failed: ValueError: broken"


async def test_a_veto_names_its_own_class() -> None:
    ended = await lifecycle(chain_of(spec(name="a", at="before_run", what="veto"), spec(name="b")))
    assert isinstance(ended, Failure)
    assert (ended.kind, ended.message) == ("agent", "a says no")
    assert "b.before_run" not in JOURNAL
    assert "b.on_error" in JOURNAL


# --- while the agent runs ---


class Watcher:
    def __init__(self, what: str) -> None:
        self.what = what

    async def during_run(self, context: HookContext) -> None:
        try:
            JOURNAL.append("began")
            if self.what == "raise":
                raise ValueError("broken")
            if self.what == "end":
                assert context.end_agent is not None
                await context.end_agent("enough")
            await asyncio.sleep(60)
        finally:
            JOURNAL.append("ended")


@pytest.mark.parametrize("what", ["", "raise", "end"])
async def test_what_goes_on_beside_the_agent_ends_with_it(what: str) -> None:
    said: list[str] = []
    ended = asyncio.Event()

    async def end_agent(reason: str) -> None:
        said.append(reason)
        ended.set()

    chain = chain_of(spec(hook=f"{__name__}:Watcher", what=what))
    async with chain.during_run(end_agent):
        if what == "end":
            await asyncio.wait_for(ended.wait(), 5)
        else:
            await asyncio.sleep(0.05)
    assert JOURNAL == ["began", "ended"]
    assert said == (["enough"] if what == "end" else [])
    assert len(chain.troubles) == (what == "raise")


async def test_one_that_must_work_beside_the_agent_fails_the_attempt_after_it() -> None:
    async def end_agent(reason: str) -> None:
        raise AssertionError(reason)

    chain = chain_of(spec("fail", hook=f"{__name__}:Watcher", what="raise"))
    with pytest.raises(StageFailed, match="during_run of the hook"):
        async with chain.during_run(end_agent):
            await asyncio.sleep(0.05)
            JOURNAL.append("agent ended")
    assert JOURNAL[-1] == "agent ended"


# --- which hooks there are ---


def test_those_of_the_configuration_come_first() -> None:
    own = HookSpec(hook="webhook", args={"url": "http://x"})
    config = Config(worker=WorkerConfig(hooks=("resources", spec("fail", hook="git_diff"))))
    assert [each.hook for each in hooks_of(config, Task(prompt="p", hooks=(own,)))] == [
        "resources",
        "git_diff",
        "webhook",
    ]


def test_the_configuration_is_written_and_read_back(tmp_path: Path) -> None:
    table = HookSpec(hook="artifacts", args={"paths": ["a b", '"c"'], "deep": {"x": 1}}, on_failure="fail")
    config = Config(worker=WorkerConfig(hooks=("resources", table), handlers=("maths=my.mod:Class",)))
    (tmp_path / "c.toml").write_text(to_toml(config))
    assert load_config(tmp_path / "c.toml", {}).worker == config.worker
    assert load_config(tmp_path / "c.toml", {"ROLLYARD__WORKER__HOOKS": "logs"}).worker.hooks == ("logs",)


@pytest.mark.parametrize(
    ("hook", "says"),
    [
        (HookSpec(hook="git_dif"), "hooks[0].hook: no hook is called 'git_dif' (did you mean 'git_diff'?"),
        (HookSpec(hook="wall_clock"), "hooks[0].args: Object missing required field `limit_s`"),
        (HookSpec(hook="wall_clock", args={"limit_s": -1}), "hooks[0].args.limit_s: Expected `float` > 0"),
        (HookSpec(hook="resources", args={"x": 1}), "hooks[0].args: Object contains unknown field `x`"),
        (HookSpec(hook="webhook", args={"url": "ftp://x"}), "hooks[0].args: url is no http address"),
        (HookSpec(hook="webhook", args={"url": "http://u:p@x"}), "hooks[0].args: url holds a password"),
        (HookSpec(hook="artifacts", args={"paths": ["../x"]}), "hooks[0].args: '../x' is no pattern"),
        (HookSpec(hook="command_audit", args={"flag": ["("]}), "hooks[0].args: '(' is no regular expression"),
        (HookSpec(hook=HOOK, args={"nothing": 1}), "hooks[0].args: the hook"),
        (HookSpec(hook="builtins:dict"), "hooks[0].hook: 'builtins:dict' is no hook"),
    ],
)
def test_one_that_cannot_work_is_refused_before_anything_is_made(hook: HookSpec, says: str) -> None:
    problems = check_task(Task(prompt="p", hooks=(hook,)))
    assert any(problem.startswith(says) for problem in problems), problems
    with pytest.raises(TaskError) as caught:
        open_hook(hook)
    assert "Traceback" not in str(caught.value)


def test_a_worker_does_not_start_with_one() -> None:
    from rollyard.schemas.errors import ConfigError  # noqa: PLC0415

    with pytest.raises(ConfigError, match=r"worker\.hooks\[0\]: no hook is called 'moon'"):
        check_configured(Config(worker=WorkerConfig(hooks=("moon",))))
    with pytest.raises(ConfigError, match=r"worker\.handlers: 'moon' is no handler of a source"):
        check_configured(Config(worker=WorkerConfig(handlers=("moon",))))
    check_configured(Config(worker=WorkerConfig(hooks=("resources",))))


# --- what is written about them ---


def arguments() -> list[str]:
    """The table of docs/hooks.md: every argument of every shipped hook but `timeout_s`."""
    lines = ["| hook | argument | default | means |", "| --- | --- | --- | --- |"]
    for name in HOOKS.shipped:
        info = inspect.type_info(HOOKS.load(name))
        assert isinstance(info, inspect.StructType)
        for field in info.fields:
            kind = field.type
            means = (kind.extra_json_schema or {}).get("description", "") if isinstance(kind, inspect.Metadata) else ""
            default = "required" if field.required else f"`{msgspec.json.encode(field.default).decode()}`"
            if field.name != "timeout_s":
                lines.append(f"| `{name}` | `{field.name}` | {default} | {means} |")
    return lines


def test_the_page_names_every_hook_and_argument() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs/hooks.md").read_text()
    assert "\n".join(arguments()) in text
    assert [name for name in HOOKS.shipped if f"\n| `{name}` | " not in text] == []
    assert [step for step in STEPS if f"| `{step}(" not in text and f"| `async {step}(" not in text] == []
