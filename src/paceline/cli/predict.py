"""`paceline predict`: labels for images, what a detector finds in them, or what a language model writes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.options import (
    FiniteRange,
    LocalPath,
    best_option,
    json_option,
    target_argument,
    trust_code_option,
    weights_option,
)
from paceline.cli.output import echo, print_json
from paceline.cli.predict_clicks import answer_clicks
from paceline.cli.predict_images import ImagesAsked, answer_images

if TYPE_CHECKING:
    from paceline.inference.text import TextPredictor

_LABELS = 3


@click.command("predict")
@target_argument
@click.argument("sources", nargs=-1, type=LocalPath(), metavar="[SOURCE...]")
@click.option("--prompt", metavar="TEXT", help="What a language model is to go on from, or to fill in.")
@click.option("--tokens", type=click.IntRange(min=1), metavar="N", help="With --prompt: most to write (default: 200).")
@click.option(
    "--temperature",
    type=FiniteRange(min=0),
    metavar="T",
    help="With --prompt: how freely to choose; 0 always takes the most probable token (default: 0.8).",
)
@click.option("--seed", type=click.IntRange(min=0), metavar="S", help="With --prompt: keys the draws (default: 0).")
@click.option(
    "--top-k",
    type=click.IntRange(min=1),
    metavar="K",
    help="Most answers for each image or hidden token (default: 3), or objects (default: all); to write, choose among "
    "so many tokens only.",
)
@click.option("--draw", type=LocalPath(file_okay=False), metavar="DIR", help="Of a detector: draw what it finds.")
@click.option(
    "--output",
    type=LocalPath(dir_okay=False),
    metavar="FILE",
    help="Write the answers to a new file: .jsonl, .csv (a line for each label) or .parquet. It is there when it is "
    "whole; until then it is FILE.partial.",
)
@click.option("--batch-size", type=click.IntRange(min=1), metavar="N", help="Images answered at once (default: 64).")
@click.option("--stdin-image", is_flag=True, help="The source - is an image itself, not a list of paths.")
@weights_option
@best_option
@trust_code_option
@json_option
def command(target: Path, sources: tuple[Path, ...], prompt: str | None, as_json: bool, **given: Any) -> int:
    """Label images, find objects in them, or write text, with the weights of TARGET: a run directory, a checkpoint, a
    safetensors file, a hub folder, or an ONNX file that labels images.

    Sources are files, folders (searched through), patterns in quotes, archives (.zip, .tar, .tar.gz: nothing is
    unpacked), and - for paths from standard input, one a line. Answers come in their order.

    Unreadable images are named, the others are labelled, and the exit code is then 1. Of a detector the answers are the
    objects that are likelier there than not, each with its box: left, top, right and bottom edge in pixels. A language
    model goes on from the prompt; one that was trained to find hidden tokens says what stands in place of each [MASK].
    Weights of a recommendation task take lines of samples (.tsv, .txt, .jsonl) and say with which probability each is
    clicked on.

    \b
    Examples:
      paceline predict runs/photos new-photos
      paceline predict runs/photos cat.jpg dog.jpg --best --top-k 1 --json
      paceline predict model.onnx "new/**/*.jpg" more.tar.gz --output answers.jsonl
      find new -name "*.jpg" | paceline predict runs/photos -
      paceline predict runs/gpt --prompt "The for statement" --tokens 300
      paceline predict runs/bert --prompt "The f[MASK]r statement"
      paceline predict runs/boxes new-photos --draw found
    """
    top_k, draw = given.pop("top_k"), given.pop("draw")
    of_images = {name: given.pop(name) for name in ("output", "batch_size", "stdin_image")}
    writing = {name: given.pop(name) for name in ("tokens", "temperature", "seed")}
    asked = {name: value for name, value in writing.items() if value is not None}
    if prompt is None and not sources:
        raise click.UsageError(
            "Missing argument 'SOURCE...': images to label or to find objects in, or lines of samples (.tsv, "
            ".txt, .jsonl) of a recommendation task; a language model takes --prompt."
        )
    if prompt is not None and sources:
        raise click.UsageError("--prompt is for language models and files are for image models: give one of them.")
    if prompt is None and asked:
        raise click.UsageError(f"--{next(iter(asked))} says how to write, and without --prompt nothing is written.")
    typed = {"draw": draw, **of_images}
    idle = [name.replace("_", "-") for name, value in typed.items() if value]
    if prompt is None:
        code = answer_clicks(target, sources, as_json=as_json, idle=idle, **given)
        images = ImagesAsked(sources=sources, top_k=top_k, draw=draw, as_json=as_json, **of_images)
        return answer_images(target, images, **given) if code is None else code
    if idle:
        raise click.UsageError(f"--{idle[0]} is for images, and --prompt is for language models: give one of them.")
    return _write(target, prompt, asked, top_k, given, as_json=as_json)


def _write(
    target: Path, prompt: str, asked: dict[str, Any], top_k: int | None, given: dict[str, Any], *, as_json: bool
) -> int:
    from paceline.distributed.device import choose_device
    from paceline.inference.text import Sampling, load_text_predictor
    from paceline.world import World

    predictor = load_text_predictor(target, device=choose_device("auto", World()), **given)
    if predictor.is_masked:
        if asked:
            raise click.UsageError(f"--{next(iter(asked))} says how to write, and this model finds hidden tokens.")
        _fill(predictor, prompt, _LABELS if top_k is None else top_k, as_json=as_json)
        return 0
    sampling = Sampling(top_k=top_k, **asked)
    ids = list(predictor.write(prompt, sampling))
    text = predictor.tokenizer.decode([*predictor.tokenizer.encode(prompt).tolist(), *ids])
    if as_json:
        print_json({"prompt": prompt, "text": text, "written": len(ids), **dataclasses.asdict(sampling)})
    else:
        echo(text)
    return 0


def _fill(predictor: TextPredictor, prompt: str, top_k: int, *, as_json: bool) -> None:
    filled = predictor.fill(prompt, top_k=top_k)
    if as_json:
        print_json({"prompt": prompt, **dataclasses.asdict(filled)})
        return
    echo(filled.text)
    for guess in filled.guesses:
        echo(_answers(tuple(map(repr, guess.texts)), guess.probabilities))


def _answers(labels: tuple[str, ...], probabilities: tuple[float, ...]) -> str:
    pairs = zip(labels, probabilities, strict=True)
    return "  ".join(f"{label} {100 * value:.1f} %" for label, value in pairs)
