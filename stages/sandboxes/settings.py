"""What the settings of all backends have in common; a user's own stand in [backends.NAME] of the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

import msgspec
from msgspec import Meta, Struct

from rollyard.schemas.errors import ConfigError


class BackendSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Given by the worker, where the user does not set them."""

    root: Annotated[str, Meta(min_length=1, description="folder for what the backend keeps on this machine")]
    lease_s: Annotated[float, Meta(gt=0, description="sandboxes end 1 to 2 times so long after the last renewal")] = (
        30.0
    )
    relay: Annotated[str, Meta(description="folder of the sockets of this machine's relay; empty: none")] = ""
    installation: Annotated[
        str,
        Meta(
            min_length=1,
            description="sandboxes of other installations, on a daemon or key that is shared, are left alone",
        ),
    ] = "default"
    gateway_url: Annotated[str, Meta(description="the gateway's address, for sandboxes that are elsewhere")] = ""

    @classmethod
    def of(cls, backend: str, settings: Mapping[str, Any]) -> Self:
        """Raises ConfigError that names the setting which is not acceptable."""
        try:
            return msgspec.convert(settings, cls)
        except msgspec.ValidationError as error:
            known = ", ".join(cls.__struct_fields__)
            raise ConfigError(f"sandbox backend {backend}: {error}", hint=f"its settings are {known}") from error
