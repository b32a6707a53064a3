#!/bin/bash
cat >cache.py <<'PYTHON'
from collections import OrderedDict


class Cache:
    def __init__(self, size, lifetime, clock):
        if size < 1:
            raise ValueError("a cache has room for one entry at least")
        self._size, self._lifetime, self._clock = size, lifetime, clock
        self._entries = OrderedDict()

    def put(self, key, value):
        self._drop_expired()
        self._entries[key] = (value, self._clock() + self._lifetime)
        self._entries.move_to_end(key)
        if len(self._entries) > self._size:
            self._entries.popitem(last=False)

    def get(self, key, default=None):
        self._drop_expired()
        if key not in self._entries:
            return default
        self._entries.move_to_end(key)
        return self._entries[key][0]

    def __len__(self):
        self._drop_expired()
        return len(self._entries)

    def _drop_expired(self):
        now = self._clock()
        for key in [key for key, (_, until) in self._entries.items() if until <= now]:
            del self._entries[key]
PYTHON
