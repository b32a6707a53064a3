import json
from pathlib import Path

assert json.loads(Path("service.json").read_text()) == {
    "http": {"address": "0.0.0.0", "port": 8080, "timeout": 0.5, "workers": 4},
    "debug": False,
    "storage": {"path": "/var/lib/timetable", "caches": ["64", "128", "256"], "retry_after": 180, "mirrors": []},
    "other": {"mail.sender": "yard@example.org", "mail.signature": "The yard; trains = everything"},
}
