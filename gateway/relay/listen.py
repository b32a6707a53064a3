"""Listens in the network of a sandbox for the relay: `python -I -S listen.py FOLDER PORT (PID KEY)...`.

For each holder PID it enters the holder's user and network namespace, brings the loopback interface up, listens on
127.0.0.1:PORT there, and hands the listening socket to the relay of FOLDER under KEY; then it ends. A process of its
own does that, since nobody comes back from a user namespace. It prints a line of JSON for each key. It is started as a
plain script, so it imports nothing but what it must.
"""

import ctypes
import fcntl
import json
import os
import socket
import struct
import sys

CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
SIOCGIFFLAGS = 0x8913
SIOCSIFFLAGS = 0x8914
IFF_UP = 1
BACKLOG = 512
ANSWER_S = 30.0


class Refused(Exception):
    """The relay's own words."""


def open_door(folder: str, port: int, pid: int, key: str) -> None:
    """Hand one listening socket over. Raises OSError that says at what it failed, or Refused."""
    relay = connect(folder)
    user, net = namespaces(pid)
    netns = os.fstat(net).st_ino
    if netns == inode("/proc/self/ns/net"):
        # The host's own: anything on this machine would be served.
        raise OSError(f"process {pid} has no network of its own")
    if os.fstat(user).st_ino != inode("/proc/self/ns/user"):
        enter(user, CLONE_NEWUSER, f"the user namespace of process {pid}")
    enter(net, CLONE_NEWNET, f"the network of process {pid}")
    loopback_up()
    request = {"do": "open", "key": key, "holder": pid, "netns": netns}
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    descriptors = [listener.fileno()]
    try:
        listener.bind(("127.0.0.1", port))
        listener.listen(BACKLOG)
    except OSError:
        # The relay may have this very door already. If not, it says that the port is taken.
        descriptors = []
    relay.settimeout(ANSWER_S)
    socket.send_fds(relay, [json.dumps(request).encode() + b"\n"], descriptors)
    answer = json.loads(relay.makefile("rb").readline() or b'{"error": "the relay gave no answer"}')
    if "error" in answer:
        raise Refused(answer["error"])


def connect(folder: str) -> socket.socket:
    """The relay's control socket, by a short name of its folder: the kernel takes no long one."""
    relay = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    directory = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    relay.connect(f"/proc/self/fd/{directory}/control.sock")
    os.close(directory)
    return relay


def namespaces(pid: int) -> tuple[int, int]:
    """The user and the network namespace of a process, open."""
    return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY), os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)


def inode(path: str) -> int:
    """The number of a namespace."""
    return os.stat(path).st_ino  # noqa: PTH116 - pathlib costs as much as the rest of it


def enter(descriptor: int, kind: int, what: str) -> None:
    """Enter a namespace. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, kind):
        raise OSError(f"cannot enter {what}: {os.strerror(ctypes.get_errno())}")


def loopback_up() -> None:
    """Bring `lo` up; with it comes 127.0.0.1."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        answer = fcntl.ioctl(control, SIOCGIFFLAGS, struct.pack("16sh14x", b"lo", 0))
        flags = struct.unpack("16sh14x", answer)[1]
        if not flags & IFF_UP:
            fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | IFF_UP))


def tell(folder: str, port: int, pid: int, key: str) -> None:
    """Open one door and print how it went."""
    said = {"key": key}
    try:
        open_door(folder, port, pid, key)
    except (OSError, Refused, ValueError) as error:
        path = getattr(error, "filename", None)
        said["error"] = f"{path}: {os.strerror(getattr(error, 'errno', 0))}" if path else str(error)
    os.write(1, json.dumps(said).encode() + b"\n")


def main() -> None:
    """One process a door, for the reason above."""
    folder, port, *rest = sys.argv[1:]
    for pid, key in zip(rest[::2], rest[1::2], strict=True):
        child = os.fork()
        if child == 0:
            tell(folder, int(port), int(pid), key)
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
