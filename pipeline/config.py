"""Configuration: one TOML file decoded straight into frozen structs, and environment variables over it.

A variable ROLLYARD__SECTION__KEY replaces one key. Unknown sections and keys are errors. Secrets never stand in the
file, which names the variable or the file that holds them. Reference: docs/configuration.md.
"""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct, structs

from rollyard.pipeline.streams import Limits
from rollyard.schemas.errors import ConfigError
from rollyard.schemas.rollout import StageName
from rollyard.schemas.task import HookSpec

ENV_PREFIX = "ROLLYARD__"
ENV_FILE = "ROLLYARD_CONFIG"
DEFAULT_FILE = "rollyard.toml"

Port = Annotated[int, Meta(ge=0, le=65535)]
Positive = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(ge=1)]
Share = Annotated[float, Meta(gt=0, le=1)]
Portion = Annotated[float, Meta(ge=0, le=1)]
WorkerStage = Literal["admit"] | StageName


class NatsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The bus."""

    url: Annotated[str, Meta(description="address of nats-server; several are separated by commas")] = (
        "nats://127.0.0.1:4222"
    )


class GatewayConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The gateway between agents and model servers."""

    host: Annotated[str, Meta(description="address that it listens on")] = "127.0.0.1"
    port: Annotated[Port, Meta(description="port that it listens on; 0: any free one")] = 8400
    url: Annotated[str, Meta(description="base URL that agents are given; empty: made from host and port")] = ""
    secret_env: Annotated[str, Meta(description="variable that holds the secret which signs session keys")] = (
        "ROLLYARD_SECRET"
    )
    secret_file: Annotated[str, Meta(description="file that holds it; empty: `secret` in the data folder")] = ""
    admin_token_env: Annotated[str, Meta(description="variable that holds the token of the endpoints under /admin")] = (
        "ROLLYARD_ADMIN_TOKEN"
    )
    admin_token_file: Annotated[
        str, Meta(description="file that holds it; empty: `admin-token` in the data folder; no such file: they are off")
    ] = ""

    def address(self) -> str:
        """Base URL that agents are given, without a slash at the end."""
        return self.url.rstrip("/") or f"http://{self.host}:{self.port}"


class WorkerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The stages, and the leases by which processes show that they live."""

    stages: Annotated[tuple[WorkerStage, ...], Meta(description="stages of a worker that is not told")] = (
        "init",
        "run",
        "eval",
    )
    slots: Annotated[Count, Meta(description="messages of each stage worked on at a time")] = 64
    ack_wait_s: Annotated[Positive, Meta(description="a message not heard of for so long goes to another worker")] = (
        20.0
    )
    heartbeat_s: Annotated[Positive, Meta(description="how often a worker says that it is still at it")] = 6.0
    lease_s: Annotated[Positive, Meta(description="a place or gateway not renewed for so long counts as dead")] = 30.0
    backends: Annotated[tuple[str, ...], Meta(description="sandbox backends that it offers")] = ("local", "none")
    max_ready: Annotated[Count, Meta(description="initialised sandboxes that may wait at one place")] = 256
    sandboxes: Annotated[str, Meta(description="folder of local sandboxes; empty: `sandboxes` in the data folder")] = ""
    ready_s: Annotated[Positive, Meta(description="how long a sandbox may wait for RUN and EVAL, all in all")] = (
        86_400.0
    )
    keep_output_bytes: Annotated[
        int, Meta(ge=0, le=64 << 20, description="bytes kept of the end of an agent's output and errors; 0: none")
    ] = 256 << 10
    cache: Annotated[str, Meta(description="folder of fetched repositories; empty: `cache` in the data folder")] = ""
    cache_bytes: Annotated[Count, Meta(description="what it may hold; what was used longest ago goes first")] = 20 << 30
    hooks: Annotated[
        tuple[str | HookSpec, ...],
        Meta(description="hooks of every task, before its own: names, or tables {hook, args, on_failure}"),
    ] = ()
    handlers: Annotated[
        tuple[str, ...], Meta(description="handlers by data source, each as `source=package.module:Class`")
    ] = ()


class StoreConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Folders. Every role must see the same blobs."""

    data: Annotated[str, Meta(description="the data folder")] = ".rollyard"
    blobs: Annotated[str, Meta(description="large payloads; empty: `blobs` in the data folder")] = ""
    samples: Annotated[str, Meta(description="Parquet files; empty: `samples` in the data folder")] = ""
    archive: Annotated[str, Meta(description="archived logs; empty: `archive` in the data folder")] = ""


class AdmitConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much work is let in."""

    window: Annotated[Count, Meta(description="rollouts in flight, over all runs")] = 4096
    full: Annotated[Share, Meta(description="admit nothing when a stream is filled to this share")] = 0.7


class SinkConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When the sink cuts the stream of samples into a file."""

    max_deliveries: Annotated[Count, Meta(description="deliveries of one cut")] = 2000
    max_bytes: Annotated[Count, Meta(description="encoded bytes of one cut")] = 64_000_000
    max_wait_s: Annotated[Positive, Meta(description="a smaller cut is made after so long")] = 5.0


class AlarmsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When the controller raises an alarm about a run. A share of 1 is never passed: it switches the alarm off."""

    drift_share: Annotated[
        Portion,
        Meta(description="share of a run's calls that may drift; compactions, sub-agents and retries are no drift"),
    ] = 0.2
    min_calls: Annotated[Count, Meta(description="calls of a run before its drift is judged")] = 100
    zero_trainable_share: Annotated[
        Portion, Meta(description="share of the completed rollouts with model calls that may have no token to train on")
    ] = 0.5
    min_rollouts: Annotated[Count, Meta(description="such rollouts of a run before that is judged")] = 20


class RelayConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The relay, one a machine, by which sandboxes without a network reach a gateway."""

    folder: Annotated[str, Meta(description="folder of its sockets; empty: `relay` in the data folder")] = ""
    start: Annotated[bool, Meta(description="workers that need one start it where none answers; it outlives them")] = (
        True
    )


class LogConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The diary that processes write to standard error."""

    level: Annotated[Literal["debug", "info", "warning", "error"], Meta(description="least level written")] = "info"
    format: Annotated[Literal["auto", "json", "text"], Meta(description="auto: text on a terminal, else JSON")] = "auto"


class Config(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that can be set, by section."""

    nats: NatsConfig = NatsConfig()
    gateway: GatewayConfig = GatewayConfig()
    worker: WorkerConfig = WorkerConfig()
    store: StoreConfig = StoreConfig()
    admit: AdmitConfig = AdmitConfig()
    sink: SinkConfig = SinkConfig()
    alarms: AlarmsConfig = AlarmsConfig()
    relay: RelayConfig = RelayConfig()
    limits: Limits = Limits()
    log: LogConfig = LogConfig()
    backends: dict[str, dict[str, Any]] = {}
    """Settings of sandbox backends: [backends.NAME], whose keys the backend knows."""

    def data_dir(self) -> Path:
        """The data folder."""
        return Path(self.store.data)

    def blobs_dir(self) -> Path:
        """The folder of blobs, which every role must see."""
        return Path(self.store.blobs) if self.store.blobs else self.data_dir() / "blobs"

    def samples_dir(self) -> Path:
        """The folder of Parquet files."""
        return Path(self.store.samples) if self.store.samples else self.data_dir() / "samples"

    def archive_dir(self) -> Path:
        """The folder of archived logs."""
        return Path(self.store.archive) if self.store.archive else self.data_dir() / "archive"

    def sandboxes_dir(self) -> Path:
        """The folder of local sandboxes."""
        return Path(self.worker.sandboxes) if self.worker.sandboxes else self.data_dir() / "sandboxes"

    def cache_dir(self) -> Path:
        """The folder of what INIT workers of this machine keep between rollouts."""
        return Path(self.worker.cache) if self.worker.cache else self.data_dir() / "cache"

    def relay_dir(self) -> Path:
        """The folder of the relay's sockets."""
        return Path(self.relay.folder) if self.relay.folder else self.data_dir() / "relay"

    def secret(self, env: Mapping[str, str] = os.environ) -> bytes:
        """The secret that signs session keys: from the environment, else from its file. Raises ConfigError."""
        if value := env.get(self.gateway.secret_env, ""):
            return value.encode()
        path = Path(self.gateway.secret_file) if self.gateway.secret_file else self.data_dir() / "secret"
        hint = (
            f"set the variable {self.gateway.secret_env}, or [gateway] secret_file; `rollyard up` makes one by itself"
        )
        try:
            return _long_enough(path.read_bytes(), f"the secret in {path}", hint)
        except OSError as error:
            raise ConfigError(
                f"there is no secret to sign session keys with: {path}: {error.strerror}", hint=hint
            ) from error

    def admin_token(self, env: Mapping[str, str] = os.environ) -> bytes:
        """The token of the admin endpoints: from the environment, else from its file; empty: there is none.

        Raises ConfigError for a file that is named and cannot be read, and for a token that is too short.
        """
        hint = f"set the variable {self.gateway.admin_token_env}, or [gateway] admin_token_file"
        if value := env.get(self.gateway.admin_token_env, ""):
            return _long_enough(value.encode(), f"the admin token in {self.gateway.admin_token_env}", hint)
        named = self.gateway.admin_token_file
        path = Path(named) if named else self.data_dir() / "admin-token"
        try:
            return _long_enough(path.read_bytes(), f"the admin token in {path}", hint)
        except FileNotFoundError:
            if not named:
                return b""
            raise ConfigError(f"there is no file {path} with the admin token", hint=hint) from None
        except OSError as error:
            raise ConfigError(f"the admin token in {path} cannot be read: {error.strerror}", hint=hint) from error


def _long_enough(given: bytes, what: str, hint: str) -> bytes:
    if len(secret := given.strip()) < 16:
        raise ConfigError(f"{what} is shorter than 16 bytes", hint=hint)
    return secret


BACKENDS = "backends"
SECTIONS: dict[str, type[Struct]] = {
    field.name: kind for field in structs.fields(Config) if isinstance(kind := field.type, type)
}


