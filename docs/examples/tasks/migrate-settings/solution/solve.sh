#!/bin/bash
set -e
python3 - <<'PYTHON'
import configparser
import json

settings = configparser.RawConfigParser()
settings.read("service.ini")
with open("schema.json") as file:
    schema = json.load(file)
found = {f"{section}.{key}": text for section in settings.sections() for key, text in settings[section].items()}


def seconds(text):
    for ending, factor in (("ms", 0.001), ("s", 1), ("m", 60)):
        if text.endswith(ending):
            return float(text[: -len(ending)]) * factor


convert = {
    "text": str,
    "integer": int,
    "boolean": lambda text: text.lower() in ("yes", "on", "true", "1"),
    "seconds": seconds,
    "list": lambda text: [item.strip() for item in text.split(",")] if text.strip() else [],
}
made = {"other": {key: text for key, text in found.items() if key not in schema}}
for key, field in schema.items():
    if key in found:
        value = convert[field["type"]](found[key])
    elif "default" in field:
        value = field["default"]
    else:
        continue
    *above, last = field["to"].split(".")
    place = made
    for name in above:
        place = place.setdefault(name, {})
    place[last] = value
with open("service.json", "w") as file:
    json.dump(made, file, indent=2)
PYTHON
