"""Training from Python: :func:`paceline.train`, the same path as the command, its report too."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from paceline.recipe.load import Overrides, load_recipe
from paceline.references import trusting_code
from paceline.report.html.page import report_at_the_end
from paceline.telemetry.display import choose_display
from paceline.trainer.process_settings import restore_torch_settings
from paceline.trainer.train import Options, TaskMaker, TrainResult, train_recipe


def train(
    recipe: str | Path,
    *,
    overrides: Overrides = (),
    run_dir: str | Path | None = None,
    resume: str = "auto",
    task: TaskMaker | None = None,
    quiet: bool = False,
) -> TrainResult:
    """Train a recipe, or go on with the run in ``run_dir``.

    Joins the world it finds (torchrun, Slurm), else trains in this process. Signal handlers, and torch's number of
    threads and settings of determinism and precision, are afterwards what they were; torch's generator has been seeded.

    Args:
        recipe: A shipped recipe's name or the path of a YAML file.
        overrides: ``{"train.duration": "3 epochs"}`` or ``["train.duration=3 epochs"]``.
        run_dir: The run directory; by default a new one under ``runs/``.
        resume: ``auto``, ``never``, or the path of one of the run's checkpoints.
        task: A :class:`paceline.Task` subclass, or any function from a recipe to a task, instead of the one
            the recipe names.
        quiet: Show no progress.

    Raises:
        PacelineError: For every mistake in the recipe, the data or the directory.
    """
    options = Options(
        run_dir=None if run_dir is None else Path(run_dir).expanduser(),
        resume=os.path.expanduser(resume),
        display=None if quiet else choose_display(sys.stdout),
        task=task,
        report=report_at_the_end,
    )
    with trusting_code():  # to train a recipe is to run what it names
        loaded = load_recipe(recipe, overrides)
    with restore_torch_settings():
        return train_recipe(loaded, options)
