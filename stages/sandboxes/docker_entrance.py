"""How programs are run in a container."""

from __future__ import annotations

from collections.abc import Sequence

from rollyard.schemas.errors import SandboxError
from rollyard.stages.sandboxes.docker_wire import EngineRefused, ExecStream, Wire
from rollyard.stages.sandboxes.inside_channel import NoRoom


class DockerEntrance:
    """The `Entrance` of one container: a `docker exec` for each stream."""

    binary = True

    def __init__(self, wire: Wire, container: str) -> None:
        self._wire = wire
        self._container = container

    async def open(self, argv: Sequence[str], *, user: str, tty: bool = False) -> ExecStream:
        """Run a program in it. Raises SandboxError."""
        config = {
            "AttachStdin": True,
            "AttachStdout": True,
            "AttachStderr": True,
            "Tty": tty,
            "Cmd": list(argv),
            "User": user,
        }
        try:
            return await self._wire.run(self._container, config)
        except EngineRefused as error:
            raise refused(self._container, error) from error


def refused(container: str, error: EngineRefused) -> SandboxError:
    """What the engine's refusal means for whoever uses the sandbox."""
    if error.status in (404, 409):
        return SandboxError(f"the sandbox {container[:12]} is gone: {error.said}", hint="a new attempt makes another")
    return NoRoom(f"no program can be run in the sandbox {container[:12]}: {error.said}")
