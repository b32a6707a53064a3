from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from rollyard.gateway.scripted.journal import Entry, open_journal, read_journal
from rollyard.gateway.scripted.script import Script, load_script
from rollyard.gateway.scripted_llm import build_app, serve_app
from rollyard.gateway.tokens.tokenizer import TextTokenizer
from rollyard.schemas.errors import ConfigError, SetupError
from rollyard.schemas.packed import Logprobs, TokenIds

TEXT = "Having said hello, the assistant returns the answer to the user. 😀"
CALL = {"name": "bash", "arguments": {"command": "ls # {prompt}"}}


class Client:
    """A client of one scripted server, and that server's journal."""

    def __init__(self, http: aiohttp.ClientSession, path: Path) -> None:
        self.http = http
        self.path = path

    @property
    def journal(self) -> list[Entry]:
        return read_journal(self.path)

    def post(self, request_id: str = "r", messages: Any = None, **fields: Any) -> Any:
        body = {"messages": messages or [user("hello")], "return_token_ids": True, "logprobs": True, **fields}
        return self.http.post("/v1/chat/completions", json=body, headers={"x-request-id": request_id})

    async def ask(self, request_id: str = "r", messages: Any = None, **fields: Any) -> dict[str, Any]:
        async with self.post(request_id, messages, **fields) as response:
            assert response.status == 200, await response.text()
            answer: dict[str, Any] = await response.json()
        return answer

    async def complete(self, prompt: str | list[int], **fields: Any) -> dict[str, Any]:
        async with self._completion(prompt, fields) as response:
            assert response.status == 200, await response.text()
            answer: dict[str, Any] = await response.json()
        return answer

    async def complete_stream(self, prompt: str | list[int], **fields: Any) -> list[dict[str, Any]]:
        async with self._completion(prompt, {"stream": True, **fields}) as response:
            return await events(response)

    def _completion(self, prompt: str | list[int], fields: dict[str, Any]) -> Any:
        named = {"return_token_ids": True, "return_tokens_as_token_ids": True, "logprobs": 0}
        return self.http.post("/v1/completions", json={"prompt": prompt, **named, **fields})

    async def stream(self, request_id: str = "r", messages: Any = None, **fields: Any) -> list[dict[str, Any]]:
        async with self.post(request_id, messages, stream=True, **fields) as response:
            return await events(response)


async def events(response: aiohttp.ClientResponse) -> list[dict[str, Any]]:
    assert response.status == 200
    lines = [line.strip() async for line in response.content if line.strip()]
    assert lines[-1] == b"data: [DONE]"
    return [json.loads(line.removeprefix(b"data: ")) for line in lines[:-1]]


Serve = Callable[..., AbstractAsyncContextManager[Client]]


@pytest.fixture
def serve(tokenizer: TextTokenizer, tmp_path: Path) -> Serve:
    @asynccontextmanager
    async def serving(*turns: dict[str, Any], **settings: Any) -> AsyncIterator[Client]:
        content = {"conversations": [{"turns": turns}], **settings}
        script = msgspec.convert(content, Script)
        path = tmp_path / "journal.jsonl"
        with open_journal(path) as journal:
            async with (
                serve_app(build_app(script, tokenizer, journal)) as url,
                aiohttp.ClientSession(base_url=url) as http,
            ):
                yield Client(http, path)

    return serving


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def streamed_ids(chunks: list[dict[str, Any]]) -> list[int]:
    return [number for chunk in chunks for choice in chunk["choices"] for number in choice.get("token_ids", ())]


def timeless(answer: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in answer.items() if key not in ("created", "id")}


async def test_a_reply_has_vllms_fields(serve: Serve, tokenizer: TextTokenizer) -> None:
    async with serve({"content": TEXT}) as client:
        answer = await client.ask("call-1")

    (choice,) = answer["choices"]
    prompt = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert answer["id"] == "chatcmpl-call-1"
    assert answer["prompt_token_ids"] == tokenizer.encode_rendered(prompt, "").tolist()
    assert choice["message"]["content"] == TEXT
    assert choice["finish_reason"] == "stop"
    assert tokenizer.decode(TokenIds.of(choice["token_ids"]), False) == TEXT + "<|im_end|>"
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]) == answer["usage"]["completion_tokens"]
    assert choice["logprobs"]["content"][-1]["token"] == "<|im_end|>"
    assert answer["usage"]["prompt_tokens"] == len(answer["prompt_token_ids"])


