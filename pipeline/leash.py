"""A launcher that ties a program to its parent: `python leash.py PARENT_PID SIGNAL COMMAND...`.

On Linux the kernel sends SIGNAL to the program when the parent dies, however that happens. Elsewhere the program simply
runs. It is started as a plain script, so it imports nothing but what it must.
"""

import os
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ask for the signal, make sure that the parent did not die before that, and become the program."""
    parent, signal_number, *command = sys.argv[1:]
    if sys.platform == "linux":
        import ctypes  # noqa: PLC0415 - other systems do not need it

        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal_number))
    if os.getppid() != int(parent):
        sys.exit(0)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
