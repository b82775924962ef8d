"""`paceline import-timm`: a command line of timm's train.py becomes a recipe."""

from __future__ import annotations

from pathlib import Path

import click

from paceline.cli.imported import finish, import_options
from paceline.cli.options import json_option
from paceline.cli.output import echo


@click.command("import-timm", short_help="Convert a command line or args.yaml of timm's train.py into a recipe.")
@click.argument("source", nargs=-1, required=True, metavar="SOURCE|-- COMMAND...")
@import_options
@json_option
def command(
    source: tuple[str, ...],
    output: Path | None,
    overwrite: bool,
    processes: int | None,
    skipped: tuple[str, ...],
    as_json: bool,
) -> int:
    """Convert SOURCE into a recipe: an args.yaml that train.py wrote, a file with its command, or the command after --.

    Its defaults count too, and are written out. Every option is mapped to keys, or said to need none, or refused by
    name, because it would change the result and nothing here does that: exit code 2, unless it is left out by --skip.
    Without --output the recipe goes to standard output and the account to standard error.

    \b
    Examples:
      paceline import-timm output/train/20261122-resnet50-224/args.yaml --processes 8 --output recipe.yaml
      paceline import-timm --output recipe.yaml -- ./distributed_train.sh 4 --data-dir /imagenet --model seresnet34
      paceline import-timm train.sh --skip recount > recipe.yaml
    """
    from paceline.models.published import published_settings
    from paceline.recipe.imports.timm import InputSettings, convert_timm, read_timm

    read, given = read_timm(source)
    name = str(given.values["model"])
    settings = published_settings(name)
    conversion = convert_timm(read, given, settings or InputSettings(), processes=processes, skipped=skipped)
    if settings is None:
        echo(
            f"Note: the timm that is installed has no network {name}: what it says of its images is not known.",
            err=True,
        )
    return finish(conversion, output, overwrite=overwrite, as_json=as_json)
