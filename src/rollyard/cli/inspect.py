"""Looking at what there is: samples, replay, dead letters, schemas, the configuration."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollyard.cli.common import (
    Commands,
    check_run,
    command,
    config_of,
    connected,
    json_flag,
    run_async,
    table,
    to_json,
)

if TYPE_CHECKING:
    from rollyard.pipeline.config import Config
    from rollyard.pipeline.sample_view import Decode

LS_COLUMNS = ("sample_id", "run", "task_id", "index", "branch", "status", "reward", "tokens", "trained_tokens")


def add(commands: Commands) -> None:
    """The commands of this file."""
    samples = command(commands, "samples", run_samples_ls, "look at samples in the Parquet files")
    kinds = samples.add_subparsers(title="what", metavar="WHAT", required=True)
    ls = command(kinds, "ls", run_samples_ls, "list samples, newest first")
    ls.add_argument("--run", dest="run_name", metavar="RUN", help="only of this run")
    ls.add_argument("--limit", type=_count, default=50, metavar="N", help="at most so many (default: 50)")
    json_flag(ls)
    show = command(kinds, "show", run_samples_show, "show one sample, with its trained tokens marked")
    show.add_argument("id", metavar="ID", help="a sample's or a rollout's id, or the start of one")
    show.add_argument("--tokenizer", type=Path, metavar="PATH", help="tokenizer.json or GGUF that turns ids into text")
    json_flag(show)
    sql = command(kinds, "sql", run_samples_sql, "ask the tables `samples` and `rollouts` with DuckDB")
    sql.add_argument("query", metavar="QUERY", help='for example "select run, count(*) from samples group by run"')
    json_flag(sql)
    replay = command(commands, "replay", run_replay, "rebuild samples from the log and compare them with the commits")
    replay.add_argument("--run", dest="run_name", required=True, metavar="RUN", help="name of the run")
    json_flag(replay)
    _add_dead(commands)
    schema = command(commands, "schema", run_schema, "print the JSON Schema of a record")
    schema.add_argument("name", metavar="NAME", nargs="?", help="name of a record (default: list the names)")
    config = command(commands, "config", run_config_show, "print the configuration")
    shows = config.add_subparsers(title="what", metavar="WHAT", required=True)
    json_flag(command(shows, "show", run_config_show, "print the configuration in effect, as TOML"))
    command(shows, "reference", run_config_reference, "print every key with its default, as Markdown")


def _add_dead(commands: Commands) -> None:
    dead = command(commands, "dead", run_dead_ls, "look at messages that could not be worked on")
    kinds = dead.add_subparsers(title="what", metavar="WHAT", required=True)
    ls = command(kinds, "ls", run_dead_ls, "list them")
    ls.add_argument("--run", dest="run_name", metavar="RUN", help="only of this run")
    json_flag(ls)
    show = command(kinds, "show", run_dead_show, "show one with its body")
    show.add_argument("seq", type=int, metavar="SEQ", help="its number, from `dead ls`")
    json_flag(show)


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def run_samples_ls(args: argparse.Namespace) -> int:
    """List samples, newest first."""
    from rollyard.pipeline.datasets import connect

    sql = f"SELECT {', '.join(LS_COLUMNS)} FROM samples WHERE $1 IS NULL OR run = $1 ORDER BY stream_seq DESC LIMIT $2"
    folder = config_of(args).samples_dir()
    with connect(folder) as connection:
        rows = connection.execute(sql, [args.run_name, args.limit]).fetchall()
    if not rows and not args.json:
        print(f"There are no samples{f' of run {args.run_name}' if args.run_name else ''} in {folder}.")
        return 0
    _print_rows(list(LS_COLUMNS), rows, as_json=args.json)
    return 0


def run_samples_show(args: argparse.Namespace) -> int:
    """Show samples by the start of an id."""
    from rollyard.pipeline.datasets import find_samples
    from rollyard.pipeline.sample_view import render
    from rollyard.schemas.errors import ConfigError

    folder = config_of(args).samples_dir()
    found = find_samples(folder, args.id)
    if not found:
        raise ConfigError(
            f"no sample or rollout in {folder} has an id that begins with {args.id!r}",
            hint="`rollyard samples ls` lists them; the newest may not be written yet",
        )
    if args.json:
        print("\n".join(map(to_json, found)))
        return 0
    decode = decoder(args.tokenizer or _tokenizer_of(args))
    print("\n\n".join(render(sample, decode, colour=sys.stdout.isatty()) for sample in found))
    return 0


def decoder(tokenizer: Path | None) -> Decode | None:
    """What turns token ids into text, special tokens included."""
    from rollyard.gateway.tokens.tokenizer import load_tokenizer
    from rollyard.schemas.packed import TokenIds

    if tokenizer is None:
        return None
    loaded = load_tokenizer(tokenizer)
    return lambda ids: loaded.decode(TokenIds.of(ids), skip_special=False)


def _tokenizer_of(args: argparse.Namespace) -> Path | None:
    """The tokenizer of the model that `rollyard up` serves, or served last, in the data folder."""
    from rollyard.pipeline.datafolder import find_config

    state = find_config(args.config, args.data)[1].read_state()
    path = Path(state["tokenizer"]) if state and state.get("tokenizer") else None
    return path if path and path.exists() else None


def run_samples_sql(args: argparse.Namespace) -> int:
    """Run one SELECT."""
    from rollyard.pipeline.datasets import query

    _print_rows(*query(config_of(args).samples_dir(), args.query), as_json=args.json)
    return 0


def _print_rows(names: list[str], rows: list[tuple[Any, ...]], *, as_json: bool) -> None:
    if as_json:
        for row in rows:
            print(json.dumps(dict(zip(names, row, strict=True)), default=str))
    else:
        print(table(names, rows))


def run_replay(args: argparse.Namespace) -> int:
    """Compare; exit code 5 when a sample differs."""
    return run_async(_replay(args, config_of(args)))


async def _replay(args: argparse.Namespace, config: Config) -> int:
    from rollyard.schemas.errors import ReplayError
    from rollyard.stages.replay import replay_run

    async with connected(config) as bus:
        await check_run(bus, args.run_name)
        report = await replay_run(bus, args.run_name)
    if args.json:
        print(to_json(report))
    else:
        for one in report.mismatches:
            print(f"{one.problem}: sample {one.sample_id or '?'} of rollout {one.rollout_id} {one.detail}".rstrip())
        open_still = f" {report.uncommitted} rollouts are not at their end yet." if report.uncommitted else ""
        print(
            f"{report.equal} of {report.samples} samples of {report.rollouts} rollouts equal their commits.{open_still}"
        )
    return 0 if report.ok else ReplayError.exit_code


def run_schema(args: argparse.Namespace) -> int:
    """Print a schema, or the names."""
    from rollyard.schemas.catalogue import RECORDS, json_schema

    if args.name is None:
        print("\n".join(sorted(RECORDS)))
    else:
        print(json.dumps(json_schema(args.name), indent=2))
    return 0


def run_config_show(args: argparse.Namespace) -> int:
    """Print the configuration in effect. It holds no secrets."""
    from rollyard.pipeline.config import to_toml

    config = config_of(args)
    print(to_json(config) if args.json else to_toml(config))
    return 0


def run_config_reference(args: argparse.Namespace) -> int:
    """Print the tables of docs/configuration.md."""
    from rollyard.pipeline.config import reference

    print(reference())
    return 0


def run_dead_ls(args: argparse.Namespace) -> int:
    """List dead letters."""
    return run_async(_dead_ls(args, config_of(args)))


async def _dead_ls(args: argparse.Namespace, config: Config) -> int:
    from rollyard.pipeline.dead import letters

    async with connected(config) as bus:
        rows = [(seq, letter) async for seq, letter in letters(bus, args.run_name)]
    if args.json:
        for seq, letter in rows:
            print(to_json({"seq": seq, "letter": letter}))
        return 0
    if not rows:
        print("There are no dead letters.")
        return 0
    shown = [
        (seq, _when(letter.at_ms), letter.stage, letter.run, letter.rollout_id, letter.reason) for seq, letter in rows
    ]
    print(table(("seq", "when", "stage", "run", "rollout", "reason"), shown))
    return 0


def run_dead_show(args: argparse.Namespace) -> int:
    """Show one dead letter."""
    return run_async(_dead_show(args, config_of(args)))


async def _dead_show(args: argparse.Namespace, config: Config) -> int:
    from rollyard.pipeline.dead import letter_at
    from rollyard.schemas.errors import ConfigError

    async with connected(config) as bus:
        letter = await letter_at(bus, args.seq)
    if letter is None:
        raise ConfigError(f"there is no dead letter {args.seq}", hint="`rollyard dead ls` lists them")
    if args.json:
        print(to_json(letter))
        return 0
    for name in ("stage", "run", "rollout_id", "subject", "reason"):
        print(f"{name:11}{getattr(letter, name)}")
    print(f"{'when':11}{_when(letter.at_ms)}\n\n{letter.body.decode(errors='backslashreplace')}")
    return 0


def _when(at_ms: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_ms / 1000)) if at_ms else ""
