"""`paceline evaluate`: score saved weights, each held-out sample once, with any number of processes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from paceline.cli.options import (
    best_option,
    choose_processes,
    is_first_process,
    is_one_of_several,
    json_option,
    launch,
    overrides_argument,
    present_gpus,
    processes_option,
    trust_code_option,
    usable_gpus,
    weights_option,
)
from paceline.cli.output import print_json, print_pairs
from paceline.recipe.load import refuse_training_overrides, stored_recipe


@click.command("evaluate", short_help="Score the weights of a run, a checkpoint or a file.")
@click.argument("target", type=click.Path(path_type=Path))
@overrides_argument
@processes_option
@click.option(
    "--predictions",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write one line per sample (.jsonl or .csv): id, sample, prediction, probability, target.",
)
@weights_option
@best_option
@trust_code_option
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
    """Score the weights of TARGET: a run directory, a checkpoint directory or a safetensors file out of one.

    The recipe the weights were trained with says on what; overrides change it. Every held-out sample is scored once,
    with any number of processes.

    \b
    Examples:
      paceline evaluate runs/digits --best
      paceline evaluate runs/photos data.path=more-photos --predictions answers.csv
    """
    refuse_training_overrides(overrides)
    arguments = ["evaluate", str(target), *overrides, "--weights", weights]
    arguments += ["--predictions", str(predictions)] if predictions else []
    arguments += ["--best"] if best else []
    arguments += ["--trust-code"] if trust_code else []
    if not is_one_of_several(processes):
        gpus = _usable_gpus(target, overrides, weights=weights, best=best) if processes is None else 0
        launched = launch(choose_processes(processes, gpus), [*arguments, "--json"] if as_json else arguments)
        if launched is not None:
            return launched
    from paceline.trainer.evaluate_target import EvaluationRequest, evaluate_target

    report = evaluate_target(
        EvaluationRequest(
            target=target,
            overrides=overrides,
            weights=weights,
            best=best,
            trust_code=trust_code,
            predictions=predictions,
        )
    )
    if not is_first_process():
        return 0
    if as_json:
        fields = dataclasses.asdict(report)
        nested = {"metrics", "counts"}
        print_json({k: v for k, v in fields.items() if k not in nested} | fields["metrics"] | fields["counts"])
        return 0
    click.echo(f"{report.path} ({report.weights} weights)")
    lines = {
        name: f"{value:.2f} %" if name.endswith("accuracy") else f"{value:.4f}"
        for name, value in report.metrics.items()
    }
    print_pairs({"samples": f"{report.samples:,}", **lines, **report.counts})
    for path in report.broken:
        click.echo(f"  not scored, unreadable: {path}")
    return 0


def _usable_gpus(target: Path, overrides: tuple[str, ...], *, weights: str, best: bool) -> int:
    """GPUs of the kind that the weights' recipe or an override names."""
    present = present_gpus()
    if sum(present.values()) < 2:
        return 1  # whatever the recipe says, so it need not be read
    from paceline.checkpoint.weights import read_weights

    saved = read_weights(target, weights, best=best)
    recipe = stored_recipe(saved.described("recipe"), str(saved.path), overrides)
    return usable_gpus(recipe.parallel.device, present)
