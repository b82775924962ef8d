"""`paceline evaluate`: score saved weights, each held-out sample once, with any number of processes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paceline.cli.options import (
    LocalPath,
    best_option,
    choose_processes,
    chosen_images,
    chosen_sizes,
    is_first_process,
    is_one_of_several,
    json_option,
    launch,
    on_option,
    overrides_argument,
    present_gpus,
    processes_option,
    sizes_option,
    target_argument,
    trust_code_option,
    usable_gpus,
    weights_option,
)
from paceline.cli.output import echo, print_json, print_pairs, print_table
from paceline.errors import NotFiniteError
from paceline.escaping import one_line
from paceline.loading import loading
from paceline.recipe.load import refuse_training_overrides, stored_recipe
from paceline.units import metric_unit

if TYPE_CHECKING:
    from paceline.trainer.evaluate_target import EvaluationReport, EvaluationRequest, SizeSweep, Split


@click.command("evaluate")
@target_argument
@overrides_argument
@processes_option
@click.option(
    "--predictions",
    type=LocalPath(),
    metavar="FILE",
    help="Write one line per sample (.jsonl or .csv): id, sample, and what the task says; of a class: prediction, "
    "probability, target; of a detector: boxes, labels, scores; of a language model: loss, tokens.",
)
@weights_option
@best_option
@trust_code_option
@sizes_option
@on_option
@json_option
def command(
    target: Path,
    overrides: tuple[str, ...],
    processes: int | None,
    predictions: Path | None,
    weights: str,
    best: bool,
    trust_code: bool,
    as_json: bool,
) -> int:
    """Score the weights of TARGET: a run directory, a checkpoint directory, a safetensors file or a hub folder.

    The recipe the weights were trained with says on what; overrides change it. Every held-out sample is scored once,
    with any number of processes. A hub folder of timm's says how images are shown, but not which: give data.path.

    --sizes tries several sizes of images instead, on those that the run held out of training
    (data.holdout_fraction), and says which is best.

    \b
    Examples:
      paceline evaluate runs/digits --best
      paceline evaluate runs/photos evaluate.augment=flip
      paceline evaluate runs/photos --sizes 192,224,256,288
      paceline evaluate runs/photos data.path=more-photos --predictions answers.csv
      paceline evaluate resnet50-folder data.path=photos
    """
    refuse_training_overrides(overrides)
    sizes, on = _sweep(predictions)
    arguments = ["evaluate", str(target), *overrides, "--weights", weights, "--on", on]
    arguments += ["--sizes", ",".join(map(str, sizes))] if sizes else []
    arguments += ["--predictions", str(predictions)] if predictions else []
    arguments += ["--best"] if best else []
    if not is_one_of_several(processes):
        gpus = _usable_gpus(target, overrides, weights=weights, best=best) if processes is None else 0
        launched = launch(choose_processes(processes, gpus), [*arguments, "--json"] if as_json else arguments)
        if launched is not None:
            return launched
    with loading():
        from paceline.trainer.evaluate_target import EvaluationRequest

    request = EvaluationRequest(
        target=target,
        overrides=overrides,
        weights=weights,
        best=best,
        trust_code=trust_code,
        predictions=predictions,
        on=on,
    )
    if sizes:
        _sweep_here(request, sizes, as_json=as_json)
    else:
        _evaluate_here(request, as_json=as_json)
    return 0


def _evaluate_here(request: EvaluationRequest, *, as_json: bool) -> None:
    from paceline.trainer.evaluate_target import evaluate_target

    report = evaluate_target(request)
    if is_first_process():
        _tell(report, as_json=as_json)
    _check_finite(report)


def _check_finite(report: EvaluationReport) -> None:
    if report.not_finite:
        raise NotFiniteError(
            f"{', '.join(report.not_finite)} of {report.path} on {report.samples:,} samples: not a finite number, "
            "so not a result."
        )


def _tell(report: EvaluationReport, *, as_json: bool) -> None:
    if as_json:
        fields = dataclasses.asdict(report)
        apart = {"metrics", "counts", "seconds", "not_finite"}
        print_json({k: v for k, v in fields.items() if k not in apart} | fields["metrics"] | fields["counts"])
        return
    echo(f"{report.path} ({report.weights} weights)")
    lines = {name: _in_words(name, value) for name, value in report.metrics.items()}
    print_pairs({"samples": f"{report.samples:,}", **lines, **report.counts})
    for path in report.broken:
        echo(one_line(f"  not scored, unreadable: {path}"))
    if report.no_confusion:
        echo(f"  no confusion matrix (--json has one): {report.no_confusion}")
    _tell_left_out(report)


def _tell_left_out(report: EvaluationReport) -> None:
    for sentence in report.left_out:
        echo(f"note: {sentence}")


def _sweep_here(request: EvaluationRequest, sizes: tuple[int, ...], *, as_json: bool) -> None:
    from paceline.trainer.evaluate_target import sweep_sizes

    sweep = sweep_sizes(request, sizes)
    if is_first_process():
        _tell_sweep(sweep, as_json=as_json)
    for trial in sweep.trials:
        _check_finite(trial.report)


def _tell_sweep(sweep: SizeSweep, *, as_json: bool) -> None:
    if as_json:
        print_json(sweep.to_json())
        return
    first = sweep.trials[0].report
    images = "training images that were held out" if sweep.on == "holdout" else "validation images"
    echo(f"{first.path} ({first.weights} weights) on {first.samples:,} {images}")
    names = tuple(first.metrics)
    rows = [
        (
            f"{trial.size}{' *' * (trial is sweep.best)}",
            *(_in_words(name, trial.report.metrics[name]) for name in names),
            f"{trial.samples_per_second:,.0f}",
        )
        for trial in sweep.trials
    ]
    print_table(("size", *names, "images/s"), rows)
    echo(f"best by {sweep.metric}: data.evaluation_size={sweep.best.size}")
    if sweep.on == "validation":
        echo("note: a size chosen on the validation images is fitted to them; data.holdout_fraction holds others out")
    _tell_left_out(first)


def _in_words(name: str, value: float) -> str:
    return f"{value:.2f} %" if metric_unit(name) else f"{value:.4f}"


def _sweep(predictions: Path | None) -> tuple[tuple[int, ...], Split]:
    """The sizes to try, if any, and on which images."""
    sizes, on = chosen_sizes(), chosen_images()
    if sizes and predictions is not None:
        raise click.UsageError("--predictions is for one evaluation, and --sizes makes several; leave one of them out.")
    return sizes, on or ("holdout" if sizes else "validation")


def _usable_gpus(target: Path, overrides: tuple[str, ...], *, weights: str, best: bool) -> int:
    """GPUs of the kind that the weights' recipe or an override names."""
    present = present_gpus()
    if sum(present.values()) < 2:
        return 1  # whatever the recipe says, so it need not be read
    from paceline.checkpoint.weights import read_weights

    saved = read_weights(target, weights, best=best)
    recipe = stored_recipe(saved.described("recipe"), str(saved.path), overrides)
    return usable_gpus(recipe.parallel.device, present)
