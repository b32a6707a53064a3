"""What an image is brought from: a folder or an archive that holds named files, and what they say of its layers."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import platform
import posixpath
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final, Protocol, cast

import zstandard

from rollyard.schemas.errors import SandboxError

MAX_JSON_BYTES: Final = 16 << 20
_GZIP: Final = b"\x1f\x8b"
_ZSTD: Final = b"\x28\xb5\x2f\xfd"
_ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm"}
_LISTS: Final = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")


class Bundle(Protocol):
    """Named files."""

    def open(self, name: str) -> IO[bytes] | None:
        """A file of it; None: there is none."""
        ...


class FolderBundle:
    """The files below a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()

    def open(self, name: str) -> IO[bytes] | None:
        """A file of it; None: there is none. Raises SandboxError for one outside."""
        path = (self._folder / name).resolve()
        if not path.is_relative_to(self._folder):
            raise SandboxError(f"the image names a file outside of it: {name!r}")
        return path.open("rb") if path.is_file() else None


class ArchiveBundle:
    """The members of an uncompressed tar archive."""

    def __init__(self, archive: tarfile.TarFile) -> None:
        self._archive = archive
        self._members = {posixpath.normpath(member.name): member for member in archive}

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def open(self, name: str) -> IO[bytes] | None:
        """A member; None: there is none."""
        member = self._members.get(posixpath.normpath(name))
        if member is not None and member.issym():
            # Older `docker save` writes a layer that two images share once.
            target = posixpath.normpath(posixpath.join(posixpath.dirname(member.name), member.linkname))
            member = self._members.get(target)
        return self._archive.extractfile(member) if member is not None and member.isreg() else None


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: how to open it, and the digest that its bytes must have (empty: it has none)."""

    name: str
    open: Callable[[], IO[bytes]]
    sha256: str = ""


@dataclass(frozen=True, slots=True)
class Described:
    """An image as its bundle describes it, lowest layer first."""

    layers: list[Layer]
    env: dict[str, str] = field(default_factory=dict)
    workdir: str = ""
    user: str = ""


def describe(bundle: Bundle, tag: str) -> Described | None:
    """The image of a bundle, as `docker save` or as OCI lays it out; None: it is neither.

    `tag` chooses among several. Raises SandboxError.
    """
    if (manifest := _json(bundle, "manifest.json")) is not None and isinstance(manifest, list):
        return _docker(bundle, manifest, tag)
    if (index := _json(bundle, "index.json")) is not None:
        return _oci(bundle, index, tag)
    return None


def _docker(bundle: Bundle, manifest: list[Any], tag: str) -> Described:
    with _shaped():
        found = [image for image in manifest if not tag or tag in (image.get("RepoTags") or [])]
        names = [name for image in manifest for name in (image.get("RepoTags") or ["untagged"])]
        image = _only(found, names, tag)
        layers = [Layer(name, _opener(bundle, name)) for name in image["Layers"]]
        return _with_config(layers, _json(bundle, image["Config"]) or {})


def _oci(bundle: Bundle, index: Any, tag: str) -> Described:
    with _shaped():
        entries = index["manifests"]
        named = {_ref_name(entry): entry for entry in entries}
        found = [entry for entry in entries if not tag or _ref_name(entry) == tag]
        if len(found) > 1:
            found = _for_this_machine(found) or found
        entry = _only(found, list(named), tag)
        for _ in range(4):
            manifest = _blob(bundle, entry["digest"])
            if "manifests" not in manifest and entry.get("mediaType") not in _LISTS:
                break
            entry = _only(_for_this_machine(manifest["manifests"]), ["other platforms only"], "")
        layers = [
            Layer(layer["digest"], _opener(bundle, _blob_path(layer["digest"])), layer["digest"].partition(":")[2])
            for layer in manifest["layers"]
        ]
        return _with_config(layers, _blob(bundle, manifest["config"]["digest"]))


def _with_config(layers: list[Layer], config: Any) -> Described:
    inner = config.get("config") or {}
    pairs = (text.partition("=") for text in inner.get("Env") or [])
    env = {name: value for name, _, value in pairs if name}
    return Described(layers, env, inner.get("WorkingDir") or "", inner.get("User") or "")


def _only(found: list[Any], names: list[str], tag: str) -> Any:
    if len(found) == 1:
        return found[0]
    known = ", ".join(filter(None, names)) or "none with a name"
    if not found:
        raise SandboxError(
            f"there is no image {tag!r} in it" if tag else "there is no image in it", hint=f"has {known}"
        )
    raise SandboxError("there are several images in it", hint=f"choose one with --tag; there are {known}")


def _for_this_machine(entries: list[Any]) -> list[Any]:
    machine = platform.machine()
    wanted = ("linux", _ARCHITECTURES.get(machine, machine))
    of_platform = [(entry.get("platform") or {}, entry) for entry in entries]
    return [entry for found, entry in of_platform if (found.get("os"), found.get("architecture")) == wanted]


def _ref_name(entry: Any) -> str:
    notes = entry.get("annotations") or {}
    return str(notes.get("io.containerd.image.name") or notes.get("org.opencontainers.image.ref.name") or "")


def _blob_path(digest: str) -> str:
    kind, _, value = digest.partition(":")
    if kind != "sha256" or len(value) != 64 or not all(letter in "0123456789abcdef" for letter in value):
        raise SandboxError(f"the image names a blob by {digest!r}", hint="only sha256 digests are known")
    return f"blobs/sha256/{value}"


def _blob(bundle: Bundle, digest: str) -> Any:
    found = _json(bundle, _blob_path(digest), digest.partition(":")[2])
    if found is None:
        raise SandboxError(f"the image lacks its blob {digest}", hint="was it copied whole?")
    return found


def _json(bundle: Bundle, name: str, sha256: str = "") -> Any:
    file = bundle.open(name)
    if file is None:
        return None
    with file:
        data = file.read(MAX_JSON_BYTES)
    if sha256 and hashlib.sha256(data).hexdigest() != sha256:
        raise SandboxError(f"the blob {name} of the image is damaged", hint="copy it again")
    try:
        return json.loads(data)
    except ValueError as error:
        raise SandboxError(f"the file {name} of the image is no JSON: {error}") from error


def _opener(bundle: Bundle, name: str) -> Callable[[], IO[bytes]]:
    def opened() -> IO[bytes]:
        file = bundle.open(name)
        if file is None:
            raise SandboxError(f"the image lacks its layer {name}", hint="was it copied whole?")
        return file

    return opened


@contextmanager
def _shaped() -> Iterator[None]:
    """Whatever of an image's description is not as it should be is a SandboxError."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise SandboxError(f"the image's description cannot be understood: {error!r}") from error


