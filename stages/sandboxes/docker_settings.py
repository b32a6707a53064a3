"""Settings of the backend `docker`: [backends.docker] of the configuration."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from rollyard.stages.sandboxes.docker_labels import MAX_FILE_BYTES
from rollyard.stages.sandboxes.settings import BackendSettings


class DockerSettings(BackendSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What holds for every container that a task says nothing else about."""

    base_url: Annotated[
        str, Meta(description="the engine: unix:///path or tcp://host:port; empty: DOCKER_HOST, else the usual socket")
    ] = ""
    image: Annotated[str, Meta(description="image of tasks that name none; empty: they must")] = ""
    pull: Annotated[bool, Meta(description="fetch an image that the engine does not have")] = True
    user: Annotated[str, Meta(description="user of tasks that name none; empty: the image's")] = ""
    cpus: Annotated[float, Meta(ge=0, description="processor cores; 0: no limit")] = 0.0
    memory_bytes: Annotated[int, Meta(ge=0, description="memory; 0: no limit")] = 0
    max_processes: Annotated[int, Meta(ge=8, description="processes and threads at a time")] = 1024
    max_file_bytes: Annotated[int, Meta(ge=512, description="bytes that one file may have")] = MAX_FILE_BYTES
    tmpfs_bytes: Annotated[
        int, Meta(ge=1 << 20, description="room in the folders that can be written of a read-only sandbox; uses memory")
    ] = 1 << 30
    cap_add: Annotated[
        tuple[str, ...],
        Meta(description="Linux capabilities; for apt-get: CHOWN, DAC_OVERRIDE, FOWNER, SETUID, SETGID"),
    ] = ()
    runtime: Annotated[str, Meta(description="OCI runtime, for example runsc; empty: the engine's")] = ""
    warm: Annotated[int, Meta(ge=0, le=256, description="started containers kept ready for each kind of sandbox")] = 0
    warm_kinds: Annotated[
        int, Meta(ge=1, le=64, description="kinds of sandbox that are kept ready, the latest used ones")
    ] = 4
    timeout_s: Annotated[float, Meta(gt=0, description="how long the engine may take for an answer")] = 120.0
    extra: Annotated[
        dict[str, Any], Meta(description="further fields of the engine's HostConfig, as it spells them")
    ] = msgspec.field(default_factory=dict)
