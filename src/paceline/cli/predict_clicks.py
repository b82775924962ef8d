"""What `paceline predict` says of samples that may be clicked on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from paceline.cli.output import concluded, echo, print_json
from paceline.escaping import one_line

_ENDINGS = (".tsv", ".txt", ".gz", ".jsonl")
_ARCHIVE = ".tar.gz"


def answer_clicks(
    target: Path, sources: Sequence[Path], *, as_json: bool, idle: Sequence[str], **given: Any
) -> int | None:
    """Say with which probability each line is clicked on; None if these are no such files, or weights.

    Args:
        target: Where the weights are.
        sources: Files of lines.
        as_json: Print JSON.
        idle: Options that were typed and have no effect on samples.
        given: What :func:`~paceline.inference.clicks.load_click_predictor` takes besides.
    """
    if not all(_holds_lines(each) for each in sources):
        return None
    from paceline.distributed.device import choose_device
    from paceline.inference.clicks import load_click_predictor
    from paceline.world import World

    predictor = load_click_predictor(target, device=choose_device("auto", World()), **given)
    if predictor is None:
        return None
    if idle:
        raise click.UsageError(
            f"--{idle[0]} is for images, and these weights are about lines of samples: leave it out."
        )
    code = 0
    rows = []
    for each in (answer for source in sources for answer in predictor.predict(source)):
        if each.error is not None:
            code = concluded(passed=False)
        if as_json:
            rows.append(dataclasses.asdict(each))
        elif each.probability is None:
            echo(one_line(f"{each.path}:{each.line}  wrong: {each.error}"))
        else:
            echo(one_line(f"{each.path}:{each.line}  {100 * each.probability:.1f} %"))
    if as_json:
        print_json(rows)
    return code


def _holds_lines(path: Path) -> bool:
    return path.is_file() and path.name.endswith(_ENDINGS) and not path.name.endswith(_ARCHIVE)
