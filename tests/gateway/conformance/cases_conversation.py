"""What a request may hold: messages, limits, forms, options; and what it may refer to."""

from __future__ import annotations

import gzip
from functools import partial
from itertools import pairwise
from typing import Any

import msgspec
from conformance_table import EVERY, NA, YES, Unsupported, feature
from gateway_rig import Talk

from rollyard.schemas.call import CallRecord
from rollyard.schemas.packed import TokenIds
from rollyard.schemas.task import Sampling

row = partial(feature, group="Requests")
TOKENS_RECORDED = "no: recorded only"


def full(record: CallRecord) -> TokenIds:
    """Prompt and sampled ids of a call."""
    assert record.end is not None
    return record.prompt_ids + record.end.completion_ids


async def chain(talk: Talk, calls: int) -> list[CallRecord]:
    """The records of a session, which are one chain: by parents always, by ids in tokens mode."""
    records = await talk.records()
    assert len(records) == calls
    assert [record.intent.parent for record in records] == [None, *(each.intent.call_id for each in records[:-1])]
    assert [record.intent.drift for record in records] == [None] * calls
    assert [record.end and (record.end.status, record.end.untrainable) for record in records] == [("ok", None)] * calls
    if talk.model.endswith("-tokens"):
        for record, after in pairwise(records):
            assert after.prompt_ids.startswith(full(record))
    return records


@row("Text, whole and streamed", completions=YES, models=EVERY)
async def text(talk: Talk) -> None:
    talk.user("good day")
    for stream in (False, True):
        said = await talk.repeat(stream=stream)
        assert (said.text, said.finish) == ("hello 0", talk.speaker.words["stop"])


@row("A conversation is one chain of calls", models=EVERY)
async def conversation(talk: Talk) -> None:
    talk.system = "Be brief."
    for turn in range(4):
        talk.user(f"say on {turn} \u00e4\U0001f600 <|im_end|>")
        said = await talk.ask(stream=bool(turn % 2))
        assert said.text == f"hello {turn}"
    records = await chain(talk, 4)
    assert [len(record.intent.messages) for record in records] == [2, 1, 1, 1]


@row("System prompt")
async def system_prompt(talk: Talk) -> None:
    talk.system = "Be brief."
    talk.user("go")
    await talk.ask()
    [record] = await talk.records()
    assert [message["role"] for message in record.messages] == ["system", "user"]
    assert record.messages[0]["content"] == "Be brief."
    assert "Be brief." in talk.rig.tokenizer.decode(record.prompt_ids, True)


@row("Developer messages", messages=NA)
async def developer_message(talk: Talk) -> None:
    talk.history.append({**talk.speaker.system("Be kind."), "role": "developer"})
    talk.history.append(talk.speaker.user(f"{talk.opening} go"))
    assert (await talk.ask()).text == "hello 0"
    [record] = await talk.records()
    assert [(message["role"], message["content"]) for message in record.messages[:1]] == [("developer", "Be kind.")]
    assert "Be kind." in talk.rig.tokenizer.decode(record.prompt_ids, True)


@row("System messages later on")
async def system_message_later(talk: Talk) -> None:
    talk.user("go")
    await talk.ask()
    talk.history.append(talk.speaker.system("The date is new."))
    talk.user("go on")
    assert (await talk.ask()).text == "hello 1"
    records = await chain(talk, 2)
    assert [message["role"] for message in records[-1].messages] == ["user", "assistant", "system", "user"]
    assert "The date is new." in talk.rig.tokenizer.decode(records[-1].prompt_ids, True)


@row("Images", tokens="no: 400, text only")
async def images(talk: Talk) -> None:
    talk.history.append(talk.speaker.image(f"{talk.opening} what is it?", "aGVsbG8="))
    if talk.model.endswith("-tokens"):
        _, _, message = await talk.refused(400)
        assert "images need a server in capture mode" in message
        raise Unsupported
    talk.model = "odd"
    await talk.ask()
    content = (await talk.asked())["messages"][-1]["content"]
    assert [part["type"] for part in content] == ["text", "image_url"]
    assert content[1]["image_url"]["url"] == "data:image/png;base64,aGVsbG8="


