"""One reply as it is sampled: ids to text, text cut at stop strings, then read by the model's family. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rollyard.gateway.tokens.decoder import IncrementalDecoder, StopStrings
from rollyard.gateway.tokens.parsers.parser import Piece, ReplyParser
from rollyard.gateway.tokens.tokenizer import TextTokenizer
from rollyard.schemas.packed import TokenIds


class ReplyReader:
    """Reads one reply, pushed in any portions.

    Stop strings are looked for as model servers do: in all of the text, reasoning and calls included. `stop_string` is
    the one that was met; `finished` says that the reply is over, by it or by an id of `eos_ids`: ids that still come
    give no text.
    """

    def __init__(
        self, tokenizer: TextTokenizer, parser: ReplyParser, stops: Sequence[str], eos_ids: Collection[int]
    ) -> None:
        self.finished = False
        self._parser = parser
        self._shown = frozenset(tokenizer.specials[name] for name in parser.specials & tokenizer.specials.keys())
        self._eos_ids = frozenset(eos_ids)
        self._tokenizer = tokenizer
        self._decoder = IncrementalDecoder(tokenizer, shown=self._shown)
        self._stops = StopStrings(stops)

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the reply."""
        return self._stops.matched

    def push(self, ids: TokenIds, text: str | None = None) -> Piece:
        """What these ids add. `text`, where given, is what they say, for ids that are not all there."""
        if self.finished:
            return Piece()
        numbers = ids.tolist()
        end = next((at for at, number in enumerate(numbers) if number in self._eos_ids), None)
        if end is not None:
            # Some families end a call with an id that ends the turn: their parsers see it, agents never do.
            numbers = numbers[: end + (numbers[end] in self._shown)]
        said = self._decoder.push(numbers) if text is None else self._given(numbers, text)
        piece = self._read(said)
        self.finished = self.finished or end is not None
        return piece

    def end(self) -> Piece:
        """The reply is over: what was held back."""
        piece = self._read(self._decoder.flush())
        last = self._parser.push(self._stops.flush())
        return _joined(_joined(piece, last), self._parser.end())

    def _read(self, text: str) -> Piece:
        piece = self._parser.push(self._stops.push(text))
        self.finished = self.finished or self._stops.matched is not None
        return piece

    def _given(self, numbers: list[int], text: str) -> str:
        """A server's own text, which lacks the special tokens; half characters of before are in it."""
        self._decoder.reset()
        marks = self._decoder.push(number for number in numbers if number in self._shown)
        return text if marks in text else marks + text


def _joined(first: Piece, second: Piece) -> Piece:
    return Piece(first.reasoning + second.reasoning, first.text + second.text, first.tool_calls + second.tool_calls)
