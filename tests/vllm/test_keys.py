"""The scripted server beside a real vLLM, key by key: what each answers to the same requests, whole and streamed.

A key is its path in the JSON, with the types of what stands there; of words such as finish_reason it is the word.
`-s` prints the table. DIFFERENCES are those that are meant to be: any other fails, and so does one that is gone.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import aiohttp
import msgspec

from rollyard.gateway.scripted.script import Script
from rollyard.gateway.scripted_llm import build_app, serve_app
from rollyard.gateway.tokens.tokenizer import TextTokenizer

USER = {"role": "user", "content": "hello"}
TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "run",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}
SAID = "yes it is what it was and always will be, so that is that"
CALLED = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
WORDS = frozenset({"object", "role", "type", "code", "param", "finish_reason", "owned_by", "stop_reason", "status"})
"""Keys whose value is compared, not only its type."""

FLAGS = {
    CHAT: {"return_token_ids": True, "logprobs": True, "top_logprobs": 0},
    COMPLETIONS: {"return_token_ids": True, "logprobs": 0, "return_tokens_as_token_ids": True},
}
NAMES = {CHAT: {"return_tokens_as_token_ids": True, "top_logprobs": 1}, COMPLETIONS: {"logprobs": 1}}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}

# (request, key, why) in the patterns of fnmatch, where `[[]` is a bracket.
DIFFERENCES = (
    ("GET /v1/models", ".data[[]].permission[[]]*", "who may do what with a model is nothing that a gateway asks"),
    ("tokenize *", ".token_strs", "its SGLang answers here too, and has none"),
    ("* /nothing", "*", "the web framework's own page, with the same status"),
    ("*, GET", "*", "the web framework's own page, with the same status"),
    ("*, no *", ".error.param", "names of fields as pydantic writes them"),
    ("*, a wrong type", ".error.param", "names of fields as pydantic writes them"),
    ("pause in no mode", ".error.param", "names of fields as pydantic writes them"),
    ("*, no *", ".error.type", "vLLM has two words for a request that is wrong, by who notices it"),
    ("*, a wrong type", ".error.type", "vLLM has two words for a request that is wrong, by who notices it"),
    ("pause in no mode", ".error.type", "vLLM has two words for a request that is wrong, by who notices it"),
)
# What is so in some replies and not in others, in vLLM itself.
CHANCE = (
    ("*, cut", "last.*", "tokens that were sampled since the last piece come with the word abort"),
    ("*, a stop string, stream", "last.choices[[]].delta.content", "what a stop string held back comes at the end"),
)


@dataclass(frozen=True)
class Case:
    """One request. `says` is what both sides sample; `cut` aborts the reply after the first piece."""

    name: str
    path: str
    body: Any = None
    says: str = SAID
    cut: bool = False
    get: bool = False


Keys = dict[str, set[str]]


@dataclass
class Answer:
    """What came: a status, and the keys of its JSON."""

    keys: Keys = field(default_factory=dict)

    def add(self, part: str, value: Any) -> None:
        for path, kind in walk(value, part):
            self.keys.setdefault(path, set()).add(kind)


def walk(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Every path in a JSON value with the type of what is there, or the value itself where it is one of the words."""
    if isinstance(value, dict):
        yield path, "{}"
        for key, item in value.items():
            # The keys of one object are tokens.
            yield from walk(item, f"{path}.*" if path.endswith(".top_logprobs[]") else f"{path}.{key}")
    elif isinstance(value, list):
        yield path, "[]"
        for item in value:
            yield from walk(item, f"{path}[]")
    elif path.rsplit(".", 1)[-1] in WORDS:
        yield path, repr(value)
    else:
        yield path, {"NoneType": "null"}.get(type(value).__name__, type(value).__name__)


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [USER], "max_tokens": 200, **more}


def completion(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "hello", "max_tokens": 200, **more}


