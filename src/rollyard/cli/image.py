"""Images for sandboxes of the backend bubblewrap: root trees in this machine's image store."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollyard.cli.common import Commands, command, config_of, json_flag, to_json

if TYPE_CHECKING:
    from rollyard.stages.images.store import ImageStore
    from rollyard.stages.sandboxes.jail_settings import BubblewrapSettings


def add(commands: Commands) -> None:
    """The commands of this file."""
    text = "the images of this machine for bubblewrap sandboxes"
    inner = commands.add_parser("image", help=text, description=f"{text[:1].upper()}{text[1:]}.").add_subparsers(
        title="commands", metavar="COMMAND", required=True
    )
    bring = command(inner, "import", run_import, "make a root tree from an archive or a folder")
    bring.add_argument(
        "source",
        type=Path,
        metavar="SOURCE",
        help="what `docker save` or `docker export` wrote (.tar, .tar.gz, .tar.zst), an OCI layout, or a folder",
    )
    bring.add_argument("--name", required=True, help="what tasks call it in sandbox.image")
    bring.add_argument("--tag", default="", help="which image, where SOURCE has several")
    bring.add_argument("--replace", action="store_true", help="put it in the place of one with that name")
    json_flag(bring)
    json_flag(command(inner, "ls", run_ls, "list the images"))
    gone = command(inner, "rm", run_rm, "remove images")
    gone.add_argument("names", nargs="+", metavar="NAME", help="name of an image")


def run_import(args: argparse.Namespace) -> int:
    """Bring an image into the store."""
    from rollyard.stages.images.importing import ImportOptions, import_image

    settings, store = _store(args)
    options = ImportOptions(tag=args.tag, owner=settings.drop_to(), replace=args.replace)
    done = import_image(store, args.source, args.name, options, lambda line: print(f"{line} ...", file=sys.stderr))
    for note in done.notes:
        print(f"not kept: {note}", file=sys.stderr)
    print(to_json(done.image) if args.json else f"{args.name}: {done.image.bytes / 1e6:.0f} MB in {store.folder}")
    return 0


def run_ls(args: argparse.Namespace) -> int:
    """List the images."""
    _, store = _store(args)
    images = store.list()
    if args.json:
        print(to_json(images))
        return 0
    if not images:
        print("no images; `rollyard image import SOURCE --name NAME` makes one")
    width = max((len(image.name) for image in images), default=0)
    for image in images:
        over = f", over {image.base}" if image.base else ""
        print(f"{image.name:{width}}  {image.bytes / 1e6:8.1f} MB  from {image.source}{over}")
    return 0


def run_rm(args: argparse.Namespace) -> int:
    """Remove images."""
    _, store = _store(args)
    for name in args.names:
        store.remove(name)
        print(f"{name}: removed")
    return 0


def _store(args: argparse.Namespace) -> tuple[BubblewrapSettings, ImageStore]:
    """The store that workers with the same configuration use."""
    from rollyard.stages.sandboxes.bubblewrap import BubblewrapBackend
    from rollyard.stages.sandboxes.jail_settings import BubblewrapSettings

    config = config_of(args)
    given: dict[str, Any] = {"root": str(config.sandboxes_dir())} | config.backends.get("bubblewrap", {})
    settings = BubblewrapSettings.of("bubblewrap", given)
    return settings, BubblewrapBackend(settings).images
