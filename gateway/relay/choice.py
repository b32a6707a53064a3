"""Which gateway a sandbox goes to: always the same one while that lives, and each gateway its share. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from rollyard.gateway.rendezvous import choose, ranking

SUSPECT_S = 2.0
"""A gateway that took no connection is tried last for so long."""


@dataclass
class Choice:
    """Remembers the gateway of each key (a sandbox), so that its session's state stays in one gateway's memory."""

    _at: dict[str, str] = field(default_factory=dict)
    _suspect_until_s: dict[str, float] = field(default_factory=dict)

    def order(self, key: str, urls: Sequence[str], now_s: float) -> list[str]:
        """All of `urls`, each once, in the order in which to try them for `key`.

        The key's own comes first; one without goes where few are. Those that would not take a connection lately come
        last. `now_s` is a monotonic time.
        """
        if not urls:
            return []
        own = self._at.get(key, "")
        if own not in urls:
            counts = Counter(self._at.values())
            own = choose(key, {url: counts[url] for url in urls})
        ordered = [own, *(url for url in ranking(key, dict.fromkeys(urls)) if url != own)]
        return sorted(ordered, key=lambda url: self._suspect_until_s.get(url, now_s) > now_s)

    def took(self, key: str, url: str) -> None:
        """The gateway took a connection of the key: it is the key's from now on."""
        self._at[key] = url
        self._suspect_until_s.pop(url, None)

    def refused(self, url: str, now_s: float) -> bool:
        """The gateway took no connection. Returns whether that is news."""
        self._suspect_until_s = {each: until for each, until in self._suspect_until_s.items() if until > now_s}
        known = url in self._suspect_until_s
        self._suspect_until_s[url] = now_s + SUSPECT_S
        return not known

    def forget(self, key: str) -> None:
        """The sandbox is gone."""
        self._at.pop(key, None)
