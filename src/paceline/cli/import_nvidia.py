"""`paceline import-nvidia`: a command line or preset of NVIDIA's ConvNets trainer becomes a recipe."""

from __future__ import annotations

from pathlib import Path

import click

from paceline.cli.imported import finish, import_options
from paceline.cli.options import json_option


@click.command(
    "import-nvidia", short_help="Convert a command line or preset of NVIDIA's ConvNets trainer into a recipe."
)
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
    """Convert SOURCE into a recipe: a file with a command of main.py or launch.py, or the command after --.

    launch.py's presets are known: model, mode, precision and platform choose one. Every option is mapped to keys, or
    said to need none, or refused by name, because it would change the result and nothing here does that: exit code 2,
    unless it is left out by --skip. Without --output the recipe goes to standard output and the account to standard
    error.

    \b
    Examples:
      paceline import-nvidia DGXA100_resnet50_AMP_90E.sh --output recipe.yaml
      paceline import-nvidia -- python ./multiproc.py --nproc_per_node 8 ./main.py --arch resnet50 --amp /imagenet
      paceline import-nvidia --processes 8 -- launch.py --model resnet50 --precision AMP --mode convergence
          --platform DGXA100 /imagenet
    """
    from paceline.recipe.imports.nvidia import convert_nvidia, read_nvidia

    conversion = convert_nvidia(read_nvidia(source), processes=processes, skipped=skipped)
    return finish(conversion, output, overwrite=overwrite, as_json=as_json)
