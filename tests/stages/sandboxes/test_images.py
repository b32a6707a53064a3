"""The image store: what is brought into it, and that nothing of an image lands outside."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import stat
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollyard.cli import main
from rollyard.schemas.errors import SandboxError
from rollyard.stages.images.importing import ImportOptions, import_image
from rollyard.stages.images.packer import excluded, pack, without
from rollyard.stages.images.store import Image, ImageStore
from rollyard.stages.images.unpacker import Unpacker

Entry = tuple[str, str, Any]  # kind, name, content


def tar(*entries: Entry, mode: int = 0o755) -> bytes:
    """An archive of files, folders, links, hard links, devices."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for kind, name, content in entries:
            member = tarfile.TarInfo(name)
            member.mode, member.mtime = mode, 1000
            if kind == "file":
                data = content.encode() if isinstance(content, str) else content
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
                continue
            member.type = {
                "dir": tarfile.DIRTYPE, "link": tarfile.SYMTYPE, "hard": tarfile.LNKTYPE, "dev": tarfile.CHRTYPE,
                "fifo": tarfile.FIFOTYPE, "block": tarfile.BLKTYPE,
            }[kind]  # fmt: skip
            member.linkname = content or ""
            archive.addfile(member)
    return buffer.getvalue()


def told(root: Path) -> dict[str, str | None]:
    """What a tree holds: path -> content, target of a link, or None for a folder."""
    found: dict[str, str | None] = {}
    for parent, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(parent, name)
            key = str(path.relative_to(root))
            if path.is_symlink():
                found[key] = f"-> {path.readlink()}"
            else:
                found[key] = None if path.is_dir() else path.read_text()
    return found


CONFIG = {"config": {"Env": ["PATH=/opt/bin:/usr/bin", "X=a=b"], "WorkingDir": "/srv", "User": "1000"}}


def docker_archive(path: Path, layers: list[bytes], tags: list[str] | None = None) -> Path:
    """What `docker save` writes."""
    config = json.dumps(CONFIG).encode()
    manifest = [
        {"Config": "c.json", "RepoTags": [tag], "Layers": [f"{number}/layer.tar" for number in range(len(layers))]}
        for tag in tags or ["it:1"]
    ]
    named: list[Entry] = [("file", f"{number}/layer.tar", layer) for number, layer in enumerate(layers)]
    path.write_bytes(tar(*named, ("file", "c.json", config), ("file", "manifest.json", json.dumps(manifest))))
    return path


def oci_layout(folder: Path, layers: list[bytes], *, nested: bool = False) -> Path:
    """An OCI layout; with an index of platforms inside if `nested`."""
    blobs = folder / "blobs/sha256"
    blobs.mkdir(parents=True)

    def put(data: bytes) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {"digest": f"sha256:{digest}", "size": len(data)}

    manifest = {"config": put(json.dumps(CONFIG).encode()), "layers": [put(layer) for layer in layers]}
    entry = put(json.dumps(manifest).encode())
    if nested:
        platforms = [
            entry | {"platform": {"os": "linux", "architecture": {"x86_64": "amd64"}.get(os.uname().machine, "arm64")}},
            {"digest": "sha256:" + "0" * 64, "platform": {"os": "linux", "architecture": "s390x"}},
        ]
        entry = put(json.dumps({"manifests": platforms}).encode())
    (folder / "index.json").write_text(json.dumps({"manifests": [entry]}))
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return folder


def imported(tmp_path: Path, source: Path, **options: Any) -> tuple[Path, Image, tuple[str, ...]]:
    store = ImageStore(tmp_path / "images")
    done = import_image(store, source, "it/name:1", ImportOptions(**options), lambda _: None)
    stored = store.get("it/name:1")
    assert stored.image == done.image
    return stored.layers[0], done.image, done.notes


