"""What an agent changed in its working directory: a git diff against the state in which INIT left it.

It needs git inside the sandbox, and no repository: the state is kept in a git folder of its own below the home, so that
what the agent commits, or does to the repository that it works on, changes nothing. Files that the working directory's
.gitignore names, unless a repository has them, and what is inside nested repositories, are not seen.
"""

from __future__ import annotations

import posixpath
from typing import Final

from rollyard.schemas.errors import SandboxError
from rollyard.stages.sandbox import Sandbox

FOLDER: Final = ".rollyard/baseline"
MARK_S: Final = 300.0
DIFF_S: Final = 120.0
MAX_DIFF_BYTES: Final = 32 << 20
COPIED_KB: Final = 65_536
"""Objects of a repository up to this are copied, so that removing its .git does no harm; more are only referred to."""

_NO_GIT: Final = 93
_ENVIRONMENT: Final = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_TERMINAL_PROMPT": "0",
    "LC_ALL": "C",
}
_SETTINGS: Final = (
    "-c core.looseCompression=0 -c gc.auto=0 -c core.autocrlf=false -c core.fsmonitor=false -c core.hooksPath=/dev/null"
    " -c core.quotePath=true -c advice.addEmbeddedRepo=false"
)
# An index is copied with its time: by that git tells which files may have changed in the very moment it was written.
_MARK: Final = f"""
command -v git >/dev/null 2>&1 || exit {_NO_GIT}
set -e
umask 077
folder=$1 root=$2
cd "$root"
rm -rf "$folder"
mkdir -p "$folder"
printf '%s\\n' "$root" >"$folder/root"
git init -q --bare --template= "$folder/git"
mkdir -p "$folder/git/info"
printf '.rollyard/\\n' >"$folder/git/info/exclude"
if [ -d .git/objects ]; then
  if [ "$(du -sk .git/objects | cut -f 1)" -le {COPIED_KB} ]; then
    cp -R .git/objects/. "$folder/git/objects/"
  else
    printf '%s/.git/objects\\n' "$root" >"$folder/git/objects/info/alternates"
  fi
  if [ -f .git/index ]; then cp -p .git/index "$folder/git/index"; fi
fi
GIT_DIR=$folder/git GIT_WORK_TREE=$root
export GIT_DIR GIT_WORK_TREE
git {_SETTINGS} add -A --ignore-errors . >&2 || :
git write-tree >"$folder/tree"
"""
_DIFF: Final = f"""
folder=$1
command -v git >/dev/null 2>&1 && [ -s "$folder/tree" ] || exit {_NO_GIT}
umask 077
root=$(cat "$folder/root")
cd "$root" || exit 1
rm -f "$folder/now" "$folder/now.lock"
cp -p "$folder/git/index" "$folder/now" || exit 1
GIT_DIR=$folder/git GIT_WORK_TREE=$root GIT_INDEX_FILE=$folder/now
export GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE
git {_SETTINGS} add -A --ignore-errors . >&2 || :
git {_SETTINGS} diff --cached --binary --full-index --no-color --no-renames --no-ext-diff --no-textconv \\
  "$(cat "$folder/tree")" >"$folder/diff"
"""


async def mark_baseline(sandbox: Sandbox, path: str = "", *, timeout_s: float = MARK_S) -> bool:
    """Remember the working directory, or the folder `path` below it, as it is now; False: there is no git inside.

    Raises SandboxError, with git's own words, when that fails.
    """
    root = posixpath.normpath(posixpath.join(sandbox.workdir, path))
    return await _run(sandbox, _MARK, (_folder(sandbox), root), timeout_s, "the state before the agent")


async def working_diff(sandbox: Sandbox, *, max_bytes: int = MAX_DIFF_BYTES, timeout_s: float = DIFF_S) -> bytes | None:
    """What has changed since `mark_baseline`, as a binary git diff for `git apply`; empty: nothing.

    None: there is no git inside, or the state before is not known any more. Raises SandboxError when the diff has over
    `max_bytes`, or cannot be made.
    """
    if not await _run(sandbox, _DIFF, (_folder(sandbox),), timeout_s, "the diff of the working directory"):
        return None
    diff = await sandbox.read_file(posixpath.join(_folder(sandbox), "diff"), max_bytes + 1)
    if diff is not None and len(diff) > max_bytes:
        raise SandboxError(f"the diff of the working directory has over {max_bytes:,} bytes", hint="see .gitignore")
    return diff


def _folder(sandbox: Sandbox) -> str:
    return posixpath.join(sandbox.home, FOLDER)


async def _run(sandbox: Sandbox, script: str, arguments: tuple[str, ...], timeout_s: float, what: str) -> bool:
    argv = ("sh", "-c", script, "sh", *arguments)
    ended = await sandbox.exec(argv, cwd="/", env=_ENVIRONMENT, timeout_s=timeout_s, max_output_bytes=4_096)
    if ended.exit_code == _NO_GIT:
        return False
    if ended.timed_out or ended.exit_code != 0:
        said = ended.stderr[-1_000:].decode(errors="replace").strip()
        how = f"took longer than {timeout_s:g} s" if ended.timed_out else said or f"git ended with {ended.exit_code}"
        raise SandboxError(f"{what} cannot be told: {how}")
    return True
