"""Sample policies from outside: checked, read from a file, and compared with the one that a run has."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from rollyard.pipeline.fieldwords import explain
from rollyard.pipeline.specfile import read_spec
from rollyard.schemas.errors import ConfigError
from rollyard.schemas.policy import LENIENCE_RULES, SamplePolicy


def policy_problems(policy: SamplePolicy, prefix: str = "") -> list[str]:
    """What no type can say: texts `field: what is wrong; how to mend it`, each field with `prefix` before it."""
    problems: list[str] = []
    for name in policy.lenience_off:
        if name not in LENIENCE_RULES:
            near = difflib.get_close_matches(name, LENIENCE_RULES, 1)
            mend = f"did you mean {near[0]!r}?" if near else f"rules are {', '.join(LENIENCE_RULES)}"
            problems.append(f"{prefix}lenience_off: {name[:60]!r} is no rule of lenient matching; {mend}")
    if policy.max_tokens is not None and policy.min_trained_tokens > policy.max_tokens:
        problems.append(
            f"{prefix}min_trained_tokens: is {policy.min_trained_tokens}, and a sample has at most {policy.max_tokens} "
            f"tokens; keep it below {prefix}max_tokens, else no sample is left"
        )
    return problems


def as_policy(value: SamplePolicy | Mapping[str, Any], prefix: str = "samples.") -> SamplePolicy:
    """A policy as somebody gave it, checked. Raises ConfigError that names each field that is wrong."""
    if not isinstance(value, SamplePolicy | Mapping):
        field = prefix.rstrip(".")
        raise ConfigError(f"{field}: is a {type(value).__name__}", hint="give a SamplePolicy, or a dictionary")
    try:
        # Python's constructor checks nothing; the way through plain values does.
        raw = msgspec.to_builtins(value)
        policy = msgspec.convert(raw, SamplePolicy)
    except msgspec.ValidationError as error:
        raise ConfigError(prefix + explain(error, raw, SamplePolicy)) from error
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{prefix.rstrip('.')}: holds what JSON cannot: {error}", hint="use plain values") from error
    if problems := policy_problems(policy, prefix):
        raise ConfigError("; ".join(problems))
    return policy


def read_policy(path: Path) -> SamplePolicy:
    """The policy in a TOML or JSON file. Raises ConfigError that names the file and each field that is wrong."""
    policy = read_spec(path, SamplePolicy)
    if problems := policy_problems(policy):
        raise ConfigError(f"{path}: " + "; ".join(problems))
    return policy


def check_same(run: str, standing: SamplePolicy, given: SamplePolicy) -> None:
    """Raises ConfigError when a run has another policy than the one given."""
    differ = [name for name in SamplePolicy.__struct_fields__ if getattr(standing, name) != getattr(given, name)]
    if differ:
        words = ", ".join(f"{name} is {_json(standing, name)} and not {_json(given, name)}" for name in differ)
        raise ConfigError(
            f"run {run!r} has another sample policy, which stays as it was when the run began: {words}",
            hint="leave `samples` out, give it to the tasks, or begin another run",
        )


def _json(policy: SamplePolicy, name: str) -> str:
    return msgspec.json.encode(getattr(policy, name)).decode()
