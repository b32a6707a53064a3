"""Every record that crosses a process boundary: its JSON Schema, its two encodings, its version."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from msgspec import structs

from rollyard.pipeline.codec import decode, encode, encode_json
from rollyard.schemas import alarm, call, failure, fleet, policy, rollout, sample, task, weights
from rollyard.schemas.catalogue import RECORDS, json_schema
from rollyard.schemas.errors import ConfigError, DecodeError
from rollyard.schemas.packed import Logprobs, LossMask, TokenIds, Versions

IDS: dict[str, Any] = {"run": "r", "task_id": "t", "group_id": "t", "rollout_id": "x", "index": 0, "attempt": 1}
ROLLOUT = rollout.Rollout.of("r", "t", 0, 1)
INTENT = call.CallIntent(
    call_id="c", run="r", rollout_id="x", attempt=1, gateway="g", at_ms=1, latest_end_ms=2, messages=[{"role": "user"}]
)
END = call.CallEnd(
    call_id="c", run="r", rollout_id="x", attempt=1, at_ms=2, status="ok", completion_ids=TokenIds.of([1, 2**32 - 1])
)
SAMPLE = sample.Sample(
    **IDS, sample_id="s", branch=0, branches=1, scenario="main", status="completed",
    token_ids=TokenIds.of([1, 2]), loss_mask=LossMask.of([0, 1]), logprobs=Logprobs.of([0.0, -0.5]),
    policy_versions=Versions.of([-1, 3]),
)  # fmt: skip
EXAMPLES: list[Any] = [
    task.Task(prompt="p", agent=task.AgentSpec(max_calls=3), metadata={"a": [1, None]}),
    task.TaskProgress(content_hash="h", group_size=1),
    policy.SamplePolicy(max_tokens=10),
    ROLLOUT,
    rollout.RolloutState(
        rollout=ROLLOUT,
        effects=(
            rollout.CloseSession(attempt=1),
            rollout.DestroySandbox(attempt=1, sandbox=rollout.SandboxRef(backend="b", place="p", handle="h")),
        ),
    ),
    rollout.StageMessage(rollout=ROLLOUT, stage="run", step=1, attempt=1),
    rollout.RolloutEvent(kind="evaluated", rollout=ROLLOUT, attempt=1, at_ms=1, reward=0.5),
    INTENT,
    END,
    call.CallRecord(
        intent=INTENT, end=END, intent_seq=1, end_seq=2, messages=[], tools=None, prompt_ids=TokenIds(), broken=None
    ),
    SAMPLE,
    sample.Commit(**IDS, group_size=1, status="completed"),
    sample.Delivery(**IDS, group_size=1, status="completed", samples=(SAMPLE,)),
    sample.Group(run="r", task_id="t", group_id="t", size=1),
    failure.Failure.of("llm", "no model"),
    alarm.Alarm(run="r", kind="drift", message="m", value=0.25),
    fleet.Lease(owner="o", lease_s=1.5),
    fleet.LlmServer(server_id="s", url="http://x", engine="vllm"),
    fleet.PolicyVersion(run="r", version=3),
    fleet.Cancel(),
    fleet.ClosedSession(),
    fleet.DeadLetter(stage="run", run="r", subject="s", reason="why", body=b"\x81\xff"),
    fleet.Run(run="r"),
    weights.WeightUpdate(update_id="u", version=3, servers=("s",)),
    weights.WeightProgress(server_id="s", step="done"),
    weights.WeightReport(servers=(weights.WeightProgress(server_id="s", step="failed", hint="h"),)),
    weights.PoolView(gateway="g", servers=(weights.ServerView(server_id="s", calls=1),)),
]
VERSIONED = [example for example in EXAMPLES if "schema_version" in example.__struct_fields__]


def name_of(example: Any) -> str:
    return type(example).__name__


def test_the_examples_are_all_records() -> None:
    assert {name_of(example) for example in EXAMPLES} == set(RECORDS)
    assert len(VERSIONED) >= len(EXAMPLES) - 4  # parts of others carry no version of their own


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_a_schema_describes_every_field(name: str) -> None:
    schema = json.loads(json.dumps(json_schema(name)))
    definitions = schema["$defs"]
    fields = {field.encode_name for field in structs.fields(RECORDS[name])}
    assert set(definitions[name]["properties"]) - {"type"} == fields
    assert definitions[name]["description"]
    for record, definition in definitions.items():
        for field, value in definition.get("properties", {}).items():
            assert field == "type" or _described(value, definitions), f"{record}.{field} has no description"


def _described(value: dict[str, Any], definitions: dict[str, Any]) -> bool:
    """A field may be described where it stands, or by its type where that says it all."""
    if "$ref" in value:
        return bool(definitions[value["$ref"].rpartition("/")[2]].get("description"))
    return "description" in value or any(_described(part, definitions) for part in value.get("anyOf", []))


def test_packed_arrays_are_lists_of_numbers_in_json() -> None:
    properties = json_schema("Sample")["$defs"]["Sample"]["properties"]
    assert properties["token_ids"]["items"] == {"type": "integer"}
    assert properties["logprobs"]["items"] == {"type": "number"}
    assert json.loads(encode_json(SAMPLE))["token_ids"] == [1, 2]


def test_a_user_sees_what_is_required() -> None:
    definitions = json_schema("Task")["$defs"]
    assert definitions["Task"]["required"] == ["prompt"]
    assert definitions["Task"]["additionalProperties"] is False
    assert definitions["Task"]["properties"]["group_size"]["maximum"] == task.MAX_GROUP_SIZE


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"no record is called 'Tusk' .choose one of Alarm, CallEnd, CallIntent, "):
        json_schema("Tusk")


@pytest.mark.parametrize("example", EXAMPLES, ids=name_of)
def test_both_encodings_give_the_record_back(example: Any) -> None:
    assert decode(encode(example), type(example)) == example
    assert decode(encode_json(example), type(example)) == example


@pytest.mark.parametrize("example", VERSIONED, ids=name_of)
@pytest.mark.parametrize("as_json", [False, True], ids=["msgpack", "json"])
def test_a_newer_record_is_refused_with_what_mends_it(example: Any, as_json: bool) -> None:
    newer = json.loads(encode_json(example)) | {"schema_version": task.SCHEMA_VERSION + 1, "of the future": [1]}
    data = json.dumps(newer).encode() if as_json else msgspec.msgpack.encode(newer)
    with pytest.raises(DecodeError, match=r"a record of schema version 2 cannot be read .*upgrade Rollyard"):
        decode(data, type(example))


@pytest.mark.parametrize("example", VERSIONED, ids=name_of)
def test_a_record_without_a_version_is_one_of_the_first(example: Any) -> None:
    plain = msgspec.json.decode(encode_json(example))
    plain.pop("schema_version", None)
    assert decode(json.dumps(plain).encode(), type(example)) == example