async def test_ids_and_logprobs_come_only_when_asked_for(serve: Serve) -> None:
    async with serve({"content": "a"}) as client:
        plain = await client.ask(return_token_ids=None, logprobs=None)
        named = await client.ask(return_tokens_as_token_ids=True, top_logprobs=1)
        first, *_, last = await client.stream(return_token_ids=False, logprobs=False)

    assert plain["prompt_token_ids"] is plain["choices"][0]["token_ids"] is plain["choices"][0]["logprobs"] is None
    entry = named["choices"][0]["logprobs"]["content"][0]
    assert entry["token"] == f"token_id:{named['choices'][0]['token_ids'][0]}"
    assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]
    assert first["prompt_token_ids"] is None
    assert last["choices"][0]["token_ids"] is None


async def test_a_stream_says_the_same_as_a_whole_reply(serve: Serve) -> None:
    turn = {"content": TEXT, "tool_calls": [CALL]}
    async with serve(turn, chat_template="chatml_tools") as client:
        whole = await client.ask()
        chunks = await client.stream(stream_options={"include_usage": True})

    first, *middle, usage = chunks
    message = whole["choices"][0]["message"]
    deltas = [chunk["choices"][0] for chunk in middle]
    assert first["prompt_token_ids"] == whole["prompt_token_ids"]
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert streamed_ids(chunks) == whole["choices"][0]["token_ids"]
    logprobs = [entry for choice in deltas for entry in choice["logprobs"]["content"]]
    assert logprobs == whole["choices"][0]["logprobs"]["content"]
    assert "".join(choice["delta"].get("content") or "" for choice in deltas) == message["content"] == TEXT
    (name,), (arguments,) = (choice["delta"]["tool_calls"] for choice in deltas[-3:-1])
    assert {**name, "function": name["function"] | arguments["function"]} == {"index": 0, **message["tool_calls"][0]}
    assert json.loads(arguments["function"]["arguments"]) == {"command": "ls # hello"}
    assert "tool_calls" not in deltas[-1]["delta"]
    assert [choice["finish_reason"] for choice in deltas] == [None] * (len(deltas) - 1) + ["tool_calls"]
    assert usage["choices"] == []
    assert whole["usage"] == usage["usage"] | {"prompt_tokens_details": None, "completion_tokens_details": None}


async def test_some_texts_are_sampled_as_other_ids(serve: Serve, tokenizer: TextTokenizer) -> None:
    for noncanonical in (True, False):
        async with serve({"content": TEXT}, noncanonical=noncanonical) as client:
            ids = (await client.ask())["choices"][0]["token_ids"]
        again = tokenizer.encode_plain(TEXT).tolist()
        assert (ids[:-1] != again) == noncanonical


async def test_answers_are_functions_of_the_request(serve: Serve) -> None:
    turns = ({"content": "first {prompt}"}, {"content": "turn {turn}: {last}"})
    history = [user("a"), {"role": "assistant", "content": "x"}, {"role": "tool", "content": "seen"}]
    async with serve(*turns) as client:
        await client.ask(messages=[user("b")])
        first = await client.ask("one", [user("a")])
        second = await client.ask("two", history)
        beyond = await client.ask("more", [*history, *history[1:]])
    async with serve(*turns) as client:
        assert timeless(await client.ask("three", history)) == timeless(second)
        assert timeless(await client.ask("four", [user("a")])) == timeless(first)

    assert first["choices"][0]["message"]["content"] == "first a"
    assert second["choices"][0]["message"]["content"] == "turn 1: seen"
    assert beyond["choices"][0]["message"]["content"] == "turn 2: seen"


async def test_strings_of_a_json_answer_and_later_user_messages_count_too(serve: Serve) -> None:
    conversations = [
        {"match": "second", "turns": [{"content": "it is {last.id}, {last.count}, {last.none}"}]},
        {"turns": [{"content": "{last.id}"}]},
    ]
    history = [user("first"), user("the second"), {"role": "tool", "content": '{"id": "a1", "count": 2}'}]
    async with serve(conversations=conversations) as client:
        answer = await client.ask(messages=history)
        other = await client.ask(messages=[user('["id"]')])

    assert answer["choices"][0]["message"]["content"] == "it is a1, {last.count}, {last.none}"
    assert other["choices"][0]["message"]["content"] == "{last.id}"


