"""Whether this machine can make bubblewrap jails, found out once; and what to do if it cannot."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Final

from rollyard.schemas.errors import SandboxError
from rollyard.stages.sandboxes.jail import Jail, Keeping, Tools, become_user, holder_line

PROBE_S: Final = 30.0
HOLDER: Final = Path(__file__).with_name("holder.sh")
STAY: Final = "  watch\n"
_PACKAGES: Final = {"bwrap": "bubblewrap"}
_SEARCH: Final = os.pathsep.join(("/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin"))


def find_tools() -> Tools:
    """Raises SandboxError that names the program which is missing."""
    found = {}
    for name in ("bwrap", "unshare", "nsenter", "prlimit", "setpriv", "mount"):
        path = shutil.which(name) or shutil.which(name, path=_SEARCH)
        if path is None:
            package = _PACKAGES.get(name, "util-linux")
            raise SandboxError(
                f"the backend 'bubblewrap' needs the program {name!r}",
                hint=f"install the package {package} of your distribution, or choose another sandbox.backend",
            )
        found[name] = path
    del found["mount"]
    return Tools(
        **found,
        denies_namespaces="--disable-userns" in _help(found["bwrap"]),
    )


def probe(tools: Tools, uid: int | None, root: Path) -> None:
    """Make one jail and throw it away, in `root`. Raises SandboxError that says what this machine does not allow."""
    with tempfile.TemporaryDirectory(prefix=".probe-", dir=root) as folder:
        state, layer = Path(folder, "state"), Path(folder, "layer")
        hidden = uid is not None
        for path in (state, layer):
            path.mkdir()
            if uid is not None:
                os.chown(path, uid, uid)
        (layer / "file").touch()
        jail = Jail(
            layers=("/tmp/s0" if hidden else str(layer),),
            base="/tmp/base" if hidden else str(state),
            workdir="/", home="/", network="none", uid=uid, disk_bytes=1 << 20, max_file_bytes=1 << 20,
        )  # fmt: skip
        # A holder that ends at once, and instead of it a jail without root tree.
        ends = holder_script().replace(STAY, "  exit 0\n")
        shown = (str(layer),) if hidden else ()
        keeping = Keeping(state=str(state), shown=shown, lease="/", folder="/", lease_s=1, deadline_s=1)
        line = holder_line(jail, tools, ends, keeping)
        _try(line, "user namespaces with a file system in memory and an overlay")
        minimal = ("--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--unshare-all", "--cap-drop", "ALL")
        _try([*_become(tools, uid), tools.bwrap, *minimal, "--", "/bin/sh", "-c", ":"], "bubblewrap")


@cache
def holder_script() -> str:
    """holder.sh without its comments."""
    return "\n".join(line for line in HOLDER.read_text().splitlines() if line and not line.startswith("#"))


def _become(tools: Tools, uid: int | None) -> list[str]:
    return [] if uid is None else [tools.setpriv, *become_user(uid)]


def _try(line: list[str], what: str) -> None:
    try:
        done = subprocess.run(line, capture_output=True, timeout=PROBE_S, check=False, stdin=subprocess.DEVNULL)
        said = done.stderr.decode(errors="replace").strip()
        if done.returncode == 0:
            return
    except (OSError, subprocess.TimeoutExpired) as error:
        said = str(error)
    raise SandboxError(f"this machine does not allow {what}: {said or 'no reason given'}", hint=_hint(said))


def _hint(said: str) -> str:
    switch = Path("/proc/sys/kernel/unprivileged_userns_clone")
    if switch.exists() and switch.read_text().strip() == "0":
        return "user namespaces are switched off: `sysctl kernel.unprivileged_userns_clone=1`"
    most = Path("/proc/sys/user/max_user_namespaces")
    if most.exists() and most.read_text().strip() == "0":
        return "user namespaces are switched off: `sysctl user.max_user_namespaces=15000`"
    apparmor = Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
    if apparmor.exists() and apparmor.read_text().strip() == "1":
        return "AppArmor keeps them from users: `sysctl kernel.apparmor_restrict_unprivileged_userns=0`, or a profile"
    if "CAP_SYS_ADMIN" in said:
        return "run the worker as an ordinary user, or give its container CAP_SYS_ADMIN"
    return (
        "in a container allow `unshare` and `mount` (seccomp and AppArmor unconfined), or set sandbox.backend otherwise"
    )


def _help(program: str) -> str:
    done = subprocess.run([program, "--help"], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr
