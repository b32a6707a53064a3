"""A server that speaks E2B's protocol: REST, `/files`, and the Process and Filesystem services of a sandbox's daemon.

For tests of the backend `e2b` through the real SDK. Each sandbox is a bubblewrap jail with one pid namespace, which
lives as long as the sandbox; its network is a namespace of its own whose few hosts the server's egress rules guard.
The protocol is written from what the SDK sends and from the published sources of E2B's own server, not from the SDK's
generated classes, so that both sides do not share a mistake.

    python -m e2b_server --key KEY [--internet IP:PORT=HOST:PORT ...] [--name NAME=IP ...]

prints `{"port": N}` and serves on 127.0.0.1 until it is killed; its jails die with it.
"""