async def test_a_user_message_chooses_the_conversation(serve: Serve) -> None:
    conversations = [
        {"match": "README", "turns": [{"content": "reads"}]},
        {"match": "test", "turns": [{"content": "tests"}]},
    ]
    async with serve(conversations=conversations) as client:
        assert (await client.ask(messages=[user("run the test")]))["choices"][0]["message"]["content"] == "tests"
        parts = [{"type": "text", "text": "the README test"}]
        answer = await client.ask(messages=[{"role": "system", "content": "test"}, {"role": "user", "content": parts}])
        assert answer["choices"][0]["message"]["content"] == "reads"
        async with client.post(messages=[user("else")]) as response:
            assert response.status == 400
            assert "no conversation of the script matches" in (await response.json())["error"]["message"]


async def test_the_journal_holds_what_was_sampled(serve: Serve) -> None:
    async with serve({"content": TEXT}) as client:
        whole = await client.ask("a")
        async with client.post("b", stream=True) as response:
            async for line in response.content:
                if line.startswith(b"data: [DONE]"):
                    assert [entry.request_id for entry in client.journal] == ["a", "b"]
        first, second = client.journal

    assert (first.status, first.http_status, first.turn) == ("ok", 200, 0)
    assert first.prompt_token_ids == whole["prompt_token_ids"]
    assert first.token_ids == whole["choices"][0]["token_ids"] == second.token_ids
    logprobs = [entry["logprob"] for entry in whole["choices"][0]["logprobs"]["content"]]
    assert first.logprobs == logprobs == Logprobs.of(logprobs).tolist()
    assert len(set(logprobs)) > len(logprobs) // 2


async def test_failures_end_after_so_many_times(serve: Serve) -> None:
    async with serve({"content": "a", "fail_status": 503, "fail_times": 2}) as client:
        statuses = []
        for request_id, stream in (("a", True), ("b", False), ("c", True)):
            async with client.post(request_id, stream=stream) as response:
                statuses.append(response.status)
        other = {**user("another request"), "name": "n"}
        async with client.post("d", [other]) as response:
            assert response.status == 503
            assert (await response.json())["error"]["code"] == 503
        journal = client.journal

    assert statuses == [503, 503, 200]
    assert [entry.status for entry in journal] == ["failed", "failed", "ok", "failed"]
    assert journal[0].token_ids == []


@pytest.mark.parametrize("tokens", [0, 3, 1000])
async def test_a_stream_breaks_after_so_many_tokens(serve: Serve, tokens: int) -> None:
    async with serve({"content": TEXT, "break_after_tokens": tokens}) as client:
        seen = b""
        with pytest.raises(aiohttp.ClientPayloadError):
            async with client.post("a", stream=True) as response:
                async for line in response.content:
                    seen += line
        chunks = await client.stream("b")
        broken, whole = client.journal

    assert b"[DONE]" not in seen
    ids = streamed_ids(chunks)
    assert seen.count(b'"token_ids"') == len(broken.token_ids) == min(tokens, len(ids))
    assert (broken.status, whole.status) == ("broken", "ok")
    assert whole.token_ids == ids
    assert ids[: len(broken.token_ids)] == broken.token_ids


async def test_a_whole_reply_breaks_in_the_middle(serve: Serve) -> None:
    async with serve({"content": TEXT, "break_after_tokens": 1}) as client:
        with pytest.raises(aiohttp.ClientPayloadError):
            await client.ask("a")
        assert (await client.ask("b"))["choices"][0]["message"]["content"] == TEXT
        assert [entry.status for entry in client.journal] == ["broken", "ok"]


async def test_a_client_that_leaves_is_noted(serve: Serve) -> None:
    async with serve({"content": TEXT, "chunk_delay_s": 0.02}) as client:
        async with client.post("a", stream=True) as response:
            await response.content.readline()
            response.close()
        async with asyncio.timeout(30):
            while not client.journal:  # noqa: ASYNC110 - the server only writes a file
                await asyncio.sleep(0.02)
        (entry,) = client.journal

    assert entry.status == "aborted"
    assert 0 <= len(entry.token_ids) < len(TEXT)


