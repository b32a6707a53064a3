"""What passes between whoever changes the pool of model servers and the gateways: weight updates, and what they see.

These records travel by plain NATS requests and are stored nowhere.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from rollyard.schemas.names import SchemaVersion, UnixMs
from rollyard.schemas.task import SCHEMA_VERSION

How = Literal["drain", "pause", "abort"]
Step = Literal["waiting", "pausing", "loading", "resuming", "done", "failed"]

ServerId = Annotated[str, Meta(description="its name in the pool")]


class WeightUpdate(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Servers are to serve other weights. Sent to `gateway.weights`; one gateway carries it out."""

    update_id: Annotated[str, Meta(description="unique; stands in the entries that it has taken out of service")]
    version: Annotated[int, Meta(ge=0, lt=2**31, description="policy version of the new weights")]
    checkpoint: Annotated[
        str | None, Meta(description="path that the servers read; null: the weights have come to them by another way")
    ] = None
    how: Annotated[How, Meta(description="what becomes of calls that run: finish, wait, or are cut and continued")] = (
        "drain"
    )
    servers: Annotated[tuple[str, ...], Meta(description="ids; empty: all servers of `model`")] = ()
    model: Annotated[str, Meta(description="served model, where no servers are named")] = "default"
    rolling: Annotated[bool, Meta(description="one server after the other; false: all at once")] = True
    timeout_s: Annotated[float, Meta(gt=0, description="seconds that each server's calls may take to end")] = 600.0
    schema_version: SchemaVersion = SCHEMA_VERSION


class WeightProgress(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="progress", tag_field="type"):
    """How far one server is in an update. Repeated every second while the update runs."""

    server_id: ServerId
    step: Annotated[Step, Meta(description="where it is; done and failed are the last")]
    policy_version: Annotated[int | None, Meta(description="of its entry now; null: not known")] = None
    serving: Annotated[bool, Meta(description="whether it gets calls now")] = False
    calls: Annotated[int, Meta(ge=0, description="calls that still run there")] = 0
    detail: Annotated[str, Meta(description="what it waits for, or what went wrong")] = ""
    hint: Annotated[str, Meta(description="how to mend it")] = ""
    schema_version: SchemaVersion = SCHEMA_VERSION


class WeightReport(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="report", tag_field="type"):
    """What came of an update: the last progress of each server. `error` is set when it could not begin or go on."""

    servers: Annotated[tuple[WeightProgress, ...], Meta(description="in the order of the update")] = ()
    error: Annotated[str, Meta(description="why the whole update failed; empty: it did not")] = ""
    schema_version: SchemaVersion = SCHEMA_VERSION

    @property
    def failed(self) -> tuple[WeightProgress, ...]:
        """The servers that do not serve the new weights."""
        return tuple(server for server in self.servers if server.step != "done")


class ServerView(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A model server as one gateway sees it."""

    server_id: ServerId
    calls: Annotated[int, Meta(ge=0, description="calls that run there")] = 0
    healthy: Annotated[bool, Meta(description="whether it would get calls, were it serving")] = False
    trouble: Annotated[str, Meta(description="why it is not healthy")] = ""
    template: Annotated[str, Meta(description="findings about its chat template, in tokens mode")] = ""


class PoolView(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The whole pool as one gateway sees it: its answer on `gateway.<incarnation>.pool`."""

    gateway: Annotated[str, Meta(description="incarnation")]
    revision: Annotated[int, Meta(description="newest change of the bucket that it has heard of; 0: none")] = 0
    servers: Annotated[tuple[ServerView, ...], Meta(description="all that it knows")] = ()
    at_ms: UnixMs = 0
    schema_version: SchemaVersion = SCHEMA_VERSION

    def of(self, server_id: str) -> ServerView:
        """What it says about one server; without calls when it does not know it."""
        return next((view for view in self.servers if view.server_id == server_id), ServerView(server_id=server_id))
