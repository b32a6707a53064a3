"""What the scripted rollouts are about: a tokenizer, a script for the model server, tasks, and what must come of them.

The agent is the shipped `bash`. Its model multiplies a number by two, adds one, and says done: three calls. Each
command appends a line to a ledger outside of the sandbox, so that an agent or a command that ran twice is found out.
The model samples texts in ids that no tokenizer would choose.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import structs
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from rollyard.schemas.sandbox import SandboxSpec
from rollyard.schemas.task import AgentSpec, EvaluationSpec, Task, Timeouts

CALLS = 3
COMMANDS = 2
POLICY_VERSION = 7

# What a task can ask for, as a word in its prompt.
SLOWLY = "slowly"  # each command takes a second
STREAMING = "streaming"  # the first reply takes a second and a half to stream
FOREVER = "forever"  # the first command does not end by itself
ONCE_FOREVER = "once"  # it does not end in the first attempt

_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_DOUBLE = "set -- {prompt}; echo $(($1 * 2))"
_ADD_ONE = "set -- {prompt}; echo $(($1 + 1))"


def _noted(number: int, command: str) -> str:
    return f'echo "$HOME {number}" >> "$LEDGER"; {command}'


def _turns(first: str = _DOUBLE, second: str = _ADD_ONE, **behaviour: Any) -> list[dict[str, Any]]:
    return [
        {"content": _noted(1, first), **behaviour},
        {"content": _noted(2, second)},
        {"content": "done"},
    ]


def script() -> dict[str, Any]:
    """The script of the model server."""
    once = "case $HOME in */r*.1.*/home) sleep 600;; esac; " + _DOUBLE
    conversations = [
        {"match": SLOWLY, "turns": _turns("sleep 1; " + _DOUBLE, "sleep 1; " + _ADD_ONE)},
        {"match": STREAMING, "turns": _turns(_DOUBLE + " # " + "so it goes on " * 8, chunk_delay_s=0.025)},
        {"match": FOREVER, "turns": _turns("sleep 600; " + _DOUBLE)},
        {"match": ONCE_FOREVER, "turns": _turns(once)},
        {"match": "", "turns": _turns()},
    ]
    return {"conversations": conversations, "noncanonical": True}


def make_tokenizer(folder: Path) -> Path:
    """A folder as a model has it: a byte-level BPE of about 400 tokens that merges what the agents say; ChatML."""
    folder.mkdir(parents=True, exist_ok=True)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        show_progress=False,
        special_tokens=[AddedToken(text, special=True) for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    said = [turn["content"] for conversation in script()["conversations"] for turn in conversation["turns"]]
    backend.train_from_iterator([*said, "system user assistant\n", "Answer with one shell command."] * 4, trainer)
    backend.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": _CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def make_tasks(
    rollouts: int, *, ledger: Path, group_size: int = 4, words: Sequence[str] = ("",), backend: str = "local"
) -> list[Task]:
    """Tasks for so many rollouts, which have `words` in turn and are asked for streams in turn.

    Every second one is asked for a result that its agent will not find: reward 0.
    """
    return [
        Task(
            id=f"t{number}",
            prompt=f"{number} {words[number % len(words)]}".strip(),
            group_size=min(group_size, rollouts - number * group_size),
            agent=AgentSpec(harness="bash", args={"examples": [], "stream": number // 2 % 2 == 0}),
            sandbox=SandboxSpec(env={"LEDGER": str(ledger)}, backend=backend),
            evaluation=EvaluationSpec(rule="exact", args={"answer": str(_asked_for(number))}),
            timeouts=Timeouts(init_s=60, run_s=240, eval_s=60),
            metadata={"number": number},
        )
        for number in range(-(-rollouts // group_size))
    ]


def judged_afresh(tasks: Sequence[Task]) -> list[Task]:
    """The same, whose rewards are made in a sandbox of their own as well."""
    command = {"rule": "command", "args": {"command": "sleep 0.2; test -d ."}}

    def composite(own: EvaluationSpec) -> EvaluationSpec:
        parts = [{"rule": own.rule, "args": own.args}, command]
        return EvaluationSpec(rule="composite", args={"parts": parts, "combine": "min"})

    return [structs.replace(task, evaluation=composite(task.evaluation)) for task in tasks]


def _asked_for(number: int) -> int:
    return 2 * number + 1 if number % 2 else -1


def answer_of(task: Task) -> str:
    """What the agent finds."""
    return str(2 * int(task.metadata["number"]) + 1)


def reward_of(task: Task) -> float:
    """The reward that its rollouts must get."""
    return float(task.metadata["number"] % 2)


def rollouts_of(tasks: Sequence[Task]) -> int:
    """How many rollouts they ask for."""
    return sum(task.group_size for task in tasks)
