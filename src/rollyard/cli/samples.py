"""Samples in the Parquet files: lists, one rollout with its tokens marked, breaks by reason, SQL."""

from __future__ import annotations

import argparse
import json
import os
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
    from rollyard.pipeline.viewer.drift import DriftTable, Reason
    from rollyard.pipeline.viewer.text import TokenBytes

LS_COLUMNS = (
    *("sample_id", "run", "task_id", "index", "branch", "scenario"),
    *("status", "reward", "tokens", "trained_tokens"),
)
ROLLOUTS_SHOWN = 20
STDOUT = "-"


def add(commands: Commands) -> None:
    """The commands of this file."""
    samples = command(commands, "samples", run_samples_ls, "look at samples in the Parquet files")
    kinds = samples.add_subparsers(title="what", metavar="WHAT", required=True)
    ls = command(kinds, "ls", run_samples_ls, "list samples, newest first")
    ls.add_argument("--run", dest="run_name", metavar="RUN", help="only of this run")
    ls.add_argument("--limit", type=_count, default=50, metavar="N", help="at most so many (default: 50)")
    json_flag(ls)
    show = command(kinds, "show", run_samples_show, "show a rollout's branches, and a sample with its tokens marked")
    show.add_argument("id", metavar="ID", help="a sample's or a rollout's id, or the start of one")
    _tokenizer_argument(show)
    forms = show.add_mutually_exclusive_group()
    forms.add_argument(
        "--html",
        nargs="?",
        const="",
        metavar="FILE",
        help="write one page of HTML that needs nothing else (default: rollyard-<rollout>.html; -: standard output)",
    )
    forms.add_argument("--json", action="store_true", help="print JSON, for programs")
    drift = command(kinds, "drift", run_samples_drift, "say how often calls leave the tokens they continue, and why")
    drift.add_argument("--run", dest="run_name", required=True, metavar="RUN", help="the run")
    _tokenizer_argument(drift)
    json_flag(drift)
    sql = command(kinds, "sql", run_samples_sql, "ask the tables `samples`, `rollouts` and `events` with DuckDB")
    sql.add_argument("query", metavar="QUERY", help='for example "select run, count(*) from samples group by run"')
    json_flag(sql)


def _tokenizer_argument(parser: argparse.ArgumentParser) -> None:
    words = "tokenizer.json or GGUF that turns ids into text"
    parser.add_argument("--tokenizer", type=Path, metavar="PATH", help=words)


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


# --- show ---


def run_samples_show(args: argparse.Namespace) -> int:
    """Show rollouts or samples by the start of an id."""
    from rollyard.pipeline.viewer.rollout import find_rollouts, read_rollout
    from rollyard.pipeline.viewer.terminal import render_rollout

    folder = config_of(args).samples_dir()
    found = find_rollouts(folder, args.id)
    if args.html is not None:
        return _write_page(args, folder, found)
    token_bytes = decoder(args.tokenizer or _tokenizer_of(args)) if not args.json else None
    for place, (run, rollout_id) in enumerate(found[:ROLLOUTS_SHOWN]):
        view = read_rollout(folder, run, rollout_id, args.id)
        if args.json:
            for sample in view.asked:
                print(to_json(sample))
            continue
        for block, text in enumerate(render_rollout(view, token_bytes, colour=has_colours())):
            print(f"\n{text}" if place or block else text)
    if len(found) > ROLLOUTS_SHOWN:
        print(f"{ROLLOUTS_SHOWN} of {len(found)} rollouts are shown; a longer id names fewer", file=sys.stderr)
    return 0


def _write_page(args: argparse.Namespace, folder: Path, found: list[tuple[str, str]]) -> int:
    from rollyard.pipeline.viewer.page import page
    from rollyard.pipeline.viewer.rollout import read_rollout
    from rollyard.schemas.errors import ConfigError

    if len(found) > 1:
        raise ConfigError(
            f"{len(found)} rollouts have an id that begins with {args.id!r}, and a page is of one",
            hint=f"give a longer one: {', '.join(rollout_id for _, rollout_id in found[:3])}",
        )
    ((run, rollout_id),) = found
    written = page(read_rollout(folder, run, rollout_id, args.id), decoder(args.tokenizer or _tokenizer_of(args)))
    if args.html == STDOUT:
        sys.stdout.write(written)
        return 0
    path = Path(args.html or f"rollyard-{rollout_id}.html")
    try:
        path.write_text(written, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot write the page to {path}: {error.strerror}", hint="give a file: --html FILE"
        ) from error
    print(f"{path} ({path.stat().st_size / 1000:,.0f} kB)")
    return 0


