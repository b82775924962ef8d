"""`paceline predict`: image labels, detected objects, or text of a language model."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
from annotated_types import Ge

from paceline.cli.options import refuse_unused
from paceline.cli.output import echo, print_json, store_verdict
from paceline.command import Best, Log, Shape, Target, TrustCode, Weights, command
from paceline.errors import DataError
from paceline.parsing.files import SkippedItems
from paceline.parsing.plain_text import one_line, utf8
from paceline.plugins.loading import loading
from paceline.recipe.load import load_recipe

if TYPE_CHECKING:
    from paceline.prediction.predictor import Answer, Predictor, Prompt, Seen
    from paceline.prediction.sources import PictureFile

_AT_ONCE = 64  # rows written together


def _thresholds(text: str) -> float | dict[str, float]:
    """Parse them as the recipe's key is written."""
    return load_recipe(None, [f"evaluate.thresholds={text}"]).recipe.evaluate.thresholds


@command("predict")
@dataclass(frozen=True, kw_only=True)
class Predict:
    """Label images, predict numbers, find objects, or generate text with the weights of TARGET.

    TARGET is a run directory, a checkpoint, a safetensors file, a hub folder, or an ONNX file that labels images.

    Sources are files, folders (searched through), patterns in quotes, archives (.zip, .tar, .tar.gz: nothing is
    unpacked), and - for paths from standard input, one a line. Answers come in their order.

    Unreadable images are named, the others are labelled, and the exit code is then 1. A detector lists the objects with
    a score above 50 %, each with its box: left, top, right and bottom edge in pixels. A language model continues the
    prompt; one trained on masked tokens fills in each [MASK].
    Weights of a recommendation task take lines of samples (.tsv, .txt, .jsonl) and predict the click probability of
    each; a text or token classifier takes lines of text (.txt; .jsonl with the key text, or tokens for lists of words),
    or a prompt.

    Examples:
      paceline predict runs/photos new-photos
      paceline predict runs/photos cat.jpg dog.jpg --best --top-k 1 --json
      paceline predict model.onnx "new/**/*.jpg" more.tar.gz --output answers.jsonl
      find new -name "*.jpg" | paceline predict runs/photos -
      paceline predict runs/gpt --prompt "The for statement" --tokens 300
      paceline predict runs/bert --prompt "The f[MASK]r statement"
      paceline predict runs/boxes new-photos --draw found
    """

    target: Target
    sources: Annotated[tuple[Path, ...], Shape(metavar="[SOURCE...]", argument=True, path="local")] = ()
    prompt: Annotated[
        str | None, Shape(metavar="TEXT"), "Text for a language model to continue or fill in, or to classify."
    ] = None
    tokens: Annotated[int | None, Ge(1), Shape(only="prompt"), "With --prompt: most to write (default: 200)."] = None
    temperature: Annotated[
        float | None,
        Ge(0),
        Shape(metavar="T", only="prompt"),
        "With --prompt: sampling temperature; 0 always takes the most probable token (default: 0.8).",
    ] = None
    seed: Annotated[
        int | None, Ge(0), Shape(metavar="S", only="prompt"), "With --prompt: random seed (default: 0)."
    ] = None
    top_k: Annotated[
        int | None,
        Ge(1),
        Shape(metavar="K"),
        "Maximum predictions for each image or masked token (default: 3), or objects (default: all); when generating, "
        "sample from this many tokens only.",
    ] = None
    thresholds: Annotated[
        float | dict[str, float] | None,
        Shape(metavar="P", parse=_thresholds, without=("prompt",)),
        "Of any number of labels: give those above this probability, 0.3, or {cat: 0.3} for some classes (default: as "
        "trained, evaluate.thresholds).",
    ] = None
    draw: Annotated[
        Path | None,
        Shape(metavar="DIR", path="folder", without=("prompt",)),
        "Detection: draw the objects found. Segmentation: write label maps, PNG files whose values are class indices.",
    ] = None
    output: Annotated[
        Path | None,
        Shape(metavar="FILE", path="file", without=("prompt",)),
        "Write the predictions to a new file: .jsonl, .csv (a line for each label, or a column for each number; "
        "multi-label: "
        "a column for the labels and one for each probability) or .parquet. Until it is complete, it is called "
        "FILE.partial.",
    ] = None
    batch_size: Annotated[int | None, Ge(1), Shape(without=("prompt",)), "Images per batch (default: 64)."] = None
    stdin_image: Annotated[
        bool, Shape(without=("prompt",)), "Standard input (source -) is an image itself, not a list of paths."
    ] = False
    weights: Weights = "auto"
    best: Best = False
    trust_code: TrustCode = False

    def __post_init__(self) -> None:
        if self.prompt is None and not self.sources:
            raise click.UsageError(
                "Missing argument 'SOURCE...': images to label or to find objects in; for a text or token classifier "
                "lines of text (.txt, .jsonl) or --prompt; for a recommendation task lines of samples (.tsv, .txt, "
                ".jsonl); a language model takes --prompt."
            )
        if self.prompt is not None and self.sources:
            raise click.UsageError("--prompt is for language models and files are for image models: give one of them.")
        if self.prompt is not None and utf8(self.prompt) != self.prompt:
            raise click.UsageError("--prompt is not UTF-8 text; correct its bytes, or the terminal's encoding.")

    def stream(self, *, as_json: bool) -> int:
        """Predict, and print each result as it arrives; return 1 if an image or a line could not be read."""
        predictor = self.opened()
        if self.prompt is None:
            return _answer_files(self, predictor, as_json=as_json)
        reply = predictor.reply(self.asked(self.prompt))
        if as_json:
            print_json(reply.document)
        else:
            for line in reply.lines:
                echo(line or "(empty answer)")
        return 0

    def opened(self, *, looks_for_files: bool = True) -> Predictor:
        """Return the predictor of the weights.

        Args:
            looks_for_files: Whether the sources are names of files, which must exist.

        Raises:
            click.UsageError: If an option has no effect on it.
        """
        with loading():
            from paceline.distributed.device import choose_device
            from paceline.host.world import World
            from paceline.inference.predict import open_predictor
            from paceline.prediction.answer_files import check_output
            from paceline.prediction.sources import STANDARD_INPUT, check_exists
        if self.stdin_image and [str(each) for each in self.sources] != [STANDARD_INPUT]:
            raise click.UsageError("--stdin-image is for the source - alone: the bytes of one image on standard input.")
        if self.output is not None:
            check_output(self.output)
        for source in self.sources if looks_for_files else ():
            check_exists(source)
        predictor = open_predictor(
            self.target,
            weights=self.weights,
            best=self.best,
            trust_code=self.trust_code,
            device=choose_device("auto", World()),
        )
        for name, reason in predictor.unused_options.items():
            refuse_unused(click.get_current_context(), name, reason)
        _refuse_ineffective_options(self, predictor)
        if self.thresholds is not None:
            predictor.set_thresholds(self.thresholds)
        return predictor

    def asked(self, text: str) -> Prompt:
        """Return a prompt with the options."""
        from paceline.prediction.predictor import Prompt

        options = {name: getattr(self, name) for name in ("tokens", "temperature", "seed", "top_k")}
        return Prompt(text=text, **options)

    def answers(self, predictor: Predictor, pictures: Iterable[PictureFile]) -> Generator[Answer, None, None]:
        """Yield the answer to each file, in order."""
        from paceline.prediction.predictor import predict_ahead

        return predict_ahead(
            predictor,
            pictures,
            top_k=self.top_k or predictor.usual_top_k,
            batch_size=self.batch_size,
            on_prediction=None if self.draw is None else _drawer(self.draw, predictor.classes),
        )


