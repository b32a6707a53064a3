"""Tokenizers for tests: a small one trained here, so that most tests need no model, and the local model's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from rollyard.gateway.local_model import LocalModel, demo_model_path
from rollyard.gateway.tokens.renderer import Renderer
from rollyard.gateway.tokens.template import ChatTemplate
from rollyard.gateway.tokens.tokenizer import TextTokenizer, load_tokenizer
from rollyard.schemas.errors import SetupError

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = [
    "Having said hello, the assistant lists files and returns the answer to the user.",
    "def hello(world):\n    return world\n\nsystem user assistant tool bash command ls -la\n",
    "An unbelievable number of having, hello, answer: 12, 345. Does the model see the bash tool?",
    '{"name": "bash", "arguments": {"command": "ls"}} <tool_call> </tool_call>',
]


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a model has it: tokenizer.json and tokenizer_config.json, ChatML, about 400 tokens."""
    folder = tmp_path_factory.mktemp("tokenizer")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    specials = [AddedToken(text, special=True) for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        show_progress=False,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(CORPUS * 4, trainer)
    backend.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    backend.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "bos_token": {"content": "<|im_start|>"}, "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> TextTokenizer:
    return load_tokenizer(tokenizer_folder)


@pytest.fixture(scope="session")
def renderer(tokenizer: TextTokenizer) -> Renderer:
    return Renderer(tokenizer, ChatTemplate(CHATML))


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The weights of the local model. Skips where they are missing; in CI that is a failure."""
    try:
        return demo_model_path()
    except SetupError as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def model_tokenizer(model_path: Path) -> TextTokenizer:
    return load_tokenizer(model_path)


@pytest.fixture(scope="session")
def local_model(model_path: Path) -> Iterator[LocalModel]:
    """The local model, serving, once for the whole test session."""
    command = [sys.executable, "-m", "rollyard.gateway.local_model", "--port", "0", "--slots", "2", "--ctx", "4096"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout
        url = process.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:"), "the local model did not start"
        yield LocalModel(url=url, model="smollm2", pid=process.pid, tokenizer=model_path)
        process.terminate()
