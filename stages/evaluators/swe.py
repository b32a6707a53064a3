"""Rule `swe`: the agent's changes applied to the repository as it was, then the tests that are to pass."""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Final

from msgspec import Meta

from rollyard.schemas.errors import EvaluationError
from rollyard.stages.evaluator import (
    MAX_LOG_CHARS,
    Carry,
    EvalContext,
    EvaluationHopeless,
    Isolation,
    RuleArgs,
    Verdict,
)
from rollyard.stages.evaluators import patches, reports
from rollyard.stages.evaluators.verifier import VerifierLate, run_verifier, said_by
from rollyard.stages.sandbox import ExecResult, Sandbox

MAX_OUTPUT_BYTES: Final = 8 << 20
MAX_REPORT_BYTES: Final = 32 << 20
PROTECTED: Final = ("conftest.py", "sitecustomize.py", "usercustomize.py", "pytest.ini", "*.pth")
AGENT_PATCH: Final = "agent.patch"
TEST_PATCH: Final = "tests.patch"
APPLY_S: Final = 120.0
MISSING: Final = 96
# `git apply` outside of a repository, and below one that is not to take part, says nothing and does nothing.
_APPLY: Final = f"""
cd -- "$1" || exit {MISSING}
if command -v git >/dev/null; then
  GIT_CEILING_DIRECTORIES=$PWD git -c safe.directory='*' -c core.fsmonitor= -c core.hooksPath=/dev/null apply -v \
    --whitespace=nowarn $3 -- "$2" && exit 0
fi
command -v git >/dev/null || command -v patch >/dev/null || exit {MISSING}
command -v patch >/dev/null || exit 1
patch --batch ${{3:---forward}} --fuzz=3 -p1 -i "$2"
"""
_NO_SUCH_COMMAND: Final = (126, 127)


@dataclass(frozen=True, slots=True)
class _Ran:
    """One run of the tests: whether the runner came to work at all, and what it found."""

    worked: bool
    exit_code: int | None
    found: reports.Outcomes
    log: str


