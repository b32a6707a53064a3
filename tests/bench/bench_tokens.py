"""What a call costs in tokens mode as the conversation grows: the next prompt, continued and rendered anew.

python tests/bench/bench_tokens.py [--tokenizer PATH]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measure import table

from rollyard.gateway.local_model import demo_model_path
from rollyard.gateway.scripted import chatml
from rollyard.gateway.tokens.renderer import Renderer
from rollyard.gateway.tokens.template import ChatTemplate
from rollyard.gateway.tokens.tokenizer import load_tokenizer
from rollyard.schemas.packed import TokenIds

Message = dict[str, Any]
WORDS = "The build has failed in {n}: expected a value of type int, found str at line {n}.\n"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"tool{number}",
            "description": WORDS.format(n=number) * 20,
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string", "description": "what to run"}},
            },
        },
    }
    for number in range(12)
]


def conversation(rounds: int) -> list[Message]:
    """A task, and rounds of one call with its result, some 460 tokens each."""
    messages: list[Message] = [
        {"role": "system", "content": "You are an agent."},
        {"role": "user", "content": "Fix it."},
    ]
    for number in range(rounds):
        call = {"name": "tool1", "arguments": '{"command": "make test"}'}
        calls = [{"id": f"call{number:05}", "type": "function", "function": call}]
        messages.append({"role": "assistant", "content": "I run the tests.", "tool_calls": calls})
        result = "".join(WORDS.format(n=number * 20 + line) for line in range(16))
        messages.append({"role": "tool", "tool_call_id": f"call{number:05}", "content": result})
    return messages


def cpu_ms(work: Callable[[list[Message]], object], messages: list[Message]) -> float:
    """The least of many tries: what else runs on the machine makes a try longer, never shorter.

    Each try has another last message, so that no cache knows it.
    """
    times = []
    for number in range(30):
        last = {**messages[-1], "content": f"try {number}\n" + messages[-1]["content"]}
        asked = [*messages[:-1], last]
        before = time.process_time()
        work(asked)
        times.append((time.process_time() - before) * 1000)
    return min(times)


def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json, its folder, or a GGUF file")
    tokenizer = load_tokenizer(parser.parse_args().tokenizer or demo_model_path())
    renderer = Renderer(tokenizer, ChatTemplate(chatml.TEMPLATE))
    sampled = TokenIds.of([min(tokenizer.eos_ids)])
    rows: list[list[object]] = []
    for rounds in (6, 20, 65, 200):
        messages = conversation(rounds)
        tokens = len(renderer.prompt(messages, None))
        suffix = renderer.suffix(messages, TOOLS, len(messages) - 1, sampled)
        assert suffix is not None
        continued = cpu_ms(lambda asked: renderer.suffix(asked, TOOLS, len(asked) - 1, sampled), messages)
        anew = cpu_ms(lambda asked: renderer.prompt(asked, TOOLS), messages)
        first = rows[0][3] if rows else continued
        assert isinstance(first, float)
        rows.append([len(messages), tokens, len(suffix), continued, continued / first, anew])
    head = ["messages", "tokens of history", "tokens of suffix", "continued, CPU ms", "times the first", "anew, CPU ms"]
    print(table(head, rows))


if __name__ == "__main__":
    main()
