"""Every exception of the E2B SDK becomes a SandboxError here, and here only.

The SDK has no common base class: it raises its own, those of httpx, pyqwest and connectrpc, and whatever a reply that
is no JSON leads to. So whatever comes out of it is converted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import httpx
from e2b.exceptions import (
    AuthenticationException,
    InvalidArgumentException,
    NotEnoughSpaceException,
    RateLimitException,
    SandboxNotFoundException,
    SandboxNotRunningException,
    ServiceBusyException,
    TimeoutException,
)

from rollyard.schemas.errors import SandboxError

_BUSY: Final = (429, 502, 503, 504)


def is_gone(error: BaseException) -> bool:
    """Whether E2B says that the sandbox is not there any more."""
    return isinstance(error, SandboxNotFoundException | SandboxNotRunningException)


def is_busy(error: BaseException) -> bool:
    """Whether E2B refused for now and did nothing: another try a little later may do."""
    if isinstance(error, RateLimitException | ServiceBusyException):
        return True
    return getattr(error, "status_code", None) in _BUSY


def is_unreachable(error: BaseException) -> bool:
    """Whether no answer came, so that nobody knows what was done."""
    return isinstance(error, httpx.TransportError | ConnectionError)


@contextmanager
def converted(what: str) -> Iterator[None]:
    """Raise SandboxError for whatever the SDK raises within. `what` is the sentence's subject, as in `WHAT failed`."""
    try:
        yield
    except SandboxError:
        raise
    except Exception as error:
        raise sandbox_error(what, error) from error


def sandbox_error(what: str, error: Exception) -> SandboxError:
    """What the user reads. The SDK's own words go in, shortened."""
    said = " ".join(str(error).split())[:300] or type(error).__name__
    if is_gone(error):
        return SandboxError(f"{what}: the sandbox is gone", hint="a new attempt makes another")
    if isinstance(error, AuthenticationException) and "username" in said:
        return SandboxError(f"{what}: the template has no such user: {said}", hint="correct sandbox.user")
    if isinstance(error, AuthenticationException):
        return SandboxError(f"{what}: E2B refuses the API key", hint="see [backends.e2b] api_key_env")
    if is_busy(error):
        hint = "lower [backends.e2b] max_creates, or ask E2B for a higher limit"
        return SandboxError(f"{what}: E2B refuses for now, also after several tries: {said}", hint=hint)
    if isinstance(error, NotEnoughSpaceException):
        return SandboxError(f"{what}: the sandbox's disk is full", hint="use a template with a larger disk")
    if isinstance(error, InvalidArgumentException):
        return SandboxError(f"{what}: E2B does not accept it: {said}")
    if getattr(error, "status_code", None) == 404:
        return SandboxError(f"{what}: {said}", hint="is sandbox.image a template of this team? See `e2b template list`")
    if is_unreachable(error) or isinstance(error, TimeoutException | TimeoutError):
        return SandboxError(f"{what}: E2B gives no answer: {said}", hint="see [backends.e2b] domain and api_url")
    return SandboxError(f"{what}: {type(error).__name__}: {said}")
