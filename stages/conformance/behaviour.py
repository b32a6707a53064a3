"""One behaviour of a sandbox: what it shows, what a backend must offer for it, and how it is tried."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, Literal

from rollyard.stages.capabilities import Capabilities
from rollyard.stages.conformance.bench import Bench

Outcome = Literal["pass", "fail", "not offered"]
Try = Callable[[Bench], Coroutine[Any, Any, None]]
Lack = Callable[[Capabilities], str]
"""What a backend with these capabilities does not offer; empty: it offers what the behaviour needs."""

MAX_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Behaviour:
    """`tried` raises `Unmet`, or any other exception, when the sandbox does not behave so."""

    group: str
    name: str
    shows: str
    tried: Try
    lack: Lack
    max_s: float = MAX_S

    @property
    def id(self) -> str:
        """How it is asked for: `group.name`."""
        return f"{self.group}.{self.name}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a backend did. `reason` says what was seen instead, or what is not offered."""

    behaviour: Behaviour
    outcome: Outcome
    reason: str
    took_s: float


class Group:
    """Collects the behaviours of one module, by decorator. The first line of the docstring is what each shows."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.behaviours: list[Behaviour] = []

    def __call__(self, lack: Lack | None = None, *, name: str = "", max_s: float = MAX_S) -> Callable[[Try], Try]:
        """Register the function under its name, or `name`. `lack`: see there; none: every backend must."""

        def register(tried: Try) -> Try:
            shows = (tried.__doc__ or "").strip().split("\n")[0].rstrip(".")
            self.behaviours.append(Behaviour(self.name, name or tried.__name__, shows, tried, lack or _nothing, max_s))
            return tried

        return register


def _nothing(_: Capabilities) -> str:
    return ""


def limit(field: str) -> Lack:
    """Offered where the backend keeps that limit."""

    def lack(capabilities: Capabilities) -> str:
        return "" if field in dict(capabilities.limits) else f"it keeps no {field}"

    return lack


def flag(field: str, text: str) -> Lack:
    """Offered where that capability is true."""
    return lambda capabilities: "" if getattr(capabilities, field) else text


def network(mode: str) -> Lack:
    """Offered where the backend keeps to that network."""
    return lambda capabilities: "" if mode in capabilities.networks else f"it has no network {mode!r}"