async def test_limits_cut_the_reply(serve: Serve, tokenizer: TextTokenizer) -> None:
    async with serve({"content": TEXT, "tool_calls": [CALL]}, max_model_len=60) as client:
        short = (await client.ask(max_tokens=4))["choices"][0]
        stopped = (await client.ask(stop=["the answer", " said"]))["choices"][0]
        full = await client.ask(max_tokens=60)
        async with client.post(messages=[user("hello")], max_tokens=61) as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] == "max_tokens"
        async with client.post(messages=[user("long " * 60)]) as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] == "input_tokens"

    assert short["finish_reason"] == "length"
    assert "tool_calls" not in short["message"]
    assert len(short["token_ids"]) == 4
    assert tokenizer.decode(TokenIds.of(short["token_ids"]), False) == short["message"]["content"]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", " said")
    assert stopped["message"]["content"] == "Having"
    assert tokenizer.decode(TokenIds.of(stopped["token_ids"]), False).startswith("Having said")
    assert full["usage"]["total_tokens"] == 60


async def test_finish_reasons_of_the_script(serve: Serve, tokenizer: TextTokenizer) -> None:
    end = tokenizer.specials["<|im_end|>"]
    for reason in ("length", "abort"):
        async with serve({"content": "a", "finish_reason": reason}) as client:
            choice = (await client.ask())["choices"][0]
        assert choice["finish_reason"] == reason
        assert end not in choice["token_ids"]


async def test_prompt_ids_can_be_given(serve: Serve) -> None:
    async with serve({"content": "a"}) as client:
        given = await client.ask(kv_transfer_params={"prompt_token_ids": [5, 6, 7]})
        async with client.post(kv_transfer_params={"prompt_token_ids": ["x"]}) as response:
            assert response.status == 400
    assert given["prompt_token_ids"] == [5, 6, 7]


async def test_a_prompt_of_ids_is_answered_as_the_conversation_in_it(serve: Serve) -> None:
    """As at vLLM, the chat endpoint and the completions endpoint sample the same for the same prompt ids."""
    turns = (
        {"content": "I look. {prompt}", "tool_calls": [CALL]},
        {"reasoning": "{last}!", "content": TEXT + "{turn}"},
        {"content": "bye"},
    )
    messages = [{"role": "system", "content": "hello\nworld"}, user("What?\n\nHaving 😀")]
    tools = [{"type": "function", "function": {"name": "bash"}}]
    async with serve(*turns, chat_template="chatml_tools") as client:
        for number in range(4):
            chat = await client.ask(messages=messages, tools=tools)
            choice = chat["choices"][0]
            completed = await client.complete(chat["prompt_token_ids"], max_tokens=500)
            again = completed["choices"][0]
            assert again["token_ids"] == choice["token_ids"]
            assert again["prompt_token_ids"] == chat["prompt_token_ids"]
            assert again["logprobs"]["tokens"] == [f"token_id:{n}" for n in again["token_ids"]]
            assert again["logprobs"]["token_logprobs"] == [entry["logprob"] for entry in choice["logprobs"]["content"]]
            assert again["finish_reason"] == "stop"
            assert client.journal[-1].turn == client.journal[-2].turn == number
            messages += [choice["message"], {"role": "tool", "content": "file"}]


async def test_completions_have_vllms_fields(serve: Serve, tokenizer: TextTokenizer) -> None:
    async with serve({"content": "{prompt} " + TEXT}, tokens_per_chunk=3) as client:
        whole = await client.complete("hello", max_tokens=500, stop=["answer"])
        chunks = await client.complete_stream(
            "hello", max_tokens=500, stop=["answer"], stream_options={"include_usage": True}
        )
        plain = await client.complete("hello", return_token_ids=None, logprobs=None)
    *parts, usage = chunks
    choice = whole["choices"][0]
    assert whole["object"] == parts[0]["object"] == "text_completion"
    assert choice["prompt_token_ids"] == tokenizer.encode_plain("hello").tolist()
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "answer")
    assert choice["text"].startswith("hello Having said hello, ")
    pieces = [part["choices"][0] for part in parts]
    assert "".join(piece["text"] for piece in pieces) == choice["text"]
    assert streamed_ids(parts) == choice["token_ids"]
    assert [piece["prompt_token_ids"] for piece in pieces] == [choice["prompt_token_ids"]] + [None] * (len(pieces) - 1)
    for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [entry for piece in pieces for entry in piece["logprobs"][key]] == choice["logprobs"][key]
    assert usage["choices"] == []
    assert whole["usage"] == usage["usage"] | {"prompt_tokens_details": None, "completion_tokens_details": None}
    # Who does not say how long a reply may be gets 16 tokens.
    assert plain["usage"]["completion_tokens"] == 16
    assert plain["choices"][0]["finish_reason"] == "length"
    assert plain["choices"][0]["token_ids"] is plain["choices"][0]["logprobs"] is None