def _refuse_ineffective_options(options: Predict, predictor: Predictor) -> None:
    if options.draw is not None and not predictor.draws:
        raise click.UsageError("--draw draws objects or pixel classes, and these weights predict neither.")
    if options.batch_size is not None and options.batch_size > 1 and predictor.largest_batch == 1:
        raise click.UsageError(
            f"--batch-size={options.batch_size} has no effect: {predictor.holds} takes one picture at a time, since "
            "larger ones in a batch would change its predictions. Leave it out."
        )
    if options.top_k is not None and predictor.number_names:
        raise click.UsageError(
            "--top-k has no effect: a prediction of these weights has all its numbers. Leave it out."
        )


def _answer_files(options: Predict, predictor: Predictor, *, as_json: bool) -> int:
    """Predict every image or line; return 1 if one of them could not be read."""
    from paceline.prediction.sources import picture_from_standard_input

    skipped = SkippedItems()
    pictures = [picture_from_standard_input()] if options.stdin_image else predictor.files(options.sources, skipped)
    answers = options.answers(predictor, pictures)
    with contextlib.closing(answers):
        if options.output is not None:
            code = _to_file(options.output, predictor, answers, skipped, as_json=as_json)
        else:
            code = _to_screen(answers, as_json=as_json)
    for sentence in skipped.summaries():
        echo(f"note: {sentence}", err=True)
    return code