LAYERS = [
    tar(
        ("dir", "usr", None), ("dir", "usr/lib", None), ("link", "lib", "usr/lib"), ("file", "usr/lib/old", "1"),
        ("dir", "etc", None), ("file", "etc/a", "1"), ("file", "etc/b", "1"), ("dir", "gone", None),
        ("file", "gone/x", "1"), ("dir", "turned", None), ("file", "turned/in", "1"), ("link", "abs", "/etc"),
        ("file", "opaque/low", "1"), ("file", "opaque/deep/low", "1"),
    ),
    tar(
        ("file", "lib/new", "2"), ("file", "etc/.wh.a", ""), ("file", "etc/b", "2"), ("file", ".wh.gone", ""),
        ("file", "turned", "now a file"), ("hard", "etc/c", "etc/b"), ("file", "abs/d", "2"), ("dev", "dev/null", None),
        ("file", "opaque/.wh..wh..opq", ""), ("file", "opaque/high", "2"), ("file", ".wh..wh.plnk", ""),
    ),
]  # fmt: skip
MERGED = {
    "usr": None, "usr/lib": None, "lib": "-> usr/lib", "usr/lib/old": "1", "usr/lib/new": "2", "etc": None,
    "etc/b": "2", "etc/c": "2", "etc/d": "2", "turned": "now a file", "abs": "-> /etc", "opaque": None,
    "opaque/high": "2",
}  # fmt: skip


def without_dev(found: dict[str, str | None]) -> dict[str, str | None]:
    return {path: content for path, content in found.items() if path != "dev"}


@pytest.mark.parametrize("form", ["docker", "docker.gz", "docker.zst", "oci", "oci nested", "oci.tar"])
def test_layers_are_applied_from_every_form(tmp_path: Path, form: str) -> None:
    source = tmp_path / "source"
    if form.startswith("docker"):
        docker_archive(source, LAYERS)
        pack_by = {"docker": bytes, "docker.gz": gzip.compress, "docker.zst": zstandard.compress}[form]
        source.write_bytes(pack_by(source.read_bytes()))
    else:
        packed = [gzip.compress(LAYERS[0]), zstandard.compress(LAYERS[1])]
        layout = oci_layout(tmp_path / "layout", packed, nested=form == "oci nested")
        source = layout
        if form == "oci.tar":
            source = tmp_path / "oci.tar"
            with tarfile.open(source, "w") as archive:
                archive.add(layout, ".")
    root, image, notes = imported(tmp_path, source)
    assert without_dev(told(root)) == MERGED
    assert (image.env, image.workdir) == ({"PATH": "/opt/bin:/usr/bin", "X": "a=b"}, "/srv")
    assert [note.split(":")[0] for note in notes] == ["1 devices and pipes", "its user '1000'"]
    assert (root / "etc/b").stat().st_mtime == 1000


def test_a_root_tree_and_a_folder_are_images_too(tmp_path: Path) -> None:
    entries: list[Entry] = [
        ("dir", "./a", None),
        ("file", "./a/b", "1"),
        ("hard", "./a/c", "./a/b"),
        ("link", "d", "/a"),
    ]
    path = tmp_path / "exported.tar"
    path.write_bytes(tar(*entries))
    root, image, _ = imported(tmp_path, path)
    assert told(root) == {"a": None, "a/b": "1", "a/c": "1", "d": "-> /a"}
    again, _, _ = imported(tmp_path, root, replace=True)
    assert told(again) == told(root)
    assert (again / "a/b").stat().st_ino == (again / "a/c").stat().st_ino
    assert image.env == {}


OUTSIDE = [
    [("file", "../planted", "x")],
    [("file", "a/../../planted", "x")],
    [("file", "/planted", "x")],
    [("link", "out", "{outside}"), ("file", "out/planted", "x")],
    [("link", "out", "../../../../.."), ("file", "out{outside}/planted", "x")],
    [("link", "one", "{outside}"), ("link", "two", "one"), ("file", "two/deep/planted", "x")],
    [("link", "out", "{outside}"), ("dir", "out", None), ("file", "out/planted", "x")],
    [("link", "f", "{outside}/planted"), ("file", "f", "x")],
    [("hard", "h", "{outside}/secret"), ("file", "h", "x")],
    [("hard", "h", "../../outside/secret")],
    [("link", "out", "{outside}"), ("hard", "h", "out/secret"), ("file", "h", "planted")],
    [("link", "out", "{outside}"), ("file", "out/.wh.secret", "")],
    [("link", "out", "{outside}"), ("file", "out/.wh..wh..opq", "")],
    [("file", ".wh..", "")],
    [("file", "a/.wh...", "")],
    [("link", "loop", "loop"), ("file", "loop/x", "x")],
    [("file", "f", "x"), ("file", "f/planted", "x")],
]


