"""What `paceline predict` says of images: to people, as JSON, or into a file."""

from __future__ import annotations

import contextlib
import json
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.output import concluded, echo, print_json
from paceline.escaping import one_line
from paceline.loading import loading

if TYPE_CHECKING:
    from paceline.files import LeftOut
    from paceline.inference.ahead import Seen
    from paceline.inference.answers import Answer, ImagePredictor


@dataclass(frozen=True, kw_only=True)
class ImagesAsked:
    """What to do with images.

    Attributes:
        sources: Files, folders, patterns, archives, ``-``.
        top_k: Most labels of each; None for what is usual.
        batch_size: Images answered at once; None for what is usual.
        draw: A folder for copies with what was found drawn into them.
        output: A file for the answers.
        stdin_image: Whether ``-`` is an image itself.
        as_json: Print JSON.
    """

    sources: Sequence[Path]
    top_k: int | None
    batch_size: int | None
    draw: Path | None
    output: Path | None
    stdin_image: bool
    as_json: bool


def answer_images(target: Path, asked: ImagesAsked, **given: Any) -> int:
    """Answer for every image; 1 if one of them could not be read.

    Args:
        target: Where the weights are.
        asked: What to do.
        given: What :func:`~paceline.inference.predict.open_predictor` takes besides.
    """
    with loading():
        from paceline.distributed.device import choose_device
        from paceline.files import LeftOut
        from paceline.inference.ahead import BATCH, answers_ahead
        from paceline.inference.answer_files import check_output
        from paceline.inference.predict import open_predictor
        from paceline.inference.sources import STANDARD_INPUT, picture_from_standard_input, pictures_of
        from paceline.world import World

    if asked.stdin_image and [str(each) for each in asked.sources] != [STANDARD_INPUT]:
        raise click.UsageError("--stdin-image is for the source - alone: the bytes of one image on standard input.")
    if asked.output is not None:
        check_output(asked.output)
    left_out = LeftOut()
    pictures = [picture_from_standard_input()] if asked.stdin_image else pictures_of(asked.sources, left_out)
    predictor = open_predictor(target, device=choose_device("auto", World()), **given)
    _check(predictor, asked)
    answers = answers_ahead(
        predictor,
        pictures,
        top_k=asked.top_k or predictor.usual_top_k,
        batch_size=asked.batch_size or BATCH,
        seen=None if asked.draw is None else _drawer(asked.draw, predictor.classes),
    )
    with contextlib.closing(answers):
        if asked.output is not None:
            code = _to_file(answers, asked.output, left_out, boxes=predictor.finds_boxes, as_json=asked.as_json)
        else:
            code = _to_screen_as_json(answers) if asked.as_json else _to_screen(answers)
    for sentence in left_out.told():
        echo(f"note: {sentence}", err=True)
    return code


def _check(predictor: ImagePredictor, asked: ImagesAsked) -> None:
    """Refuse what has no effect on these weights."""
    if asked.draw is not None and not predictor.finds_boxes:
        raise click.UsageError("--draw draws the objects that a detector finds, and these weights label images.")
    if asked.batch_size is not None and predictor.largest_batch == 1 and asked.batch_size > 1:
        raise click.UsageError(
            f"--batch-size={asked.batch_size} has no effect: a detector looks at one picture at a time, since beside "
            "larger ones it would answer otherwise. Leave it out."
        )


def _drawer(folder: Path, classes: Sequence[str]) -> Seen:
    """What writes copies with the answers drawn into them."""
    from paceline.inference.detection import CopyNames

    names = CopyNames()

    def draw(prepared: Any, answer: Answer) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        answer.drawn(prepared, classes).save(folder / names.of(answer.path))

    return draw


def _to_screen(answers: Iterable[Answer]) -> int:
    code = 0
    for answer in answers:
        if answer.error is not None:
            code = concluded(passed=False)
        echo(one_line(f"{answer.path}  {answer.described()}"))
    return code


def _to_screen_as_json(answers: Iterable[Answer]) -> int:
    """One list, printed row by row: thousands of answers need no memory."""
    from paceline.records.run_directory import encode_json

    code, before = 0, "["
    for answer in answers:
        if answer.error is not None:
            code = concluded(passed=False)
        row = json.dumps(json.loads(encode_json(answer.row())), indent=2)
        echo(f"{before}\n{textwrap.indent(row, '  ')}", nl=False)
        before = ","
    echo("[]" if before == "[" else "\n]")
    return code


def _to_file(answers: Iterator[Answer], output: Path, left_out: LeftOut, *, boxes: bool, as_json: bool) -> int:
    """Write the answers, and say of which images there is none."""
    from paceline.inference.ahead import BATCH
    from paceline.inference.answer_files import answer_file

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
