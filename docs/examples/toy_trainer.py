"""A small trainer: publish tasks, take whole groups, compute advantages, raise the policy version; three rounds.

Start `rollyard up` first, then: python docs/examples/toy_trainer.py --run toy
"""

import argparse
import asyncio
from statistics import fmean, pstdev

import rollyard

ROUNDS, GROUP_SIZE = 3, 4
QUESTIONS = {"What is 2 + 3?": "5", "What is the capital of France?": "Paris"}


def tasks_of(round_number: int) -> list[rollyard.Task]:
    """The tasks of one round. Fixed ids make it safe to submit them again after a crash."""
    return [
        rollyard.Task(
            id=f"round-{round_number}-{number}",
            prompt=question,
            group_size=GROUP_SIZE,
            agent=rollyard.AgentSpec(harness="ask", sampling=rollyard.Sampling(temperature=1.0, max_tokens=32)),
            evaluation=rollyard.EvaluationSpec(rule="contains", args={"answer": answer, "word": True}),
        )
        for number, (question, answer) in enumerate(QUESTIONS.items())
    ]


def advantages(batch: rollyard.GroupBatch) -> list[float]:
    """Group-relative advantages, one for each delivery. A rollout without a reward teaches nothing: 0."""
    rewards = [delivery.reward for delivery in batch.deliveries if delivery.reward is not None] or [0.0]
    mean, deviation = fmean(rewards), pstdev(rewards)
    return [0.0 if d.reward is None else (d.reward - mean) / (deviation + 1e-6) for d in batch.deliveries]


def train(round_number: int, batches: list[rollyard.GroupBatch]) -> None:
    """A real trainer makes its gradient step here, from token_ids, loss_mask, logprobs and the advantage."""
    pairs = [pair for batch in batches for pair in zip(batch.deliveries, advantages(batch), strict=True)]
    tokens = sum(sum(sample.loss_mask) for delivery, advantage in pairs if advantage for sample in delivery.samples)
    rewards = [delivery.reward for delivery, _ in pairs if delivery.reward is not None]
    mean = f"{fmean(rewards):.2f}" if rewards else "unknown"
    print(f"round {round_number}: {len(batches)} groups, {len(pairs)} rollouts, mean reward {mean}, ", end="")
    print(f"{tokens} tokens with an advantage")


async def main(url: str | None, run: str) -> None:
    """A trainer that starts again goes on after the last version that it announced."""
    async with rollyard.connect(url, run=run) as client:
        groups = client.groups(ack="manual")
        for round_number in range((await client.policy_version() or 0) + 1, ROUNDS + 1):
            task_ids = (await client.submit(tasks_of(round_number))).task_ids
            batches: dict[str, rollyard.GroupBatch] = {}
            while len(batches) < len(task_ids):
                batch = await anext(groups)
                # Groups of the last round come again if we died between its version and its ack.
                if batch.group.task_id in task_ids:
                    batches[batch.group.task_id] = batch
            train(round_number, list(batches.values()))
            await client.publish_policy_version(round_number)
            await groups.ack()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A toy trainer")
    parser.add_argument("--url", help="address of nats-server (default: ROLLYARD_NATS_URL, or the configuration)")
    parser.add_argument("--run", default="toy", help="name of the training run")
    arguments = parser.parse_args()
    asyncio.run(main(arguments.url, arguments.run))
