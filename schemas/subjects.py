"""Names on the bus: subject tokens, deterministic ids, streams, subjects, consumers and buckets.

These names are public API: dashboards, autoscalers and programs in other languages rely on them.
Contract: docs/architecture.md section 4.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

MAX_ID_CHARS: Final = 256
_PLAIN: Final = re.compile(r"(?:[A-Za-z0-9_-]{1,48}|=[0-9a-f]{24})\Z")

TASKS: Final = "TASKS"
STAGES: Final = "STAGES"
LOG: Final = "LOG"
SAMPLES: Final = "SAMPLES"
DEAD: Final = "DEAD"
ALARMS: Final = "ALARMS"

RUNS: Final = "runs"
TASK_BUCKET: Final = "tasks"
ROLLOUTS: Final = "rollouts"
SESSIONS: Final = "sessions"
POLICY: Final = "policy"
CANCEL: Final = "cancel"
LLM_SERVERS: Final = "llm_servers"
GATEWAYS: Final = "gateways"
NODES: Final = "nodes"
POOLS: Final = "pools"
BUCKETS: Final = (RUNS, TASK_BUCKET, ROLLOUTS, SESSIONS, POLICY, CANCEL, LLM_SERVERS, GATEWAYS, NODES, POOLS)

_STREAMS: Final = {
    "task": TASKS,
    "stage": STAGES,
    "log": LOG,
    "sample": SAMPLES,
    "group": SAMPLES,
    "dead": DEAD,
    "alarm": ALARMS,
}

WEIGHTS_SUBJECT: Final = "gateway.weights"
"""Where gateways, as one queue group, take weight updates: a plain request with many replies, stored nowhere."""


def digest(*parts: str | bytes, chars: int = 24) -> str:
    """A hex digest of `parts`, kept apart by their lengths, `chars` long."""
    state = hashlib.blake2b(digest_size=32)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little") + data)
    return state.hexdigest()[:chars]


def token(text: str) -> str:
    """The subject token of a user's id: the text itself when it is plain or a token already, else `=` and its hash.

    Raises ValueError for an empty id or one of more than 256 characters.
    """
    if _PLAIN.match(text):
        return text
    if not text or len(text) > MAX_ID_CHARS:
        raise ValueError(f"an id has 1 to {MAX_ID_CHARS} characters, this one has {len(text)}")
    return "=" + digest(text)


def rollout_id(run: str, task_id: str, index: int) -> str:
    """The deterministic id of one rollout: a function of (run, task, index)."""
    return "r" + digest(token(run), task_id, str(index))


def task_subject(run: str) -> str:
    """Where the tasks of a run are published."""
    return f"task.{token(run)}"


def stage_subject(stage: str, where: str | None, run: str) -> str:
    """Where a stage takes its messages from; `where` is a pool (init), a place (run, eval) or None (aggregate)."""
    return f"stage.{stage}.{token(run)}" if where is None else f"stage.{stage}.{token(where)}.{token(run)}"


def stage_filter(stage: str, where: str | None) -> str:
    """What the consumer of a stage at a pool or place filters by."""
    return stage_subject(stage, where, "x")[:-1] + "*"


def stage_consumer(stage: str, where: str | None) -> str:
    """The durable name of that consumer."""
    return stage if where is None else f"{stage}-{token(where)}"


def log_subject(run: str, rollout: str, kind: str) -> str:
    """Where an event of a rollout is logged; kind is call, life, commit or `*`."""
    return f"log.{token(run)}.{rollout}.{kind}"


def sample_subject(run: str, group_id: str, index: int | str) -> str:
    """Where the one delivery of a rollout stands."""
    return f"sample.{token(run)}.{token(group_id)}.{index}"


def group_subject(run: str, group_id: str) -> str:
    """Where a complete group is announced."""
    return f"group.{token(run)}.{token(group_id)}"


def dead_subject(stage: str, run: str) -> str:
    """Where a message that cannot be worked on is kept."""
    return f"dead.{stage}.{token(run)}"


def alarm_subject(run: str, kind: str) -> str:
    """Where the one alarm of a kind that a run raised stands."""
    return f"alarm.{token(run)}.{kind}"


def gateway_pool_subject(incarnation: str) -> str:
    """Where one gateway answers what it sees of the pool of model servers: plain request and reply, stored nowhere."""
    return f"gateway.{token(incarnation)}.pool"


def rollout_key(run: str, rollout: str) -> str:
    """Key in the `rollouts` bucket."""
    return f"{token(run)}.{rollout}"


def task_key(run: str, task_id: str) -> str:
    """Key in the `tasks` bucket for how far a task is; its body stands under this key + `.body`."""
    return f"{token(run)}.{token(task_id)}"


def session_key(run: str, rollout: str, attempt: int) -> str:
    """Key in the `sessions` bucket; present means closed."""
    return f"{token(run)}.{rollout}.{attempt}"


def cancel_key(run: str, task_id: str | None = None, index: int | None = None) -> str:
    """Key in the `cancel` bucket for a run, a task or one rollout."""
    parts = [token(run)]
    if task_id is not None:
        parts.append(token(task_id))
        if index is not None:
            parts.append(str(index))
    return ".".join(parts)


def kv_stream(bucket: str) -> str:
    """The stream behind a key-value bucket."""
    return f"KV_{bucket}"


def kv_subject(bucket: str, key: str) -> str:
    """The subject of one key of a bucket."""
    return f"$KV.{bucket}.{key}"


def stream_of(subject: str) -> str:
    """The stream that holds a subject. Raises ValueError for a subject that is not ours."""
    head, _, rest = subject.partition(".")
    if head == "$KV":
        return kv_stream(rest.partition(".")[0])
    try:
        return _STREAMS[head]
    except KeyError:
        raise ValueError(f"no stream holds {subject!r}") from None