async def test_an_aborted_reply_can_be_gone_on_with_at_any_token(serve: Serve) -> None:
    turn = {"reasoning": "hm", "content": TEXT, "tool_calls": [CALL]}
    async with serve(turn, chat_template="chatml_tools") as client:
        chat = await client.ask()
        prompt, choice = chat["prompt_token_ids"], chat["choices"][0]
        whole = (await client.complete(prompt, max_tokens=500))["choices"][0]
        for count in range(len(choice["token_ids"])):
            rest = (await client.complete(prompt + choice["token_ids"][:count], max_tokens=500))["choices"][0]
            assert choice["token_ids"][:count] + rest["token_ids"] == choice["token_ids"]
            logprobs = whole["logprobs"]["token_logprobs"]
            assert rest["logprobs"]["token_logprobs"] == logprobs[count:]
            assert whole["text"].endswith(rest["text"])
        other = (await client.complete([*prompt, 5, 6, 7], max_tokens=500))["choices"][0]
    assert other["text"] == whole["text"]


async def test_reasoning_has_a_field_of_its_own_and_is_sampled(serve: Serve, tokenizer: TextTokenizer) -> None:
    async with serve({"reasoning": "Hm, {prompt}", "content": TEXT}, chat_template="chatml_tools") as client:
        whole = await client.ask()
        chunks = await client.stream()
        message = whole["choices"][0]["message"]
        again = await client.ask(messages=[user("hello"), message, user("more")])
    sampled = tokenizer.decode(TokenIds.of(whole["choices"][0]["token_ids"]), True)
    assert sampled == f"<think>\nHm, hello\n</think>\n\n{TEXT}"
    assert (message["reasoning"], message["content"]) == ("Hm, hello", TEXT)
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "Hm, hello"
    assert "".join(delta.get("content", "") for delta in deltas) == TEXT
    history = tokenizer.decode(TokenIds.of(again["prompt_token_ids"]), True)
    assert sampled in history


async def test_an_operator_pauses_and_goes_on(serve: Serve) -> None:
    async with serve({"content": TEXT, "chunk_delay_s": 0.01}) as client:

        async def post(path: str, **body: Any) -> Any:
            async with client.http.post(path, json=body) as response:
                assert response.status == 200, await response.text()
                return await response.json()

        async with client.post("kept", stream=True) as response:
            await response.content.readline()
            await post("/pause?mode=keep")
            await post("/resume")
            assert b"[DONE]" in await response.content.read()
        async with client.post("named", stream=True) as named, client.post("other", stream=True) as other:
            await asyncio.gather(named.content.readline(), other.content.readline())
            assert (await post("/abort_requests", request_ids=["chatcmpl-named"]))["aborted"] == 1
            await named.content.read()
            await other.content.read()
        for mode, status in (("abort", 200), ("wait", 200), ("else", 400)):
            async with client.http.post(f"/pause?mode={mode}") as response:
                assert response.status == status
        await post("/update_weight_version", new_version="8")
        async with client.http.get("/weight_info") as response:
            assert await response.json() == {"weight_version": "8"}
        statuses = {entry.request_id: entry.status for entry in client.journal}
    assert statuses == {"kept": "ok", "named": "aborted", "other": "ok"}


async def test_a_call_that_waits_for_its_first_byte_is_aborted_without_ids(serve: Serve) -> None:
    async with serve({"content": TEXT, "delay_s": 60}) as client:
        for stream in (True, False):
            call = asyncio.ensure_future(client.ask(stream=stream) if not stream else client.stream())
            await asyncio.sleep(0.05)
            async with client.http.post("/abort_requests", json={}) as response:
                assert (await response.json())["aborted"] == 1
            answer = await call
            chunk = answer[-1] if isinstance(answer, list) else answer
            assert chunk["choices"][0]["finish_reason"] == "abort"
            assert chunk["choices"][0]["token_ids"] == []


