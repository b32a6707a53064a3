"""Rule `code`: a program that the agent wrote, run on cases, each with limits of its own.

What is expected never enters the sandbox: the program's output is compared outside of it.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal

from msgspec import Meta, Struct, field

from rollyard.schemas.errors import EvaluationError, SandboxError
from rollyard.stages.evaluator import Carry, EvalContext, Isolation, RuleArgs, Verdict
from rollyard.stages.evaluators.verifier import SHORT_S
from rollyard.stages.sandbox import ExecResult, Sandbox, check_path

MAX_SOURCE_BYTES: Final = 1 << 20
MAX_CASE_METRICS: Final = 64
SLOW_IN_A_ROW: Final = 3
_BLOCK: Final = re.compile(
    r"^[ \t]*(`{3,}|~{3,})[ \t]*([\w+#.-]*)[^\n]*\n(.*?)^[ \t]*\1[ \t]*$", re.MULTILINE | re.DOTALL
)
_LIMITED: Final = 'ulimit -v "$1" 2>/dev/null; ulimit -c 0; ulimit -t "$2"; shift 2; exec sh -c "$1"'
_NO_SUCH_COMMAND: Final = 127
_DRIVER: Final = """
import contextlib, importlib.util, json, os, sys
path, name, nonce = sys.argv[1:4]
arguments = json.load(sys.stdin)
out = os.fdopen(os.dup(1), "w")
with contextlib.redirect_stdout(sys.stderr):
    spec = importlib.util.spec_from_file_location("solution", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["solution"] = module
    spec.loader.exec_module(module)
    found = module
    for part in name.split("."):
        found = getattr(found() if isinstance(found, type) else found, part)
    value = found(*arguments)
    text = json.dumps(value)
out.write(nonce + text + "\\n")
out.flush()
"""


class CodeCase(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One case: standard input and output, or arguments and result of the function."""

    input: Annotated[str, Meta(description="standard input")] = ""
    output: Annotated[str | None, Meta(description="expected standard output")] = None
    args: Annotated[tuple[Any, ...], Meta(description="arguments of the function")] = ()
    result: Annotated[Any, Meta(description="what the function is to return, as JSON")] = None


@dataclass(frozen=True, slots=True)
class _Run:
    """What became of one case."""

    passed: bool
    trouble: Literal["", "timed_out", "crashed", "too_much_output"] = ""


class Code(RuleArgs, frozen=True, kw_only=True):
    """Takes the program from `file`, or from the last code block of the answer, and runs it once a case.

    The reward is 1 when all cases pass, or the share that does. A program that is not there is 0, and so is a case in
    which it fails, is late, or writes too much.
    """

    isolation: ClassVar[Isolation] = "fresh"
    carry: ClassVar[Carry] = "nothing"

    cases: Annotated[tuple[CodeCase, ...], Meta(min_length=1, max_length=10_000, description="the cases, in order")]
    file: Annotated[
        str, Meta(description="the program, in the agent's working directory; empty: the answer's last code block")
    ] = ""
    save_as: Annotated[str, Meta(min_length=1, description="name under which the program is run")] = "solution.py"
    run: Annotated[str, Meta(min_length=1, description="shell command that runs it on a case")] = "python3 solution.py"
    build: Annotated[str, Meta(description="shell command before the first case; when it fails the reward is 0")] = ""
    function: Annotated[
        str, Meta(description="call this function, or Class.method, of a Python file instead; empty: run a program")
    ] = ""
    files: Annotated[dict[str, str], Meta(description="further files beside the program")] = field(default_factory=dict)
    case_timeout_s: Annotated[float, Meta(gt=0, le=600, description="seconds that a case may take")] = 10.0
    build_timeout_s: Annotated[float, Meta(gt=0, le=3600, description="seconds that `build` may take")] = 120.0
    max_memory_bytes: Annotated[int, Meta(ge=1 << 20, description="address space of a process of a case")] = 1 << 30
    max_output_bytes: Annotated[int, Meta(ge=1, le=1 << 26, description="bytes that a case may write")] = 1 << 20
    compare: Annotated[
        Literal["words", "lines", "exact"],
        Meta(
            description="outputs are equal word by word, numbers by value; line by line, less blanks at ends; exactly"
        ),
    ] = "words"
    tolerance: Annotated[float, Meta(ge=0, description="largest difference of numbers, absolute or as a share")] = 1e-6
    credit: Annotated[
        Literal["all", "share"], Meta(description="1 only if every case passes, or the share that does")
    ] = "all"

    def __post_init__(self) -> None:
        try:
            for path in (self.save_as, *self.files, *([self.file] if self.file else [])):
                check_path(path)
        except SandboxError as error:
            raise ValueError(str(error)) from error
        if not self.function and any(case.output is None for case in self.cases):
            raise ValueError("a case has no `output`, and there is no `function`")

    async def reward(self, context: EvalContext) -> Verdict:
        """Raises EvaluationError when a case cannot be run, SandboxError when the sandbox is out of reach."""
        sandbox = context.place("code")
        source = await self._source(context)
        cases = float(len(self.cases))
        if source is None:
            return Verdict(0.0, {"cases": cases, "passed": 0.0, "no_program": 1.0})
        await self._check(sandbox)
        await sandbox.put_files({**self.files, self.save_as: source})
        if self.build:
            built = await sandbox.exec(self.build, timeout_s=self.build_timeout_s)
            if built.timed_out or built.exit_code != 0:
                said = (built.stdout + built.stderr).decode(errors="replace")
                return Verdict(0.0, {"cases": cases, "passed": 0.0, "not_built": 1.0}, log=said)
        return self._verdict(await self._cases(sandbox))

    async def _cases(self, sandbox: Sandbox) -> list[_Run]:
        """Each case, until what comes cannot change the reward, or the program is too slow again and again."""
        runs: list[_Run] = []
        slow = 0
        for case in self.cases:
            runs.append(await self._case(sandbox, case))
            slow = slow + 1 if runs[-1].trouble == "timed_out" else 0
            if slow >= SLOW_IN_A_ROW or (self.credit == "all" and not runs[-1].passed):
                break
        return runs

    def _verdict(self, runs: list[_Run]) -> Verdict:
        passed = sum(run.passed for run in runs)
        share = passed / len(self.cases)
        metrics = {"cases": len(self.cases), "passed": passed, "not_run": len(self.cases) - len(runs)}
        metrics |= {
            name: sum(run.trouble == name for run in runs) for name in ("timed_out", "crashed", "too_much_output")
        }
        metrics |= {f"case_{number}": run.passed for number, run in enumerate(runs[:MAX_CASE_METRICS], 1)}
        reward = share if self.credit == "share" else float(passed == len(self.cases))
        return Verdict(reward, {name: float(value) for name, value in metrics.items()}, (), {"passed": share})

    async def _case(self, sandbox: Sandbox, case: CodeCase) -> _Run:
        nonce = secrets.token_hex(16)
        if self.function:
            words = ("python3", "-c", _DRIVER, self.save_as, self.function, nonce)
            command, stdin = shlex.join(words), json.dumps(case.args)
        else:
            command, stdin = self.run, case.input
        ended = await sandbox.exec(
            ("sh", "-c", _LIMITED, "sh", *self._limits(), command),
            stdin=stdin.encode(),
            timeout_s=self.case_timeout_s,
            max_output_bytes=self.max_output_bytes,
        )
        if ended.timed_out:
            return _Run(False, "timed_out")
        if ended.truncated:
            return _Run(False, "too_much_output")
        if ended.exit_code != 0:
            return _Run(False, "crashed")
        return _Run(self._right(case, ended, nonce))

    def _limits(self) -> tuple[str, str]:
        # The processor's time is a net under the clock's, which a stopped process does not use up.
        return str(self.max_memory_bytes // 1024), str(math.ceil(self.case_timeout_s) + 1)

    def _right(self, case: CodeCase, ended: ExecResult, nonce: str) -> bool:
        text = ended.stdout.decode(errors="replace")
        if not self.function:
            assert case.output is not None
            return same_output(text, case.output, self.compare, self.tolerance)
        _, there, said = text.partition(nonce)
        try:
            return bool(there) and same_value(json.loads(said), case.result, self.tolerance)
        except (ValueError, RecursionError):
            return False

    async def _source(self, context: EvalContext) -> str | bytes | None:
        """The program. Raises EvaluationError when there is no sandbox to read it from."""
        if not self.file:
            return last_block(context.result.answer)
        if context.agent is None:
            raise EvaluationError(
                "the rule `code` reads a file of a sandbox, and there is none", hint="leave out `file`"
            )
        content = await context.agent.read_file(self.file, MAX_SOURCE_BYTES + 1)
        return None if content is None or len(content) > MAX_SOURCE_BYTES else content

    async def _check(self, sandbox: Sandbox) -> None:
        """Raises EvaluationError when what runs the program is not in the image: that is nobody's wrong answer."""
        program = "python3" if self.function else (shlex.split(self.run) or [""])[0]
        if "/" in program or program == self.save_as:
            return
        ended = await sandbox.exec(("sh", "-c", 'command -v -- "$1"', "sh", program), timeout_s=SHORT_S)
        if ended.exit_code != 0:
            raise EvaluationError(
                f"there is no program {program!r} in the sandbox", hint="see evaluation.args.run, or use another image"
            )


def last_block(answer: str) -> str | None:
    """The last fenced block of an answer; without any fence the whole of it; None when it is empty."""
    blocks = _BLOCK.findall(answer)
    if blocks:
        return str(blocks[-1][2])
    return answer if answer.strip() and "```" not in answer else None


def same_output(found: str, expected: str, compare: str, tolerance: float) -> bool:
    """Whether two outputs are equal."""
    if compare == "exact":
        return found == expected
    if compare == "lines":
        return _lines(found) == _lines(expected)
    have, want = found.split(), expected.split()
    return len(have) == len(want) and all(
        mine == theirs or _near(mine, theirs, tolerance) for mine, theirs in zip(have, want, strict=True)
    )


def same_value(found: Any, expected: Any, tolerance: float) -> bool:
    """Whether two JSON values are equal, numbers up to `tolerance`."""
    if isinstance(found, bool) or isinstance(expected, bool):
        return found is expected
    if isinstance(found, int | float) and isinstance(expected, int | float):
        return found == expected or math.isclose(found, expected, rel_tol=tolerance, abs_tol=tolerance)
    if isinstance(found, list) and isinstance(expected, list):
        return len(found) == len(expected) and all(
            same_value(mine, theirs, tolerance) for mine, theirs in zip(found, expected, strict=True)
        )
    if isinstance(found, Mapping) and isinstance(expected, Mapping):
        return found.keys() == expected.keys() and all(
            same_value(found[name], expected[name], tolerance) for name in found
        )
    return bool(found == expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _near(mine: str, theirs: str, tolerance: float) -> bool:
    # Whole numbers are not near: 1000000007 is another than 1000000008.
    if not any(sign in word for sign in ".eE" for word in (mine, theirs)):
        return False
    try:
        return math.isclose(float(mine), float(theirs), rel_tol=tolerance, abs_tol=tolerance)
    except ValueError:
        return False
