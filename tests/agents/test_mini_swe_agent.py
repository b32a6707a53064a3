"""mini-swe-agent, as it comes from PyPI, solves a task through the whole pipeline, driven by a scripted policy."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import rollyard

pytestmark = pytest.mark.agent("mini-swe-agent")

RUN = "mini"
ANSWER = "HELLO & <GOODBYE>"
TASK = {
    "id": "upper",
    "prompt": "Make answer.txt: the text of seed.txt in capital letters.",
    "agent": {"harness": "mini_swe_agent", "max_calls": 10, "sampling": {"temperature": 1.0, "max_tokens": 512}},
    "sandbox": {"files": {"seed.txt": ANSWER.lower()}},
    "evaluation": {
        "rule": "command",
        "args": {"command": f"test \"$(cat answer.txt)\" = '{ANSWER}'"},
    },
    "group_size": 2,
}


@pytest.fixture(scope="module")
def deliveries(installation: Any) -> list[rollyard.Delivery]:
    (installation.folder / "tasks.jsonl").write_text(json.dumps(TASK))
    said = installation.rollyard("submit", "tasks.jsonl", "--run", RUN)
    assert said == f"1 task published to run {RUN}.\n"
    with rollyard.connect_sync(installation.nats, run=RUN, blobs=installation.data / "blobs") as client:
        batch = next(client.groups())
    return list(batch.deliveries)


def test_it_makes_the_file_and_gets_the_reward(deliveries: list[rollyard.Delivery]) -> None:
    assert [delivery.index for delivery in deliveries] == [0, 1]
    for delivery in deliveries:
        assert (delivery.status, delivery.failure, delivery.reward) == ("completed", None, 1.0)
        assert (delivery.answer, delivery.calls, delivery.attempt) == (ANSWER, 3, 1)


def test_its_turns_are_one_chain_of_the_ids_that_the_model_server_sampled(
    deliveries: list[rollyard.Delivery], installation: Any
) -> None:
    for delivery in deliveries:
        (sample,) = delivery.samples
        entries = [installation.journal[call] for call in sample.calls]
        assert [(entry.turn, entry.status) for entry in entries] == [(0, "ok"), (1, "ok"), (2, "ok")]
        last = entries[-1]
        assert sample.token_ids.tolist() == last.prompt_token_ids + last.token_ids
        trained = np.zeros(len(sample.token_ids), dtype=np.uint8)
        logprobs = np.zeros(len(sample.token_ids), dtype=np.float32)
        for entry in entries:
            span = slice(len(entry.prompt_token_ids), len(entry.prompt_token_ids) + len(entry.token_ids))
            assert sample.token_ids.tolist()[: span.start] == entry.prompt_token_ids
            trained[span], logprobs[span] = 1, entry.logprobs
        assert np.asarray(sample.loss_mask).tolist() == trained.tolist()
        assert np.asarray(sample.logprobs).tolist() == logprobs.tolist()


def test_the_conversation_is_kept_as_the_agent_had_it(deliveries: list[rollyard.Delivery]) -> None:
    (sample,) = deliveries[0].samples
    roles = [message["role"] for message in sample.messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert sample.tools is not None and sample.tools[0]["function"]["name"] == "bash"
    assert "seed.txt" in str(sample.messages[3]["content"])
    assert (sample.params["temperature"], sample.params["max_tokens"]) == (1.0, 512)


def test_its_samples_can_be_replayed_and_shown(deliveries: list[rollyard.Delivery], installation: Any) -> None:
    assert installation.rollyard("replay", "--run", RUN) == "2 of 2 samples of 2 rollouts equal their commits.\n"
