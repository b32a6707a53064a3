"""What a request refers to instead of sending it again: an earlier response, or single items of one."""

from __future__ import annotations

from msgspec import structs

from rollyard.gateway.exchange import ModelRequest
from rollyard.gateway.protocols.responses import referenced_calls, with_replies
from rollyard.gateway.refusal import Refusal
from rollyard.gateway.sessions import Session
from rollyard.pipeline.bus import Bus
from rollyard.pipeline.images import REFERENCE, names
from rollyard.schemas.call import Message

_INSTRUCTIONS = "_instructions"


async def resolve_references(request: ModelRequest, session: Session, bus: Bus) -> ModelRequest:
    """The request whole, from the session's log.

    Raises Refusal (400) when what it refers to is not there, BusError, BlobError.
    """
    if names(request.messages):
        raise Refusal(
            400,
            "invalid_request",
            f"an image is given as {REFERENCE}..., which stands for one in our records only",
            hint="send the image itself, as a data URL",
            param="messages",
        )
    if request.protocol != "responses":
        return request
    if ids := referenced_calls(request):
        replies: dict[str, Message] = {}
        for call_id in ids:
            conversation = await session.conversation(bus, call_id)
            if conversation is not None:
                replies[call_id] = conversation[-1]
        request = with_replies(request, replies)
    previous = request.context.get("previous_response_id")
    return await _after(request, str(previous), session, bus) if previous else request


async def _after(request: ModelRequest, previous: str, session: Session, bus: Bus) -> ModelRequest:
    conversation = await session.conversation(bus, previous.removeprefix("resp_"))
    if conversation is None:
        raise Refusal(
            400,
            "previous_response_not_found",
            f"Previous response with id '{previous}' not found.",
            hint="send the whole input instead",
            param="previous_response_id",
        )
    # Instructions belong to one response and are not carried over.
    kept = [message for message in conversation if not message.get(_INSTRUCTIONS)]
    head = [message for message in request.messages if message.get(_INSTRUCTIONS)]
    rest = [message for message in request.messages if not message.get(_INSTRUCTIONS)]
    return structs.replace(request, messages=[*head, *kept, *rest])