@row("`n` replies", responses=NA, messages=NA, completions=YES)
async def several_choices(talk: Talk) -> None:
    talk.user("go")
    async with talk.post(talk.body(n=3)) as response:
        body = await response.json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    records = await talk.records()
    assert len({record.intent.call_id for record in records}) == 3
    sampled = sum(len(record.end.completion_ids) for record in records if record.end)
    assert body["usage"]["completion_tokens"] == sampled
    assert body["usage"]["prompt_tokens"] == len(records[0].prompt_ids)


@row("Stop strings, named where the protocol does", {"content": "one STOP two"}, completions=YES, models=EVERY)
async def stop_strings(talk: Talk) -> None:
    talk.user("go")
    for stream in (False, True):
        said = await talk.repeat(stream=stream, **{talk.speaker.stop: ["STOP", "never"]})
        assert (said.text, said.finish) == ("one ", talk.speaker.words["stop_string"])
        assert talk.protocol != "messages" or said.body["stop_sequence"] == "STOP"
    assert [record.end and record.end.stop_string for record in await talk.records()] == ["STOP"] * 2


@row("Most tokens; then the protocol's own word for it", completions=YES, models=EVERY)
async def most_tokens(talk: Talk) -> None:
    talk.user("go")
    for stream in (False, True):
        said = await talk.repeat(stream=stream, **{talk.speaker.limit: 2})
        assert said.finish == talk.speaker.words["length"]
        assert said.usage and said.usage[1] == 2


@row("JSON schema of the reply", models=EVERY)
async def json_schema(talk: Talk) -> None:
    schema = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
    talk.user("go")
    await talk.ask(**talk.speaker.schema(schema))
    assert msgspec.json.encode(schema) in msgspec.json.encode(await talk.asked()).replace(b'\\"', b'"')


@row("Temperature, top_p; the task's own come before", completions=YES)
async def sampling(talk: Talk) -> None:
    talk.grant = {"sampling": Sampling(temperature=0.5)}
    talk.user("go")
    await talk.ask(temperature=0.9, top_p=0.8)
    [record] = await talk.records()
    asked = await talk.asked()
    for params in (record.intent.params, asked):
        assert (params["temperature"], params["top_p"]) == (0.5, 0.8)


@row("Effort of reasoning", tokens=TOKENS_RECORDED)
async def effort(talk: Talk) -> None:
    said = {"chat": {"reasoning_effort": "high"}, "responses": {"reasoning": {"effort": "high"}}}
    talk.user("go")
    await talk.ask(**said.get(talk.protocol, {"output_config": {"effort": "high"}}))
    [record] = await talk.records()
    assert record.intent.extras["reasoning_effort"] == "high"
    if "reasoning_effort" not in await talk.asked():
        raise Unsupported
    assert (await talk.asked())["reasoning_effort"] == "high"


@row("Options of the chat template")
async def template_options(talk: Talk) -> None:
    fields: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
    talk.user("go")
    await talk.ask(**({"thinking": {"type": "disabled"}} if talk.protocol == "messages" else fields))
    [record] = await talk.records()
    assert record.intent.template == {"enable_thinking": False}
    if talk.model.endswith("-capture"):
        assert (await talk.asked())["chat_template_kwargs"] == {"enable_thinking": False}


@row("Fields that nobody knows are no error", completions=YES)
async def unknown_fields(talk: Talk) -> None:
    talk.user("go")
    talk.headers["x-unheard-of"] = "1"
    said = await talk.ask(unheard_of={"a": [1]}, metadata={"user_id": "u"}, service_tier="auto", verbosity=None)
    assert said.text == "hello 0"


