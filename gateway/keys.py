"""Session keys: what an attempt may do at the gateway, signed, so that every gateway knows it without asking anybody.

A key is `ry-<payload>.<signature>`, both URL-safe base64, so that it fits a bearer token, a header and a path.
"""

from __future__ import annotations

import binascii
import hmac
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from rollyard.gateway.refusal import Refusal
from rollyard.schemas import subjects
from rollyard.schemas.task import Sampling

PREFIX: Final = "ry-"
# It is a part of subjects as it stands.
_ROLLOUT_ID: Final = re.compile(r"[A-Za-z0-9_=-]{1,64}\Z")
_DOMAIN: Final = b"rollyard session key 1\0"


class SessionGrant(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a session key stands for. Unknown fields of a newer release are ignored."""

    run: str
    rollout_id: str
    attempt: Annotated[int, Meta(ge=1, description="the session belongs to this attempt only")]
    model: Annotated[str, Meta(description="served model, whatever name the agent asks for")] = "default"
    sampling: Annotated[Sampling, Meta(description="overrides of the agent's own sampling parameters")] = Sampling()
    max_calls: Annotated[int, Meta(ge=1, description="calls of the session; null: no limit")] | None = None
    max_tokens: Annotated[int, Meta(ge=1, description="sampled tokens of all calls; null: no limit")] | None = None
    expires_ms: Annotated[int, Meta(description="no call after this Unix time; null: no limit")] | None = None
    training: Annotated[bool, Meta(description="refuse servers that return no token ids")] = True

    def session(self) -> str:
        """Key of this session in the `sessions` bucket."""
        return subjects.session_key(self.run, self.rollout_id, self.attempt)


def sign(grant: SessionGrant, secret: bytes) -> str:
    """The key of a grant. The same grant and secret give the same key."""
    payload = _text(msgspec.json.encode(grant))
    return f"{PREFIX}{payload}.{_text(_signature(payload, secret))}"


def verify(key: str, secret: bytes) -> SessionGrant:
    """The grant of a key. Raises Refusal (401) for anything that was not signed with `secret`."""
    payload, dot, signature = key.removeprefix(PREFIX).partition(".")
    if not key.startswith(PREFIX) or not dot or not key.isascii():
        raise _refused("it is no session key")
    if not hmac.compare_digest(signature, _text(_signature(payload, secret))):
        raise _refused("its signature is wrong")
    try:
        grant = msgspec.json.decode(urlsafe_b64decode(payload + "=" * (-len(payload) % 4)), type=SessionGrant)
    except (msgspec.MsgspecError, binascii.Error, ValueError) as error:
        raise _refused(f"its payload cannot be read: {error}") from None
    if not _ROLLOUT_ID.match(grant.rollout_id):
        raise _refused(f"{grant.rollout_id[:80]!r} is no rollout id")
    return grant


def _signature(payload: str, secret: bytes) -> bytes:
    return hmac.digest(secret, _DOMAIN + payload.encode(), "sha256")


def _text(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()


def _refused(why: str) -> Refusal:
    return Refusal(
        401,
        "invalid_api_key",
        f"the API key is not accepted: {why}",
        hint="send the session key that the rollout was given, as bearer token, x-api-key or /s/<key>/ in the path",
    )
