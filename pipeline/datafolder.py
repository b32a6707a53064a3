"""The data folder of `rollyard up`: everything that one installation on one machine keeps, under one path."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from rollyard.pipeline.config import ENV_FILE, Config, load_config
from rollyard.schemas.errors import ConfigError, SetupError

VERSION = 1
"""Counts up when a newer layout cannot be read by older code."""


def find_config(
    path: Path | None = None, data: Path | None = None, env: Mapping[str, str] = os.environ
) -> tuple[Config, DataFolder]:
    """The configuration of an installation that is to be talked to, and its data folder.

    The file `path` or that of ROLLYARD_CONFIG, or else the one that `rollyard up` left in the data folder, or else
    ./rollyard.toml or the defaults. Raises ConfigError, also for a data folder of a newer version.
    """
    config = load_config(path, env)
    if data is not None:
        config = structs.replace(config, store=structs.replace(config.store, data=str(data)))
    folder = DataFolder(config.data_dir())
    folder.check_version()
    if path is None and (data is not None or not env.get(ENV_FILE)) and folder.config.is_file():
        return load_config(folder.config, env), folder
    return config, folder


class DataFolder:
    """What is in the folder `root`: nats/, blobs/, sandboxes/, samples/, archive/, logs/, secret, version, ..."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.nats = self.root / "nats"
        self.logs = self.root / "logs"
        self.config = self.root / "config.toml"
        self.state = self.root / "state.json"
        self.secret = self.root / "secret"
        self.admin_token = self.root / "admin-token"
        self.version = self.root / "version"
        self.lock = self.root / "lock"

    def open(self) -> None:
        """Make what is missing. Raises ConfigError for a newer version, SetupError if the folder is not writable."""
        self.check_version()
        try:
            for folder in (self.root, self.nats, self.logs):
                folder.mkdir(parents=True, exist_ok=True)
            if not self.version.exists():
                self.version.write_text(f"{VERSION}\n")
            for secret in (self.secret, self.admin_token):
                if not secret.exists():
                    self._make_secret(secret)
        except OSError as error:
            raise SetupError(
                f"the data folder {self.root} cannot be written: {error.strerror}", hint="choose another with --data"
            ) from error

    def check_version(self) -> None:
        """Raises ConfigError when the folder was written by a newer Rollyard, or says no number."""
        try:
            text = self.version.read_text().strip()
        except FileNotFoundError:
            return
        except OSError as error:
            raise SetupError(
                f"{self.version} cannot be read: {error.strerror}", hint="choose another --data"
            ) from error
        if not text.isdigit():
            raise ConfigError(f"{self.version} holds {text[:40]!r}, not a number", hint="is this a data folder?")
        if int(text) > VERSION:
            raise ConfigError(
                f"the data folder {self.root} has version {text}, this Rollyard reads up to version {VERSION}",
                hint="update Rollyard, or choose another folder with --data",
            )

    def _make_secret(self, path: Path) -> None:
        # Written aside and linked, so that a reader never sees half a secret and two writers agree on one.
        aside = self.root / f".{path.name}-{os.getpid()}"
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32) + "\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(aside, path)
        except FileExistsError:
            pass
        finally:
            aside.unlink()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder. Raises SetupError, which names the pid, when another process of this machine holds it."""
        with self.lock.open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                file.seek(0)
                pid = file.read().strip() or "unknown"
                raise SetupError(
                    f"another rollyard (pid {pid}) runs on {self.root}",
                    hint=f"stop it with `kill {pid}`, or choose another folder with --data",
                ) from error
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
            try:
                yield
            finally:
                file.truncate(0)

    def write_state(self, state: dict[str, Any]) -> None:
        """Replace state.json: pid, addresses and children of what runs."""
        aside = self.state.with_suffix(".tmp")
        aside.write_bytes(msgspec.json.format(msgspec.json.encode(state)) + b"\n")
        aside.replace(self.state)

    def read_state(self) -> dict[str, Any] | None:
        """What state.json says, or None when nothing has run here."""
        try:
            state: dict[str, Any] = msgspec.json.decode(self.state.read_bytes(), type=dict)
        except (OSError, msgspec.DecodeError):
            return None
        return state