def _drawer(folder: Path, classes: Sequence[str]) -> Seen:
    """Return a function that writes images with drawn predictions, under the image names, numbered where needed."""
    if folder.is_dir() and any(folder.iterdir()):
        raise DataError(f"--draw={folder} is not empty, and nothing in it is overwritten; give another name.")
    names: dict[Path, str] = {}
    used: set[str] = set()

    def draw(prepared: Any, answer: Answer) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        stem, number = answer.path.stem, 1
        name = names.get(answer.path, f"{stem}.png")
        # Some file systems are not case-sensitive.
        while answer.path not in names and name.lower() in used:
            number += 1
            name = f"{stem}-{number}.png"
        names[answer.path] = name
        used.add(name.lower())
        answer.drawn(prepared, classes).save(folder / name)
        if (label_map := answer.label_map(classes)) is not None:
            (folder / "masks").mkdir(exist_ok=True)
            label_map.save(folder / "masks" / name)

    return draw


def _to_screen(answers: Iterable[Answer], *, as_json: bool) -> int:
    """Print a line for each image as its result arrives, or one JSON list."""
    code, rows = 0, []
    for answer in answers:
        if answer.error is not None:
            code = store_verdict(passed=False)
        if as_json:
            rows.append(answer.row())
        else:
            echo(one_line(f"{answer.path}  {answer.description()}"))
    if as_json:
        print_json(rows)
    return code


def write_answers(output: Path, predictor: Predictor, answers: Iterator[Answer], tell: Log) -> dict[str, Any]:
    """Write the predictions to a file.

    Returns:
        What `--json` prints, without files that were skipped.
    """
    from paceline.prediction.answer_files import answer_file

    count, unreadable = 0, []
    with answer_file(output, predictor) as file:
        while batch := list(islice(answers, _AT_ONCE)):
            count += len(batch)
            for each in (answer for answer in batch if answer.error is not None):
                unreadable.append({"path": str(each.path), "error": each.error})
                tell(one_line(f"{each.path}  {each.description()}"))
            file.write(each.row() for each in batch)
    return {"output": str(output), predictor.unit: count, "unreadable": unreadable}


def _to_file(
    output: Path, predictor: Predictor, answers: Iterator[Answer], skipped: SkippedItems, *, as_json: bool
) -> int:
    """Write the predictions, and report samples without one."""
    document = write_answers(output, predictor, answers, (lambda _: None) if as_json else echo)
    count, unreadable = document[predictor.unit], document["unreadable"]
    code = store_verdict(passed=not unreadable)
    if as_json:
        print_json({**document, "left_out": skipped.summaries()})
    else:
        broken = f", {len(unreadable):,} of them unreadable" if unreadable else ""
        echo(f"{count:,} {predictor.unit}{broken}: {output}")
    return code
