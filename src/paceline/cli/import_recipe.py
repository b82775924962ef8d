"""`paceline import`: command lines of other trainers become recipes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.options import LocalPath, json_option
from paceline.cli.output import echo, print_json
from paceline.errors import RecipeError
from paceline.files import refuse_odd_outputs

if TYPE_CHECKING:
    from paceline.recipe.imports.draft import Conversion


@click.group("import")
def command() -> None:
    """Convert a command line of another trainer into a recipe.

    \b
    Every option ends in one of three places:
      mapped to recipe keys;
      listed, because it has no effect here;
      refused by name, because it would change the result and is unsupported (exit code 2, unless --skip names it).

    Without --output the recipe goes to standard output and the account to standard error.
    """


def _options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add what all importers take."""
    for option in (
        json_option,
        click.option("--skip", "skipped", multiple=True, metavar="OPTION", help="Ignore this option (repeatable)."),
        click.option(
            "--processes",
            type=click.IntRange(min=1),
            metavar="N",
            help="Number of processes, where the source does not say; they share the global batch.",
        ),
        click.option("--overwrite", is_flag=True, help="Overwrite an existing file."),
        click.option("--output", type=LocalPath(), metavar="FILE", help="Write the recipe here."),
        click.argument("source", nargs=-1, required=True, metavar="SOURCE|-- COMMAND..."),
    ):
        function = option(function)
    return function


@command.command("timm", short_help="Convert a command line or args.yaml of timm's train.py.")
@_options
def timm(source: tuple[str, ...], processes: int | None, skipped: tuple[str, ...], **asked: Any) -> int:
    """Convert SOURCE: an args.yaml that train.py wrote, a file with its command, or the command after --.

    The defaults of train.py are converted too, and written out.

    \b
    Examples:
      paceline import timm output/train/20261122-resnet50-224/args.yaml --processes 8 --output recipe.yaml
      paceline import timm --output recipe.yaml -- ./distributed_train.sh 4 --data-dir /imagenet --model seresnet34
      paceline import timm train.sh --skip recount > recipe.yaml
    """
    from paceline.models.build import published_settings
    from paceline.recipe.imports.timm import InputSettings, convert_timm, read_timm

    read, given = read_timm(source)
    name = str(given.get("model", "resnet50"))
    settings = published_settings(name)
    conversion = convert_timm(read, given, settings or InputSettings(), processes=processes, skipped=skipped)
    if settings is None:
        echo(f"Note: the installed timm has no network {name}; its image settings are not known.", err=True)
    return _finish(conversion, **asked)


@command.command("nvidia", short_help="Convert a command line or preset of NVIDIA's ConvNets trainer.")
@_options
def nvidia(source: tuple[str, ...], processes: int | None, skipped: tuple[str, ...], **asked: Any) -> int:
    """Convert SOURCE: a file with a command of main.py or launch.py, or the command after --.

    The presets of launch.py are known: model, mode, precision and platform choose one.

    \b
    Examples:
      paceline import nvidia DGXA100_resnet50_AMP_90E.sh --output recipe.yaml
      paceline import nvidia -- python ./multiproc.py --nproc_per_node 8 ./main.py --arch resnet50 --amp /imagenet
      paceline import nvidia --processes 8 -- launch.py --model resnet50 --precision AMP --mode convergence
          --platform DGXA100 /imagenet
    """
    from paceline.recipe.imports.nvidia import convert_nvidia, read_nvidia

    return _finish(convert_nvidia(*read_nvidia(source), processes=processes, skipped=skipped), **asked)


def _finish(conversion: Conversion, output: Path | None, *, overwrite: bool, as_json: bool) -> int:
    """Refuse, or write and report; returns the exit code.

    Raises:
        RecipeError: If an option is refused, or the file exists.
    """
    from paceline.recipe.imports.draft import refusal, shown_value

    if conversion.refused:
        raise refusal(conversion)
    if output is not None:
        refuse_odd_outputs(output)
        if output.exists() and not overwrite:
            raise RecipeError(f"{output} exists already; choose another --output, or add --overwrite.")
        try:
            output.write_text(conversion.to_yaml(), encoding="utf-8")
        except OSError as error:
            raise RecipeError(f"{output} cannot be written: {error.strerror}.") from None
    if as_json:
        print_json({**conversion.to_json(), "output": None if output is None else str(output)})
        return 0
    if output is None:
        echo(conversion.to_yaml(), nl=False)
    lines: list[str] = []
    for place, title in (("mapped", "Mapped"), ("listed", "No effect here")):
        entries = [each for each in conversion.entries if each.place == place]
        lines += [f"{title}: {len(entries)}"] if entries else []
        typed = [each.option if each.value is True else f"{each.option} {shown_value(each.value)}" for each in entries]
        width = min(max(map(len, typed), default=0), 40)
        lines += [f"  {words:<{width}}  {each.says}" for words, each in zip(typed, entries, strict=True)]
    lines += [f"Not identical: {len(conversion.differences)}"] if conversion.differences else []
    lines += [f"  {option}: {says}" for option, says in conversion.differences]
    lines += [f"Left out: {name}" for name in conversion.left_out]
    lines += [f"Note: {notice}" for notice in conversion.notices]
    for line in lines:
        # Standard output has the recipe, which may go to a file.
        echo(line, err=output is None)
    if output is not None:
        echo(f"Wrote {output}: paceline train {output} --plan-only shows its plan.")
    return 0
