"""One sandbox of E2B: what inside.sh does not do by itself."""

from __future__ import annotations

import asyncio
import posixpath
import secrets
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from e2b import AsyncSandbox

from rollyard.schemas.errors import SandboxError
from rollyard.schemas.rollout import SandboxRef
from rollyard.schemas.sandbox import NetworkMode
from rollyard.stages.sandbox import Base, Change, ProcessEnd, Stats, check_path
from rollyard.stages.sandboxes.door import GATEWAY_URL, forwarder_argv
from rollyard.stages.sandboxes.e2b_errors import converted
from rollyard.stages.sandboxes.e2b_identity import Handle, timeout_of
from rollyard.stages.sandboxes.e2b_stream import E2bEntrance
from rollyard.stages.sandboxes.forwarding import start_forwarder
from rollyard.stages.sandboxes.inside import TRANSFER_S, Inside, InsideSandbox
from rollyard.stages.sandboxes.inside_archive import checked_archive
from rollyard.stages.sandboxes.inside_channel import call_text

if TYPE_CHECKING:
    from rollyard.stages.sandboxes.e2b import E2bBackend

CONTROL: Final = "/tmp/.rollyard"
COMMAND_S: Final = 30.0
BATCH_FILES: Final = 100
BATCH_BYTES: Final = 4 << 20
UPLOAD_BYTES: Final = 1 << 20
MAX_FILE_BYTES: Final = 256 << 20


def batches(files: Sequence[tuple[str, bytes]]) -> Iterator[Sequence[tuple[str, bytes]]]:
    """Files in their order, in parts of at most BATCH_FILES files and about BATCH_BYTES bytes."""
    part: list[tuple[str, bytes]] = []
    size = 0
    for path, data in files:
        if part and (len(part) == BATCH_FILES or size + len(data) > BATCH_BYTES):
            yield part
            part, size = [], 0
        part.append((path, data))
        size += len(data)
    if part:
        yield part


