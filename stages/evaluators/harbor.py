"""Rule `harbor`: the tests of a task in Harbor's format: tests/test.sh, and the reward file that it writes."""

from __future__ import annotations

import io
import json
import math
import shlex
import tarfile
from base64 import b64decode
from collections.abc import Mapping
from typing import Annotated, ClassVar, Final

from msgspec import Meta, field

from rollyard.schemas.errors import EvaluationError, SandboxError
from rollyard.stages.evaluator import MAX_LOG_CHARS, EvalContext, Isolation, RuleArgs, Verdict
from rollyard.stages.evaluators.verifier import DROPPED, VerifierLate, must, run_verifier, said_by
from rollyard.stages.sandbox import Sandbox, check_path

TEST_SCRIPT: Final = "test.sh"
ARTIFACTS: Final = "/logs/artifacts"
MAX_REWARD_BYTES: Final = 1 << 20
_SHOWN_CHARS: Final = 800
# In the agent's own sandbox it may have planted something, in a fresh one the image may have brought something.
_PREPARE: Final = """
if [ "$1" = same ]; then rm -rf -- "$2" "$3/verifier"; fi
rm -rf -- "$3/verifier/reward.txt" "$3/verifier/reward.json"
mkdir -p -- "$2" "$3/verifier" "$3/agent" "$3/artifacts" && chmod 0777 "$2" "$3/verifier" "$3/agent" "$3/artifacts"
"""


class Harbor(RuleArgs, frozen=True, kw_only=True):
    """Puts `tests` to /tests and runs /tests/test.sh from the working directory.

    Its exit status is ignored. /logs/verifier/reward.json, a number or named ones, goes before reward.txt, a number.
    """

    isolation: ClassVar[Isolation] = "fresh"

    tests: Annotated[dict[str, str], Meta(description="path below tests/ -> UTF-8 content; test.sh must be there")]
    binary_tests: Annotated[dict[str, str], Meta(description="the same for other files -> base64")] = field(
        default_factory=dict
    )
    env: Annotated[dict[str, str], Meta(description="environment of test.sh, over sandbox.env")] = field(
        default_factory=dict
    )
    timeout_s: Annotated[float, Meta(gt=0, description="how long test.sh may take, at most timeouts.eval_s")] = 600.0
    main: Annotated[
        str, Meta(description="which named reward counts; empty: that called `reward`, else the mean of all")
    ] = ""
    drop: Annotated[
        tuple[str, ...], Meta(description="names of files of the agent that a fresh sandbox does not get, * and ? work")
    ] = DROPPED
    copy: Annotated[
        tuple[str, ...], Meta(description="absolute paths of the agent's that a fresh sandbox gets as well")
    ] = (ARTIFACTS,)
    timeout_reward: Annotated[
        float | None, Meta(description="reward when test.sh does not end in time; null: the evaluation has failed")
    ] = None

    def __post_init__(self) -> None:
        if TEST_SCRIPT not in self.tests:
            raise ValueError(f"`tests` has no {TEST_SCRIPT}")
        try:
            for path in (*self.tests, *self.binary_tests):
                check_path(path)
            for content in self.binary_tests.values():
                b64decode(content, validate=True)
        except SandboxError as error:
            raise ValueError(str(error)) from error
        except ValueError as error:
            raise ValueError(f"`binary_tests` holds what is no base64: {error}") from error
        if any(not path.startswith("/") for path in self.copy):
            raise ValueError("`copy` takes absolute paths; the working directory is copied anyway")

    async def reward(self, context: EvalContext) -> Verdict:
        """Raises EvaluationError when there is no reward, SandboxError when the sandbox is out of reach."""
        sandbox = context.place("harbor")
        root = "" if context.capabilities.isolated else f"{sandbox.home}/harbor"
        tests, logs = f"{root}/tests", f"{root}/logs"
        user = "root" if context.capabilities.users else None
        await must(
            sandbox, _PREPARE, context.isolation, tests, logs, user=user, what=f"{tests} and {logs} cannot be made"
        )
        await sandbox.put_tree(_archive(self.tests, self.binary_tests), tests)
        try:
            await run_verifier(
                context,
                f"exec {shlex.quote(f'{tests}/{TEST_SCRIPT}')}",
                env={"ROLLYARD_TESTS": tests, "ROLLYARD_LOGS": logs, **self.env},
                timeout_s=self.timeout_s,
            )
        except VerifierLate as late:
            if self.timeout_reward is not None:
                return Verdict(self.timeout_reward, {"timed_out": 1.0})
            tail = (await said_by(context, sandbox, _SHOWN_CHARS))[-_SHOWN_CHARS:].strip() or "nothing"
            raise VerifierLate(f"{late.message}; it had written: {tail}", hint=late.hint) from None
        said = await said_by(context, sandbox, MAX_LOG_CHARS)
        try:
            rewards = await self._read(sandbox, f"{logs}/verifier")
        except EvaluationError as error:
            tail = said[-_SHOWN_CHARS:].strip() or "nothing"
            raise EvaluationError(f"{error.message}; test.sh wrote: {tail}", hint=error.hint) from None
        return Verdict.of(rewards, self.main, log=said)

    async def _read(self, sandbox: Sandbox, folder: str) -> Mapping[str, float]:
        for name, parse in (("reward.json", json_rewards), ("reward.txt", text_reward)):
            content = await sandbox.read_file(f"{folder}/{name}", MAX_REWARD_BYTES + 1)
            if content is None:
                continue
            if len(content) > MAX_REWARD_BYTES:
                raise EvaluationError(f"{name} has over {MAX_REWARD_BYTES:,} bytes")
            try:
                return parse(content)
            except ValueError as error:
                raise EvaluationError(
                    f"{name} {error}", hint="write one finite number, or named ones as JSON"
                ) from None
        raise EvaluationError(f"test.sh has written neither {folder}/reward.json nor reward.txt")


def json_rewards(content: bytes) -> dict[str, float]:
    """The named rewards of a reward.json; a bare number is called `reward`. Raises ValueError."""
    if not content.strip():
        raise ValueError("is empty")
    try:
        found = json.loads(content, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"holds {content[:80]!r}, which is no JSON: {error}") from None
    named = found if isinstance(found, dict) else {"reward": found}
    if not named:
        raise ValueError("names no reward")
    for name, value in named.items():
        # bool is an int to Python, and to Harbor.
        if not isinstance(value, int | float) or not _is_finite(value):
            raise ValueError(f"holds {value!r:.80} for {name!r}, which is no finite number")
    return {name: float(value) for name, value in named.items()}


def text_reward(content: bytes) -> dict[str, float]:
    """The reward of a reward.txt, called `reward`. Raises ValueError."""
    if not content.strip():
        raise ValueError("is empty")
    try:
        value = float(content.decode())
    except ValueError:
        raise ValueError(f"holds {content[:80]!r}, which is no number") from None
    if not math.isfinite(value):
        raise ValueError(f"holds {content[:80]!r}, which is no finite number")
    return {"reward": value}


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no finite number")


def _archive(texts: Mapping[str, str], binaries: Mapping[str, str]) -> bytes:
    """The tests as a tar archive. What begins with `#!` can be executed, and so can test.sh."""
    buffer = io.BytesIO()
    files = {path: text.encode() for path, text in texts.items()}
    files |= {path: b64decode(text) for path, text in binaries.items()}
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, content in sorted(files.items()):
            member = tarfile.TarInfo(check_path(path))
            member.size = len(content)
            member.mode = 0o755 if path == TEST_SCRIPT or content.startswith(b"#!") else 0o644
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()