async def test_with_canonical_ids_a_conversation_of_tool_calls_is_one_chain(serve: Serve) -> None:
    turns = ({"content": "I look.", "tool_calls": [CALL]}, {"content": "Having seen it: done."})
    async with serve(*turns, chat_template="chatml_tools", noncanonical=False) as client:
        first = await client.ask(messages=[user("a")])
        reply = first["choices"][0]
        tool = {"role": "tool", "content": "file", "tool_call_id": reply["message"]["tool_calls"][0]["id"]}
        second = await client.ask(messages=[user("a"), reply["message"], tool])

    chain = first["prompt_token_ids"] + reply["token_ids"]
    assert second["prompt_token_ids"][: len(chain)] == chain


async def test_requests_that_vllm_refuses(serve: Serve) -> None:
    async with serve({"content": "a"}, models=["m"]) as client:
        for fields, status in (({"model": "x"}, 404), ({"n": 2}, 400), ({"messages": []}, 200)):
            async with client.post(**fields) as response:
                assert response.status == status
        async with client.http.post("/v1/chat/completions", data=b"{") as response:
            assert response.status == 400
        image = [{"type": "image_url", "image_url": {"url": "data:"}}]
        async with client.post(messages=[{"role": "user", "content": image}]) as response:
            assert response.status == 400


async def test_the_other_endpoints(serve: Serve, tokenizer: TextTokenizer) -> None:
    async with serve({"content": "a"}, models=["m", "n"], max_model_len=99) as client:
        async with client.http.get("/health") as response:
            assert response.status == 200
        async with client.http.get("/v1/models") as response:
            models = (await response.json())["data"]
        async with client.http.post("/tokenize", json={"prompt": "hello<|im_end|>"}) as response:
            text = await response.json()
        async with client.http.post("/tokenize", json={"messages": [user("hello")]}) as response:
            conversation = await response.json()
        asked = await client.ask(model="n")

    assert [(model["id"], model["max_model_len"]) for model in models] == [("m", 99), ("n", 99)]
    assert text["tokens"][-1] == tokenizer.specials["<|im_end|>"]
    assert conversation["tokens"] == asked["prompt_token_ids"]
    assert asked["model"] == "n"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"conversations": [{"turns": [{"contents": "x"}]}]}', "unknown field `contents`"),
        ('{"conversations": []}', "length >= 1"),
        ('{"conversations": [{"turns": [{"fail_status": 200}]}]}', ">= 400"),
        ('{"conversations": [{"turns": [{"delay_s": -1}]}]}', ">= 0"),
        ("{", "truncated"),
    ],
)
def test_a_wrong_script_is_refused(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "s.json").write_text(content)
    with pytest.raises(ConfigError, match=says):
        load_script(tmp_path / "s.json")


async def test_a_busy_port_is_named(tokenizer: TextTokenizer) -> None:
    app = build_app(msgspec.convert({"conversations": [{"turns": [{}]}]}, Script), tokenizer)
    again = build_app(msgspec.convert({"conversations": [{"turns": [{}]}]}, Script), tokenizer)
    async with serve_app(app) as url:
        with pytest.raises(SetupError, match="cannot listen on"):
            async with serve_app(again, int(url.rsplit(":", 1)[1])):
                pytest.fail("two servers on one port")


async def test_the_command(tokenizer_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text('{"conversations": [{"turns": [{"content": "hi"}]}]}')
    options = [str(tmp_path / "s.json"), "--tokenizer", str(tokenizer_folder), "--journal", str(tmp_path / "j.jsonl")]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rollyard.gateway.scripted_llm", *options), stdout=subprocess.PIPE
    )
    assert process.stdout
    url = (await process.stdout.readline()).decode().strip()
    async with aiohttp.ClientSession(base_url=url) as http:
        answer = await Client(http, tmp_path / "j.jsonl").ask("x")
    process.send_signal(signal.SIGTERM)
    assert await process.wait() == 0

    assert answer["choices"][0]["message"]["content"] == "hi"
    assert [entry.request_id for entry in read_journal(tmp_path / "j.jsonl")] == ["x"]


def test_the_command_without_a_script(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rollyard.gateway.scripted_llm", str(tmp_path / "s.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"error: cannot read the script {tmp_path / 's.json'}" in done.stderr