def _bytes(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else bytes(content)


class E2bSandbox(InsideSandbox):
    """A sandbox, connected to when something is first asked of it."""

    def __init__(self, backend: E2bBackend, handle: Handle, connected: AsyncSandbox | None = None) -> None:
        self._backend = backend
        self._handle = handle
        self._client = backend.clients.of(handle.id)
        self._connected = connected
        self._connecting = asyncio.Lock()
        self.gateway_url = GATEWAY_URL if handle.gateway and backend.settings.gateway_url else None
        self._label = f"the sandbox {handle.id}"
        home = handle.home()
        inside = Inside(
            handle=handle.id,
            workdir=handle.workdir or f"{home}/work",
            home=home,
            control=CONTROL,
            user=handle.user,
            max_file_bytes=handle.max_file_bytes or MAX_FILE_BYTES,
        )
        super().__init__(E2bEntrance(self.connected, self._label), inside)

    @property
    def ref(self) -> SandboxRef:
        """The handle is JSON: id, deadline, directory and user."""
        return self._backend.ref(self._handle)

    async def connected(self) -> AsyncSandbox:
        """The SDK's sandbox. Raises SandboxError when it is gone."""
        async with self._connecting:
            if self._connected is None:
                self._connected = await self._backend.clients.patiently(self._failed("reached"), self._connect)
            return self._connected

    async def put_files(self, files: Mapping[str, str | bytes], *, base: Base = "work") -> None:
        """Write files, many in one request, since each request goes a long way. Raises SandboxError."""
        top = self.workdir if base == "work" else self.home
        checked = [(check_path(path), _bytes(content)) for path, content in files.items()]
        for some in batches(checked):
            calls = [call_text("ry_put", (top, path, len(data))) for path, data in some]
            reply = await self._transfer(" &&\n".join(calls), b"".join(data for _, data in some))
            if reply.status != "0":
                # One by one, to learn which; a file that was written is written again.
                await super().put_files(dict(some), base=base)

    async def put_tree(self, archive: bytes | Path, target: str) -> None:
        """Unpack an archive inside. A large one goes up by E2B's own way for files, several times as fast."""
        size = len(archive) if isinstance(archive, bytes) else (await asyncio.to_thread(archive.stat)).st_size
        if size < UPLOAD_BYTES:
            await super().put_tree(archive, target)
            return
        data = await asyncio.to_thread(checked_archive, archive)
        folder, name = posixpath.join(self.workdir, target), f"{CONTROL}/tree.{secrets.token_hex(8)}"
        sandbox = await self.connected()
        user = "root" if self._inside.user.isdecimal() else self._inside.user or None
        with converted(self._failed("given an archive")):
            await sandbox.files.write(name, data, user=user, use_octet_stream=True, request_timeout=TRANSFER_S)
        unpack = call_text("ry_unpack", (folder, len(data)))
        reply = await self._transfer(f"{unpack} <{name}; ry_code=$?; rm -f {name}; (exit $ry_code)", b"")
        if reply.status != "0":
            raise SandboxError(f"the archive cannot be unpacked in {folder!r}: {reply.problem()}")

    async def prepare(self) -> None:
        """Make the folders and let the gateway be reached. Raises SandboxError."""
        await self._make_folders()
        await self._request(":")  # makes the folders, and says what the template lacks
        if self.gateway_url is not None:
            await self._start_forwarder()

    async def wait(self, name: str) -> ProcessEnd:
        """Wait for the end, on the process's own stream also when another worker started it."""
        if name not in self._started and (pid := await self._shim_pid(name)):
            attached = await E2bEntrance(self.connected, self._label).attach(pid)
            if attached is not None:
                self._started[name] = attached
        return await super().wait(name)

    async def snapshot(self) -> str:
        """A snapshot of the files, whose name `create` takes as a template. It stays until you delete it."""
        made = await self._backend.clients.patiently(
            self._failed("kept"), lambda: self._client.create_snapshot(self._handle.id, mode="filesystem")
        )
        return made.snapshot_id

    async def diff(self) -> list[Change]:
        """E2B tells no difference. Raises SandboxError."""
        raise SandboxError("the backend 'e2b' cannot tell what differs from the template", hint="use git inside")

    async def set_network(self, mode: NetworkMode, allow_hosts: Sequence[str] = ()) -> None:
        """Replace the rules of what can be reached. Raises SandboxError."""
        await self._backend.set_network(self._handle, mode, allow_hosts)

    async def stats(self) -> Stats:
        """The last sample that E2B has; it takes one every few seconds."""
        samples = await self._backend.clients.patiently(
            self._failed("measured"), lambda: self._client.get_metrics(self._handle.id)
        )
        return Stats(memory_bytes=int(samples[-1].mem_used)) if samples else Stats()

    async def destroy(self) -> None:
        """End it. Does nothing when it is gone."""
        await self.close_channels()
        await self._backend.clients.patiently(self._failed("removed"), lambda: self._client.kill(self._handle.id))

    async def _shim_pid(self, name: str) -> int:
        """What E2B knows the shim of a process by; 0: it never started, or its file is gone."""
        folder = shlex.quote(f"{CONTROL}/{name}")
        script = f'read -r token <{folder}/started && read -r pid rest <{folder}/shim."$token" && echo "$pid"'
        said = await self.exec(script, timeout_s=COMMAND_S)
        return int(said.stdout) if said.stdout.strip().isdigit() else 0

    async def _connect(self) -> AsyncSandbox:
        """Connecting sets a time limit as well, if it is longer than the present one; so it is given ours."""
        timeout = timeout_of(self._handle, self._backend.settings.timeout_s, time.time_ns() // 1_000_000)
        return await self._client.connect(self._handle.id, timeout=timeout)

    async def _make_folders(self) -> None:
        """As root, since the task's user may not make a folder there. One that exists is left as it is."""
        user = shlex.quote(self._handle.user or "user")
        script = f"mkdir -p -m 1777 {CONTROL}"
        for path in (shlex.quote(self.home), shlex.quote(self.workdir)):
            script += f" && {{ [ -d {path} ] || {{ mkdir -p {path} && chown {user} {path}; }}; }}"
        sandbox = await self.connected()
        with converted(self._failed("given its folders")):
            await sandbox.commands.run(script, user="root", cwd="/", timeout=COMMAND_S)

    async def _start_forwarder(self) -> None:
        left_s = max(1.0, self._handle.deadline_ms / 1000 - time.time())
        # As root, so that an agent that kills all processes of its user does not cut itself off.
        keeper = InsideSandbox(self._entrance, replace(self._inside, user="root"))
        try:
            await start_forwarder(keeper, forwarder_argv(self._backend.settings.gateway_url), deadline_s=left_s)
        finally:
            await keeper.close_channels()

    def _failed(self, what: str) -> str:
        return f"the sandbox {self._handle.id} could not be {what}"
