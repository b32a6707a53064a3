# ruff: noqa: PLC0415, PTH102, PTH103, PTH104, PTH108, PTH112, PTH114, PTH118, PTH119, PTH120, PTH208
"""What runs inside a jail: starts processes and opens files for the server, and says when a process ended.

Standard library only, since it starts with each sandbox. It talks over a SEQPACKET socket, which is its standard input:
each message is one byte with the JSON in a memory file as its first descriptor, then further descriptors.
"""

import array
import json
import os
import select
import shutil
import signal
import socket
import stat
import sys
import time


def send(channel, message, fds=()):
    memory = os.memfd_create("message")
    try:
        os.write(memory, json.dumps(message).encode())
        rights = array.array("i", [memory, *fds])
        channel.sendmsg([b"."], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
    finally:
        os.close(memory)


def receive(channel):
    data, fds, _, _ = socket.recv_fds(channel, 1, 8)
    if not data:
        return None, []
    with os.fdopen(fds[0], "rb") as memory:
        memory.seek(0)
        return json.loads(memory.read()), fds[1:]


def start(ask, fds, group):
    """Processes share one group and have no session of their own, as under E2B's daemon, unless on a terminal."""
    if not os.path.isdir(ask["cwd"]):
        return {"error": f"cwd '{ask['cwd']}' does not exist"}
    pid = os.fork()
    if pid:
        return {"pid": pid}
    try:
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
        os.closerange(3, 1 << 16)
        if ask["pty"]:
            os.setsid()
            import fcntl
            import termios

            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        else:
            os.setpgid(0, group)
        if os.getuid() == 0 and ask["uid"]:
            os.setgroups([])
            os.setresgid(ask["uid"], ask["uid"], ask["uid"])
            os.setresuid(ask["uid"], ask["uid"], ask["uid"])
        for number in (signal.SIGPIPE, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.chdir(ask["cwd"])
        os.execve("/bin/sh", ["/bin/sh", "-c", 'exec "${@}"', "--", *ask["argv"]], ask["env"])
    finally:
        os._exit(127)


def entry(path):
    found = os.lstat(path)
    kind = {stat.S_IFDIR: "DIRECTORY", stat.S_IFREG: "FILE", stat.S_IFLNK: "SYMLINK"}
    return {
        "name": os.path.basename(path),
        "type": "FILE_TYPE_" + kind.get(stat.S_IFMT(found.st_mode), "UNSPECIFIED"),
        "path": path,
        "size": str(found.st_size),
        "mode": stat.S_IMODE(found.st_mode),
        "permissions": stat.filemode(found.st_mode),
        "owner": "user",
        "group": "user",
        "modifiedTime": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(found.st_mtime)),
    }


def listing(path, depth):
    found = []
    for name in sorted(os.listdir(path)):
        inner = os.path.join(path, name)
        found.append(entry(inner))
        if depth > 1 and os.path.isdir(inner) and not os.path.islink(inner):
            found += listing(inner, depth - 1)
    return found


def open_file(ask):
    path = ask["path"]
    if not ask["write"]:
        if os.path.isdir(path):
            raise IsADirectoryError(path)
        return os.open(path, os.O_RDONLY)
    above = os.path.dirname(path)
    missing = []
    while not os.path.isdir(above):
        missing.append(above)
        above = os.path.dirname(above)
    for folder in reversed(missing):
        os.mkdir(folder)
        os.chown(folder, ask["uid"], ask["uid"])
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.fchown(fd, ask["uid"], ask["uid"])
    return fd


def listen(ask):
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind((ask["host"], ask["port"]))
    server.listen(64)
    return server.detach()


def remove(path):
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)


def answer(ask, fds, group):
    """The reply to one request, and descriptors that go with it."""
    path = ask.get("path", "")
    match ask["op"]:
        case "start":
            return start(ask, fds, group), []
        case "signal":
            os.kill(ask["pid"], ask["signal"])
            return {}, []
        case "open":
            return {}, [open_file(ask)]
        case "listen":
            return {}, [listen(ask)]
        case "stat":
            return {"entry": entry(path)}, []
        case "list":
            return {"entries": listing(path, ask["depth"])}, []
        case "mkdir":
            if os.path.isdir(path):
                return {"error": "directory already exists", "errno": "EEXIST"}, []
            os.makedirs(path)
            return {"entry": entry(path)}, []
        case "move":
            os.makedirs(os.path.dirname(ask["target"]), exist_ok=True)
            os.rename(path, ask["target"])
            return {"entry": entry(ask["target"])}, []
        case "remove":
            remove(path)
            return {}, []
    return {"error": f"no operation {ask['op']}"}, []


def errno_name(error):
    import errno

    return errno.errorcode.get(error.errno or 0, "EIO")


def reap(channel):
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        send(channel, {"exit": pid, "status": os.waitstatus_to_exitcode(status)})


def main():
    if os.getuid() == 0:
        os.chown("/home/user", 1000, 1000)
    channel = socket.socket(fileno=os.dup(0))
    os.set_inheritable(channel.fileno(), False)
    group = os.fork()
    os.setpgid(group, group)  # by both, since each may be the first to need it
    if not group:
        channel.close()
        os.close(0)
        while True:
            signal.pause()
    wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    send(channel, {"ready": os.getpid()})
    while True:
        ready, _, _ = select.select([channel, wake], [], [])
        if wake in ready:
            os.read(wake, 4096)
        if channel in ready:
            try:
                ask, fds = receive(channel)
            except ConnectionResetError:
                return
            if ask is None:
                return
            try:
                reply, given = answer(ask, fds, group)
            except OSError as error:
                reply, given = {"error": error.strerror or str(error), "errno": errno_name(error)}, []
            send(channel, reply | {"id": ask["id"]}, given)
            for fd in [*fds, *given]:
                os.close(fd)
        reap(channel)


if __name__ == "__main__":
    sys.exit(main())