@pytest.mark.parametrize("image", [True, False])
@pytest.mark.parametrize("entries", OUTSIDE, ids=str)
def test_nothing_lands_outside(tmp_path: Path, entries: list[Entry], image: bool) -> None:
    outside, root = tmp_path / "outside", tmp_path / "root"
    outside.mkdir()
    root.mkdir()
    (outside / "secret").write_text("secret")
    filled = [
        (kind, name.format(outside=outside), content and content.format(outside=outside))
        for kind, name, content in entries
    ]
    unpacker = Unpacker(root=root, image=image)
    try:
        with tarfile.open(fileobj=io.BytesIO(tar(*filled))) as archive:
            unpacker.apply(archive)
        unpacker.finish()
    except SandboxError:
        pass
    else:
        # An image may go through its own links; else only a folder in place of a link makes a way.
        assert image or ("dir", "out", None) in filled or not any("planted" in name for _, name, _ in filled)
    assert told(outside) == {"secret": "secret"}
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["outside", "root"]
    assert not any(path.read_text() == "secret" for path in root.rglob("*") if path.is_file() and not path.is_symlink())


names = st.lists(st.sampled_from(["a", "b", "..", ".", "", ".wh.a", ".wh..wh..opq"]), min_size=1, max_size=4).map(
    "/".join
)
entries_of = st.lists(
    st.tuples(st.sampled_from(["file", "dir", "link", "hard", "fifo"]), names, names).map(
        lambda entry: (entry[0], entry[1] or "a", "x" if entry[0] == "file" else entry[2] or "a")
    ),
    max_size=8,
)


