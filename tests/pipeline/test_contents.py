from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollyard.pipeline.blobs import BlobStore
from rollyard.pipeline.contents import MIN_BYTES, Contents
from rollyard.schemas.call import CallIntent
from rollyard.schemas.errors import BlobError

LONG = "x" * MIN_BYTES
TOOLS = [{"type": "function", "function": {"name": "bash", "description": LONG}}]


def intent(**fields: Any) -> CallIntent:
    who: dict[str, Any] = {"call_id": "c", "run": "run", "rollout_id": "r", "attempt": 1, "gateway": "g"}
    return CallIntent(**who, at_ms=0, latest_end_ms=0, **fields)


def blobs(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


async def test_what_recurs_is_kept_once_and_put_back(tmp_path: Path) -> None:
    system, developer = {"role": "system", "content": LONG}, {"role": "developer", "content": LONG + "!"}
    user = {"role": "user", "content": LONG}
    whole = intent(messages=[system, user, developer], tools=TOOLS)
    contents = Contents(BlobStore(tmp_path))
    for _ in range(2):
        taken = await contents.take_out(whole)
        assert taken.messages == [{"role": "system"}, user, {"role": "developer"}]
        assert taken.tools is None
        assert sorted(taken.contents) == ["0", "2", "tools"]
        assert len(blobs(tmp_path)) == 3
    assert contents.put_back(taken) == whole
    assert Contents(BlobStore(tmp_path)).put_back(taken) == whole


@pytest.mark.parametrize("tools", [None, [], [{"type": "function"}]])
async def test_what_is_small_stays(tmp_path: Path, tools: list[dict[str, Any]] | None) -> None:
    small = intent(messages=[{"role": "system", "content": "be brief"}, {"role": "user", "content": LONG}], tools=tools)
    contents = Contents(BlobStore(tmp_path))
    assert await contents.take_out(small) is small
    assert contents.put_back(small) is small
    assert blobs(tmp_path) == []


async def test_without_a_store_everything_stays_inline(tmp_path: Path) -> None:
    whole = intent(tools=TOOLS)
    assert await Contents(None).take_out(whole) is whole
    taken = await Contents(BlobStore(tmp_path)).take_out(whole)
    with pytest.raises(BlobError, match="there is no blob store here"):
        Contents(None).put_back(taken)


async def test_a_part_that_is_lost_is_an_error_that_names_it(tmp_path: Path) -> None:
    taken = await Contents(BlobStore(tmp_path)).take_out(intent(tools=TOOLS))
    blobs(tmp_path)[0].unlink()
    with pytest.raises(BlobError, match=taken.contents["tools"]):
        Contents(BlobStore(tmp_path)).put_back(taken)
