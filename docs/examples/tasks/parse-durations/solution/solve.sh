#!/bin/bash
cat >durations.py <<'PYTHON'
import re
import sys

UNITS = re.compile(r"(?:([0-9]+) *d)? *(?:([0-9]+) *h)? *(?:([0-9]+) *m)? *(?:([0-9]+) *s)?")
CLOCK = re.compile(r"(?:([0-9]+):([0-5][0-9]):|([0-9]+):)([0-5][0-9])")


def seconds(text):
    if re.fullmatch("[0-9]+", text):
        return int(text)
    if match := CLOCK.fullmatch(text):
        hours, minutes, first, last = (int(part or 0) for part in match.groups())
        return hours * 3600 + (minutes + first) * 60 + last
    match = UNITS.fullmatch(text)
    if not text or not match:
        return "error"
    return sum(int(part or 0) * unit for part, unit in zip(match.groups(), (86400, 3600, 60, 1)))


for line in sys.stdin:
    print(seconds(line.strip()))
PYTHON