def has_colours() -> bool:
    """Whether standard output takes colours: NO_COLOR and FORCE_COLOR decide before the terminal does."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR", "0") != "0":
        return True
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def decoder(tokenizer: Path | None) -> TokenBytes | None:
    """What turns a token id into its bytes, those of special tokens included."""
    from rollyard.gateway.tokens.tokenizer import load_tokenizer

    return load_tokenizer(tokenizer).token_bytes if tokenizer else None


def _tokenizer_of(args: argparse.Namespace) -> Path | None:
    """The tokenizer of the model that `rollyard up` serves, or served last, in the data folder."""
    from rollyard.pipeline.datafolder import find_config

    state = find_config(args.config, args.data)[1].read_state()
    path = Path(state["tokenizer"]) if state and state.get("tokenizer") else None
    return path if path and path.exists() else None


# --- drift ---


def run_samples_drift(args: argparse.Namespace) -> int:
    """Print the breaks of a run by reason, with an example each."""
    from rollyard.pipeline.viewer.drift import drift_of
    from rollyard.pipeline.viewer.facts import count_of
    from rollyard.pipeline.viewer.text import printable

    found = drift_of(config_of(args).samples_dir(), args.run_name)
    token_bytes = decoder(args.tokenizer or _tokenizer_of(args))
    if args.json:
        print(json.dumps(_drift_json(found, token_bytes)))
        return 0
    lost = sum(reason.calls for reason in found.reasons if not reason.is_structural)
    told = f"{lost:,} of them ({found.share(lost):.1%})" if lost else "None of them"
    print(f"Run {printable(found.run)}: {count_of(found.rollouts, 'rollout')}, {count_of(found.calls, 'call')}.")
    print(f"{told} left the tokens of the call whose conversation they continue.")
    if found.reasons:
        header = ("reason", "kind", "calls", "of all calls", "rollouts")
        print(f"\n{table(header, [_reason_row(found, reason) for reason in found.reasons])}")
    for reason in found.reasons:
        _print_example(reason, token_bytes)
    for title, column, counts in (
        ("Matched by lenient rules:", "rule", found.lenience),
        ("Left out of the samples:", "reason", found.excluded),
    ):
        if counts:
            print(f"\n{title}\n\n{table((column, 'calls'), list(counts.items()))}")
    return 0


def _reason_row(found: DriftTable, reason: Reason) -> tuple[object, ...]:
    kind = "structure" if reason.is_structural else "break"
    return reason.name, kind, reason.calls, f"{found.share(reason.calls):.1%}", reason.rollouts


def _print_example(reason: Reason, token_bytes: TokenBytes | None) -> None:
    from rollyard.pipeline.viewer.facts import break_words, sides
    from rollyard.pipeline.viewer.text import printable

    if reason.example is None:
        return
    point = reason.example.point
    expected, found = sides(point, token_bytes)
    print(f"\n{printable(break_words(point, str))}")
    print(f"  in        rollout {reason.example.rollout_id}, sample {reason.example.sample_id}, call {point.call_id}")
    print(f"  expected  {expected}\n  found     {found}")
    if point.detail:
        print(f"  messages  {printable(' '.join(point.detail.split()))}")


def _drift_json(found: DriftTable, token_bytes: TokenBytes | None) -> dict[str, object]:
    return {
        "run": found.run,
        "rollouts": found.rollouts,
        "calls": found.calls,
        "drift": [
            {
                "reason": each.name,
                "structural": each.is_structural,
                "calls": each.calls,
                "share": found.share(each.calls),
                "rollouts": each.rollouts,
                "example": _example_json(each, token_bytes),
            }
            for each in found.reasons
        ],
        "lenience": dict(found.lenience),
        "excluded": dict(found.excluded),
    }


def _example_json(reason: Reason, token_bytes: TokenBytes | None) -> dict[str, object] | None:
    from rollyard.pipeline.viewer.text import text_of

    if reason.example is None:
        return None
    point = reason.example.point
    return {
        "rollout_id": reason.example.rollout_id,
        "sample_id": reason.example.sample_id,
        "call_id": point.call_id,
        "continues": point.continues,
        "position": point.position,
        "message": point.message,
        "detail": point.detail,
        **{
            name: {"ids": ids.tolist(), "text": text_of(ids, token_bytes) if token_bytes else None}
            for name, ids in (("expected", point.expected), ("found", point.found))
        },
    }


def run_samples_sql(args: argparse.Namespace) -> int:
    """Run one SELECT."""
    from rollyard.pipeline.datasets import query

    config = config_of(args)
    found = query(config.samples_dir(), args.query, archive=config.archive_dir())
    _print_rows(*found, as_json=args.json)
    return 0


def _print_rows(names: list[str], rows: list[tuple[Any, ...]], *, as_json: bool) -> None:
    if as_json:
        for row in rows:
            print(json.dumps(dict(zip(names, row, strict=True)), default=str))
    else:
        print(table(names, rows))
