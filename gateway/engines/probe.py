"""Whether a server can be trained on, told from a few tokens that it is asked for."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Final

import numpy as np
import structlog
from msgspec import Struct, structs

from rollyard.gateway.engines.engine import EngineChunk, LogprobKind
from rollyard.schemas.call import Usage
from rollyard.schemas.errors import ModelError
from rollyard.schemas.fleet import LlmServer
from rollyard.schemas.packed import Logprobs, TokenIds

log = structlog.get_logger(__name__)

# So hot that every token is as likely as any other: logprobs after the temperature are all the same, raw ones are not.
HOT: Final[dict[str, Any]] = {"temperature": 10_000.0}
# Where a temperature over 2 is refused: one token is made certain, of which raw logprobs know nothing.
CERTAIN: Final[dict[str, Any]] = {"logit_bias": {"1000": 100.0}}
PROBE_PARAMS: Final[dict[str, Any]] = {"max_tokens": 4, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
_SAME: Final = 0.01


class Findings(Struct, frozen=True, kw_only=True):
    """What came of a probe. `lacks` says why it cannot be trained on; empty: it can."""

    lacks: str
    logprobs: Logprobs


async def examine_gently(
    ask: Callable[[dict[str, Any]], Awaitable[Findings]], server: LlmServer, telling: dict[str, Any] = HOT
) -> Findings:
    """What `ask` finds with parameters that are `telling`, without them if those are refused. Raises ModelError.

    A server that takes neither is up, but cannot be judged so: every call is checked by itself anyway.
    """
    for extra in (telling, {}):
        try:
            findings = await ask(PROBE_PARAMS | extra)
        except ModelError as error:
            if error.status != 400:
                raise
            log.warning("probe_refused", server=server.server_id, params=extra, error=str(error))
        else:
            return findings if extra else structs.replace(findings, logprobs=Logprobs())
    return Findings(lacks="", logprobs=Logprobs())


async def examine(
    chunks: AsyncGenerator[EngineChunk, None], sent: TokenIds | None = None, *, counted: int | None = None
) -> Findings:
    """Read a probe's reply. Raises ModelError.

    `sent` are the prompt's ids, which the server must report just so. `counted` is how many there are, for llama.cpp:
    it only counts them, and of a character that several tokens make up, which a hot sampler often begins, it withholds
    ids. That is found out in each call.
    """
    prompt, ids, logprobs = TokenIds(), TokenIds(), Logprobs()
    usage, fault = Usage(), None
    async with aclosing(chunks):
        async for chunk in chunks:
            prompt += chunk.prompt_ids or TokenIds()
            ids += chunk.token_ids or TokenIds()
            logprobs += chunk.logprobs or Logprobs()
            usage = chunk.usage or usage
            fault = fault or chunk.fault
    prompt_count, sampled_count = len(prompt), len(ids)
    if counted is not None:
        prompt_count, sampled_count, fault = counted, usage.completion_tokens, None
    missing = [name for name, there in (("prompt ids", prompt_count), ("sampled ids", ids)) if not there]
    if fault or missing:
        lacks = fault or f"it returned no {', no '.join(missing)}"
    elif sent is not None and prompt != sent:
        lacks = f"it was sent the prompt {sent.tolist()[:8]} and used {prompt.tolist()[:8]}"
    elif len(ids) != len(logprobs):
        lacks = f"it returned {len(ids)} sampled ids but {len(logprobs) or 'no'} logprobs"
    elif (usage.prompt_tokens, usage.completion_tokens) != (prompt_count, sampled_count):
        told = f"{usage.prompt_tokens} and {usage.completion_tokens}"
        lacks = f"it counted {told} tokens of prompt and reply, but there were {prompt_count} and {sampled_count}"
    else:
        lacks = ""
    return Findings(lacks=lacks, logprobs=logprobs)


def logprob_kind(server: LlmServer, findings: Findings, usual: LogprobKind) -> LogprobKind:
    """What logprobs mean: as the server's entry says, else as measured, else what is usual for its kind."""
    if server.logprob_kind != "unknown":
        return server.logprob_kind
    values = np.asarray(findings.logprobs)
    if len(values) < 3 or not np.isfinite(values).all():
        return usual
    return "processed" if float(np.ptp(values)) < _SAME else "raw"
