"""`paceline evaluate`: score saved weights, each held-out sample once, with any number of processes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from paceline.cli.options import (
    best_option,
    is_first_process,
    json_option,
    launch_if_asked,
    overrides_argument,
    processes_option,
    trust_code_option,
    weights_option,
)
from paceline.cli.output import print_json, print_pairs


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

    The recipe the weights were trained with says on what; overrides change it, for example data.path=elsewhere.
    """
    arguments = ["evaluate", str(target), *overrides, "--weights", weights]
    arguments += ["--predictions", str(predictions)] if predictions else []
    arguments += ["--best"] if best else []
    arguments += ["--trust-code"] if trust_code else []
    launched = launch_if_asked(processes, [*arguments, "--json"] if as_json else arguments, device="auto")
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
