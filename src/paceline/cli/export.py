"""`paceline export`: weights as a file for other programs."""

from __future__ import annotations

from pathlib import Path

import click

from paceline.cli.options import best_option, json_option, weights_option
from paceline.cli.output import print_json


@click.command("export", short_help="Write trained weights to one file.")
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--format", "form", type=click.Choice(["safetensors"]), default="safetensors", show_default=True)
@click.option("--output", type=click.Path(path_type=Path), required=True, help="The new file.")
@weights_option
@best_option
@json_option
def command(target: Path, form: str, output: Path, weights: str, best: bool, as_json: bool) -> int:
    """Write the weights of TARGET (a run directory, a checkpoint or a safetensors file) to one file.

    Works on a CPU, for runs of any strategy: parts that processes hold with parallel.strategy=fsdp are put together,
    and low-rank adapters are merged into the weights.

    \b
    Examples:
      paceline export runs/photos --output photos.safetensors
      paceline export runs/photos --best --weights model --output best.safetensors
    """
    from paceline.inference.export import export_safetensors

    saved = export_safetensors(target, output, weights=weights, best=best)
    size = output.stat().st_size
    if as_json:
        print_json({"output": str(output), "format": form, "weights": saved.weights, "bytes": size})
    else:
        click.echo(f"{output}: {len(saved.plain)} tensors of the {saved.weights} weights, {size / 2**20:.1f} MiB")
    return 0
