"""Ids of responses and of their items. They hold the call id, so that what an agent echoes tells whose it is. Pure."""

from __future__ import annotations

import re
from typing import Any, Final

_ITEM: Final = re.compile(r"[a-z]+_([0-9a-f]{32})([nr])\d+")
_RAW: Final = "r"


def response_id(call_id: str) -> str:
    """The id of the response that a call gave."""
    return f"resp_{call_id}"


def item_id(kind: str, call_id: str, index: int, *, raw: bool = False) -> str:
    """The id of item `index` of a response. `kind` is the vendor's prefix: msg, rs, fc, ...

    `raw` marks a custom tool call whose input is the model's arguments as they are, see responses_tools.py.
    """
    return f"{kind}_{call_id}{_RAW if raw else 'n'}{index}"


def call_of_item(item: Any) -> str | None:
    """The call that an item id (anything) came from; None: it is not one of ours."""
    found = _ITEM.fullmatch(item) if isinstance(item, str) else None
    return found[1] if found else None


def is_raw(item: Any) -> bool:
    """Whether the id of a custom tool call says that its input is the arguments as they are."""
    found = _ITEM.fullmatch(item) if isinstance(item, str) else None
    return found is not None and found[2] == _RAW
