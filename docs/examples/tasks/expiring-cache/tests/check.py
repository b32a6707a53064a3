import os
import sys

sys.path.insert(0, os.getcwd())
from cache import Cache

now = 0.0
cache = Cache(2, 10, lambda: now)
cache.put("a", 1)
cache.put("b", 2)
assert (cache.get("a"), cache.get("b"), cache.get("c"), cache.get("c", 7), len(cache)) == (1, 2, None, 7, 2)
cache.get("a")
cache.put("c", 3)
assert (cache.get("a"), cache.get("b"), cache.get("c")) == (1, None, 3), "the one that was used last must stay"
now = 9.9
assert cache.get("a") == 1
now = 10.0
assert (cache.get("a"), len(cache)) == (None, 0), "an entry expires at its time"
cache.put("a", None)
assert cache.get("a", "no") is None, "None is a value like any other"
now = 15.0
cache.put("b", 2)
now = 20.0
cache.put("d", 4)
assert (cache.get("b"), cache.get("d"), len(cache)) == (2, 4, 2), "what has expired goes first"
now = 24.0
cache.put("b", 5)
now = 26.0
assert (cache.get("b"), len(cache)) == (5, 2), "putting again lets an entry live longer"
for size in (0, -1):
    try:
        Cache(size, 1, lambda: now)
    except ValueError:
        continue
    raise AssertionError(f"no ValueError for a size of {size}")
old = Cache(2, 10, lambda: now)
old.put("x", 1)
now += 5
old.put("y", 2)
old.get("x")
now += 5
old.put("z", 3)
assert (old.get("y"), old.get("z")) == (2, 3), "an expired entry goes before a living one, whenever it was read"
