"""A reward for each kind of line, and their mean as the reward."""

import json
import subprocess
import sys
from pathlib import Path

KINDS = {
    "units": {"90s": 90, "1h30m": 5400, "2 d 4 h": 187200, "1d1h1m1s": 90061, " 0m ": 0, "10 m5s": 605, "7d": 604800},
    "clock": {"1:30": 90, "2:00:00": 7200, "0:07": 7, "75:01": 4501, "100:59:59": 363599},
    "bare": {"75": 75, "0": 0, " 12 ": 12, "007": 7},
    "errors": dict.fromkeys(
        ["1m1h", "1:75", "soon", "", "1h1h", "-5", "1.5h", "1:2", "1:30s", "h", "5 5", "1:00:60", "s5", "1h 30"], "error"
    ),
}
rewards = {}
for kind, lines in KINDS.items():
    try:
        ended = subprocess.run(
            [sys.executable, "durations.py"], input="\n".join(lines) + "\n", capture_output=True, text=True, timeout=20
        )
        found = ended.stdout.splitlines()
    except subprocess.TimeoutExpired:
        found = []
    right = sum(mine.strip() == str(theirs) for mine, theirs in zip(found, lines.values()))
    rewards[kind] = right / len(lines) if len(found) == len(lines) else 0
    print(kind, f"{right} of {len(lines)}")
rewards["reward"] = sum(rewards.values()) / len(rewards)
Path("/logs/verifier/reward.json").write_text(json.dumps(rewards))
