"""Sample policies as users set them: in a task, in a file, for a run."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

import rollyard
from rollyard.pipeline.bus import Bus
from rollyard.pipeline.client import Client
from rollyard.pipeline.embedded import EmbeddedNats
from rollyard.pipeline.kv import Bucket
from rollyard.pipeline.samplepolicy import as_policy, read_policy
from rollyard.pipeline.taskfile import check_tasks, decode_task
from rollyard.schemas import subjects
from rollyard.schemas.errors import ConfigError, TaskError
from rollyard.schemas.fleet import Run
from rollyard.schemas.policy import SamplePolicy
from rollyard.schemas.task import TaskProgress

RUN = "policies"
CUT = SamplePolicy(max_tokens=4096, failed="mask")

BAD: list[tuple[dict[str, Any], str]] = [
    ({"scenarios": ["bogus"]}, 'scenarios[0]: must be one of "main", "sub_agent", "compaction", '),
    ({"scenarios": []}, "scenarios: must be a list of length >= 1, has 0"),
    ({"scenario": ["main"]}, "scenario: unknown field; did you mean `"),
    ({"zzz": 1}, "zzz: unknown field; known here are scenarios, min_trained_tokens, "),
    ({"failed": "kept"}, 'failed: must be one of "keep", "mask", "drop", is "kept"'),
    ({"max_tokens": 1}, "max_tokens: must be an integer >= 2, is 1"),
    ({"lenience_off": "trailing_space"}, "lenience_off: must be a list, is"),
    ({"lenience_off": ["trailing_spaces"]}, "lenience_off: 'trailing_spaces' is no rule of lenient matching; did you"),
    ({"lenience_off": ["zzz"]}, "lenience_off: 'zzz' is no rule of lenient matching; rules are private_keys_dropped,"),
    ({"min_trained_tokens": 9, "max_tokens": 8}, "min_trained_tokens: is 9, and a sample has at most 8 tokens; keep"),
]


@pytest.mark.parametrize(("raw", "says"), BAD)
def test_a_bad_policy_is_refused_with_its_field_wherever_it_stands(
    raw: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(TaskError) as of_task:
        check_tasks([{"prompt": "p", "samples": raw}])
    assert f"samples.{says}" in str(of_task.value)
    with pytest.raises(ConfigError) as given:
        as_policy(raw)
    assert str(given.value).startswith(f"samples.{says}")
    path = tmp_path / "policy.json"
    path.write_text(json.dumps(raw))
    with pytest.raises(ConfigError) as of_file:
        read_policy(path)
    assert str(of_file.value).startswith(f"{path}: {says}")


@pytest.mark.parametrize("odd", [5, "main", ["main"]])
def test_what_is_no_policy_at_all(odd: Any) -> None:
    with pytest.raises(ConfigError, match=r"samples: is a (int|str|list) \(give a SamplePolicy"):
        as_policy(odd)
    with pytest.raises(TaskError, match="samples: must be an object or null, is "):
        check_tasks([{"prompt": "p", "samples": odd}])


def test_a_policy_made_in_python_is_checked_too() -> None:
    assert as_policy(CUT) == CUT
    assert as_policy({"max_tokens": 4096, "failed": "mask"}) == CUT
    with pytest.raises(ConfigError, match=r"samples.reward: must be one of"):
        as_policy(SamplePolicy(reward="half"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="samples: holds what JSON cannot"):
        as_policy({"max_tokens": object()})


def test_the_policy_of_a_task_counts_in_its_id() -> None:
    bare, empty, other = (
        decode_task(body)
        for body in (
            b'{"prompt": "p"}',
            b'{"prompt": "p", "samples": {}}',
            b'{"prompt": "p", "samples": {"max_tokens": 9}}',
        )
    )
    assert (bare.samples, empty.samples) == (None, SamplePolicy())
    assert len({bare.id, empty.id, other.id}) == 3


@pytest.mark.parametrize(
    "text",
    ['max_tokens = 4096\nfailed = "mask"\n', '{"max_tokens": 4096, "failed": "mask"}'],
)
def test_a_file_is_toml_or_json(text: str, tmp_path: Path) -> None:
    path = tmp_path / "policy"
    path.write_text(text)
    assert read_policy(path) == CUT


async def run_of(bus: Bus) -> Run | None:
    found = await Bucket[Run](bus, subjects.RUNS, Run).get(subjects.token(RUN))
    return found[0] if found else None


async def test_the_first_task_of_a_run_fixes_its_policy(bus: Bus, nats: EmbeddedNats, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"run": RUN, "blobs": tmp_path / "blobs"}
    async with rollyard.connect(nats.url, **settings, samples={"max_tokens": 4096, "failed": "mask"}) as client:
        assert await run_of(bus) is None
        await client.submit({"prompt": "one"})
        await client.set_models({"x": "y"})
    run = await run_of(bus)
    assert run is not None
    assert (run.samples, run.models) == (CUT, {"x": "y"})
    async with rollyard.connect(nats.url, **settings) as client:
        await client.submit({"prompt": "two"})
    async with rollyard.connect(nats.url, **settings, samples=CUT) as client:
        await client.submit({"prompt": "three"})
    with pytest.raises(ConfigError) as refused:
        async with rollyard.connect(nats.url, **settings, samples=SamplePolicy(max_tokens=4096)):
            pass
    assert str(refused.value) == (
        "run 'policies' has another sample policy, which stays as it was when the run began: "
        'failed is "mask" and not "drop" (leave `samples` out, give it to the tasks, or begin another run)'
    )
    assert await run_of(bus) == run

    def program() -> None:
        with pytest.raises(ConfigError, match="has another sample policy"):
            rollyard.connect_sync(nats.url, **settings, samples=SamplePolicy())
        with rollyard.connect_sync(nats.url, **settings, samples=CUT) as client:
            assert client.submit({"prompt": "four"}).accepted == 1

    await asyncio.to_thread(program)


async def test_of_two_that_begin_a_run_at_once_the_second_is_refused(bus: Bus) -> None:
    first, second = Client(bus, RUN, samples=CUT), Client(bus, RUN, samples=SamplePolicy())
    await first.check_policy()
    await second.check_policy()
    await first.submit({"prompt": "one"})
    with pytest.raises(ConfigError, match="max_tokens is 4096 and not null"):
        await second.submit({"prompt": "two"})
    # Also where there is nothing to publish.
    task = decode_task(b'{"prompt": "one"}')
    progress = TaskProgress(content_hash=task.content_hash(), group_size=1, task_id=task.id, run=RUN)
    await Bucket[TaskProgress](bus, subjects.TASK_BUCKET, TaskProgress).put(subjects.task_key(RUN, task.id), progress)
    with pytest.raises(ConfigError, match="has another sample policy"):
        await second.submit({"prompt": "one"})
    with pytest.raises(ConfigError, match="has another sample policy"):
        await second.set_models({})
    assert sum((await bus.subjects(subjects.TASKS, ">")).values()) == 1


async def test_a_bad_policy_is_refused_before_anything_is_reached() -> None:
    with pytest.raises(ConfigError, match=r"samples.failed: must be one of"):
        async with rollyard.connect("nats://127.0.0.1:1", run=RUN, samples={"failed": "yes"}):
            pass
