"""Sampled ids to text while they come: whole characters only, and nothing that may turn out to be a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable

from rollyard.gateway.tokens.tokenizer import TextTokenizer


class IncrementalDecoder:
    """Gives the text of ids as they come. Pushed in any portions, the text is the same as `decode` of all of them.

    Special tokens are left out with `skip_special`, except those in `shown`.
    """

    def __init__(
        self, tokenizer: TextTokenizer, *, skip_special: bool = True, shown: Collection[int] = frozenset()
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = (tokenizer.special_ids if skip_special else frozenset()) - frozenset(shown)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strips_space = tokenizer.alphabet.strips_space

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids complete; the bytes of a half character are held back."""
        text = self._utf8.decode(b"".join(self._tokenizer.token_bytes(n) for n in ids if n not in self._hidden))
        if text and self._strips_space:
            self._strips_space = False
            return text.removeprefix(" ")
        return text

    def reset(self) -> None:
        """Forget half a character."""
        self._utf8.reset()

    def flush(self) -> str:
        """What is held back, at the end: half a character is U+FFFD."""
        return self._utf8.decode(b"", final=True)


class StopStrings:
    """Cuts text before the stop string that is complete first; of those complete together, the longest.

    `matched` is that stop string once it was seen. Pushed in any portions, the text is the same.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that is certainly before any stop string; what could be the start of one is held back."""
        if self.matched is not None:
            return ""
        self._held += text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            _, start, self.matched = min(found)
            return self._release(start)
        return self._release(len(self._held) - max((self._overlap(stop) for stop in self._stops), default=0))

    def flush(self) -> str:
        """What is held back, at the end."""
        return "" if self.matched is not None else self._release(len(self._held))

    def _overlap(self, stop: str) -> int:
        """How many characters at the end of the held text could begin this stop string."""
        longest = min(len(stop) - 1, len(self._held))
        return next((size for size in range(longest, 0, -1) if self._held.endswith(stop[:size])), 0)

    def _release(self, size: int) -> str:
        released, self._held = self._held[:size], self._held[size:]
        return released
