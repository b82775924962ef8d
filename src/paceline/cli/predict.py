"""`paceline predict`: labels and probabilities for images, or what a detector finds in them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from paceline.cli.options import best_option, json_option, trust_code_option, weights_option
from paceline.cli.output import print_json


@click.command("predict", short_help="Label images with trained weights.")
@click.argument("target", type=click.Path(path_type=Path))
@click.argument("sources", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE-OR-FOLDER...")
@click.option(
    "--top-k", type=click.IntRange(min=1), help="Most labels per image (default: 3), or objects (default: all)."
)
@click.option(
    "--draw", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help="Of a detector: draw what it finds."
)
@weights_option
@best_option
@trust_code_option
@json_option
def command(
    target: Path,
    sources: tuple[Path, ...],
    top_k: int | None,
    draw: Path | None,
    weights: str,
    best: bool,
    trust_code: bool,
    as_json: bool,
) -> int:
    """Label images with the weights of TARGET: a run directory, a checkpoint or a safetensors file out of one.

    Unreadable images are named, the others are labelled, and the exit code is then 1. Of a detector the answers are the
    objects that are likelier there than not, each with its box: left, top, right and bottom edge in pixels.

    \b
    Examples:
      paceline predict runs/photos new-photos
      paceline predict runs/photos cat.jpg dog.jpg --best --top-k 1 --json
      paceline predict runs/boxes new-photos --draw found
    """
    from paceline.distributed.device import choose_device
    from paceline.inference.detection import DetectionPredictor
    from paceline.inference.predict import image_files, open_predictor
    from paceline.world import World

    files = image_files(sources)
    device = choose_device("auto", World())
    predictor = open_predictor(target, weights=weights, best=best, trust_code=trust_code, device=device)
    options: dict[str, Any] = {"top_k": top_k or predictor.usual_top_k}
    if draw is not None:
        if not isinstance(predictor, DetectionPredictor):
            raise click.UsageError("--draw draws the objects that a detector finds, and these weights label images.")
        options["draw"] = draw
    failed = False
    rows = []
    for prediction in predictor.predict(files, **options):
        failed = failed or prediction.error is not None
        if as_json:
            rows.append(dataclasses.asdict(prediction))
        else:
            click.echo(f"{prediction.path}  {prediction.described()}")
    if as_json:
        print_json(rows)
    return 1 if failed else 0
