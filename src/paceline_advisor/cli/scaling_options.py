"""Options that `paceline scale` and `paceline plan` share: where, and what one device does there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.options import FiniteRange
from paceline.units import format_seconds

if TYPE_CHECKING:
    from paceline_advisor.scaling.study import Asked, Figure


def _milliseconds(_: click.Context, __: click.Parameter, value: float | None) -> float | None:
    return None if value is None else value / 1000


def _all_of(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def decorate(function: Any) -> Any:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


_POSITIVE = FiniteRange(min=0, min_open=True)

where_options: Callable[[Any], Any] = _all_of(
    click.option(
        "--cluster",
        metavar="NAME|FILE",
        help="dgx-1, dgx-2, dgx-a100, dgx-h100, 8xh200, p4d, ethernet-10g, ... or a YAML file of your own "
        "(docs/guide/scaling.md); this machine if left out.",
    ),
    click.option("--price-per-gpu-hour", type=_POSITIVE, metavar="DOLLARS", help="In place of the cluster's, if any."),
    click.option(
        "--samples",
        type=click.IntRange(min=1),
        metavar="N",
        help="Training samples of an epoch, where the data are not here.",
    ),
)
figure_options: Callable[[Any], Any] = _all_of(
    click.option("--throughput", type=_POSITIVE, metavar="RATE", help="One GPU's samples per second."),
    click.option("--step-seconds", type=_POSITIVE, metavar="S", help="One GPU's step, in place of --throughput."),
    click.option(
        "--one-gpu-batch",
        type=click.IntRange(min=1),
        metavar="N",
        help="Samples of the step that figure was measured with; larger shares become several passes.",
    ),
    click.option(
        "--loop",
        type=click.Choice(["paceline", "nvidia-convnets"]),
        default="paceline",
        show_default=True,
        help="Whose training loop: ours, or NVIDIA's published one, to check its tables.",
    ),
    click.option(
        "--cpu-ms-per-sample",
        type=FiniteRange(min=0),
        callback=_milliseconds,
        metavar="MS",
        help="Time of one core for reading and varying a sample; 0 if that is not done on cores.",
    ),
)


def shown_hours(hours: float | None) -> str:
    """Hours for a table; less than six minutes with a unit of their own, and nothing where they are unknown."""
    if hours is None:
        return ""
    if hours < 0.1:
        return format_seconds(3600 * hours)
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}"


def read_asked(recipe: str, overrides: tuple[str, ...], batch_per_gpu: int | None, options: Mapping[str, Any]) -> Asked:
    """What both commands ask for.

    Raises:
        click.UsageError: If options do not go together.
    """
    from paceline_advisor.scaling.study import Asked

    return Asked(
        recipe=recipe,
        overrides=overrides,
        batch_per_device=batch_per_gpu,
        figure=_read_figure(options),
        cluster=options["cluster"],
        loop=options["loop"],
        seconds_per_sample=options["cpu_ms_per_sample"],
        price=options["price_per_gpu_hour"],
        samples=options["samples"],
    )


def _read_figure(options: Mapping[str, Any]) -> Figure:
    """What the user said of one device.

    Raises:
        click.UsageError: If the batch of a figure is given without the figure.
    """
    from paceline_advisor.scaling.study import Figure

    figure = Figure(
        throughput=options["throughput"], step_seconds=options["step_seconds"], batch=options["one_gpu_batch"]
    )
    if figure.batch is not None and not figure.is_given:
        raise click.UsageError("--one-gpu-batch belongs to --throughput or --step-seconds; give one of them too.")
    if figure.step_seconds is not None and figure.throughput is not None:
        raise click.UsageError("--throughput and --step-seconds say the same thing; give one of them.")
    return figure
