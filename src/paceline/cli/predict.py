"""`paceline predict`: labels and probabilities for images."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from paceline.cli.options import best_option, json_option, trust_code_option, weights_option
from paceline.cli.output import print_json
from paceline.cli.predict_clicks import answer_clicks


@click.command("predict", short_help="Label images with trained weights.")
@click.argument("target", type=click.Path(path_type=Path))
@click.argument("sources", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE-OR-FOLDER...")
@click.option("--top-k", type=click.IntRange(min=1), default=3, show_default=True, help="Labels per image.")
@weights_option
@best_option
@trust_code_option
@json_option
def command(
    target: Path,
    sources: tuple[Path, ...],
    top_k: int,
    weights: str,
    best: bool,
    trust_code: bool,
    as_json: bool,
) -> int:
    """Label images with the weights of TARGET: a run directory, a checkpoint or a safetensors file out of one.

    Unreadable images are named, the others are labelled, and the exit code is then 1. Weights of a recommendation
    task take lines of samples (.tsv, .txt, .jsonl) and say with which probability each is clicked on.

    \b
    Examples:
      paceline predict runs/photos new-photos
      paceline predict runs/photos cat.jpg dog.jpg --best --top-k 1 --json
    """
    from paceline.distributed.device import choose_device
    from paceline.inference.predict import image_files, load_predictor
    from paceline.world import World

    given: dict[str, Any] = {"weights": weights, "best": best, "trust_code": trust_code}
    code = answer_clicks(target, sources, as_json=as_json, **given)
    if code is not None:
        return code
    files = image_files(sources)
    device = choose_device("auto", World())
    predictor = load_predictor(target, weights=weights, best=best, trust_code=trust_code, device=device)
    failed = False
    rows = []
    for prediction in predictor.predict(files, top_k=top_k):
        failed = failed or prediction.error is not None
        if as_json:
            rows.append(dataclasses.asdict(prediction))
        elif prediction.error is not None:
            click.echo(f"{prediction.path}  unreadable: {prediction.error}")
        else:
            pairs = zip(prediction.labels, prediction.probabilities, strict=True)
            answers = "  ".join(f"{label} {100 * value:.1f} %" for label, value in pairs)
            click.echo(f"{prediction.path}  {answers}")
    if as_json:
        print_json(rows)
    return 1 if failed else 0
