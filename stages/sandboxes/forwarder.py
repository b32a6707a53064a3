"""Carries connections at 127.0.0.1:PORT of a sandbox to TARGET: `python3 -I -S -c TEXT TARGET PORT`.

TARGET is the path of a unix socket, or http://HOST:PORT or https://HOST. Towards a URL, the Host header of a request is
that URL's, and each connection is for one request. Runs inside images of any kind, so: Python 3.6 and its standard
library only.
"""

import errno
import os
import selectors
import socket
import sys
import threading
import time

CHUNK = 32768
LIMIT = 65536  # bytes that wait for a slow reader
PATIENCE_S = 5.0
HEAD_S = 75.0
CONNECT_S = 10.0
AWAY = (
    b'{"type":"error","error":{"type":"overloaded_error","code":"no_gateway","param":null,'
    b'"message":"the gateway cannot be reached from this sandbox; the same request may be fine in a moment"}}'
)
REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 2\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(AWAY), AWAY)
)


class End:
    """One side of a connection: what waits to be sent to it, and whether it has said all."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.out = b""
        self.ended = False
        self.shut = False
        self.watched = 0
        self.other = self


class Target:
    """Where to."""

    def __init__(self, text: str) -> None:
        self.path = "" if text.startswith(("http://", "https://")) else text
        self.tls = text.startswith("https://")
        self.name = text.partition("://")[2].partition("/")[0]
        host, colon, port = self.name.rpartition(":")
        if not colon or not port.isdigit():
            host, port = self.name, "443" if self.tls else "80"
        self.host = host.strip("[]")
        self.port = int(port)

    def connect(self) -> socket.socket:
        """Raises OSError."""
        if self.path:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.settimeout(CONNECT_S)
            try:
                sock.connect(self.path)
            except OSError:
                sock.close()
                raise
            return sock
        sock = socket.create_connection((self.host, self.port), CONNECT_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if not self.tls:
            return sock
        import ssl  # noqa: PLC0415 - not every image has it, and only https needs it

        return ssl.create_default_context().wrap_socket(sock, server_hostname=self.host)


class Forwarder:
    """One thread that carries; one for each connection until it has reached its target."""

    def __init__(self, target: Target, listener: socket.socket) -> None:
        self.target = target
        self.listener = listener
        self.selector = selectors.DefaultSelector()
        self.ready = []  # type: list[tuple[socket.socket, socket.socket, bytes]]
        self.wake, self.woken = socket.socketpair()
        for sock in (listener, self.woken):
            sock.setblocking(False)
            self.selector.register(sock, selectors.EVENT_READ)

    def run(self) -> None:
        """For ever."""
        while True:
            for key, _ in self.selector.select():
                if key.fileobj is self.listener:
                    self.accept()
                elif key.fileobj is self.woken:
                    self.woken.recv(4096)
                    while self.ready:
                        self.join(*self.ready.pop())
                else:
                    self.carry(key.data)

    def accept(self) -> None:
        """Take a connection, and reach the target in a thread: that may take its time."""
        try:
            agent, _ = self.listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                time.sleep(0.1)
            return
        threading.Thread(target=self.reach, args=(agent,), daemon=True).start()

    def reach(self, agent: socket.socket) -> None:
        """Connect, again for a while, before a byte has been sent on."""
        try:
            agent.settimeout(HEAD_S)
            agent.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            first = b"" if self.target.path else named(head(agent), self.target.name)
            gateway = self.connected()
            if gateway is None:
                refuse(agent, asked=bool(first))
                return
            gateway.settimeout(CONNECT_S)
            gateway.sendall(first)
        except OSError:
            agent.close()
            return
        self.ready.append((agent, gateway, b""))
        self.wake.send(b"x")

    def connected(self) -> "socket.socket | None":
        """A connection to the target; None: it takes none."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return self.target.connect()
            except OSError:
                if time.monotonic() > deadline:
                    return None
                time.sleep(0.2)

    def join(self, agent: socket.socket, gateway: socket.socket, _: bytes) -> None:
        """Carry from now on."""
        ends = End(agent), End(gateway)
        ends[0].other, ends[1].other = ends[1], ends[0]
        for end in ends:
            end.sock.setblocking(False)
        self.watch(ends[0])
        self.carry(ends[1])

    def carry(self, end: End) -> None:
        """Read and write what goes, then say what to wait for."""
        try:
            for each in (end, end.other):
                fill(each)
                flush(each)
                flush(each.other)
        except OSError:
            self.drop(end)
            return
        if end.shut and end.other.shut:
            self.drop(end)
            return
        self.watch(end)
        self.watch(end.other)

    def watch(self, end: End) -> None:
        """Tell the selector what this end waits for."""
        wanted = selectors.EVENT_WRITE if end.out else 0
        if not end.ended and len(end.other.out) < LIMIT:
            wanted |= selectors.EVENT_READ
        if wanted == end.watched:
            return
        if end.watched and wanted:
            self.selector.modify(end.sock, wanted, end)
        elif wanted:
            self.selector.register(end.sock, wanted, end)
        else:
            self.selector.unregister(end.sock)
        end.watched = wanted

    def drop(self, end: End) -> None:
        """Close both."""
        for each in (end, end.other):
            if each.watched:
                self.selector.unregister(each.sock)
                each.watched = 0
            each.sock.close()


