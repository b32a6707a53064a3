"""Which served model a call goes to, whatever name the agent asks for.

Agents ask for models that no server here has (`gpt-5`, `claude-haiku-4-5`). The key decides: it names the model of its
task. A run may map the names that its agents ask for to other served models, say for a sub-agent's small model.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from rollyard.gateway.keys import SessionGrant
from rollyard.pipeline.bus import Bus
from rollyard.pipeline.kv import Bucket
from rollyard.schemas import subjects
from rollyard.schemas.fleet import Run


def resolve_model(asked: str, grant: SessionGrant, run_models: Mapping[str, str]) -> str:
    """The name under which the pool is asked: that of the run's map for `asked`, else the model of the key.

    In the map the name itself comes before patterns, and these in their order; case does not count. That the asked name
    happens to be served as well decides nothing: which model is trained must not depend on what an agent calls it.
    """
    name = asked.lower()
    for pattern, model in run_models.items():
        if pattern.lower() == name:
            return model
    for pattern, model in run_models.items():
        if fnmatchcase(name, pattern.lower()):
            return model
    return grant.model


class RunModels:
    """The model maps of all runs, followed. `run()` must be running."""

    def __init__(self, bus: Bus) -> None:
        self._bucket: Bucket[Run] = Bucket(bus, subjects.RUNS, Run)
        self._maps: dict[str, dict[str, str]] = {}

    def of(self, run: str) -> Mapping[str, str]:
        """The map of a run; empty where it has none."""
        return self._maps.get(subjects.token(run), {})

    async def run(self) -> None:
        """Follow the bucket until cancelled."""
        async for key, run, _ in self._bucket.watch():
            if run is not None and run.models:
                self._maps[key] = run.models
            else:
                self._maps.pop(key, None)
