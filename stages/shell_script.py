"""What a shell channel writes to its shell. POSIX sh, bash where it is; tried with bash, dash and busybox. Pure.

The shell's own output stays reachable for us through a descriptor that is closed while a command runs: so a command may
redirect the shell's output for good, and take that descriptor too.
"""

from __future__ import annotations

from typing import Final

from rollyard.stages.shell_state import ShellState

BASH_CHANNEL: Final = 87
"""Unlike 9, a number that scripts do not choose for their own; other shells know only those of one digit."""
SH_CHANNEL: Final = 9

# The parent of the shell: it chooses it, and tells its end even when background jobs hold the output. The shell must
# not find a terminal at its start, or it would be interactive. A trapped signal, unlike an ignored one, ends children.
_PARENT: Final = r"""
trap : INT
exec 3>&1
if [ -t 1 ]; then stty raw -echo <&1 2>/dev/null; fi
if command -v bash >/dev/null 2>&1; then
  bash --noprofile --norc >/dev/null 2>&1
else
  sh >/dev/null 2>&1
fi
status=$?
printf '\036%s exited %s\036' "$1" "$status" >&3
"""

# In busybox, a job that ends while the output is full lets a write fail, of which nothing was written then.
_FIRST: Final = r"""
exec >&3 2>&3 3>&-
trap : INT
if [ -n "${BASH_VERSION-}" ]; then
  eval 'exec @BASH@>&1 @BASH_EXIT@>&1; shopt -s expand_aliases'
  trap '{ _ry_tell exit "$?";} >&@BASH_EXIT@ 2>/dev/null' EXIT
  _ry_channel=@BASH@
else
  exec @SH@>&1 @SH_EXIT@>&1
  trap '{ _ry_tell exit "$?";} >&@SH_EXIT@ 2>/dev/null' EXIT
  _ry_channel=@SH@
fi
_ry_status() { return "$1"; }
_ry_tell() {
  \command \printf '\036@PREFIX@ %s %s\036%s\0' "$1" "$2" "${PWD-}" ||
    \command \printf '\036@PREFIX@ %s %s\036%s\0' "$1" "$2" "${PWD-}"
  \command \export -p || \command \printf '\0'
  \command \printf '\036@PREFIX@ %s\036' "$1" || \command \printf '\036@PREFIX@ %s\036' "$1"
}
@MORE@
{ _ry_tell @NONCE@ "$_ry_channel"; unset _ry_channel; } 2>/dev/null
"""


def argv_of(prefix: str) -> tuple[str, ...]:
    """The program that a `Pipe` runs."""
    return ("sh", "-c", _PARENT, "sh", prefix)


def first_text(prefix: str, nonce: bytes, more: bytes = b"") -> bytes:
    """What a new shell reads first. Its first frame has the number of its channel as exit code."""
    parts = {
        "@BASH@": str(BASH_CHANNEL),
        "@SH@": str(SH_CHANNEL),
        "@BASH_EXIT@": str(BASH_CHANNEL - 1),
        "@SH_EXIT@": str(SH_CHANNEL - 1),
        "@PREFIX@": prefix,
        "@NONCE@": nonce.decode(),
    }
    text = _FIRST
    for name, value in parts.items():
        text = text.replace(name, value)
    return text.encode().replace(b"@MORE@", more)


def restoring_text(first: ShellState, known: ShellState) -> bytes:
    """Brings a shell that is in the state `first` to the state `known`, as far as that is possible."""
    lines = [b"unset %s\n" % name for name in known.gone_since(first)]
    lines += [line for name, line in known.declarations.items() if first.declarations.get(name) != line]
    if known.directory and known.directory != first.directory:
        lines.append(b"cd -- %s\n" % _quoted(known.directory))
    return b"{ :\n%s} >/dev/null 2>&1\n" % b"".join(lines)


def command_text(command: str, nonce: bytes, channel: int, last_code: int) -> bytes:
    """One command; its frame has `nonce`. It sees `last_code` as `$?`."""
    # In the last place of a list, `set -e` counts, and the first place lets it be.
    before = b"_ry_status %d||" % last_code if last_code else b""
    # `command` keeps dash alive when the string does not parse. The frame has a line of its own, since some errors end
    # the line that they are in; an open quote makes bash misread the start of the next one as well.
    return b'%s\\command eval %s </dev/null %d>&-\n\n{ _ry_tell %s "$?";} >&%d 2>/dev/null\n' % (
        before,
        _quoted(command.encode(errors="surrogateescape")),
        channel,
        nonce,
        channel,
    )


def _quoted(text: bytes) -> bytes:
    return b"'%s'" % text.replace(b"'", b"'\\''")
