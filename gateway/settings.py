"""What can be set about a gateway process."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct


class GatewaySettings(Struct, frozen=True, kw_only=True):
    """Times in seconds, sizes in bytes."""

    secret: Annotated[bytes, Meta(description="signs session keys; the same for every gateway and worker")]
    admin_token: Annotated[bytes, Meta(description="opens the endpoints under /admin; empty: they are off")] = b""
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(description="0: any free one")] = 0
    public_url: Annotated[str, Meta(description="base URL in the lease; empty: made from host and port")] = ""
    lease_s: Annotated[float, Meta(gt=0, description="the process counts as dead when not renewed for so long")] = 15.0
    call_timeout_s: Annotated[float, Meta(gt=0, description="a call that takes longer is aborted")] = 1800.0
    ack_timeout_s: Annotated[float, Meta(gt=0, description="how long a reply waits for its end to be logged")] = 30.0
    drain_s: Annotated[float, Meta(ge=0, description="calls in flight may take so long when the process stops")] = 20.0
    flush_s: Annotated[float, Meta(ge=0, description="then ends that are owed may take so long")] = 10.0
    full_at: Annotated[float, Meta(gt=0, le=1, description="no new calls when LOG is filled to this share")] = 0.85
    poll_s: Annotated[float, Meta(gt=0, description="how often the fill of LOG is looked at")] = 2.0
    cache_max_bytes: Annotated[int, Meta(ge=0, description="sessions kept in memory")] = 256 * 1024 * 1024
    max_body_bytes: Annotated[int, Meta(gt=0, description="largest request body")] = 64 * 1024 * 1024
    ping_s: Annotated[float, Meta(gt=0, description="a stream that is silent for so long gets a sign of life")] = 10.0
    pause_wait_s: Annotated[float, Meta(ge=0, description="how long a call waits while weights are changed")] = 300.0
    join_after_s: Annotated[float, Meta(ge=0, description="an equal request after so long is a retry and joins")] = 1.0
    header_timeout_s: Annotated[float, Meta(gt=0, description="how long the headers of a first request may take")] = (
        30.0
    )
    read_timeout_s: Annotated[float, Meta(gt=0, description="how long an agent may take to send its request")] = 60.0
    write_timeout_s: Annotated[float, Meta(gt=0, description="how long an agent may take nothing of a stream")] = 300.0
    max_header_bytes: Annotated[int, Meta(gt=0, description="largest header line")] = 32 * 1024
    canonical_off: Annotated[frozenset[str], Meta(description="rules of gateway/history.py switched off")] = frozenset()
