from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.pipeline import images
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


PNG = bytes(range(256)) * 8
NAME = hashlib.sha256(PNG).hexdigest()
TEXT = base64.b64encode(PNG).decode()
URL = f"data:image/png;base64,{TEXT}"
LOOSE = chr(ord(TEXT[-2]) + 1)  # decodes to the same bytes


def shown(*parts: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": "look"}, *parts]}


def picture(url: str = URL, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "image": (picture(detail="low"), picture(f"blob:{NAME}", detail="low", media_type="image/png")),
    "file": (
        {"type": "file", "file": {"filename": "a.pdf", "file_data": f"data:application/pdf;base64,{TEXT}"}},
        {
            "type": "file",
            "file": {"filename": "a.pdf", "file_data": f"blob:{NAME}", "media_type": "application/pdf"},
        },
    ),
    "block of Messages": (
        {
            **picture(),
            "_block": {
                "type": "image",
                "source": {"type": "base64", "media_type": "image/png", "data": TEXT},
                "cache_control": {"type": "ephemeral"},
            },
        },
        {
            **picture(f"blob:{NAME}", media_type="image/png"),
            "_block": {
                "type": "image",
                "source": {"type": "base64", "media_type": "image/png", "data": f"blob:{NAME}"},
                "cache_control": {"type": "ephemeral"},
            },
        },
    ),
}


@pytest.mark.parametrize("form", FORMS)
async def test_an_image_is_kept_once_and_the_record_refers_to_it(tmp_path: Path, form: str) -> None:
    sent, logged = FORMS[form]
    contents, store = Contents(BlobStore(tmp_path)), BlobStore(tmp_path)
    whole = intent(messages=[shown(sent), shown(sent, role="tool")])
    for _ in range(2):
        taken = await contents.take_out(whole)
        assert taken.messages == [shown(logged), shown(logged, role="tool")]
        assert [path.name for path in blobs(tmp_path)] == [NAME]
    assert store.get(NAME) == PNG
    assert whole.messages == [shown(sent), shown(sent, role="tool")]
    assert contents.put_back(taken) == taken
    assert await Contents(store).with_images(taken.messages) == whole.messages
    assert images.names(taken.messages) == {NAME}
    assert images.names(whole.messages) == set()


async def test_a_system_prompt_with_an_image_is_kept_by_content_with_a_reference(tmp_path: Path) -> None:
    whole = intent(messages=[shown(picture(), {"type": "text", "text": LONG}, role="system")])
    contents = Contents(BlobStore(tmp_path))
    taken = await contents.take_out(whole)
    assert taken.messages == [{"role": "system"}]
    back = contents.put_back(taken)
    assert TEXT not in msgspec.json.encode(back).decode()
    assert await contents.with_images(back.messages) == whole.messages


@pytest.mark.parametrize(
    "part",
    [
        picture("https://example.org/a.png"),
        picture("data:image/png;base64,AAAA"),
        picture(f"data:image/png,{TEXT}"),
        picture(f"data:image/png;base64,{TEXT[:80]}\n{TEXT[80:]}"),
        picture(URL + "AB=="),
        picture(URL[:-2] + LOOSE + "="),
        picture(URL[:-1]),
        picture(URL + "é"),
        picture(f"blob:{NAME}"),
        picture(media_type="image/png"),
        {"type": "image_url", "image_url": None},
        {"type": "image_url"},
        {"type": "text", "text": URL, "_block": {"source": None}},
        {"type": "text", "text": "x", "_block": {"source": {"type": "text", "media_type": "text/plain", "data": TEXT}}},
        "bare",
    ],
)
async def test_what_is_small_or_could_not_be_rebuilt_to_the_letter_stays(tmp_path: Path, part: Any) -> None:
    whole = intent(messages=[shown(part)])
    contents = Contents(BlobStore(tmp_path))
    assert await contents.take_out(whole) is whole
    assert await contents.with_images(whole.messages) == whole.messages
    assert blobs(tmp_path) == []


async def test_without_a_store_images_stay_inline_and_a_reference_is_an_error_that_names_it(tmp_path: Path) -> None:
    whole = intent(messages=[shown(picture())])
    assert await Contents(None).take_out(whole) is whole
    taken = await Contents(BlobStore(tmp_path)).take_out(whole)
    with pytest.raises(BlobError, match=f"{NAME}, and there is no blob store"):
        await Contents(None).with_images(taken.messages)
    blobs(tmp_path)[0].unlink()
    with pytest.raises(BlobError, match=NAME):
        await Contents(BlobStore(tmp_path)).with_images(taken.messages)


@given(st.binary(max_size=2000), st.sampled_from(["image/png", "image/svg+xml;charset=utf-8", ""]))
def test_every_data_url_comes_back_to_the_letter(data: bytes, media_type: str) -> None:
    whole = [shown(picture(f"data:{media_type};base64,{base64.b64encode(data).decode()}"))]
    taken, found = images.take_out(whole)
    assert images.put_back(taken, found) == whole
    assert images.names(taken) == found.keys()
    assert (taken == whole) == (len(base64.b64encode(data)) < images.MIN_CHARS)
    assert [images.by_content(message) for message in taken] == [images.by_content(message) for message in whole]


async def test_what_is_named_for_long_is_put_again_so_that_no_sweep_removes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = intent(tools=TOOLS)
    for put_again_s, put in ((0.0, True), (600.0, False)):
        monkeypatch.setattr("rollyard.pipeline.contents.PUT_AGAIN_S", put_again_s)
        contents = Contents(BlobStore(tmp_path))
        await contents.take_out(whole)
        blobs(tmp_path)[0].unlink()
        taken = await contents.take_out(whole)
        assert bool(blobs(tmp_path)) is put
    # What was only read, somebody else has put, who knows when.
    BlobStore(tmp_path).put(msgspec.json.encode(TOOLS))
    reader = Contents(BlobStore(tmp_path))
    assert reader.put_back(taken) == whole
    blobs(tmp_path)[0].unlink()
    await reader.take_out(whole)
    assert len(blobs(tmp_path)) == 1
