"""`rollyard up`: a whole installation on this machine, until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rollyard.cli.common import Commands, base_config, command, configure_logging, program
from rollyard.cli.services import port_number

if TYPE_CHECKING:
    from rollyard.pipeline.installation import Installation, ModelPlan, Plan

DEFAULT_DATA = ".rollyard"


def add(commands: Commands) -> None:
    """The command of this file."""
    up = command(commands, "up", run_up, "run a whole installation on this machine until Ctrl-C")
    model_arguments(up)
    up.add_argument("--nats-port", type=port_number, default=4222, help="port of nats-server (0: any free one)")
    up.add_argument("--gateway-port", type=port_number, help="port of the gateway (default: [gateway] port; 0: any)")
    up.add_argument("--model-port", type=port_number, default=0, help="port of our model server (default: any free)")


def model_arguments(parser: argparse.ArgumentParser) -> None:
    """Which model the agents get. Without any of these it is the small local one."""
    model = parser.add_argument_group("model", "which one the agents get; without any of these the small local one")
    which = model.add_mutually_exclusive_group()
    which.add_argument("--llm", metavar="URL", default="", help="use the model server at this address")
    which.add_argument("--scripted", metavar="SCRIPT", type=Path, help="use a scripted policy instead of a model")
    model.add_argument(
        "--engine",
        choices=("vllm", "sglang", "openai", "llamacpp"),
        help="what the server of --llm is (default: openai)",
    )
    model.add_argument("--api-key-env", metavar="VAR", default="", help="variable that holds that server's API key")
    model.add_argument("--model", metavar="NAME", default="", help="the model's name at that server, or in the script")
    model.add_argument(
        "--tokenizer",
        metavar="PATH",
        type=Path,
        help="of the model of --llm or --scripted: tokenizer.json, its folder, or a GGUF file",
    )
    model.add_argument("--journal", metavar="FILE", type=Path, help="where the scripted policy notes each request")


def model_of(args: argparse.Namespace) -> ModelPlan:
    """The model server that the arguments ask for. Raises ConfigError, and SetupError without the local model."""
    _check_model_arguments(args)
    if args.llm:
        return _given_model(args)
    return _scripted_model(args) if args.scripted else _local_model()


def _check_model_arguments(args: argparse.Namespace) -> None:
    """Raises ConfigError for an argument that would be without effect."""
    from rollyard.schemas.errors import ConfigError

    needs = {
        "--engine": (args.engine, args.llm, "--llm URL"),
        "--api-key-env": (args.api_key_env, args.llm, "--llm URL"),
        "--model": (args.model, args.llm or args.scripted, "--llm URL or --scripted SCRIPT"),
        "--tokenizer": (args.tokenizer, args.llm or args.scripted, "--llm URL or --scripted SCRIPT"),
        "--journal": (args.journal, args.scripted, "--scripted SCRIPT"),
    }
    for name, (given, companion, what) in needs.items():
        if given and not companion:
            raise ConfigError(f"{name} means nothing here", hint=f"it goes with {what}")
    if args.llm and not args.llm.startswith(("http://", "https://")):
        raise ConfigError(f"--llm {args.llm!r} is not a URL", hint="for example http://127.0.0.1:8000")
    if args.tokenizer and not args.tokenizer.exists():
        raise ConfigError(f"--tokenizer {args.tokenizer} does not exist", hint="is the path right?")


def _given_model(args: argparse.Namespace) -> ModelPlan:
    from rollyard.pipeline.installation import SERVER_ID, ModelPlan
    from rollyard.schemas.fleet import LlmServer

    entry = LlmServer(
        server_id=SERVER_ID,
        url=args.llm.rstrip("/").removesuffix("/v1"),
        engine=args.engine or "openai",
        upstream_model=args.model,
        api_key_env=args.api_key_env,
        tokenizer=str(args.tokenizer.absolute()) if args.tokenizer else "",
    )
    return ModelPlan(entry=entry)


def _scripted_model(args: argparse.Namespace) -> ModelPlan:
    from rollyard.gateway.local_model import demo_model_path
    from rollyard.gateway.scripted.script import load_script
    from rollyard.pipeline.installation import SERVER_ID, ModelPlan
    from rollyard.schemas.fleet import LlmServer

    tokenizer = (args.tokenizer or demo_model_path()).absolute()
    entry = LlmServer(
        server_id=SERVER_ID,
        url="",
        engine="vllm",
        upstream_model=args.model or load_script(args.scripted).models[0],
        policy_version=0,
        tokenizer=str(tokenizer),
    )
    command = ["scripted-llm", str(args.scripted.absolute()), "--tokenizer", str(tokenizer)]
    if args.journal:
        command += ["--journal", str(args.journal.absolute())]
    return ModelPlan(entry=entry, command=tuple(command))


def _local_model() -> ModelPlan:
    from rollyard.gateway import local_model
    from rollyard.pipeline.installation import SERVER_ID, ModelPlan
    from rollyard.schemas.fleet import LlmServer

    entry = LlmServer(
        server_id=SERVER_ID,
        url="",
        engine="llamacpp",
        mode="tokens",
        upstream_model=local_model.DEMO_MODEL_NAME,
        tokenizer=str(local_model.demo_model_path()),
        logprob_kind="raw",
        policy_version=0,
    )
    return ModelPlan(entry=entry, command=("local-model",))


def run_up(args: argparse.Namespace) -> int:
    """Run until Ctrl-C or SIGTERM, which is the normal end."""
    from rollyard.pipeline.installation import Plan

    config = base_config(args)
    configure_logging(config.log)
    port = config.gateway.port if args.gateway_port is None else args.gateway_port
    plan = Plan(
        data=config.data_dir(),
        base=config,
        model=model_of(args),
        nats_port=args.nats_port,
        gateway_port=port,
        model_port=args.model_port,
    )
    return asyncio.run(_up(plan))


async def _up(plan: Plan) -> int:
    from rollyard.pipeline.installation import Installation

    print(f"Starting Rollyard in {plan.data.absolute()} ...", flush=True)
    try:
        async with Installation.running(plan) as installation:
            print(describe(installation), flush=True)
            try:
                await asyncio.Event().wait()
            finally:
                print("Stopping ... (Ctrl-C once more ends everything at once)", file=sys.stderr, flush=True)
    except asyncio.CancelledError:
        print(f"Stopped.{_left_behind(plan.base.sandboxes_dir())}", file=sys.stderr)
    return 0


def _left_behind(sandboxes: Path) -> str:
    """What is to be said about agents that go on: they are what the next `rollyard up` takes up again."""
    # Sandboxes are called ROLLOUT.ATTEMPT.NONCE; those of bubblewrap lie in a folder of its name.
    if not any(path.is_dir() for folder in (sandboxes, sandboxes / "bubblewrap") for path in folder.glob("*.*.*")):
        return ""
    return (
        "\nRollouts are under way. The next `rollyard up` goes on with them; "
        "agents that run end within four minutes without it."
    )


def describe(installation: Installation) -> str:
    """What runs, and how to use it from another terminal."""
    folder, me = installation.folder, program()
    option = "" if folder.root == Path(DEFAULT_DATA).absolute() else f" --data {folder.root}"
    return f"""\
Rollyard is up. Ctrl-C stops it.
  bus       {installation.config.nats.url}
  gateway   {installation.config.gateway.address()}
  model     {installation.llm.url}
  samples   {installation.config.samples_dir()}/run=*/part-*.parquet
  logs      {folder.logs}/
In another terminal:
  {me} submit tasks.jsonl --run first{option}
  {me} status --run first --follow{option}
  {me} samples ls{option}"""