@row("Key as bearer token, `x-api-key`, or in the path", completions=YES)
async def keys(talk: Talk) -> None:
    talk.user("go")
    for path, headers in (
        (talk.speaker.path, {"Authorization": f"bearer {talk.key}"}),
        (talk.speaker.path, {"x-api-key": talk.key}),
        (f"/s/{talk.key}{talk.speaker.path}?beta=true", {"Authorization": "Bearer none"}),
    ):
        async with talk.rig.client.post(talk.gateway.url + path, json=talk.body(), headers=headers) as response:
            assert response.status == 200
    assert len(await talk.records()) == 3


@row("Bodies compressed by gzip", completions=YES)
async def compressed(talk: Talk) -> None:
    talk.user("go")
    talk.headers["Content-Encoding"] = "gzip"
    async with talk.post(gzip.compress(msgspec.json.encode(talk.body()))) as response:
        assert response.status == 200


@row("`previous_response_id`", chat=NA, messages=NA)
async def previous_response(talk: Talk) -> None:
    talk.system = "Be brief."
    talk.user("go")
    first = await talk.ask()
    talk.history = [talk.speaker.user("go on")]
    second = await talk.repeat(previous_response_id=first.body["id"])
    assert second.text == "hello 1"
    records = await chain(talk, 2)
    assert [message["role"] for message in records[1].messages] == ["system", "user", "assistant", "user"]
    _, code, _ = await talk.refused(400, talk.body(previous_response_id="resp_none"))
    assert code == "previous_response_not_found"


@row("`item_reference`", chat=NA, messages=NA)
async def item_reference(talk: Talk) -> None:
    talk.user("go")
    first = await talk.repeat()
    talk.history += [{"type": "item_reference", "id": item["id"]} for item in first.echo]
    talk.user("go on")
    assert (await talk.ask()).text == "hello 1"
    await chain(talk, 2)


@row("`conversation`, `prompt` of the vendor's store", chat=NA, messages=NA, responses="no: 400, send the input")
async def stored_conversation(talk: Talk) -> None:
    talk.user("go")
    for name in ("conversation", "prompt"):
        _, code, message = await talk.refused(400, talk.body(**{name: "id_1"}))
        assert code == "unsupported_value" and f"`{name}`" in message
    raise Unsupported


@row("`background`", chat=NA, messages=NA, responses="no: answered at once")
async def background(talk: Talk) -> None:
    talk.user("go")
    said = await talk.ask(background=True)
    assert (said.body["background"], said.finish) == (False, "completed")
    raise Unsupported


@row("`count_tokens`, exact", chat=NA, responses=NA)
async def count_tokens(talk: Talk) -> None:
    talk.tools, talk.system = True, "Be brief."
    talk.user("count \u00e4\U0001f600")
    said = await talk.repeat()
    body = talk.body()
    del body["stream"], body["max_tokens"]
    async with talk.post(body, path="/v1/messages/count_tokens?beta=true") as response:
        counted = await response.json()
    assert said.usage
    assert counted == {"input_tokens": said.usage[0]}


@row("Prompt as token ids", chat=NA, responses=NA, messages=NA, completions="no: 400, text only", tokens=YES)
async def prompt_ids(talk: Talk) -> None:
    ids = talk.rig.tokenizer.encode_plain(f"{talk.opening} go").tolist()
    if talk.model.endswith("-capture"):
        _, code, _ = await talk.refused(400, talk.body(prompt=ids))
        assert code == "unsupported_value"
        raise Unsupported
    said = await talk.repeat(prompt=ids)
    assert said.text == "hello 0"
    [record] = await talk.records()
    assert record.prompt_ids.tolist() == ids


@row(
    "`suffix`, `echo`, `best_of`, several prompts",
    chat=NA,
    responses=NA,
    messages=NA,
    completions="no: 400",
)
async def completion_extras(talk: Talk) -> None:
    talk.user("go")
    for fields in ({"suffix": "x"}, {"echo": True}, {"best_of": 2}, {"prompt": ["a", "b"]}):
        _, code, _ = await talk.refused(400, talk.body(**fields))
        assert code == "unsupported_value"
    raise Unsupported
