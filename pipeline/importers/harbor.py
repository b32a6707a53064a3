"""Task folders in Harbor's format made into tasks: the instruction, the environment, and the tests as rule `harbor`.

What a task of ours cannot say is refused by the field's name, unless it is to be ignored; nothing is left out silently.
"""

from __future__ import annotations

import io
import shlex
import tarfile
from base64 import b64encode
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from rollyard.pipeline.importers.harbor_config import Artifact, HarborConfig, network_of, read_config
from rollyard.pipeline.importers.harbor_folder import COMPOSE, Files, HarborFolder, find_folders, read_folder
from rollyard.pipeline.importers.imported import Collected, Converted, Progress
from rollyard.schemas.sandbox import ImageBuild, Limits, NetworkMode, SandboxSpec, SetupStep
from rollyard.schemas.task import AgentSpec, EvaluationSpec, Task, Timeouts

DOCKERFILE: Final = "Dockerfile"
MAX_INLINE_BYTES: Final = 1 << 20
INIT_S: Final = 300.0
MARGIN_S: Final = 60.0
REPORT_EVERY: Final = 100
_NETWORKS: Final[Mapping[str, NetworkMode]] = {"public": "open", "no-network": "gateway", "allowlist": "allow"}
_SOLVE: Final = """
d=%s
mkdir -p "$d" && base64 -d | tar -xzf - -C "$d" || exit 97
exec "$d/solve.sh"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HarborOptions:
    """What every task gets, and what the backend can do."""

    backend: str = "docker"
    isolated: bool = True
    builds: bool = True
    images: bool = True
    workdirs: bool = True
    users: bool = True
    networks: Collection[NetworkMode] = ("open", "gateway", "allow")
    limits: Collection[str] = ("cpus", "memory_bytes", "disk_bytes")
    image: str = ""
    """Image of all tasks, in the place of their own Dockerfile or docker_image."""
    network: NetworkMode | None = None
    """Instead of what the tasks say."""
    sandbox: Literal["auto", "same", "fresh"] | None = None
    """Where the tests run; null: as the task's environment_mode says, else the rule's own way, a fresh one."""
    ignore: frozenset[str] = frozenset()
    """Fields that are left out though they mean something."""
    agent: AgentSpec = AgentSpec(harness="bash")
    stand_in: Literal["", "oracle", "nothing"] = ""
    """Instead of an agent: the task's own solution, or nobody."""
    group_size: int = 1


@dataclass(slots=True)
class _Findings:
    """Problems by field, less those to be ignored."""

    ignore: frozenset[str]
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, why: str) -> None:
        if name in self.ignore or any(name.startswith(f"{each}.") for each in self.ignore):
            self.notes.append(f"{name} is ignored: {why}")
        else:
            self.problems.append(f"{name}: {why}; or ignore it: --ignore {name}")


def import_harbor(paths: list[Path], options: HarborOptions, progress: Progress = lambda count: None) -> Collected:
    """Every task folder among `paths` and directly below them."""
    collected = Collected()
    for count, path in enumerate(find_folders(paths), 1):
        collected.add(str(path), harbor_task(read_folder(path), options))
        if count % REPORT_EVERY == 0:
            progress(count)
    return collected


def harbor_task(folder: HarborFolder, options: HarborOptions) -> Converted:
    """The task of one folder."""
    found = _Findings(options.ignore)
    config, wrong = read_config(folder.config)
    for name, why in wrong.items():
        found.add(name, why)
    problems = [*folder.problems]
    for name in COMPOSE:
        if name in folder.environment:
            found.add(f"environment/{name}", "a sandbox is one container, not several")
    if folder.has_steps and "steps" not in folder.config:
        found.add("steps/", "a task has one prompt; import each step as a task of its own")
    if not folder.instruction.strip() and not problems and "steps" not in folder.config:
        problems.append("instruction.md: is empty")
    if not problems and "test.sh" not in folder.tests and "steps" not in folder.config:
        problems.append("tests/test.sh: there is none")
    if config is None or problems:
        return Converted(problems=[*problems, *found.problems])
    sandbox = _sandbox(folder, config, options, found)
    evaluation = _evaluation(folder, config, options, found)
    agent = _agent(folder, config, options, found)
    if found.problems:
        return Converted(problems=found.problems, notes=found.notes)
    return Converted(
        Task(
            prompt=folder.instruction,
            id=config.task.name or folder.path.resolve().name,
            agent=agent,
            sandbox=sandbox,
            evaluation=evaluation,
            timeouts=_timeouts(config),
            group_size=options.group_size,
            data_source=config.task.name.partition("/")[0] or "harbor",
            metadata=_metadata(config),
        ),
        notes=found.notes,
    )


