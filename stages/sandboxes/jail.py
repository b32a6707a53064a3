"""What a bubblewrap jail is told: command lines, and nothing else. Pure.

A process of a sandbox is a chain of programs, each of which becomes the next: setpriv (root workers only), nsenter
(into the namespaces that the holder keeps), prlimit, bwrap (the jail proper, with process ids of its own), sh, the
command.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from msgspec import Struct

from rollyard.schemas.errors import SandboxError
from rollyard.schemas.sandbox import NetworkMode

OWN_NETWORKS: Final[frozenset[NetworkMode]] = frozenset({"none", "gateway"})
PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SHELL: Final = "/bin/sh"
HOSTNAME: Final = "sandbox"
MAX_VARIABLES: Final = 2000
"""bwrap takes 9,000 arguments; a variable is three."""

_ENTER: Final = 'cd -- "$1" || exit 126; unset OLDPWD; shift; exec "$@"'


class Bind(Struct, frozen=True):
    """A folder that is seen read-only at `target`; `source` is its path in the holder's namespace."""

    source: str
    target: str


class Jail(Struct, frozen=True, kw_only=True):
    """What all processes of one sandbox have in common. It is kept in the sandbox's folder, for every worker."""

    image: str = ""
    layers: tuple[str, ...] = ()  # trees of the image, the uppermost first; none: `host` instead
    host: tuple[Bind, ...] = ()
    links: tuple[Bind, ...] = ()  # symbolic links of the root, when there is no image
    mounts: tuple[Bind, ...] = ()
    until_s: float = 0.0  # Unix time at which it ends by itself
    base: str  # where the holder has its own file system
    workdir: str
    home: str
    env: dict[str, str] = {}
    network: NetworkMode = "open"
    read_only: bool = False
    uid: int | None = None  # whom a root worker becomes; None: it is no root
    nested: bool = False  # whether the agent may make user namespaces
    memory_bytes: int | None = None
    disk_bytes: int
    max_processes: int | None = None
    max_file_bytes: int

    @property
    def own_network(self) -> bool:
        """Whether it has a network namespace of its own."""
        return self.network in OWN_NETWORKS


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """Absolute paths of the programs that are needed, and what they can do."""

    bwrap: str
    unshare: str
    nsenter: str
    prlimit: str
    setpriv: str
    denies_namespaces: bool = True  # whether bwrap has --disable-userns


def command_line(jail: Jail, tools: Tools, holder: int, argv: Sequence[str], *, cwd: str, data_fd: int) -> list[str]:
    """What runs `argv` in the jail that `holder` keeps; bwrap reads `options` from `data_fd`."""
    if any("\0" in part for part in (*argv, cwd)):
        raise SandboxError("an argument holds a NUL, which no program can take", hint="hand it over as a file")
    become = [] if jail.uid is None else [tools.setpriv, *become_user(jail.uid)]
    network = ["-n"] if jail.own_network else []
    limit = [] if jail.max_processes is None else [tools.prlimit, f"--nproc={jail.max_processes}:{jail.max_processes}"]
    enter = [tools.nsenter, "-t", str(holder), "-U", "-m", *network, "--preserve-credentials"]
    inner = [SHELL, "-c", _ENTER, "sh", posixpath.join(jail.workdir, cwd), *argv]
    return [*become, *enter, *limit, tools.bwrap, "--args", str(data_fd), "--", *inner]


def options(jail: Jail, tools: Tools, env: Mapping[str, str], *, tty: bool = False) -> bytes:
    """What bwrap is told through a file, so that no list of processes shows the environment. Raises SandboxError."""
    given = [
        *_files(jail),
        *("--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--hostname", HOSTNAME),
        *(("--disable-userns",) if tools.denies_namespaces and not jail.nested else ()),
        *("--die-with-parent", "--cap-drop", "ALL", "--clearenv"),
        # Who wants a terminal keeps the session that has it.
        *(() if tty else ("--new-session",)),
        *_variables(environment(jail, env)),
    ]
    return b"".join(option.encode(errors="surrogateescape") + b"\0" for option in given)