class Swe(RuleArgs, frozen=True, kw_only=True):
    """Makes the sandbox anew at the base commit, applies the agent's diff and `test_patch`, and runs the tests.

    A diff that does not apply, or none, is a reward of 0; a test patch that does not, or a runner that does not come to
    work, is a failed evaluation. Named rewards: resolved, fail_to_pass, pass_to_pass.
    """

    isolation: ClassVar[Isolation] = "fresh"
    carry: ClassVar[Carry] = "nothing"
    wants_diff: ClassVar[bool] = True

    fail_to_pass: Annotated[tuple[str, ...], Meta(min_length=1, description="ids of tests that are to pass now")]
    pass_to_pass: Annotated[tuple[str, ...], Meta(description="ids of tests that are to pass as before")] = ()
    test_patch: Annotated[str, Meta(description="diff with the tests, applied after the agent's; empty: none")] = ""
    command: Annotated[
        str,
        Meta(
            min_length=1,
            description="shell command in the repository; {files}: the test files, {tests}: the ids, both quoted",
        ),
    ] = "python3 -m pytest -rA -p no:cacheprovider {files}"
    prepare: Annotated[str, Meta(description="shell commands before it, in the same shell")] = ""
    report: Annotated[reports.Format, Meta(description="what the command writes")] = "pytest"
    report_file: Annotated[str, Meta(description="file with the report; empty: its output. junit needs one")] = ""
    path: Annotated[
        str, Meta(description="the repository, below the working directory; empty: as sandbox.repository says")
    ] = ""
    protect: Annotated[
        tuple[str, ...], Meta(description="files whose changes by the agent are left out, names or paths, * and ? work")
    ] = PROTECTED
    main: Annotated[str, Meta(description="the named reward that counts")] = "resolved"
    timeout_reward: Annotated[
        float | None, Meta(description="reward when the tests do not end in time; null: the evaluation has failed")
    ] = None

    def __post_init__(self) -> None:
        if self.report == "junit" and not self.report_file:
            raise ValueError("`report_file` is missing: junit is a file")
        if self.main not in ("resolved", "fail_to_pass", "pass_to_pass"):
            raise ValueError(f"`main` is resolved, fail_to_pass or pass_to_pass, not {self.main!r}")

    async def reward(self, context: EvalContext) -> Verdict:
        """Raises EvaluationError when the tests did not come to work, SandboxError when the sandbox did not."""
        sandbox = context.place("swe")
        diff = await context.diff() if context.diff is not None else None
        if diff is None:
            raise EvaluationHopeless(
                "what the agent changed is not known", hint="the image needs git, for the rule `swe` compares with it"
            )
        tested = patches.files_of(self.test_patch)
        kept, left_out = patches.without(diff, lambda path: path in tested or patches.matches(path, self.protect))
        repository = context.task.sandbox.repository
        base = repository.path if repository is not None else ""
        facts = {"left_out_files": float(left_out)}
        if not kept.strip():
            return self._unresolved(facts | {"empty_diff": 1.0})
        # A second evaluation in the same sandbox finds the patches applied and the tests at work, or done.
        if await sandbox.read_file(f"{sandbox.home}/.rollyard-patched-{context.process}", 1) is None:
            applied = await self._apply(sandbox, AGENT_PATCH, kept, base)
            if applied.exit_code != 0:
                return self._unresolved(facts | {"applied": 0.0}, log=_said(applied))
            await self._apply_tests(sandbox, self.path or base)
            await sandbox.put_files({f".rollyard-patched-{context.process}": "1"}, base="home")
        return await self._test(context, self.path or base, facts | {"applied": 1.0})

    async def _apply(self, sandbox: Sandbox, name: str, patch: bytes, folder: str) -> ExecResult:
        await sandbox.put_files({name: patch}, base="home")
        return await self._git(sandbox, name, folder)

    async def _git(self, sandbox: Sandbox, name: str, folder: str, *, back: bool = False) -> ExecResult:
        """Apply a patch that lies in the home, or take it back."""
        argv = ("sh", "-c", _APPLY, "sh", folder or ".", f"{sandbox.home}/{name}", "-R" if back else "")
        ended = await sandbox.exec(argv, timeout_s=APPLY_S)
        if ended.exit_code == MISSING:
            raise EvaluationHopeless(
                f"the patch cannot be applied: there is no folder {folder!r}, or neither git nor patch",
                hint="use an image that has git",
            )
        if ended.timed_out:
            raise EvaluationError(f"{name} was not applied within {APPLY_S:g} s")
        return ended

    async def _apply_tests(self, sandbox: Sandbox, folder: str) -> None:
        if not self.test_patch:
            return
        # The diff of the agent has none of these files, so that they are as in the base commit.
        ended = await self._apply(sandbox, TEST_PATCH, self.test_patch.encode(), folder)
        if ended.exit_code != 0:
            raise EvaluationError(f"the test patch does not apply: {_said(ended)[-500:]}", hint="is the commit right?")

    async def _test(self, context: EvalContext, folder: str, facts: dict[str, float]) -> Verdict:
        try:
            ran = await self._run(context, folder)
        except VerifierLate:
            if self.timeout_reward is None:
                raise
            return Verdict(self.timeout_reward, facts | {"timed_out": 1.0})
        if ran.worked:
            return self._verdict(ran.found, facts, ran.log)
        # Whose fault that is, the same shows without the agent's changes.
        base = folder if context.task.sandbox.repository is None else context.task.sandbox.repository.path
        taken_back = await self._git(context.place("swe"), AGENT_PATCH, base, back=True)
        if taken_back.exit_code == 0 and (await self._run(_control(context), folder)).worked:
            return self._unresolved(facts | {"tests_seen": 0.0, "runner_ended": 1.0}, ran.log)
        raise EvaluationError(
            f"the tests did not run (exit status {ran.exit_code}): {ran.log[-800:]}",
            hint="are `command` and `report` right, and is the runner in the image?",
        )

    async def _run(self, context: EvalContext, folder: str) -> _Ran:
        """Run the tests once, or attach to them. Raises EvaluationError for a report that is broken."""
        sandbox = context.place("swe")
        # A report that the agent's diff brought along is none.
        clear = f"rm -rf -- {shlex.quote(self.report_file)}" if self.report_file else ""
        lines = (f"cd -- {shlex.quote(folder or '.')} || exit 1", clear, self.prepare, self._command())
        end = await run_verifier(context, "\n".join(lines))
        stdout, stderr = await sandbox.output(context.process, MAX_OUTPUT_BYTES)
        text = (stdout + b"\n" + stderr).decode(errors="replace")
        if self.report_file:
            content = await sandbox.read_file(posixpath.join(folder, self.report_file), MAX_REPORT_BYTES)
            text = (content or b"").decode(errors="replace")
        worked = end.exit_code not in _NO_SUCH_COMMAND and reports.has_begun(text, self.report)
        found: reports.Outcomes = {}
        try:
            found = reports.outcomes(text, self.report)
        except ValueError:
            worked = False
        log = await said_by(context, sandbox, MAX_LOG_CHARS)
        return _Ran(worked or bool(found), end.exit_code, found, log)

    def _verdict(self, found: reports.Outcomes, facts: dict[str, float], log: str) -> Verdict:
        wanted = {"fail_to_pass": self.fail_to_pass, "pass_to_pass": self.pass_to_pass}
        passed = {name: _count(found, ids) for name, ids in wanted.items()}
        shares = {name: passed[name] / len(ids) if ids else 1.0 for name, ids in wanted.items()}
        counts = {f"{name}_passed": float(count) for name, count in passed.items()}
        missing = sum(identity not in found for ids in wanted.values() for identity in ids)
        resolved = float(all(share == 1.0 for share in shares.values()))
        metrics = facts | counts | {"tests_seen": float(len(found)), "tests_missing": float(missing)}
        return Verdict.of({"resolved": resolved, **shares}, self.main, metrics=metrics, log=log)

    def _unresolved(self, facts: dict[str, float], log: str = "") -> Verdict:
        rewards = {"resolved": 0.0, "fail_to_pass": 0.0, "pass_to_pass": 0.0}
        return Verdict.of(rewards, self.main, metrics=facts, log=log)

    def _command(self) -> str:
        ids = (*self.fail_to_pass, *self.pass_to_pass)
        files = sorted(patches.files_of(self.test_patch)) or sorted({name.partition("::")[0] for name in ids})
        return self.command.replace("{files}", _quoted(files)).replace("{tests}", _quoted(ids))


def _control(context: EvalContext) -> EvalContext:
    return replace(context, process=f"{context.process}-control")


def _count(found: reports.Outcomes, ids: Sequence[str]) -> int:
    return sum(found.get(identity) == "passed" for identity in ids)


def _quoted(words: Sequence[str]) -> str:
    return " ".join(map(shlex.quote, words))


def _said(ended: ExecResult) -> str:
    return (ended.stdout + ended.stderr).decode(errors="replace").strip()