def cases() -> Iterator[Case]:
    for path in ("/v1/models", "/version", "/is_paused", "/weight_info", "/health", "/nothing"):
        yield Case(f"GET {path}", path, get=True)
    yield Case("tokenize messages", "/tokenize", {"model": "tiny", "messages": [USER], "tools": [TOOL]})
    yield Case("tokenize text", "/tokenize", {"model": "tiny", "prompt": "hello"})
    for path, ask in ((CHAT, chat), (COMPLETIONS, completion)):
        name = path.removeprefix("/v1/")
        ids = {"prompt": [1, 2, 3]} if path == COMPLETIONS else {}
        yield Case(f"{name}, plain", path, ask())
        yield Case(f"{name}, plain stream", path, ask(stream=True))
        yield Case(f"{name}, our flags", path, ask(**FLAGS[path], **ids))
        yield Case(f"{name}, our flags, stream", path, ask(**FLAGS[path], **STREAM, **ids))
        yield Case(f"{name}, names of tokens", path, ask(**FLAGS[path] | NAMES[path]))
        yield Case(f"{name}, a limit", path, ask(max_tokens=2, **FLAGS[path]))
        yield Case(f"{name}, a limit, stream", path, ask(max_tokens=2, **FLAGS[path], **STREAM))
        yield Case(f"{name}, a stop string", path, ask(stop=[" always"], **FLAGS[path]))
        yield Case(f"{name}, a stop string, stream", path, ask(stop=[" always"], **FLAGS[path], **STREAM))
        yield Case(f"{name}, cut", path, ask(**FLAGS[path], **STREAM), says=f"{SAID} " * 20, cut=True)
        long = {"messages": [USER | {"content": "hello " * 2500}]} if path == CHAT else {"prompt": "hello " * 2500}
        yield Case(f"{name}, too long", path, ask(**long))
        yield Case(f"{name}, too long, stream", path, ask(**long, **STREAM))
        yield Case(f"{name}, a limit over the context", path, ask(max_tokens=5000))
        yield Case(f"{name}, another model", path, ask(model="other"))
        yield Case(f"{name}, no prompt", path, {"model": "tiny"})
        yield Case(f"{name}, a wrong type", path, ask(max_tokens="many"))
        yield Case(f"{name}, no limit at all", path, ask(max_tokens=0))
        yield Case(f"{name}, no JSON", path, b"{")
        yield Case(f"{name}, GET", path, get=True)
    yield Case("chat, no messages", CHAT, chat(messages=[]))
    yield Case("chat, tools", CHAT, chat(tools=[TOOL], **FLAGS[CHAT]), says=CALLED)
    yield Case("chat, tools, stream", CHAT, chat(tools=[TOOL], **FLAGS[CHAT], **STREAM), says=CALLED)
    yield Case("pause", "/pause?mode=abort", b"")
    yield Case("pause in no mode", "/pause?mode=never", b"")
    yield Case("resume", "/resume", b"")
    yield Case("abort_requests", "/abort_requests", {})
    yield Case("update_weight_version", "/update_weight_version", {"new_version": "5"})
    yield Case("reset_prefix_cache", "/reset_prefix_cache", b"")
    yield Case("collective_rpc of none", "/collective_rpc", {"method": "nothing"})


CASES = list(cases())


async def ask(client: aiohttp.ClientSession, url: str, case: Case, *, real: bool) -> Answer:
    """The answer of one side. The real one is held to the words that the script says."""
    body = case.body
    if real and isinstance(body, dict) and case.path in (CHAT, COMPLETIONS):
        # Only one of the two ids that end a reply is said as the reason.
        body = {"structured_outputs": {"choice": [case.says]}, "logit_bias": {"0": -100.0}, "seed": 1, **body}
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "x-request-id": "keys"}
    sending = client.get(url + case.path) if case.get else client.post(url + case.path, data=data, headers=headers)
    answer = Answer()
    async with sending as response:
        answer.keys["status"] = {str(response.status)}
        answer.keys["content-type"] = {response.headers.get("Content-Type", "none").split(";")[0]}
        if response.content_type == "text/event-stream":
            await read_stream(client, url, case, response, answer)
            return answer
        content = await response.read()
    try:
        answer.add("", json.loads(content) if content else None)
    except ValueError:
        answer.keys["body"] = {"no JSON"}
    return answer


