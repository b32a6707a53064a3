from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.gateway.local_model import LocalModel
from rollyard.gateway.scripted import chatml
from rollyard.gateway.tokens.renderer import Renderer
from rollyard.gateway.tokens.template import ChatTemplate
from rollyard.gateway.tokens.tokenizer import TextTokenizer
from rollyard.schemas.errors import ModelError
from rollyard.schemas.packed import TokenIds

Messages = list[dict[str, Any]]
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"properties": {"<|im_end|>": {}}}}}]
tricky = st.lists(
    st.sampled_from(["<|im_start|>", "<|im_end|>", "<|im_", "end|>", "<", "system\n", "hello", "\n", " ", "é😀"])
).map("".join)
contents = st.text(st.characters(codec="utf-8")) | tricky


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def count(ids: TokenIds, number: int) -> int:
    return ids.tolist().count(number)


def end_of(renderer: Renderer) -> int:
    return renderer.tokenizer.specials["<|im_end|>"]


@given(texts=st.lists(contents, min_size=1, max_size=4))
def test_only_the_templates_own_specials_are_special(renderer: Renderer, texts: list[str]) -> None:
    ids = renderer.prompt([user(text) for text in texts], None)

    assert count(ids, end_of(renderer)) == len(texts)
    assert count(ids, renderer.tokenizer.specials["<|im_start|>"]) == len(texts) + 1
    expected = "".join(f"<|im_start|>user\n{text}<|im_end|>\n" for text in texts) + "<|im_start|>assistant\n"
    assert renderer.tokenizer.decode(ids, skip_special=False) == expected


def test_specials_in_tools_arguments_and_names_are_text_too(tokenizer: TextTokenizer) -> None:
    renderer = Renderer(tokenizer, ChatTemplate(chatml.TEMPLATE))
    arguments = '{"command": "\\u003c|im_end|> <|im_end|>"}'
    call = {"id": "1", "type": "function", "function": {"name": "f<|im_end|>", "arguments": arguments}}
    messages = [user("a"), {"role": "assistant", "content": None, "tool_calls": [call]}, user("b")]

    ids = renderer.prompt(messages, TOOLS)

    assert count(ids, end_of(renderer)) == 4
    assert '"<|im_end|> <|im_end|>"' in tokenizer.decode(ids, skip_special=False)


def test_specials_in_options_are_text_too(tokenizer: TextTokenizer) -> None:
    renderer = Renderer(
        tokenizer, ChatTemplate(chatml.TEMPLATE + "{% if add_generation_prompt %}{{ effort }}{% endif %}")
    )
    options = {"effort": "<|im_end|>"}
    end = TokenIds.of([end_of(renderer)])

    ids = renderer.prompt([user("a")], None, options)
    suffix = renderer.suffix([user("a"), assistant("b"), user("c")], None, 2, end, options)

    assert suffix is not None
    assert (count(ids, end[0]), count(suffix, end[0])) == (1, 1)
    assert renderer.tokenizer.decode(ids, False).endswith("assistant\n<|im_end|>")
    assert renderer.tokenizer.decode(suffix, False).endswith("assistant\n<|im_end|>")


@given(
    first=contents,
    sampled=st.tuples(st.lists(st.integers(0, 380), max_size=12), st.booleans()),
    echoed=contents,
    later=st.lists(contents, min_size=1, max_size=3),
)
def test_the_next_prompt_continues_the_sampled_ids(
    renderer: Renderer, first: str, sampled: tuple[list[int], bool], echoed: str, later: list[str]
) -> None:
    end = end_of(renderer)
    ids, ended = sampled
    sampled_ids = TokenIds.of([*ids, end] if ended else ids)
    cut = not len(sampled_ids) or sampled_ids[-1] != end

    suffix = renderer.suffix([user(first), assistant(echoed), *map(user, later)], None, 2, sampled_ids)

    assert suffix is not None
    turns = "".join(f"<|im_start|>user\n{text}<|im_end|>\n" for text in later) + "<|im_start|>assistant\n"
    junction = "<|im_end|>\n" if cut else "\n"
    assert renderer.tokenizer.decode(suffix, skip_special=False) == junction + turns
    assert count(suffix, end) == len(later) + cut


@given(first=contents, reply=contents, second=contents)
def test_where_nothing_was_sampled_oddly_the_continued_prompt_is_the_rendered_one(
    renderer: Renderer, first: str, reply: str, second: str
) -> None:
    messages = [user(first), assistant(reply), user(second)]
    whole = renderer.prompt(messages, None)
    before = renderer.prompt(messages[:1], None)
    sampled = renderer.tokenizer.encode_plain(reply) + TokenIds.of([end_of(renderer)])

    suffix = renderer.suffix(messages, None, 2, sampled)

    assert suffix is not None
    text = renderer.tokenizer.decode
    assert text(before + sampled + suffix, False) == text(whole, False)
    if reply[:1].isalpha() and reply.isascii():
        assert before + sampled + suffix == whole


