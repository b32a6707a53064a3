"""Building images of tasks: one build at a time for a content, whoever asks for it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol, runtime_checkable

import msgspec
import structlog

from rollyard.schemas.errors import SandboxError
from rollyard.schemas.sandbox import ImageBuild
from rollyard.schemas.subjects import digest

log = structlog.get_logger(__name__)

TAIL_LINES: Final = 20


@runtime_checkable
class ImageBuilder(Protocol):
    """A backend that builds images."""

    name: str

    async def build(self, build: ImageBuild, on_progress: Callable[[str], None]) -> str:
        """Build it, unless an image of that content is there already; the image's name. Raises SandboxError."""
        ...


class ImageBuilds:
    """The builds of one process. Everybody who wants the same image waits for the same build."""

    def __init__(self) -> None:
        self._building: dict[str, asyncio.Task[str]] = {}
        self._waiting: dict[str, int] = {}

    async def image(self, backend: Any, build: ImageBuild) -> str:
        """The name of the image. A build for which nobody waits any more is ended. Raises SandboxError."""
        if not isinstance(backend, ImageBuilder):
            raise SandboxError(f"the sandbox backend {backend.name!r} builds no images", hint="leave out sandbox.build")
        key = digest(backend.name, msgspec.json.encode(build, order="sorted"))
        task = self._building.get(key)
        if task is None:
            task = self._building[key] = asyncio.create_task(_build(backend, build, key))
            task.add_done_callback(lambda _: self._building.pop(key, None))
        self._waiting[key] = self._waiting.get(key, 0) + 1
        try:
            return await asyncio.shield(task)
        finally:
            self._waiting[key] -= 1
            if not self._waiting[key]:
                del self._waiting[key]
                if not task.done():
                    # The next one who asks begins anew.
                    self._building.pop(key, None)
                    task.cancel()


async def _build(backend: ImageBuilder, build: ImageBuild, key: str) -> str:
    tail: deque[str] = deque(maxlen=TAIL_LINES)

    def on_progress(line: str) -> None:
        if text := line.strip():
            tail.append(text)
            log.info("image_building", backend=backend.name, build=key, line=text[:500])

    work: Awaitable[str] = backend.build(build, on_progress)
    try:
        async with asyncio.timeout(build.timeout_s):
            image = await work
    except TimeoutError:
        said = "\n".join(tail)[-1_500:]
        raise SandboxError(
            f"the build of the image took longer than {build.timeout_s:g} s; it said last: {said or 'nothing'}",
            hint="raise sandbox.build.timeout_s",
        ) from None
    log.info("image_built", backend=backend.name, build=key, image=image)
    return image