async def read_stream(client: aiohttp.ClientSession, url: str, case: Case, response: Any, answer: Answer) -> None:
    """Events, apart by what they are: the first one, those with a piece, the last piece, and usage."""
    events, ended = [], False
    async for line in response.content:
        if line.strip() in (b"", b"data: [DONE]"):
            ended = ended or bool(line.strip())
            continue
        assert line.startswith(b"data: {"), line
        events.append(json.loads(line[6:]))
        if case.cut and len(events) == 2:
            async with client.post(f"{url}/pause?mode=abort") as paused:
                assert paused.status == 200
            async with client.post(f"{url}/resume") as resumed:
                assert resumed.status == 200
    answer.keys["[DONE]"] = {str(ended)}
    for number, event in enumerate(events):
        choices = event.get("choices")
        reason = choices[0].get("finish_reason") if choices else None
        part = (
            "error"
            if choices is None
            else "usage"
            if not choices
            else "last"
            if reason
            else "first"
            if not number
            else "piece"
        )
        answer.add(part, event)


@asynccontextmanager
async def scripted(tokenizer: TextTokenizer) -> AsyncIterator[Any]:
    """scripted(case): the address of a scripted server that says what the case says."""
    async with aiohttp.ClientSession() as client:

        async def answer(case: Case) -> Answer:
            turn: dict[str, Any] = {"content": case.says, "chunk_delay_s": 0.01 if case.cut else 0}
            if case.says == CALLED:
                turn = {"tool_calls": [{"name": "bash", "arguments": {"command": "ls"}}]}
            plan = {
                "conversations": [{"turns": [turn]}],
                "models": ["tiny"],
                "chat_template": "chatml_tools",
                "max_model_len": 2048,
            }
            async with serve_app(build_app(msgspec.convert(plan, Script), tokenizer)) as url:
                return await ask(client, url, case, real=False)

        yield answer


def differences(real: Answer, script: Answer) -> dict[str, tuple[str, str]]:
    """What is not the same, by path: the types in each."""

    def told(answer: Answer, path: str) -> str:
        return " or ".join(sorted(answer.keys[path])) if path in answer.keys else "-"

    paths = sorted(real.keys.keys() | script.keys.keys())
    pairs = {path: (told(real, path), told(script, path)) for path in paths}
    return {path: pair for path, pair in pairs.items() if pair[0] != pair[1]}


def why(case: Case, path: str) -> str:
    """Why this difference is meant to be; empty: it is not."""
    return next(
        (
            reason
            for name, key, reason in (*DIFFERENCES, *CHANCE)
            if fnmatchcase(case.name, name) and fnmatchcase(path, key)
        ),
        "",
    )


async def test_the_scripted_server_has_the_keys_of_vllm(vllm: Any, tokenizer: TextTokenizer) -> None:
    reasons, unexplained, count = set(), [], 0
    async with scripted(tokenizer) as answer:
        for case in CASES:
            real = await ask(vllm.client, vllm.server.url, case, real=True)
            found = differences(real, await answer(case))
            count += len(real.keys)
            print(f"\n{case.name}: {len(real.keys)} keys, {len(found)} differ")
            for path, (there, here) in found.items():
                reason = why(case, path)
                reasons.add(reason)
                row = f"{case.name} | {path} | {there} | {here}"
                print("   ", row, "|", reason or "NOT MEANT")
                unexplained += [] if reason else [row]
    print(f"\n{len(CASES)} requests, {count} keys")
    assert unexplained == [], "\n".join(["request | key | vLLM | scripted", *unexplained])
    assert {reason for *_, reason in DIFFERENCES} <= reasons
