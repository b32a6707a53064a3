from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from rollyard.gateway.tokens.parsers import make_parser
from rollyard.gateway.tokens.parsers.parser import Piece, ToolCall
from rollyard.gateway.tokens.reply import ReplyReader
from rollyard.gateway.tokens.tokenizer import TextTokenizer
from rollyard.schemas.packed import TokenIds

TOOLS = [{"type": "function", "function": {"name": "f"}}]
CALL = '<tool_call>{"name": "f", "arguments": {"x": "é"}}</tool_call>'


def reader(tokenizer: TextTokenizer, *stops: str, family: str = "hermes") -> ReplyReader:
    return ReplyReader(tokenizer, make_parser(family, tools=TOOLS), stops, tokenizer.eos_ids)


def joined(pieces: list[Piece]) -> Piece:
    return Piece(
        "".join(piece.reasoning for piece in pieces),
        "".join(piece.text for piece in pieces),
        tuple(call for piece in pieces for call in piece.tool_calls),
    )


def with_specials(*names: str) -> TextTokenizer:
    """Every byte is a token, and these are special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({character: number for number, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return TextTokenizer(backend)


@given(
    text=st.lists(st.sampled_from(["<think>", "</think>", "é😀", CALL, "STOP", "ST", "\n", "hello", "<tool_call>"])),
    ended=st.booleans(),
    cuts=st.lists(st.integers(0, 80)),
)
def test_ids_in_any_portions_give_the_same_reply(
    tokenizer: TextTokenizer, text: list[str], ended: bool, cuts: list[int]
) -> None:
    ids = tokenizer.encode_plain("".join(text)).tolist() + [tokenizer.specials["<|im_end|>"]] * ended
    whole, pieces = reader(tokenizer, "STOP"), reader(tokenizer, "STOP")
    places = sorted({min(cut, len(ids)) for cut in cuts} | {0, len(ids)})

    expected = joined([whole.push(TokenIds.of(ids)), whole.end()])
    found = joined([*(pieces.push(TokenIds.of(ids[a:b])) for a, b in itertools.pairwise(places)), pieces.end()])

    assert found == expected
    assert pieces.stop_string == whole.stop_string == ("STOP" if "STOP" in "".join(text) else None)
    assert pieces.finished == whole.finished == (ended or whole.stop_string is not None)


def test_the_end_of_turn_is_never_shown_and_nothing_comes_after_it(tokenizer: TextTokenizer) -> None:
    reply = reader(tokenizer)
    end = TokenIds.of([tokenizer.specials["<|im_end|>"]])

    piece = reply.push(tokenizer.encode_plain("hello") + end + tokenizer.encode_plain("more"))

    assert reply.finished
    assert reply.stop_string is None
    assert joined([piece, reply.push(tokenizer.encode_plain("more")), reply.end()]) == Piece(text="hello")


def test_other_specials_are_left_out(tokenizer: TextTokenizer) -> None:
    reply = reader(tokenizer)
    ids = tokenizer.encode_plain("a") + TokenIds.of([tokenizer.specials["<|im_start|>"]]) + tokenizer.encode_plain("b")
    assert joined([reply.push(ids), reply.end()]) == Piece(text="ab")
    assert not reply.finished


def test_a_stop_string_ends_the_reply_within_a_call(tokenizer: TextTokenizer) -> None:
    reply = reader(tokenizer, '"arguments"')
    pieces = [reply.push(TokenIds.of([number])) for number in tokenizer.encode_plain("so\n" + CALL)]
    assert reply.finished
    assert reply.stop_string == '"arguments"'
    assert joined([*pieces, reply.end()]) == Piece(text='so\n<tool_call>{"name": "f", ')


def test_half_a_character_at_the_end(tokenizer: TextTokenizer) -> None:
    reply = reader(tokenizer)
    half = tokenizer.encode_plain("😀")[:-1]
    assert reply.push(half) == Piece()
    assert reply.end() == Piece(text="\ufffd")


def test_special_tokens_that_a_family_writes_are_read() -> None:
    tokenizer = with_specials("[TOOL_CALLS]", "[ARGS]", "</s>", "[INST]")
    ids = tokenizer.encode_rendered('so[TOOL_CALLS]f[ARGS]{"x": 1}</s>', "")
    reply = reader(tokenizer, family="mistral")
    assert joined([reply.push(ids), reply.end()]) == Piece(text="so", tool_calls=(ToolCall("f", '{"x": 1}'),))
    assert reply.finished


def test_an_end_of_turn_that_closes_a_call_is_for_the_parser_only() -> None:
    tokenizer = with_specials("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
    call = "<|start|>assistant to=functions.f<|channel|>commentary<|message|>{<|call|>"
    text = "<|channel|>analysis<|message|>a<|end|>" + call
    reply = reader(tokenizer, family="harmony")
    assert joined([reply.push(tokenizer.encode_rendered(text, "")), reply.end()]) == Piece(
        "a", tool_calls=(ToolCall("f", "{"),)
    )
    assert reply.finished


def test_a_servers_own_text_replaces_what_ids_say() -> None:
    tokenizer = with_specials("[TOOL_CALLS]", "[ARGS]", "</s>")
    reply = reader(tokenizer, family="mistral")
    smile = tokenizer.encode_plain("😀")
    mark, args, end = (TokenIds.of([tokenizer.specials[name]]) for name in ("[TOOL_CALLS]", "[ARGS]", "</s>"))
    pieces = [
        reply.push(smile[:1]),
        reply.push(smile[3:], "😀"),
        reply.push(mark, ""),
        reply.push(TokenIds(), "f"),
        reply.push(args, "[ARGS]"),
        reply.push(tokenizer.encode_plain("{}")),
        reply.push(end, ""),
    ]
    assert joined([*pieces, reply.end()]) == Piece(text="😀", tool_calls=(ToolCall("f", "{}"),))
    assert reply.finished
