"""Types of the fields that stand in many records, described once."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from rollyard.schemas.subjects import MAX_ID_CHARS

RunName = Annotated[str, Meta(description="the run's name")]
TaskId = Annotated[str, Meta(description="the task's id, unique in its run")]
GroupId = Annotated[str, Meta(description="equal to task_id")]
GroupSize = Annotated[int, Meta(description="rollouts of the group")]
RolloutId = Annotated[str, Meta(description="a function of run, task and index")]
Index = Annotated[int, Meta(description="of the rollout in its group, from 0")]
Attempt = Annotated[int, Meta(description="the try at the rollout, from 1")]
UnixMs = Annotated[int, Meta(description="Unix time in ms; 0: not known, or it did not happen")]
Name = Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARS)]
Duration = Annotated[float, Meta(gt=0, le=7 * 86_400)]
Seconds = Annotated[float, Meta(description="seconds")]
Tokens = Annotated[int, Meta(description="a number of tokens")]
Scenario = Literal["main", "sub_agent", "compaction", "summary", "title", "heartbeat", "count"]
SchemaVersion = Annotated[int, Meta(description="version of this record; readers refuse a newer one")]
