"""What a task says about its sandbox: where the agent works, what it finds there, and what it may use."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from rollyard.schemas.names import Duration, Name

NetworkMode = Literal["default", "gateway", "none", "allow", "open"]
"""`gateway`: nothing but the gateway; `none`: not even that; `allow`: the gateway and `allow_hosts`; `open`: all of it;
`default`: `gateway` where the backend can keep the rest away, else `open`."""


class SetupStep(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One command of the setup, with limits of its own."""

    run: Annotated[str, Meta(min_length=1, description="shell command, run in the working directory")]
    timeout_s: Annotated[Duration, Meta(description="null: what is left of timeouts.init_s")] | None = None
    max_tries: Annotated[int, Meta(ge=1, le=20, description="tries, with growing pauses between them")] = 1
    user: Annotated[str, Meta(description="who runs it; empty: the sandbox's user")] = ""


class Repository(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A git repository that INIT puts into the working directory."""

    url: Annotated[str, Meta(min_length=1, description="https, ssh or file URL, or the path of a git bundle")]
    commit: Annotated[str, Meta(description="commit, tag or branch; empty: the repository's default branch")] = ""
    path: Annotated[str, Meta(description="where to, below the working directory; empty: the directory itself")] = ""
    mirror: Annotated[str, Meta(description="URL or path tried before `url`, for example a local mirror")] = ""
    history: Annotated[
        bool, Meta(description="keep commits before `commit`; without them an agent cannot look the answer up")
    ] = False


class ImageBuild(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How to build the sandbox's image, for backends that can. INIT builds it once a content."""

    dockerfile: Annotated[str, Meta(min_length=1, description="text of the Dockerfile")]
    files: Annotated[dict[str, str], Meta(description="build context: path -> UTF-8 content")] = {}
    context: Annotated[str, Meta(description="folder of the INIT workers with more of it; empty: none")] = ""
    args: Annotated[dict[str, str], Meta(description="build arguments")] = {}
    timeout_s: Annotated[Duration, Meta(description="how long it may take")] = 600.0


class Limits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a sandbox may use. A limit that the backend cannot keep is refused; null: the backend's own default."""

    cpus: Annotated[float, Meta(gt=0, description="processor cores, may be a fraction")] | None = None
    memory_bytes: Annotated[int, Meta(ge=1 << 20, description="memory of all its processes")] | None = None
    disk_bytes: Annotated[int, Meta(ge=1 << 20, description="bytes that it may write")] | None = None
    max_processes: Annotated[int, Meta(ge=8, description="processes and threads at a time")] | None = None
    max_file_bytes: Annotated[int, Meta(ge=512, description="bytes that one file may have")] | None = None


class SandboxSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where the agent works, and what it finds there."""

    backend: Annotated[Name, Meta(description="pool that makes the sandbox")] = "local"
    image: Annotated[str, Meta(description="image or template, as the backend names it; empty: its default")] = ""
    build: Annotated[ImageBuild, Meta(description="build the image instead; null: use `image`")] | None = None
    workdir: Annotated[str, Meta(description="absolute path where the agent starts; empty: the backend's")] = ""
    user: Annotated[str, Meta(description="who runs setup, agent and evaluation; empty: the backend's")] = ""
    network: Annotated[NetworkMode, Meta(description="what can be reached from inside")] = "default"
    allow_hosts: Annotated[
        tuple[str, ...], Meta(description="of network `allow`: host names, addresses or networks")
    ] = ()
    read_only: Annotated[bool, Meta(description="only the working directory, the home and /tmp can be written")] = False
    limits: Annotated[Limits, Meta(description="what it may use")] = Limits()
    repository: Annotated[Repository, Meta(description="cloned before `files` are written; null: none")] | None = None
    files: Annotated[dict[str, str], Meta(description="path inside the working directory -> UTF-8 content")] = {}
    setup: Annotated[
        tuple[str | SetupStep, ...], Meta(description="shell commands run in the working directory by INIT")
    ] = ()
    env: Annotated[dict[str, str], Meta(description="environment of setup, agent and evaluation command")] = {}

    def steps(self) -> tuple[SetupStep, ...]:
        """The setup commands, a plain one with the default limits."""
        return tuple(step if isinstance(step, SetupStep) else SetupStep(run=step) for step in self.setup)
