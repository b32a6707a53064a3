"""One installation for all tests of this folder: `rollyard up` with a scripted policy, real processes throughout."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from rollyard.gateway.scripted.journal import Entry, read_journal

START_S = 120
STOP_S = 90


def bash(content: str, command: str) -> dict[str, Any]:
    """A turn in which the policy calls the tool of mini-swe-agent."""
    return {"content": content, "tool_calls": [{"name": "bash", "arguments": {"command": command}}]}


SCRIPT: dict[str, Any] = {
    "chat_template": "chatml_tools",
    # The server renders each prompt anew: only ids that its tokenizer would choose make one chain.
    "noncanonical": False,
    "conversations": [
        {
            "match": "Make answer.txt",
            "turns": [
                bash("I look first.", "ls -a && cat 'seed.txt'"),
                bash("", "tr a-z A-Z <seed.txt >answer.txt"),
                bash("That is it.", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; cat answer.txt"),
            ],
        },
        {"match": "2 + 3", "turns": [{"content": "It is 5."}]},
        {"match": "capital of France", "turns": [{"content": "It is Lyon."}]},
    ],
}


def make_tokenizer(folder: Path) -> Path:
    """A byte-level BPE of a few hundred tokens, with the special tokens of ChatML."""
    folder.mkdir()
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        show_progress=False,
        special_tokens=[AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator([json.dumps(SCRIPT), "system user assistant tool"] * 4, trainer)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    return folder


@dataclass(frozen=True)
class Installation:
    """A running `rollyard up`. `folder` is for the files of tests; `data` is the data folder."""

    folder: Path
    data: Path

    @property
    def nats(self) -> str:
        """Address of its nats-server."""
        return str(json.loads((self.data / "state.json").read_text())["nats"])

    @property
    def journal(self) -> dict[str, Entry]:
        """What the model server has sampled, by call id."""
        return {entry.request_id: entry for entry in read_journal(self.folder / "journal.jsonl")}

    def rollyard(self, *arguments: str) -> str:
        """Run a command against it; returns what it printed. It must succeed."""
        command = [sys.executable, "-m", "rollyard", *arguments, "--data", str(self.data)]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="session")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    """`rollyard up`, from its start to its clean end."""
    folder = tmp_path_factory.mktemp("agents")
    (folder / "script.json").write_text(json.dumps(SCRIPT))
    tokenizer = make_tokenizer(folder / "tokenizer")
    data = folder / "data"
    command = [sys.executable, "-m", "rollyard", "up", "--data", str(data), "--nats-port", "0", "--gateway-port", "0"]
    command += ["--scripted", "script.json", "--tokenizer", str(tokenizer), "--journal", "journal.jsonl"]
    said = folder / "up.out"
    with said.open("w") as output:
        up = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output, env=dict(os.environ))
    try:
        deadline = time.monotonic() + START_S
        while "is up" not in said.read_text():
            assert up.poll() is None, said.read_text()
            assert time.monotonic() < deadline, said.read_text()
            time.sleep(0.1)
        yield Installation(folder, data)
    finally:
        up.send_signal(signal.SIGTERM)
        assert up.wait(STOP_S) == 0, said.read_text()