def load_config(path: Path | None = None, env: Mapping[str, str] = os.environ) -> Config:
    """The configuration of `path`, else of the file that ROLLYARD_CONFIG names, else of ./rollyard.toml if it exists.

    Variables replace single keys. Raises ConfigError, which names the key and the file or variable.
    """
    if path is None and env.get(ENV_FILE):
        path = Path(env[ENV_FILE])
    if path is None and Path(DEFAULT_FILE).is_file():
        path = Path(DEFAULT_FILE)
    tree = _read(path) if path else {}
    source = str(path)
    backends = _backends(tree.pop(BACKENDS, {}), source)
    for section, table in tree.items():
        _check_keys(section, table, source)
    sections = {name: _convert(name, table, source) for name, table in tree.items()}
    config = structs.replace(Config(), backends=backends, **sections)
    config = _with_env(config, env)
    if config.worker.heartbeat_s * 2 > config.worker.ack_wait_s:
        raise ConfigError(
            f"worker.heartbeat_s is {config.worker.heartbeat_s:g}, over half of worker.ack_wait_s"
            f" ({config.worker.ack_wait_s:g}): one late heartbeat would hand work to a second worker",
            hint="set heartbeat_s to a third of ack_wait_s",
        )
    return config


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(
            f"the configuration {path} cannot be read: {error.strerror}", hint="name another with --config"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the configuration {path} is not valid TOML: {error}", hint="see docs/configuration.md"
        ) from error


def _backends(table: object, source: str) -> dict[str, dict[str, Any]]:
    """The tables below [backends]; what stands in them the backends check."""
    if not isinstance(table, dict) or not all(isinstance(settings, dict) for settings in table.values()):
        raise ConfigError(
            f"{source}: [backends] holds a table for each backend", hint="write for example [backends.docker]"
        )
    return table


def _check_keys(section: str, table: object, source: str) -> None:
    if section not in SECTIONS:
        raise ConfigError(f"{source}: unknown section [{section}]", hint=_suggest(section, SECTIONS))
    if not isinstance(table, dict):
        raise ConfigError(f"{source}: {section} must be a section", hint=f"write [{section}] and its keys below")
    known = SECTIONS[section].__struct_fields__
    for key in table:
        if key not in known:
            raise ConfigError(f"{source}: unknown key {section}.{key}", hint=_suggest(key, known))


def _suggest(word: str, known: Mapping[str, object] | tuple[str, ...]) -> str:
    near = difflib.get_close_matches(word, known, 1)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"


def _convert(section: str, table: dict[str, Any], source: str, *, strict: bool = True) -> Struct:
    try:
        return msgspec.convert(table, SECTIONS[section], strict=strict)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$.")
        key = where.rstrip("`")
        raise ConfigError(
            f"{source}: {section}.{key}: {what[:1].lower()}{what[1:]}", hint="see docs/configuration.md"
        ) from error


def _with_env(config: Config, env: Mapping[str, str]) -> Config:
    """`config` with the keys that variables replace, one variable at a time so that errors can name it."""
    for name in sorted(env):
        if not name.startswith(ENV_PREFIX):
            continue
        section, _, key = name.removeprefix(ENV_PREFIX).lower().partition("__")
        _check_keys(section, {key: None}, f"environment variable {name}")
        is_list = get_origin(get_type_hints(SECTIONS[section])[key]) is tuple
        value = [part.strip() for part in env[name].split(",") if part.strip()] if is_list else env[name]
        table = structs.asdict(getattr(config, section)) | {key: value}
        converted = _convert(section, table, f"environment variable {name}", strict=False)
        config = structs.replace(config, **{section: converted})
    return config


def to_toml(config: Config) -> str:
    """`config` as a TOML file that `load_config` reads back."""
    lines: list[str] = []
    sections = msgspec.to_builtins(config)
    backends = {f"{BACKENDS}.{name}": table for name, table in sections.pop(BACKENDS).items()}
    for section, table in (sections | backends).items():
        lines += [f"[{section}]", *(f"{key} = {_toml_value(value)}" for key, value in table.items()), ""]
    return "\n".join(lines)


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml_value(key)} = {_toml_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    # JSON's strings, numbers and booleans are TOML's too, as long as no character is written as a surrogate pair.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def reference() -> str:
    """Every section and key with its default, as the Markdown tables of docs/configuration.md."""
    lines: list[str] = []
    for section, kind in SECTIONS.items():
        lines += [f"## [{section}]", "", (kind.__doc__ or "").strip().partition("\n")[0], ""]
        lines += ["| key | default | means |", "| --- | --- | --- |"]
        hints = get_type_hints(kind, include_extras=True)
        defaults = msgspec.to_builtins(kind())
        for key in kind.__struct_fields__:
            meta = [part.description for part in get_args(hints[key]) if isinstance(part, Meta) and part.description]
            lines.append(f"| `{key}` | `{_toml_value(defaults[key])}` | {' '.join(meta)} |")
        lines.append("")
    return "\n".join(lines).rstrip()