@given(layers=st.lists(entries_of, max_size=3), absolute=st.booleans(), image=st.booleans())
@example(layers=[[("link", "a", "../.."), ("hard", "b", "a/outside/secret")]], absolute=False, image=True)
@settings(max_examples=150)
def test_no_archive_reaches_outside(layers: list[list[Entry]], absolute: bool, image: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        top = Path(folder).resolve()
        root = top / "deep" / "root"
        root.mkdir(parents=True)
        for name in ("a", "b"):
            (top / name).write_text("outside")
            (top / "deep" / name).write_text("outside")
        before = told_outside(top)
        unpacker = Unpacker(root=root, image=image)
        for layer in layers:
            moved = [
                (kind, name, f"{top}/{target}" if absolute and kind == "link" else target)
                for kind, name, target in layer
            ]
            try:
                with tarfile.open(fileobj=io.BytesIO(tar(*moved))) as archive:
                    unpacker.apply(archive)
            except SandboxError:
                continue
        unpacker.finish()
        assert told_outside(top) == before
        assert all(
            path.read_text() != "outside" for path in root.rglob("*") if path.is_file() and not path.is_symlink()
        )


def told_outside(top: Path) -> list[tuple[str, str]]:
    return [(path, (top / path).read_text()) for path in ("a", "b", "deep/a", "deep/b")] + [
        (folder.name, str(sorted(path.name for path in folder.iterdir()))) for folder in (top, top / "deep")
    ]


def test_modes_let_the_owner_in_and_nobody_become_another(tmp_path: Path) -> None:
    source = tmp_path / "t.tar"
    source.write_bytes(tar(("dir", "locked", None), ("file", "locked/f", "x"), mode=0o4000))
    root, _, _ = imported(tmp_path, source)
    assert stat.S_IMODE((root / "locked").stat().st_mode) == 0o700
    assert stat.S_IMODE((root / "locked/f").stat().st_mode) == 0o400


def test_an_owner_gets_everything(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root")
    source = docker_archive(tmp_path / "d.tar", LAYERS)
    root, image, _ = imported(tmp_path, source, owner=12345)
    assert {path.lstat().st_uid for path in [root, *root.rglob("*")]} == {12345}
    assert image.uid == 12345
    again, _, _ = imported(tmp_path, root, owner=12346, replace=True)
    assert {path.lstat().st_uid for path in [again, *again.rglob("*")]} == {12346}


DAMAGED = {
    "no archive": b"no archive at all" * 100,
    "cut gzip": gzip.compress(os.urandom(4096))[:2000],
    "cut tar": tar(("file", "a", "x" * 5000))[:3000],
    "empty": tar(),
    "bad json": tar(("file", "manifest.json", "[{")),
    "odd manifest": tar(("file", "manifest.json", '[{"Layers": 5}]')),
    "missing layer": tar(("file", "manifest.json", '[{"Layers": ["gone"], "Config": "c"}]')),
    "odd digest": tar(("file", "oci-layout", "{}"), ("file", "index.json", '{"manifests": [{"digest": "../x"}]}')),
    "endless index": tar(("file", "oci-layout", "{}"), ("file", "index.json", '{"manifests": []}')),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_image_leaves_nothing(tmp_path: Path, what: str) -> None:
    source = tmp_path / "source"
    source.write_bytes(DAMAGED[what])
    store = ImageStore(tmp_path / "images")
    with pytest.raises(SandboxError):
        import_image(store, source, "x", ImportOptions(), lambda _: None)
    assert list((tmp_path / "images").iterdir()) == []


def test_a_layer_that_was_changed_is_refused(tmp_path: Path) -> None:
    layout = oci_layout(tmp_path / "layout", [LAYERS[0]])
    blob = next(path for path in (layout / "blobs/sha256").iterdir() if path.stat().st_size == len(LAYERS[0]))
    blob.write_bytes(blob.read_bytes() + b"\0" * 512)
    with pytest.raises(SandboxError, match="damaged"):
        imported(tmp_path, layout)


def test_several_images_need_a_tag(tmp_path: Path) -> None:
    source = docker_archive(tmp_path / "d.tar", [LAYERS[0]], ["a:1", "b:2"])
    with pytest.raises(SandboxError, match="several images") as refused:
        imported(tmp_path, source)
    assert "a:1, b:2" in str(refused.value)
    with pytest.raises(SandboxError, match="no image 'c:3'"):
        imported(tmp_path, source, tag="c:3")
    imported(tmp_path, source, tag="b:2")


@pytest.mark.parametrize("name", ["", "/abs", ".hidden", "a b", "a" * 300, "a\0b"])
def test_names(tmp_path: Path, name: str) -> None:
    source = tmp_path / "t.tar"
    source.write_bytes(tar(("file", "a", "x")))
    with pytest.raises(SandboxError, match="no name of an image"):
        import_image(ImageStore(tmp_path / "images"), source, name, ImportOptions(), lambda _: None)


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = docker_archive(tmp_path / "d.tar", LAYERS)
    data = ["--data", str(tmp_path / "data")]
    assert main(["image", "ls", *data]) == 0
    assert main(["image", "import", str(source), "--name", "team/it:1", *data]) == 0
    first = capsys.readouterr()
    assert "layer 2 of 2" in first.err and "not kept: its user" in first.err and "team/it:1: 0 MB" in first.out
    assert main(["image", "import", str(source), "--name", "team/it:1", *data]) != 0
    assert "--replace" in capsys.readouterr().err
    assert main(["image", "import", str(source), "--name", "team/it:1", "--replace", *data]) == 0
    assert main(["image", "ls", "--json", *data]) == 0
    assert [image["name"] for image in json.loads(capsys.readouterr().out.splitlines()[-1])] == ["team/it:1"]
    assert main(["image", "rm", "team/it:1", *data]) == 0
    assert main(["image", "rm", "team/it:1", *data]) != 0
    assert "there is no image 'team/it:1'" in capsys.readouterr().err


def told_names(archive: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        return opened.getnames()


def test_packing_follows_no_link_and_keeps_to_its_limit(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    top = tmp_path / "top"
    (top / "sub/.git").mkdir(parents=True)
    (top / "sub/.git/x").write_text("1")
    (top / "sub/keep").write_text("2")
    (top / "out").symlink_to(tmp_path)
    data = pack(top, "top", max_bytes=1 << 20, exclude=(".git", "*.pyc"))
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        assert archive.getnames() == ["top", "top/out", "top/sub", "top/sub/keep"]
    assert b"secret" not in data.replace(str(tmp_path).encode(), b"")
    assert sorted(told_names(without(pack(top, "top", max_bytes=1 << 20), (".git", "out")))) == [
        "top", "top/sub", "top/sub/keep",
    ]  # fmt: skip
    with pytest.raises(SandboxError, match="has over 1000 bytes"):
        pack(top, ".", max_bytes=1000)
    assert excluded("a/node_modules/b/c.js", ["c.js"])
    assert not excluded("a/b", ["c"])
