"""The program behind rule `math`: reads questions as lines of JSON, and writes a line for each. See math_process.py."""

from __future__ import annotations

import json
import resource
import sys
from typing import Any


def main() -> None:
    """Answer questions until the input ends."""
    limit = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    from math_verify import (  # noqa: PLC0415 - heavy: the limit is to hold first
        ExprExtractionConfig,
        LatexExtractionConfig,
        parse,
        verify,
    )

    boxed = LatexExtractionConfig(boxed_match_priority=0)
    anywhere = [boxed, ExprExtractionConfig()]
    sys.stdout.write("ready\n")
    sys.stdout.flush()

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        golds = [_parsed(parse, _gold(text), anywhere) for text in question["accepted"]]
        for text, gold in zip(question["accepted"], golds, strict=True):
            if not gold:
                return {"trouble": f"the accepted answer {text!r:.100} is no expression"}
        said = str(question["answer"])
        last = _last_boxed(said)
        if question["boxed_only"] and last is None:
            return {"equal": False, "found": False}
        found = _parsed(parse, said if last is None else f"\\boxed{{{last}}}", anywhere)
        plain = _same_text(said if last is None else last, question["accepted"])
        # The library's own time limit is a signal, which some algebra never sees: whoever asked waits no longer.
        equal = plain or any(
            verify(gold, found, float_rounding=question["digits"], timeout_seconds=None) for gold in golds if found
        )
        return {"equal": bool(equal), "found": bool(found)}

    for line in sys.stdin:
        sys.stdout.write(json.dumps(answer(json.loads(line))) + "\n")
        sys.stdout.flush()


def _parsed(parse: Any, text: str, configs: list[Any]) -> list[Any]:
    found: list[Any] = parse(text, extraction_config=configs, parsing_timeout=None)
    return found


def _gold(text: str) -> str:
    """An accepted answer as something to be read; with signs of its own as it stands."""
    return text if "$" in text or "\\boxed" in text or "\\(" in text or "\\[" in text else f"\\boxed{{{text}}}"


def _last_boxed(text: str) -> str | None:
    """What stands in the last \\boxed{} of a text, by its braces."""
    at = text.rfind("\\boxed")
    start = text.find("{", at) if at >= 0 else -1
    if start < 0:
        return None
    depth = 0
    for index in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[start + 1 : index]
    return None


def _same_text(said: str, accepted: list[str]) -> bool:
    """Answers that are no mathematics, `no solution`, are compared as texts."""
    plain = "".join(said.split()).strip("$.")
    return bool(plain) and any(plain == "".join(text.split()).strip("$.") for text in accepted)


if __name__ == "__main__":
    main()