def _sandbox(folder: HarborFolder, config: HarborConfig, options: HarborOptions, found: _Findings) -> SandboxSpec:
    environment = config.environment
    image, build = _image(folder, config, options, found)
    files: dict[str, str] = {}
    steps: list[SetupStep] = []
    if DOCKERFILE not in folder.environment:
        files, steps = _uploads(folder.environment)
    if (check := environment.healthcheck) is not None:
        wait = f"sleep {check.start_period_sec:g}; " if check.start_period_sec else ""
        steps.append(SetupStep(run=wait + check.command, timeout_s=check.timeout_sec, max_tries=max(1, check.retries)))
    if environment.workdir and not options.workdirs:
        found.add("environment.workdir", f"the backend {options.backend!r} has a working directory of its own")
    user = "" if config.agent.user is None else str(config.agent.user)
    if user and not options.users:
        found.add("agent.user", f"the backend {options.backend!r} has one user only")
    network, hosts = _network(config, options, found)
    return SandboxSpec(
        backend=options.backend,
        image=image,
        build=build,
        workdir=environment.workdir or "" if options.workdirs else "",
        user=user if options.users else "",
        network=network,
        allow_hosts=hosts,
        limits=_limits(config, options, found),
        files=files,
        setup=tuple(steps),
        env=environment.env,
    )


def _image(
    folder: HarborFolder, config: HarborConfig, options: HarborOptions, found: _Findings
) -> tuple[str, ImageBuild | None]:
    name = options.image or config.environment.docker_image or ""
    if name:
        if not options.images:
            found.add("environment.docker_image", f"the backend {options.backend!r} has no images")
        return (name if options.images else ""), None
    dockerfile = folder.environment.get(DOCKERFILE)
    if dockerfile is None:
        if options.images:
            found.add("environment.docker_image", "there is none, and no environment/Dockerfile; give --image NAME")
        return "", None
    text = dockerfile.text()
    if not options.builds or text is None:
        why = f"the backend {options.backend!r} builds no images" if text is not None else "it is no text"
        found.add(f"environment/{DOCKERFILE}", f"{why}; build it elsewhere and give --image NAME")
        return "", None
    context = {path: file for path, file in folder.environment.items() if path != DOCKERFILE}
    texts = {path: said for path, file in context.items() if not file.executable and (said := file.text()) is not None}
    inline = len(texts) == len(context) and sum(map(len, texts.values())) <= MAX_INLINE_BYTES
    return "", ImageBuild(
        dockerfile=text,
        files=texts if inline else {},
        context="" if inline else str((folder.path / "environment").resolve()),
        timeout_s=config.environment.build_timeout_sec,
    )


def _uploads(files: Files) -> tuple[dict[str, str], list[SetupStep]]:
    """Files for the working directory. What is no text goes as base64, and is decoded there."""
    texts: dict[str, str] = {}
    commands: list[str] = []
    for path, file in files.items():
        text = file.text()
        if text is None:
            texts[f"{path}.base64"] = b64encode(file.content).decode()
            quoted = shlex.quote(path)
            commands.append(f"base64 -d <{quoted}.base64 >{quoted} && rm -f -- {quoted}.base64")
        else:
            texts[path] = text
        if file.executable:
            commands.append(f"chmod +x -- {shlex.quote(path)}")
    return texts, [SetupStep(run="\n".join(["set -e", *commands]))] if commands else []


def _network(config: HarborConfig, options: HarborOptions, found: _Findings) -> tuple[NetworkMode, tuple[str, ...]]:
    asked, hosts = network_of(config)
    own = (config.verifier.network_mode, config.verifier.allowed_hosts or ())
    if own[0] is not None and own != (asked or "public", hosts) and options.network is None:
        found.add("verifier.network_mode", "agent and verifier have the same network; set --network")
    if options.network is not None:
        return options.network, hosts if options.network == "allow" else ()
    # Without a word Harbor's network is open.
    mode = _NETWORKS[asked or "public"]
    if mode in options.networks:
        return mode, hosts if mode == "allow" else ()
    if asked is None:
        found.notes.append(f"the network is the default of the backend {options.backend!r}, not an open one")
    else:
        found.add(
            "environment.network_mode", f"the backend {options.backend!r} cannot keep to {asked!r}; set --network"
        )
    return "default", ()


