"""A trainer in sixty lines: publish tasks, take whole groups, compute advantages, raise the policy version.

A real trainer makes its gradient step in `train`. Start `rollyard up` first, then

    python docs/examples/toy_trainer.py --run toy
"""

import argparse
import asyncio
import statistics

import rollyard

ROUNDS = 3
GROUP_SIZE = 4
QUESTIONS = {"What is 2 + 3?": "5", "What is the capital of France?": "Paris"}


def tasks_of(round_number: int) -> list[rollyard.Task]:
    """The tasks of one round. The ids make it safe to submit them again after a crash."""
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
    """Group-relative advantages, one for each delivery. A rollout without a reward tells nothing: 0."""
    rewards = [delivery.reward for delivery in batch.deliveries if delivery.reward is not None]
    mean = statistics.fmean(rewards) if rewards else 0.0
    deviation = statistics.pstdev(rewards) if rewards else 0.0
    return [0.0 if d.reward is None else (d.reward - mean) / (deviation + 1e-6) for d in batch.deliveries]


def train(round_number: int, batches: list[rollyard.GroupBatch]) -> None:
    """Where a real trainer makes a gradient step from token_ids, loss_mask, logprobs and the advantage."""
    rewards = [delivery.reward or 0.0 for batch in batches for delivery in batch.deliveries]
    trained_tokens, signal = 0, 0.0
    for batch in batches:
        for delivery, advantage in zip(batch.deliveries, advantages(batch), strict=True):
            tokens = sum(sum(sample.loss_mask) for sample in delivery.samples)
            trained_tokens += tokens
            signal += abs(advantage) * tokens
    print(
        f"round {round_number}: {len(batches)} groups, {len(rewards)} rollouts, mean reward "
        f"{statistics.fmean(rewards):.2f}, {trained_tokens} trained tokens, signal {signal:.1f}"
    )


async def take(groups: rollyard.Reader[rollyard.GroupBatch], task_ids: tuple[str, ...]) -> list[rollyard.GroupBatch]:
    """The groups of one round. Others, which come again when we died between version and ack, are passed over."""
    batches: dict[str, rollyard.GroupBatch] = {}
    while len(batches) < len(task_ids):
        batch = await anext(groups)
        if batch.group.task_id in task_ids:
            batches[batch.group.task_id] = batch
    return list(batches.values())


async def main() -> None:
    """Three rounds; a trainer that starts again goes on after the last version that it announced."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="address of nats-server; default: ROLLYARD_NATS_URL or the configuration")
    parser.add_argument("--run", default="toy", help="name of the training run")
    options = parser.parse_args()
    async with rollyard.connect(options.url, run=options.run) as client:
        groups = client.groups(ack="manual")
        for round_number in range((await client.policy_version() or 0) + 1, ROUNDS + 1):
            submitted = await client.submit(tasks_of(round_number))
            train(round_number, await take(groups, submitted.task_ids))
            await client.publish_policy_version(round_number)
            await groups.ack()


asyncio.run(main())