def test_tool_messages_and_several_turns(tokenizer: TextTokenizer) -> None:
    renderer = Renderer(tokenizer, ChatTemplate(chatml.TEMPLATE))
    call = {"id": "1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    tool = {"role": "tool", "tool_call_id": "1", "content": "file <|im_end|>"}
    messages = [{"role": "system", "content": "s"}, user("a"), asked, tool, asked, tool]
    end = TokenIds.of([end_of(renderer)])

    suffix = renderer.suffix(messages, TOOLS, 5, tokenizer.encode_plain("odd ids") + end)

    assert suffix is not None
    expected = "\n<|im_start|>tool\nfile <|im_end|><|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(suffix, skip_special=False) == expected
    assert count(suffix, end[0]) == 1
    assert renderer.prompt(messages, TOOLS)[-len(suffix) :] == suffix


def test_another_end_of_text_does_not_replace_the_end_of_turn(renderer: Renderer) -> None:
    other = TokenIds.of([renderer.tokenizer.specials["<|endoftext|>"]])

    suffix = renderer.suffix([user("a"), assistant("b"), user("c")], None, 2, other)

    assert suffix is not None
    assert suffix[0] == end_of(renderer)


MOVES_TOOLS = (
    "{% for m in messages %}{% if loop.last and tools %}{{ tools | tojson }}{% endif %}"
    "{{ m.role + ':' + m.content + '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
DROPS_REPLIES = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}assistant:"
WRITES_TWICE = "{% for m in messages %}{{ m.content }}{% endfor %}{{ messages[1].content if messages[1] }}"
STRIPS_REASONING = (
    "{% set last = namespace(at=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set last.at = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if loop.index0 > last.at %}{{ m.content }}{% else %}{{ m.content.split('</think>')[-1] }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("source", "tools"),
    [(MOVES_TOOLS, TOOLS), (DROPS_REPLIES, None), (WRITES_TWICE, None)],
    ids=["moves", "drops", "twice"],
)
def test_a_template_that_rewrites_the_past_cannot_be_continued(
    tokenizer: TextTokenizer, source: str, tools: Messages | None
) -> None:
    renderer = Renderer(tokenizer, ChatTemplate(source))

    assert renderer.suffix([user("a"), assistant("b"), user("c")], tools, 2, TokenIds.of([1])) is None


def test_a_template_that_strips_old_reasoning_is_continued(tokenizer: TextTokenizer) -> None:
    renderer = Renderer(tokenizer, ChatTemplate(STRIPS_REASONING))
    thought = assistant("<think>long</think>b")
    messages = [user("a"), thought, {"role": "tool", "content": "t"}, thought, user("c")]

    suffix = renderer.suffix(messages, None, 4, TokenIds.of([end_of(renderer)]))

    assert suffix is not None
    assert tokenizer.decode(suffix, False) == "\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"


def test_private_characters_in_a_message_are_kept(renderer: Renderer) -> None:
    text = "a\ufdd0b\ufdd1 <|im_end|>"
    ids = renderer.prompt([user(text)], None)
    assert text in renderer.tokenizer.decode(ids, skip_special=False)

    with pytest.raises(ModelError, match="private use"):
        renderer.prompt([user("".join(map(chr, range(0xFDD0, 0xFDF0))))], None)


CONVERSATIONS: list[Messages] = [
    [user("Hello")],
    [{"role": "system", "content": "Be brief."}, user("What is 2 + 3?")],
    [user("a\n\nb   c\n"), assistant("Having said hello:\n\n    return 1"), user("émoji 😀 \t x")],
    [user([{"type": "text", "text": "two"}, {"type": "text", "text": "parts"}])],  # type: ignore[arg-type]
    [user(""), assistant("12345"), user("  spaces  "), assistant("x"), user("```python\nprint('<b>')\n```")],
]


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


@pytest.mark.model
@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_prompts_equal_llama_cpps(local_model: LocalModel, model_tokenizer: TextTokenizer, messages: Messages) -> None:
    assert model_tokenizer.chat_template is not None
    renderer = Renderer(model_tokenizer, ChatTemplate(model_tokenizer.chat_template))

    text = post(local_model.url + "/apply-template", {"messages": messages})["prompt"]
    ids = post(local_model.url + "/tokenize", {"content": text, "parse_special": True})["tokens"]

    assert renderer.prompt(messages, None).tolist() == ids


@pytest.mark.model
@pytest.mark.parametrize("text", ["<|im_end|> a", "x<|im_start|>system\n<|endoftext|>", "<repo_name>ééé😀 123"])
def test_plain_text_equals_llama_cpps(local_model: LocalModel, model_tokenizer: TextTokenizer, text: str) -> None:
    ids = post(local_model.url + "/tokenize", {"content": text, "parse_special": False})["tokens"]

    assert model_tokenizer.encode_plain(text).tolist() == ids


@pytest.mark.model
def test_llama_cpp_continues_the_ids_that_it_sampled(local_model: LocalModel, model_tokenizer: TextTokenizer) -> None:
    assert model_tokenizer.chat_template is not None
    renderer = Renderer(model_tokenizer, ChatTemplate(model_tokenizer.chat_template))
    messages = [user("Say hello.")]
    prompt = renderer.prompt(messages, None)
    odd = TokenIds.of([56, 565, 274, 2])  # "Having" as a tokenizer would not write it, and the end of turn
    messages += [assistant("Having"), user("Go on.")]
    suffix = renderer.suffix(messages, None, 2, odd)
    assert suffix is not None
    body = {"prompt": (prompt + odd + suffix).tolist(), "n_predict": 1, "cache_prompt": False}

    answer = post(local_model.url + "/completion", body)

    assert answer["tokens_evaluated"] == len(prompt) + 4 + len(suffix)
    assert renderer.prompt(messages, None) == prompt + TokenIds.of([15432, 2]) + suffix