def fill(end: End) -> None:
    """Read for the other end until it has enough, or there is no more. Raises OSError."""
    while not end.ended and len(end.other.out) < LIMIT:
        try:
            data = end.sock.recv(CHUNK)
        except OSError as error:
            if waits(error):
                return
            raise
        end.ended = not data
        end.other.out += data


def flush(end: End) -> None:
    """Send what waits; after the last of it, say that it was the last. Raises OSError."""
    while end.out:
        try:
            sent = end.sock.send(end.out)
        except OSError as error:
            if waits(error):
                return
            raise
        end.out = end.out[sent:]
    if end.other.ended and not end.shut:
        end.shut = True
        if type(end.sock) is socket.socket:
            end.sock.shutdown(socket.SHUT_WR)
        else:
            # TLS has no half of a connection.
            end.other.shut = True


def waits(error: OSError) -> bool:
    """Whether it only means: not now."""
    # The latter are ssl.SSL_ERROR_WANT_READ and WANT_WRITE.
    return isinstance(error, BlockingIOError) or (type(error).__name__.startswith("SSLWant"))


def head(agent: socket.socket) -> bytes:
    """All up to the end of the first header block. Raises OSError when it does not come."""
    data = b""
    while b"\r\n\r\n" not in data:
        more = agent.recv(CHUNK)
        if not more or len(data) > 4 * LIMIT:
            raise OSError("no request")
        data += more
    return data


def named(data: bytes, name: str) -> bytes:
    """The request with the Host of a URL; the server is to close after its answer, so that there is but one."""
    lines, _, body = data.partition(b"\r\n\r\n")
    kept = [line for line in lines.split(b"\r\n") if not line.lower().startswith((b"host:", b"connection:"))]
    kept[1:1] = [b"Host: " + name.encode(), b"Connection: close"]
    return b"\r\n".join(kept) + b"\r\n\r\n" + body


def refuse(agent: socket.socket, asked: bool) -> None:
    """Answer that there is no gateway, after the question."""
    agent.settimeout(CONNECT_S)
    with agent:
        if not asked:
            agent.recv(CHUNK)
        agent.sendall(REFUSAL)
        agent.shutdown(socket.SHUT_WR)
        while agent.recv(CHUNK):
            pass


def main() -> int:
    """Listen and carry. Exit code 0 when something listens already."""
    target, port = sys.argv[1:]
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", int(port)))
        listener.listen(512)
    except OSError as error:
        os.write(2, f"port {port} of 127.0.0.1: {error.strerror}\n".encode())
        return 0 if error.errno == errno.EADDRINUSE else 1
    threading.stack_size(262144)
    os.write(1, b"listening\n")
    Forwarder(Target(target), listener).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
