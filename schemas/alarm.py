"""Alarms: what somebody should look at before a run goes on, raised by the controller."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta, Struct

from rollyard.schemas.names import RunName, SchemaVersion, UnixMs
from rollyard.schemas.task import SCHEMA_VERSION

DRIFT: Final = "drift"
ZERO_TRAINABLE: Final = "zero_trainable"
NO_WORKER: Final = "no_worker"
KINDS: Final = (DRIFT, ZERO_TRAINABLE, NO_WORKER)


class Alarm(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A run needs a look. Created once under `alarm.<run>.<kind>`, and never taken back.

    drift: agents' requests leave the tokens that were sampled. zero_trainable: rollouts have model calls and no token
    to train on; each is a share of the run that passed its threshold. no_worker: rollouts wait for a sandbox backend
    that no living worker offers.
    """

    run: RunName
    # Not a Literal: a reader must not break at a kind that a later release raises.
    kind: Annotated[str, Meta(description="drift, zero_trainable or no_worker; later releases may know more")]
    message: Annotated[str, Meta(description="what is wrong, with the figures")]
    hint: Annotated[str, Meta(description="what to do about it")] = ""
    value: Annotated[float, Meta(description="the share that passed the threshold, 0 to 1; 0 for no_worker")] = 0.0
    threshold: Annotated[float, Meta(description="as configured when it was raised, 0 to 1; 0 for no_worker")] = 0.0
    rollouts: Annotated[int, Meta(description="rollouts that had been counted by then; no_worker: that waited")] = 0
    calls: Annotated[int, Meta(description="their model calls")] = 0
    at_ms: Annotated[
        UnixMs,
        Meta(description="when the delivery that passed the threshold was stored; no_worker: when it was raised"),
    ] = 0
    schema_version: SchemaVersion = SCHEMA_VERSION
