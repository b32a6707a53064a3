"""Bringing an image into the store: from `docker save`, `docker export`, an OCI layout, or a folder."""

from __future__ import annotations

import lzma
import os
import tarfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import zstandard

from rollyard.schemas.errors import SandboxError
from rollyard.stages.images.bundle import (
    ArchiveBundle,
    Described,
    FolderBundle,
    Hashed,
    Layer,
    decompressed,
    describe,
    opened_archive,
)
from rollyard.stages.images.layer import copy_layer
from rollyard.stages.images.store import Image, ImageStore, now_ms
from rollyard.stages.images.unpacker import Unpacker

PROGRESS_BYTES: Final = 64 << 20
OnProgress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Imported:
    """What came of it."""

    image: Image
    notes: tuple[str, ...]  # what of the source is not kept


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOptions:
    """How an image is brought in."""

    tag: str = ""  # which one, of several
    owner: int | None = None  # uid that its files get; None: whoever runs this
    replace: bool = False


def import_image(
    store: ImageStore, source: Path, name: str, options: ImportOptions, on_progress: OnProgress
) -> Imported:
    """Bring an image into the store, whole or not at all. Raises SandboxError."""
    if not source.exists():
        raise SandboxError(f"there is no {source}", hint="give an archive or a folder")
    store.sweep()
    with store.adding(name, replace=options.replace) as new:
        root = new / "root"
        notes: list[str] = []
        counter = _Counter(on_progress)
        try:
            described = _fill(source, root, options, counter, notes)
        except (tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, zstandard.ZstdError) as error:
            raise SandboxError(f"the image {source} cannot be read: {error}", hint="is it whole?") from error
        _give(root, options.owner)
        if not any(root.iterdir()):
            raise SandboxError(f"{source} holds no files")
        if described.user:
            notes.append(f"its user {described.user!r}: inside, everybody is root without power")
        image = Image(
            name=name,
            source=str(source.absolute()),
            created_ms=now_ms(),
            env=described.env,
            workdir=described.workdir,
            bytes=counter.bytes,
            uid=options.owner if options.owner is not None else os.getuid(),
        )
        store.write(new, image)
    return Imported(image, tuple(notes))


def _fill(source: Path, root: Path, options: ImportOptions, counter: _Counter, notes: list[str]) -> Described:
    if source.is_dir():
        found = describe(FolderBundle(source), options.tag)
        if found is not None:
            _apply_layers(found.layers, root, options, counter, notes)
            return found
        counter.say("copying the folder")
        counter.bytes += copy_layer(source, root, options.owner)
        return Described([])
    with opened_archive(source) as archive:
        bundle = ArchiveBundle(archive)
        found = describe(bundle, options.tag) if "manifest.json" in bundle or "oci-layout" in bundle else None
        if found is not None:
            _apply_layers(found.layers, root, options, counter, notes)
            return found
        counter.say("unpacking the root tree")
        unpacker = Unpacker(root=root, image=True, owner=options.owner, on_bytes=counter.add)
        unpacker.apply(archive)
        unpacker.finish()
        _tell_left_out(unpacker, notes)
        return Described([])


def _apply_layers(
    layers: Sequence[Layer], root: Path, options: ImportOptions, counter: _Counter, notes: list[str]
) -> None:
    unpacker = Unpacker(root=root, image=True, owner=options.owner, on_bytes=counter.add)
    for number, layer in enumerate(layers, 1):
        counter.say(f"layer {number} of {len(layers)}")
        with layer.open() as file:
            hashed = Hashed(file)
            plain = decompressed(hashed)  # type: ignore[arg-type]
            _apply(unpacker, plain)
            if layer.sha256 and hashed.sha256() != layer.sha256:
                raise SandboxError(f"the layer {layer.name} is damaged", hint="copy the image again")
    unpacker.finish()
    _tell_left_out(unpacker, notes)


def _apply(unpacker: Unpacker, plain: IO[bytes]) -> None:
    with tarfile.open(fileobj=plain, mode="r|") as archive:
        unpacker.apply(archive)
    while plain.read(1 << 20):  # what is padded after the archive belongs to the digest
        pass


def _tell_left_out(unpacker: Unpacker, notes: list[str]) -> None:
    if unpacker.left_out:
        notes.append(f"{unpacker.left_out} devices and pipes: a sandbox has its own /dev")


def _give(root: Path, owner: int | None) -> None:
    if owner is not None:
        os.lchown(root, owner, owner)
    root.chmod(root.stat().st_mode & 0o777 | 0o755)


class _Counter:
    """Tells how far an import is, now and then."""

    def __init__(self, on_progress: OnProgress) -> None:
        self._on_progress = on_progress
        self._told = 0
        self._doing = ""
        self.bytes = 0

    def say(self, doing: str) -> None:
        self._doing = doing
        self._on_progress(doing)

    def add(self, count: int) -> None:
        self.bytes += count
        if self.bytes - self._told >= PROGRESS_BYTES:
            self._told = self.bytes
            self._on_progress(f"{self._doing}, {self.bytes >> 20} MiB unpacked")