def environment(jail: Jail, env: Mapping[str, str]) -> dict[str, str]:
    """What a process sees: the image's, HOME, and what the caller says. Nothing of the worker's own."""
    return {"PATH": PATH, "LANG": "C.UTF-8"} | jail.env | {"HOME": jail.home} | dict(env)


def become_user(uid: int) -> list[str]:
    """Arguments by which setpriv turns root into `uid` for good."""
    return ["--reuid", str(uid), "--regid", str(uid), "--clear-groups", "--no-new-privs", "--"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """What a holder is told of how it starts and how long it stays, with paths as it sees them.

    `shown` are folders that a root worker shows to the user it becomes, by way of the folder `state`; none: that user
    can reach all that it needs.
    """

    state: str
    shown: tuple[str, ...] = ()
    lease: str
    folder: str  # the sandbox's; when it is gone, so is the holder
    lease_s: float
    deadline_s: float


def holder_line(jail: Jail, tools: Tools, script: str, keeping: Keeping) -> list[str]:
    """What starts the holder. `script` is the text of holder.sh, which another user may have no way to."""
    run = (SHELL, "-c", script, "holder")
    places = [jail.workdir, jail.home, "/tmp"] if jail.read_only else []
    places += [part for link in jail.links for part in ("-l", link.source, link.target)]
    stays = [str(max(1, round(seconds * 1000))) for seconds in (keeping.lease_s, keeping.deadline_s)]
    keep = [
        *(tools.unshare, "-Urmn" if jail.own_network else "-Urm", *run, "keep", keeping.lease, keeping.folder, *stays),
        *(jail.base, str(jail.disk_bytes), str(inodes(jail))),
        *(":".join(jail.layers), "own" if jail.own_network else "open", *places),
    ]
    if jail.uid is not None:
        keep = [tools.setpriv, *become_user(jail.uid), *keep]
    if not keeping.shown:
        return keep
    count = str(len(keeping.shown))
    show = [tools.unshare, "-m", "--propagation", "private", *run, "show", keeping.state, count, *keeping.shown]
    return [*show, *keep]


def inodes(jail: Jail) -> int:
    """How many files a sandbox may have: as many as it has room for if they are of 4 KiB, and some empty ones."""
    return 65_536 + jail.disk_bytes // 4096


def _files(jail: Jail) -> list[str]:
    merged = f"{jail.base}/m"
    given = ["--bind", merged, "/"]
    for bind in jail.host:
        given += ["--ro-bind", bind.source, bind.target]
    if jail.read_only:
        for path in dict.fromkeys(("/tmp", jail.home, jail.workdir)):
            given += ["--bind", f"{merged}{path}", path]
    else:
        # An agent may have removed them.
        given += ["--perms", "1777", "--dir", "/tmp", "--dir", jail.home, "--dir", jail.workdir]
    # What is written to /dev/shm counts as disk, and nothing else in /dev can be written.
    given += ["--dev", "/dev", "--bind", f"{jail.base}/shm", "/dev/shm", "--remount-ro", "/dev", "--proc", "/proc"]
    for mount in jail.mounts:
        given += ["--ro-bind", mount.source, mount.target]
    # At last, so that there is a place for everything that is mounted.
    return [*given, "--remount-ro", "/"] if jail.read_only else given


def _variables(env: Mapping[str, str]) -> list[str]:
    if len(env) > MAX_VARIABLES:
        raise SandboxError(f"there are {len(env)} environment variables", hint=f"at most {MAX_VARIABLES} can be set")
    given: list[str] = []
    for name, value in env.items():
        if not name or "=" in name or "\0" in name or "\0" in value:
            raise SandboxError(
                f"the environment variable {name!r} cannot be set", hint="names hold no '=', and nothing holds a NUL"
            )
        given += ["--setenv", name, value]
    return given
