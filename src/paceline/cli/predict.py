"""`paceline predict`: labels for images, what a detector finds in them, or what a language model writes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
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
from paceline.cli.output import concluded, echo, print_json
from paceline.escaping import one_line
from paceline.loading import loading

if TYPE_CHECKING:
    from paceline.files import LeftOut
    from paceline.inference.answers import Answer, Seen
    from paceline.inference.clicks import ClickPredictor

_LABELS = 3
_LINES = (".tsv", ".txt", ".gz", ".jsonl")


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
    if prompt is None and not sources:
        raise click.UsageError(
            "Missing argument 'SOURCE...': images to label or to find objects in, or lines of samples (.tsv, "
            ".txt, .jsonl) of a recommendation task; a language model takes --prompt."
        )
    if prompt is not None and sources:
        raise click.UsageError("--prompt is for language models and files are for image models: give one of them.")
    writing = {name: each for name in ("tokens", "temperature", "seed") if (each := given.pop(name)) is not None}
    top_k = given.pop("top_k")
    of_images = {name: given.pop(name) for name in ("draw", "output", "batch_size", "stdin_image")}
    idle = [name.replace("_", "-") for name, value in of_images.items() if value]
    if prompt is not None and idle:
        raise click.UsageError(f"--{idle[0]} is for images, and --prompt is for language models: give one of them.")
    if prompt is None and writing:
        raise click.UsageError(f"--{next(iter(writing))} says how to write, and without --prompt nothing is written.")
    with loading():
        from paceline.distributed.device import choose_device
        from paceline.world import World
    where = {**given, "device": choose_device("auto", World())}
    if prompt is not None:
        _answer_prompt(target, prompt, writing, top_k, where, as_json=as_json)
        return 0
    if all(each.is_file() and each.name.endswith(_LINES) and not each.name.endswith(".tar.gz") for each in sources):
        from paceline.inference.clicks import load_click_predictor

        if (clicks := load_click_predictor(target, **where)) is not None:
            if idle:
                raise click.UsageError(
                    f"--{idle[0]} is for images, and these weights are about lines of samples: leave it out."
                )
            return _answer_lines(clicks, sources, as_json=as_json)
    return _answer_images(target, sources, where, top_k=top_k, as_json=as_json, **of_images)


def _answer_prompt(
    target: Path, prompt: str, writing: dict[str, Any], top_k: int | None, where: dict[str, Any], *, as_json: bool
) -> None:
    """Write on from a prompt, or fill in its hidden tokens."""
    from paceline.inference.text import Sampling, load_text_predictor

    predictor = load_text_predictor(target, **where)
    if not predictor.is_masked:
        sampling = Sampling(top_k=top_k, **writing)
        ids = list(predictor.write(prompt, sampling))
        text = predictor.tokenizer.decode([*predictor.tokenizer.encode(prompt).tolist(), *ids])
        if as_json:
            print_json({"prompt": prompt, "text": text, "written": len(ids), **dataclasses.asdict(sampling)})
        else:
            echo(text)
        return
    if writing:
        raise click.UsageError(f"--{next(iter(writing))} says how to write, and this model finds hidden tokens.")
    filled = predictor.fill(prompt, top_k=top_k or _LABELS)
    if as_json:
        print_json({"prompt": prompt, **dataclasses.asdict(filled)})
        return
    echo(filled.text)
    for guess in filled.guesses:
        pairs = zip(guess.texts, guess.probabilities, strict=True)
        echo("  ".join(f"{text!r} {100 * value:.1f} %" for text, value in pairs))


def _answer_lines(predictor: ClickPredictor, sources: Sequence[Path], *, as_json: bool) -> int:
    """Say with which probability each line is clicked on; 1 if one of them is wrong."""
    code = 0
    rows = []
    for each in (answer for source in sources for answer in predictor.predict(source)):
        if each.error is not None:
            code = concluded(passed=False)
        if as_json:
            rows.append(dataclasses.asdict(each))
        else:
            said = f"wrong: {each.error}" if each.probability is None else f"{100 * each.probability:.1f} %"
            echo(one_line(f"{each.path}:{each.line}  {said}"))
    if as_json:
        print_json(rows)
    return code


def _answer_images(
    target: Path,
    sources: Sequence[Path],
    where: dict[str, Any],
    *,
    top_k: int | None,
    draw: Path | None,
    output: Path | None,
    as_json: bool,
    **reading: Any,
) -> int:
    """Answer for every image; 1 if one of them could not be read."""
    with loading():
        from paceline.files import LeftOut
        from paceline.inference.answer_files import check_output
        from paceline.inference.answers import BATCH, answers_ahead
        from paceline.inference.predict import open_predictor
        from paceline.inference.sources import STANDARD_INPUT, picture_from_standard_input, pictures_of

    is_one, batch_size = reading["stdin_image"], reading["batch_size"]
    if is_one and [str(each) for each in sources] != [STANDARD_INPUT]:
        raise click.UsageError("--stdin-image is for the source - alone: the bytes of one image on standard input.")
    if output is not None:
        check_output(output)
    left_out = LeftOut()
    pictures = [picture_from_standard_input()] if is_one else pictures_of(sources, left_out)
    predictor = open_predictor(target, **where)
    if draw is not None and not predictor.finds_boxes:
        raise click.UsageError("--draw draws the objects that a detector finds, and these weights label images.")
    if batch_size is not None and predictor.largest_batch == 1 and batch_size > 1:
        raise click.UsageError(
            f"--batch-size={batch_size} has no effect: a detector looks at one picture at a time, since larger ones "
            "in a batch would change its answer. Leave it out."
        )
    answers = answers_ahead(
        predictor,
        pictures,
        top_k=top_k or predictor.usual_top_k,
        batch_size=batch_size or BATCH,
        seen=None if draw is None else _drawer(draw, predictor.classes),
    )
    with contextlib.closing(answers):
        if output is not None:
            code = _to_file(answers, output, left_out, boxes=predictor.finds_boxes, as_json=as_json)
        else:
            code = _to_screen(answers, as_json=as_json)
    for sentence in left_out.told():
        echo(f"note: {sentence}", err=True)
    return code


def _drawer(folder: Path, classes: Sequence[str]) -> Seen:
    """Return what writes copies with the answers drawn into them."""
    from paceline.inference.detection import CopyNames

    names = CopyNames()

    def draw(prepared: Any, answer: Answer) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        answer.drawn(prepared, classes).save(folder / names.of(answer.path))

    return draw


def _to_screen(answers: Iterable[Answer], *, as_json: bool) -> int:
    """Print a line for each image, or one JSON list, row by row: thousands of answers need no memory."""
    from paceline.records.run_directory import encode_json

    code, before = 0, "["
    for answer in answers:
        if answer.error is not None:
            code = concluded(passed=False)
        if not as_json:
            echo(one_line(f"{answer.path}  {answer.described()}"))
            continue
        row = json.dumps(json.loads(encode_json(answer.row())), indent=2)
        echo(f"{before}\n{textwrap.indent(row, '  ')}", nl=False)
        before = ","
    if as_json:
        echo("[]" if before == "[" else "\n]")
    return code


def _to_file(answers: Iterator[Answer], output: Path, left_out: LeftOut, *, boxes: bool, as_json: bool) -> int:
    """Write the answers, and say of which images there is none."""
    from paceline.inference.answer_files import answer_file
    from paceline.inference.answers import BATCH

    images, unreadable = 0, []
    with answer_file(output, boxes=boxes) as file:
        while batch := list(islice(answers, BATCH)):
            images += len(batch)
            for each in (answer for answer in batch if answer.error is not None):
                unreadable.append({"path": str(each.path), "error": each.error})
                if not as_json:
                    echo(one_line(f"{each.path}  {each.described()}"))
            file.write(each.row() for each in batch)
    code = concluded(passed=not unreadable)
    if as_json:
        told = {"images": images, "unreadable": unreadable, "left_out": left_out.told()}
        print_json({"output": str(output), **told})
    else:
        echo(f"{images:,} images, {len(unreadable):,} of them unreadable: {output}")
    return code
