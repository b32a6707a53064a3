"""Run the conformance kit on every backend that this machine has, and write what came out into the documents.

    python tests/stages/sandboxes/record_conformance.py [BACKEND ...]

It replaces those backends in docs/sandboxes/conformance.json, and both tables in docs/sandboxes.md.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
RECORD = ROOT / "docs/sandboxes/conformance.json"
PAGE = ROOT / "docs/sandboxes.md"
MARKS = {"pass": "yes", "fail": "**no**", "not offered": "-"}


def capabilities_table() -> str:
    """What the backends say of themselves."""
    from rollyard.stages.conformance.overview import HEADER, overview, row  # noqa: PLC0415

    rows = [row(name, can) for name, can in overview().items() if name != "none"]
    return _markdown(HEADER, rows)


def conformance_table(record: dict[str, Any]) -> str:
    """What came out, a line a behaviour; below it why something is not as it should be."""
    from rollyard.stages.conformance.catalogue import BEHAVIOURS  # noqa: PLC0415

    backends, notes = list(record), []
    rows = []
    for behaviour in BEHAVIOURS:
        row = [f"`{behaviour.id}`", behaviour.shows]
        for backend in backends:
            outcome, reason = record[backend]["outcomes"].get(behaviour.id, ["not tried", ""])
            mark = MARKS.get(outcome, outcome)
            if outcome == "not tried" and reason:
                notes.append(reason)
                mark = f"({len(notes)})" if reason not in notes[:-1] else f"({notes.index(reason) + 1})"
                if reason in notes[:-1]:
                    notes.pop()
            row.append(mark)
        rows.append(row)
    made = [f"- {backend}: {record[backend]['made_on']}" for backend in backends]
    numbered = [f"({number}) {note}." for number, note in enumerate(notes, 1)]
    return "\n".join([_markdown(["behaviour", "shows", *backends], rows), "", *numbered, "", *made])


def _markdown(header: Any, rows: Any) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def with_tables(page: str, record: dict[str, Any]) -> str:
    """The page with both tables made anew."""
    for name, text in (("capabilities", capabilities_table()), ("conformance", conformance_table(record))):
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        head, _, rest = page.partition(begin)
        page = head + begin + text + "\n" + end + rest.partition(end)[2]
    return page


def _made_on(backend: str) -> str:
    programs = {
        "bubblewrap": lambda: subprocess.check_output(["bwrap", "--version"], text=True).strip(),
        "docker": lambda: (
            "engine "
            + subprocess.check_output(["docker", "version", "--format", "{{.Server.Version}}"], text=True).strip()
        ),
        "e2b": lambda: f"SDK {version('e2b')} against the protocol server of the tests, whose sandboxes are jails",
    }
    kernel = ".".join(platform.release().split("-")[0].split(".")[:2])
    user = "root" if os.getuid() == 0 else "an unprivileged user"
    program = f", {programs[backend]()}" if backend in programs else ""
    return f"Linux {kernel}, as {user}{program}"


async def _outcomes(backend: str) -> dict[str, list[str]]:
    from kit_settings import NOT_HERE, setting_of  # noqa: PLC0415

    from rollyard.stages.conformance.catalogue import BEHAVIOURS  # noqa: PLC0415
    from rollyard.stages.conformance.check import check  # noqa: PLC0415

    left_out = NOT_HERE.get(backend, {})
    with tempfile.TemporaryDirectory() as name:
        async with setting_of(backend, Path(name)) as setting:
            verdicts = await check(setting, [known for known in BEHAVIOURS if known.id not in left_out])
    found = {known.behaviour.id: [known.outcome, known.reason] for known in verdicts}
    return found | {name: ["not tried", why] for name, why in left_out.items()}


def main() -> None:
    """Run and write."""
    from kit_settings import BACKENDS, Missing  # noqa: PLC0415

    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    for backend in sys.argv[1:] or BACKENDS:
        try:
            outcomes = asyncio.run(_outcomes(backend))
        except Missing as missing:
            print(f"{backend} is left as it is: {missing}")
            continue
        failed = {name: reason for name, (outcome, reason) in outcomes.items() if outcome == "fail"}
        print(backend, f"{len(failed)} failed", failed)
        record[backend] = {"made_on": _made_on(backend), "outcomes": dict(sorted(outcomes.items()))}
    ordered = {backend: record[backend] for backend in BACKENDS if backend in record}
    RECORD.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n")
    PAGE.write_text(with_tables(PAGE.read_text(), ordered))


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests/stages/sandboxes")]
    main()