def _limits(config: HarborConfig, options: HarborOptions, found: _Findings) -> Limits:
    environment = config.environment
    asked = {
        "cpus": ("environment.cpus", environment.cpus),
        "memory_bytes": ("environment.memory_mb", environment.memory_bytes()),
        "disk_bytes": ("environment.storage_mb", environment.storage_bytes()),
    }
    kept: dict[str, Any] = {}
    for limit, (name, value) in asked.items():
        if value is None:
            continue
        if limit in options.limits:
            kept[limit] = value
        else:
            found.add(name, f"the backend {options.backend!r} cannot keep the limit")
    return Limits(**kept)


def _evaluation(folder: HarborFolder, config: HarborConfig, options: HarborOptions, found: _Findings) -> EvaluationSpec:
    verifier = config.verifier
    if verifier.user is not None and verifier.user not in (config.agent.user, "root" if not config.agent.user else ""):
        found.add("verifier.user", "the verifier runs as the agent does, in a sandbox of its own")
    texts = {path: text for path, file in folder.tests.items() if (text := file.text()) is not None}
    binary = {path: b64encode(file.content).decode() for path, file in folder.tests.items() if path not in texts}
    args: dict[str, Any] = {"tests": texts, "timeout_s": verifier.timeout_sec}
    if binary:
        args["binary_tests"] = binary
    if verifier.env:
        args["env"] = verifier.env
    if copied := _artifacts(config, found):
        args["copy"] = ["/logs/artifacts", *copied]
    modes: Mapping[str | None, Literal["auto", "same", "fresh"]] = {"shared": "same", "separate": "fresh"}
    sandbox = options.sandbox or modes.get(verifier.environment_mode, "auto")
    return EvaluationSpec(rule="harbor", args=args, sandbox=sandbox)


def _artifacts(config: HarborConfig, found: _Findings) -> list[str]:
    """Absolute paths of `artifacts`; relative ones are of the working directory, which is copied anyway."""
    paths: list[str] = []
    for number, artifact in enumerate(config.artifacts):
        if isinstance(artifact, Artifact) and artifact.service not in (None, "main"):
            found.add(f"artifacts[{number}].service", "a sandbox is one container, not several")
            continue
        source = artifact.source if isinstance(artifact, Artifact) else artifact
        if source.startswith("/"):
            paths.append(source)
    return paths


def _agent(folder: HarborFolder, config: HarborConfig, options: HarborOptions, found: _Findings) -> AgentSpec:
    if options.stand_in == "nothing":
        return AgentSpec(harness="command", args={"command": ["true"]})
    if options.stand_in != "oracle":
        return options.agent
    if "solve.sh" not in folder.solution:
        found.problems.append("solution/solve.sh: there is none, so that there is no oracle")
        return options.agent
    script = _SOLVE % ("/solution" if options.isolated else '"$HOME/solution"')
    args = {"command": ["sh", "-c", script], "stdin": b64encode(_packed(folder.solution)).decode()}
    return AgentSpec(harness="command", args=args | ({"env": config.solution.env} if config.solution.env else {}))


def _packed(files: Files) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for path, file in sorted(files.items()):
            member = tarfile.TarInfo(path)
            member.size = len(file.content)
            member.mode = 0o755 if file.executable or path == "solve.sh" else 0o644
            archive.addfile(member, io.BytesIO(file.content))
    return buffer.getvalue()


def _timeouts(config: HarborConfig) -> Timeouts:
    check = config.environment.healthcheck
    more_s = 0.0 if check is None else check.start_period_sec + check.retries * (check.timeout_sec + check.interval_sec)
    defaults = Timeouts()
    return Timeouts(
        init_s=INIT_S + more_s,
        run_s=config.agent.timeout_sec or defaults.run_s,
        eval_s=config.verifier.timeout_sec + MARGIN_S,
    )


def _metadata(config: HarborConfig) -> dict[str, Any]:
    package = {name: value for name in ("version", "description", "keywords") if (value := getattr(config.task, name))}
    return {**_plain(config.metadata), **package}


def _plain(value: Any) -> Any:
    """TOML's dates as text: JSON has none."""
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value if isinstance(value, str | int | float | bool) else str(value)
