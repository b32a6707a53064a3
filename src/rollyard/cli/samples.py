"""Samples in the Parquet files: lists, one with its tokens marked, SQL."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollyard.cli.common import (
    Commands,
    command,
    config_of,
    json_flag,
    table,
    to_json,
)

if TYPE_CHECKING:
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