class Hashed(io.RawIOBase):
    """A file that is read once, front to back, and hashed meanwhile."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__()
        self._file = file
        self._hash = hashlib.sha256()

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Read what comes next."""
        data = self._file.read(len(buffer))
        self._hash.update(data)
        buffer[: len(data)] = data
        return len(data)

    def sha256(self) -> str:
        """The digest of all of it."""
        while self.read(1 << 20):
            pass
        return self._hash.hexdigest()


def decompressed(file: IO[bytes]) -> IO[bytes]:
    """A file, gzip, zstd or plain, as plain bytes from its start."""
    buffered = io.BufferedReader(cast(io.RawIOBase, file), 1 << 20)
    start = buffered.peek(4)[:4]
    if start.startswith(_GZIP):
        return gzip.GzipFile(fileobj=buffered)  # type: ignore[return-value]
    if start == _ZSTD:
        return zstandard.ZstdDecompressor().stream_reader(buffered, read_across_frames=True)
    return buffered


@contextmanager
def opened_archive(path: Path) -> Iterator[tarfile.TarFile]:
    """A tar archive to be read in any order; a compressed one is unpacked aside first. Raises SandboxError."""
    with tempfile.TemporaryFile() as aside, path.open("rb", buffering=0) as raw:
        plain = decompressed(raw)
        source: IO[bytes] = aside
        if isinstance(plain, io.BufferedReader):
            source = plain
        else:
            shutil.copyfileobj(plain, aside, 1 << 20)
            aside.seek(0)
        try:
            archive = tarfile.open(fileobj=source, mode="r:")  # noqa: SIM115 - it is entered below
        except tarfile.TarError as error:
            raise SandboxError(
                f"{path} is no tar archive: {error}",
                hint="give what `docker save` or `docker export` wrote, an OCI layout, or a folder",
            ) from error
        with archive:
            yield archive
        with suppress(ValueError):
            plain.close()
