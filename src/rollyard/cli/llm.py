"""The pool of model servers, from the shell: rollyard llm."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from rollyard.cli.common import Commands, command, config_of, connected, json_flag, run_async, table, to_json

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from rollyard.pipeline.config import Config
    from rollyard.pipeline.llm_servers import LlmServers
    from rollyard.schemas.fleet import LlmServer
    from rollyard.schemas.weights import PoolView, WeightProgress

    Change = Callable[[LlmServers], Awaitable[None]]

ENGINES = ("vllm", "sglang", "llamacpp", "openai")
TIMEOUT_S = 600.0


def add(commands: Commands) -> None:
    """The commands of this file."""
    llm = command(commands, "llm", run_ls, "look at and change the pool of model servers")
    kinds = llm.add_subparsers(title="what", metavar="WHAT", required=True)
    json_flag(command(kinds, "ls", run_ls, "list the servers, and what the gateways see there"))
    _add_add(kinds)
    for name, run, help_text in (
        ("rm", run_rm, "take a server out of the pool"),
        ("pause", run_pause, "send no new calls to a server"),
        ("drain", run_drain, "the same, and wait until no call runs there"),
        ("resume", run_resume, "send calls to a server again"),
    ):
        made = command(kinds, name, run, help_text)
        made.add_argument("server_id", metavar="ID", help="its name, from `llm ls`")
        if name == "drain":
            _timeout(made)
    _add_update(kinds)


def _add_add(kinds: Commands) -> None:
    put = command(kinds, "add", run_add, "add a server, or change one")
    put.add_argument("url", metavar="URL", help="for example http://127.0.0.1:8000")
    put.add_argument("--engine", choices=ENGINES, required=True, help="what it is")
    put.add_argument("--model-name", default="default", help="name under which tasks ask for it (default: default)")
    put.add_argument("--alias", action="append", metavar="NAME", default=[], help="another such name; may be repeated")
    put.add_argument("--model", metavar="NAME", default="", help="the model's name at that server")
    put.add_argument(
        "--mode", choices=("capture", "tokens"), default="capture", help="who tokenises: server or gateway"
    )
    put.add_argument("--tokenizer", metavar="FILE", default="", help="tokenizer.json or GGUF, for --mode tokens")
    put.add_argument(
        "--parser",
        metavar="NAME",
        default="",
        help="how replies are written, for --mode tokens (default: as the template)",
    )
    put.add_argument("--api-key-env", metavar="VAR", default="", help="variable of the gateways that holds its API key")
    put.add_argument(
        "--policy-version",
        type=int,
        metavar="N",
        help="of the weights that it serves (default: as it stands, else none)",
    )
    put.add_argument("--id", dest="server_id", metavar="ID", help="its name in the pool (default: made from the URL)")
    put.add_argument("--replaces", metavar="ID", help="once it answers, drain that server and take it out")
    _timeout(put)


def _add_update(kinds: Commands) -> None:
    update = command(kinds, "update", run_update, "have servers serve other weights")
    update.add_argument("server_ids", nargs="*", metavar="ID", help="which servers (default: all of the model)")
    update.add_argument(
        "--version",
        dest="policy_version",
        type=int,
        required=True,
        metavar="N",
        help="policy version of the new weights",
    )
    update.add_argument("--checkpoint", metavar="PATH", help="where the servers read them (default: they have them)")
    update.add_argument(
        "--how",
        choices=("drain", "pause", "abort"),
        default="drain",
        help="drain: calls end first; pause: the server ends them, new ones wait; abort: they are cut, and continued",
    )
    update.add_argument("--model-name", default="default", help="model whose servers are meant (default: default)")
    update.add_argument("--at-once", action="store_true", help="all servers together, not one after the other")
    _timeout(update)
    json_flag(update)


def _timeout(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--timeout", type=float, default=TIMEOUT_S, metavar="S", help=f"seconds to wait (default: {TIMEOUT_S:g})"
    )


def run_ls(args: argparse.Namespace) -> int:
    """List the pool."""
    return run_async(_ls(args, config_of(args)))


async def _ls(args: argparse.Namespace, config: Config) -> int:
    from msgspec import to_builtins

    from rollyard.pipeline.gateways import Gateways
    from rollyard.pipeline.llm_servers import LlmServers

    async with connected(config) as bus:
        servers = await LlmServers(bus).all()
        async with Gateways.following(bus) as gateways:
            views = await gateways.ask() if servers else {}
    if args.json:
        print(to_json([{**to_builtins(server), "gateways": _seen(server, views)} for server in servers]))
        return 0
    head = ("id", "model", "engine", "mode", "url", "policy version", "state", "health")
    rows = [
        (one.server_id, one.model, one.engine, one.mode, one.url, one.policy_version, one.state, _health(one, views))
        for one in servers
    ]
    print(table(head, rows))
    for one in servers:
        if one.note:
            print(f"{one.server_id}: {one.note}")
        for findings in sorted({view.of(one.server_id).template for view in views.values() if view} - {""}):
            print(f"{one.server_id}: template {findings}")
    return 0


def _seen(server: LlmServer, views: Mapping[str, PoolView | None]) -> dict[str, object]:
    from msgspec import to_builtins

    return {owner: to_builtins(view.of(server.server_id)) if view else None for owner, view in views.items()}


def _health(server: LlmServer, views: Mapping[str, PoolView | None]) -> str:
    """In a word: what the gateways that answer think of a server."""
    answers = [view.of(server.server_id) for view in views.values() if view is not None]
    if not answers:
        return "no gateway"
    troubles = [answer.trouble or "not known yet" for answer in answers if not answer.healthy]
    if not troubles:
        return f"ok, {sum(answer.calls for answer in answers)} calls"
    return f"{troubles[0][:60]}" + (f" ({len(troubles)} of {len(answers)} gateways)" if len(answers) > 1 else "")


def run_add(args: argparse.Namespace) -> int:
    """Add a server to the pool."""
    return run_async(_add(args, config_of(args)))


async def _add(args: argparse.Namespace, config: Config) -> int:
    from rollyard.pipeline.gateways import Gateways
    from rollyard.pipeline.llm_servers import LlmServers
    from rollyard.schemas.errors import ConfigError
    from rollyard.schemas.fleet import LlmServer

    if not args.url.startswith(("http://", "https://")):
        raise ConfigError(f"{args.url!r} is not a URL", hint="for example http://127.0.0.1:8000")
    url = args.url.rstrip("/").removesuffix("/v1")
    server_id = args.server_id or url.partition("://")[2].replace(".", "-").replace(":", "-").replace("/", "-")
    server = LlmServer(
        server_id=server_id,
        url=url,
        engine=args.engine,
        model=args.model_name,
        upstream_model=args.model,
        mode=args.mode,
        tokenizer=args.tokenizer,
        parser=args.parser,
        aliases=tuple(args.alias),
        api_key_env=args.api_key_env,
        policy_version=args.policy_version,
    )
    async with connected(config) as bus:
        if args.replaces:
            async with Gateways.following(bus) as gateways:
                await LlmServers(bus).swap(
                    args.replaces, server, timeout_s=args.timeout, gateways=gateways, heard=_Told(args.replaces).heard
                )
        else:
            await LlmServers(bus).add(server)
    replaced = f" in place of {args.replaces}" if args.replaces else ""
    print(f"{server_id} serves {server.model!r} from {url}{replaced}.")
    return 0


def run_rm(args: argparse.Namespace) -> int:
    """Take a server out of the pool."""
    return _change(args, lambda servers: servers.remove(args.server_id), "is out of the pool")


def run_pause(args: argparse.Namespace) -> int:
    """Pause a server."""
    return _change(args, lambda servers: servers.pause(args.server_id), "gets no new calls")


def run_resume(args: argparse.Namespace) -> int:
    """Resume a server."""
    return _change(args, lambda servers: servers.resume(args.server_id), "gets calls")


def run_drain(args: argparse.Namespace) -> int:
    """Drain a server."""
    return run_async(_drain(args, config_of(args)))


async def _drain(args: argparse.Namespace, config: Config) -> int:
    from rollyard.pipeline.gateways import Gateways
    from rollyard.pipeline.llm_servers import LlmServers

    async with connected(config) as bus, Gateways.following(bus) as gateways:
        heard = _Told(args.server_id).heard
        await LlmServers(bus).drain(args.server_id, timeout_s=args.timeout, gateways=gateways, heard=heard)
    print(f"{args.server_id} is drained: no call runs there.")
    return 0


def run_update(args: argparse.Namespace) -> int:
    """Update weights; 1 when a server failed."""
    return run_async(_update(args, config_of(args)))


async def _update(args: argparse.Namespace, config: Config) -> int:
    from rollyard.pipeline.pool_client import PoolClient

    told = _Told()
    async with connected(config) as bus:
        report = await PoolClient(bus).update_weights(
            args.policy_version,
            checkpoint=args.checkpoint,
            how=args.how,
            servers=args.server_ids,
            model=args.model_name,
            rolling=not args.at_once,
            timeout_s=args.timeout,
            told=told.progress,
        )
    if args.json:
        print(to_json(report))
    else:
        done = len(report.servers) - len(report.failed)
        print(f"{done} of {len(report.servers)} servers serve version {args.policy_version}.")
    return 1 if report.failed else 0


def _change(args: argparse.Namespace, change: Change, says: str) -> int:
    return run_async(_changed(args, config_of(args), change, says))


async def _changed(args: argparse.Namespace, config: Config, change: Change, says: str) -> int:
    from rollyard.pipeline.llm_servers import LlmServers

    async with connected(config) as bus:
        await change(LlmServers(bus))
    print(f"{args.server_id} {says}.")
    return 0


class _Told:
    """Progress as lines on standard error, each said once."""

    def __init__(self, server_id: str = "") -> None:
        self._server_id = server_id
        self._said: dict[str, str] = {}

    def progress(self, news: WeightProgress) -> None:
        """Of a weight update."""
        self._say(news.server_id, " - ".join(filter(None, (news.step, news.detail, news.hint))))

    def heard(self, _calls: int, what: str) -> None:
        """Of a wait for gateways."""
        self._say(self._server_id, f"waiting - {what}")

    def _say(self, server_id: str, line: str) -> None:
        if self._said.get(server_id) != line:
            self._said[server_id] = line
            print(f"{server_id}: {line}", file=sys.stderr, flush=True)
