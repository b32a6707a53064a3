"""A small root tree for sandboxes, put together from this machine's own files: nothing is downloaded.

It has sh, bash, coreutils, git, tar, gzip, python3 with its standard library, and busybox for the rest. It is made once
a content and kept in the cache; `root_tar` is the same as an archive, for `docker import` and `rollyard image import`.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

VERSION: Final = "3"
LINKS: Final = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}
FOLDERS: Final = ("etc", "home", "opt", "root", "run", "srv", "tmp", "var/tmp", "proc", "sys", "dev", "usr/local/bin")
PROGRAMS: Final = (
    "sh", "bash", "git", "tar", "gzip", "find", "xargs", "grep", "sed", "awk", "diff", "patch",
    # coreutils
    "[", "basename", "cat", "chmod", "chown", "cp", "cut", "date", "dd", "df", "dirname", "du", "echo", "env", "expr",
    "false", "head", "id", "install", "join", "kill", "ln", "ls", "md5sum", "mkdir", "mkfifo", "mknod", "mktemp", "mv",
    "nl", "nohup", "nproc", "od", "paste", "printf", "pwd", "readlink", "realpath", "rm", "rmdir", "seq", "sha256sum",
    "sleep", "sort", "split", "stat", "stty", "sync", "tail", "tee", "test", "timeout", "touch", "tr", "true",
    "truncate", "tty", "uname", "uniq", "wc", "whoami", "yes", "base64",
    # util-linux
    "setsid",
)  # fmt: skip
PASSWD: Final = (
    "root:x:0:0:root:/root:/bin/sh\nagent:x:1000:1000::/home/agent:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n"
)
GROUP: Final = "root:x:0:\nagent:x:1000:\nnogroup:x:65534:\n"
UNUSED_PYTHON: Final = frozenset(
    {"test", "tests", "idlelib", "lib2to3", "ensurepip", "turtledemo", "site-packages", "dist-packages", "pydoc_data"}
)
UNUSED_GIT: Final = re.compile(r"git-(remote-|http-|imap-send|daemon|shell|credential-|sh-i18n--)|scalar|mergetools")
_LIBRARY: Final = re.compile(r"(?:=> )?(/\S+) \(0x[0-9a-f]+\)")


def missing() -> str:
    """Why no tree can be made here; empty when it can."""
    for program in ("bash", "git", "tar", "ldd"):
        if shutil.which(program) is None:
            return f"no {program} on this machine"
    return "" if sys.platform == "linux" else "not Linux"


def root_tree(uid: int | None = None) -> Path:
    """The tree, from the cache or made now, owned by `uid` (as root; None: by whoever made it)."""
    owner = os.getuid() if uid is None else uid
    folder = _cache() / f"tree-{_digest()}-{owner}"

    def make(new: Path) -> None:
        build_tree(new)
        if owner != os.getuid():
            own(new, owner)

    return _made_once(folder, make)


def root_tar() -> Path:
    """The tree as a plain tar archive, as `docker export` writes it."""

    def make(new: Path) -> None:
        with tarfile.open(new, "w") as archive:
            archive.add(root_tree(os.getuid()), arcname=".", filter=_as_root)

    return _made_once(_cache() / f"tree-{_digest()}.tar", make)


def build_tree(folder: Path) -> None:
    """Fill `folder` with the tree."""
    for path in ("usr/bin", "usr/sbin", "usr/lib", "usr/lib64", *FOLDERS):
        (folder / path).mkdir(parents=True, exist_ok=True)
    for name, target in LINKS.items():
        (folder / name).symlink_to(target)
    for path in ("tmp", "var/tmp"):
        (folder / path).chmod(0o1777)
    (folder / "etc/passwd").write_text(PASSWD)
    (folder / "etc/group").write_text(GROUP)
    (folder / "etc/hostname").write_text("image\n")
    programs = [*_copy_programs(folder), *_copy_git(folder), *_copy_python(folder)]
    for library in _libraries(programs):
        _copy(library, folder / str(library).lstrip("/"))
    _link_busybox(folder)


def own(folder: Path, uid: int) -> None:
    """Give every file of a tree to `uid`."""
    for parent, folders, files in os.walk(folder):
        os.lchown(parent, uid, uid)
        for name in (*folders, *files):
            os.lchown(os.path.join(parent, name), uid, uid)  # noqa: PTH118 - thousands of them


def _cache() -> Path:
    # Where another user can read it too: tests drop to one.
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "rollyard" / "test-images"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _digest() -> str:
    """What the tree is made of: the sizes and times of its main parts."""
    parts = [VERSION, Path(__file__).read_text()]
    for program in ("bash", "git", "tar", "busybox", "ls"):
        if found := shutil.which(program):
            state = Path(found).stat()
            parts.append(f"{found} {state.st_size} {state.st_mtime_ns}")
    parts.append(str(_python()))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _made_once(target: Path, make: Callable[[Path], None]) -> Path:
    """`target`, made aside and renamed, so that it is whole or not there."""
    if target.exists():
        return target
    aside = Path(tempfile.mkdtemp(prefix=".making-", dir=target.parent))
    aside.chmod(0o755)
    new = aside / "it"
    try:
        if target.suffix != ".tar":
            new.mkdir()
        make(new)
        try:
            new.rename(target)
        except OSError:  # another test run was first
            if not target.exists():
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return target


def _as_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    return member


def _copy(source: Path, target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists():
        shutil.copy2(source, target)
    return target


def _copy_programs(folder: Path) -> list[Path]:
    copied = []
    for name in PROGRAMS:
        found = shutil.which(name, path="/usr/bin:/bin:/usr/sbin:/sbin")
        if found is not None and not (name != "busybox" and Path(found).resolve().name == "busybox"):
            copied.append(_copy(Path(found).resolve(), folder / "usr/bin" / name))
    return copied


def _copy_git(folder: Path) -> list[Path]:
    core = Path(subprocess.run(["git", "--exec-path"], capture_output=True, text=True, check=True).stdout.strip())
    inside = folder / str(core).lstrip("/")
    copied = []
    for entry in core.iterdir():
        if UNUSED_GIT.match(entry.name):
            continue
        target = inside / entry.name
        if entry.is_dir():
            shutil.copytree(entry, target, symlinks=True)
        elif entry.name == "git" or _same_program(entry, core / "git"):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(os.path.relpath(folder / "usr/bin/git", inside))
        else:
            copied.append(_copy(entry.resolve(), target))
    templates = Path("/usr/share/git-core/templates")
    if templates.is_dir():
        shutil.copytree(templates, folder / "usr/share/git-core/templates", symlinks=True)
    return copied


def _same_program(entry: Path, git: Path) -> bool:
    return git.exists() and entry.resolve().stat().st_size == git.resolve().stat().st_size


def _python() -> tuple[Path, Path, str]:
    """A Python to copy: its program, its standard library, and the prefix that it has in the tree."""
    for found in ("/usr/bin/python3", "/usr/local/bin/python3"):
        program = Path(found).resolve()
        library = program.parent.parent / "lib" / program.name
        if program.is_file() and (library / "os.py").is_file() and (library / "json").is_dir():
            return program, library, str(program.parent.parent).lstrip("/")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    base = Path(sys.base_prefix)
    return (base / "bin" / version).resolve(), base / "lib" / version, "usr/local"


def _copy_python(folder: Path) -> list[Path]:
    program, library, prefix = _python()
    target = _copy(program, folder / prefix / "bin" / program.name)
    for name in ("python3", "python"):
        (folder / "usr/bin" / name).symlink_to(os.path.relpath(target, folder / "usr/bin"))
    inside = folder / prefix / "lib" / library.name
    shutil.copytree(library, inside, symlinks=False, ignore=_unused, ignore_dangling_symlinks=True)
    return [target, *inside.rglob("*.so")]


def _unused(folder: str, names: list[str]) -> Iterable[str]:
    return [name for name in names if name in UNUSED_PYTHON or name.startswith(("config-", "_tkinter"))]


def _libraries(programs: Iterable[Path]) -> set[Path]:
    """Every shared library that they need, and the loader."""
    files = [str(path) for path in programs if path.is_file() and _is_elf(path)]
    told = subprocess.run(["ldd", *files], capture_output=True, text=True, check=False).stdout
    return {Path(found) for found in _LIBRARY.findall(told) if Path(found).exists()}


def _is_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def _link_busybox(folder: Path) -> None:
    """Applets of busybox for every name that is not there, if this machine has a static one."""
    found = shutil.which("busybox")
    if (
        found is None
        or "not a dynamic"
        not in subprocess.run(["ldd", found], capture_output=True, text=True, check=False).stderr.lower()
    ):
        return
    target = _copy(Path(found).resolve(), folder / "usr/bin/busybox")
    applets = subprocess.run([str(target), "--list"], capture_output=True, text=True, check=True).stdout.split()
    for applet in applets:
        link = folder / "usr/bin" / applet
        if not link.exists() and not link.is_symlink():
            link.symlink_to("busybox")
    mode = target.stat().st_mode
    target.chmod(stat.S_IMODE(mode) | 0o111)
