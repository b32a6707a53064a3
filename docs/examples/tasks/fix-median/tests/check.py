import os
import sys

sys.path.insert(0, os.getcwd())
from stats import median, spread

assert median([3, 1, 2]) == 2
assert median([4, 1, 3, 2]) == 2.5
assert median([7]) == 7
assert median([2, 2]) == 2
values = [5, 3, 4, 1]
assert median(values) == 3.5
assert values == [5, 3, 4, 1], "the list was changed"
assert spread([1, 9, 4]) == 8
try:
    median([])
except ValueError:
    pass
else:
    raise AssertionError("no ValueError for an empty list")
