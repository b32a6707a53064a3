"""Content of items: parts of messages and of tool results, and reasoning with its seal. Pure."""

from __future__ import annotations

import base64
import binascii
from typing import Any, Final

import msgspec

from rollyard.gateway.refusal import Refusal

_SEAL: Final = "rollyard1."
_TEXTS: Final = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})


def content_of(content: Any, where: str) -> str | list[dict[str, Any]]:
    """Content in Chat's form: one text as a string, else a list of parts. Null is empty.

    A part of an unknown type is shown as its JSON. Raises Refusal (400) that names the field.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Refusal(400, "invalid_request", f"{where} is neither text nor a list of parts", param=where)
    parts = [_part(part, f"{where}[{index}]") for index, part in enumerate(content)]
    if not parts:
        return ""
    if len(parts) == 1 and parts[0]["type"] == "text":
        text: str = parts[0]["text"]
        return text
    return parts


def is_text(part: Any) -> bool:
    """Whether it is a part that holds text."""
    return isinstance(part, dict) and part.get("type") in _TEXTS and isinstance(part.get("text"), str)


def _part(part: Any, where: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict) or not isinstance(kind := part.get("type"), str):
        raise Refusal(400, "invalid_request", f"{where} has no type", param=f"{where}.type")
    if kind in _TEXTS:
        text = part.get("text")
        if not isinstance(text, str):
            raise Refusal(400, "invalid_request", f"{where}.text is not a string", param=f"{where}.text")
        return {"type": "text", "text": text}
    if kind == "input_image" and isinstance(url := part.get("image_url"), str):
        detail = {"detail": part["detail"]} if isinstance(part.get("detail"), str) else {}
        return {"type": "image_url", "image_url": {"url": url, **detail}}
    if kind in ("input_file", "input_image"):
        said = {key: value for key, value in part.items() if key != "type" and value is not None}
        return {"type": "file", "file": said}
    if kind in ("image_url", "file", "input_audio"):  # Chat's own
        return part
    return {"type": "text", "text": msgspec.json.encode(part).decode()}


def seal(reasoning: str) -> str:
    """Reasoning as `encrypted_content`. It hides nothing: whoever echoes it gives the model its reasoning back."""
    return _SEAL + base64.urlsafe_b64encode(reasoning.encode()).decode()


def unseal(sealed: Any) -> str | None:
    """The reasoning in an `encrypted_content` of ours; None: it is another's, or damaged."""
    if not isinstance(sealed, str) or not sealed.startswith(_SEAL):
        return None
    try:
        # Without validation, characters that are not base64 would be skipped in silence.
        return base64.b64decode(sealed[len(_SEAL) :], altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        return None


def reasoning_of(item: dict[str, Any]) -> str:
    """The text of a reasoning item: what is sealed in it, else its content, else its summary."""
    sealed = unseal(item.get("encrypted_content"))
    if sealed is not None:
        return sealed
    return _texts(item.get("content")) or _texts(item.get("summary"))


def sealed_by_others(item: dict[str, Any]) -> bool:
    """Whether a reasoning item holds what only another vendor can read."""
    sealed = item.get("encrypted_content")
    return bool(sealed) and unseal(sealed) is None


def _texts(parts: Any) -> str:
    if not isinstance(parts, list):
        return ""
    return "\n\n".join(part["text"] for part in parts if is_text(part))
