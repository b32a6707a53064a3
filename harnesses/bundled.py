"""What harnesses of agents in bundles share: options for everything that an agent of its own kind can be told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final

from msgspec import Meta, Struct

from rollyard.harnesses.bundles.bundle import Recipe
from rollyard.harnesses.harness import AgentContext, Needs, convert_args
from rollyard.schemas.errors import HarnessError

PROMPT_FILE: Final = ".rollyard/prompt.txt"
CONFIG: Final = "further keys of the agent's own configuration file, merged into it"
ENV: Final = "further environment of the agent"
MARGIN_S: Final = 5.0
"""So long before timeouts.run_s an agent that can is told to stop by itself."""


class AgentArgs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options that every agent in a bundle has."""

    env: Annotated[dict[str, str], Meta(description=ENV)] = {}
    flags: Annotated[tuple[str, ...], Meta(description="further words of the agent's command line")] = ()


class BundledHarness:
    """Base of harnesses whose agent lies in a bundle. Subclasses name it and the struct of their arguments."""

    name: ClassVar[str]
    in_process = False
    bundle: ClassVar[Recipe]
    args_kind: ClassVar[type[Struct]]
    kept_files: ClassVar[tuple[str, ...]] = ()
    """Patterns below HOME of what RUN keeps of the agent's own records."""

    def validate_args(self, args: Mapping[str, Any]) -> None:
        """Arguments are those of `args_kind`. Raises TaskError."""
        convert_args(args, self.args_kind, self.name)

    def needs(self, args: Mapping[str, Any]) -> Needs:
        """Its bundle."""
        return Needs(bundle=self.bundle.name)

    def program(self, context: AgentContext, name: str = "") -> str:
        """The program in the bundle as seen inside. Raises HarnessError when INIT found no bundle."""
        if not context.bundle:
            raise HarnessError(
                f"there is no bundle of {self.name}", hint=f"run: rollyard agent bundle {self.bundle.name}"
            )
        return f"{context.bundle}/bin/{name or self.bundle.program}"


def merged(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Both configurations in one, objects key by key; where they differ, `more` counts."""
    result = dict(base)
    for key, value in more.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def time_limit_s(context: AgentContext) -> int:
    """How long the agent may take by its own clock, a little less than RUN gives it; at least one second."""
    run_s = context.task.timeouts.run_s
    return max(1, int(run_s - min(MARGIN_S, run_s / 10)))
