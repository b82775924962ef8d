"""`paceline plan`: how many GPUs, for how long, at what price?"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.options import FiniteRange, json_option, overrides_argument, recipe_argument
from paceline.cli.output import concluded, echo, print_json, print_pairs, print_table
from paceline.cli.streams import ends_in_order
from paceline.units import TimeSpan
from paceline_advisor.cli.scaling_options import figure_options, read_asked, shown_hours, where_options

if TYPE_CHECKING:
    from paceline_advisor.scaling.planning import Choice, LrRule, TrainingPlan

_HOUR = 3600


def _hours(_: click.Context, __: click.Parameter, value: str | None) -> float | None:
    if value is None:
        return None
    try:
        return TimeSpan.parse(value).seconds / _HOUR
    except ValueError as error:
        raise click.BadParameter(f"{error}.") from None


@click.command("plan", short_help="Choose how many GPUs a training needs for a deadline or a budget.")
@recipe_argument
@overrides_argument
@click.option("--deadline", callback=_hours, metavar="TIME", help="When training must be over: 8h, 90 minutes, 2d.")
@click.option("--budget", type=FiniteRange(min=0, min_open=True), metavar="DOLLARS", help="What it may cost.")
@click.option("--most-gpus", type=click.IntRange(min=1), default=256, show_default=True, metavar="N")
@click.option(
    "--batch-per-gpu",
    type=click.IntRange(min=1),
    metavar="N",
    help="Let the global batch grow with the number of GPUs; without it the recipe's stays.",
)
@click.option(
    "--lr-rule",
    type=click.Choice(["none", "linear", "sqrt"]),
    default="none",
    show_default=True,
    help="What a grown batch makes of the learning rate; none leaves it to the recipe's optimizer.lr_scaling.",
)
@where_options
@figure_options
@json_option
def command(
    recipe: str,
    overrides: tuple[str, ...],
    deadline: float | None,
    budget: float | None,
    most_gpus: int,
    batch_per_gpu: int | None,
    lr_rule: LrRule,
    as_json: bool,
    **rest: Any,
) -> int:
    """Plan RECIPE: the fewest GPUs that meet a deadline, or the fastest training within a budget.

    It says the strategy, global batch, learning rate, hours and cost, and what of it is predicted. Deadline and budget
    are held against the upper end of the prediction's range. Nothing is changed: the recipe's batch and learning rate
    stay unless you ask for a rule. Passes are as large as the GPU's memory allows, by what `paceline estimate` says.
    Exit code 1 if nothing tried does it, the nearest is told; and without a figure of one GPU, whose bound decides
    nothing.

    \b
    Examples:
      paceline plan resnet50 --cluster dgx-a100 --throughput 2470 --one-gpu-batch 256 --deadline 3h
      paceline plan resnet50 --cluster p4d --throughput 2300 --one-gpu-batch 256 --budget 150
      paceline plan resnet50 --cluster p4d --throughput 2300 --batch-per-gpu 256 --lr-rule linear --deadline 1h
    """
    from paceline_advisor.scaling.planning import Wanted, plan_training

    wanted = Wanted(
        scaling=read_asked(recipe, overrides, batch_per_gpu, rest),
        deadline_hours=deadline,
        budget=budget,
        most=most_gpus,
        lr_rule=lr_rule,
    )
    # The user's code runs in this process, and may print.
    with ends_in_order(), contextlib.redirect_stdout(sys.stderr):
        plan = plan_training(wanted, lambda line: echo(line, err=True))
    code = concluded(passed=plan.chosen is not None)
    if as_json:
        print_json(plan.to_json())
    else:
        _show(plan)
    return code


def _show(plan: TrainingPlan) -> None:
    header = ("GPUs", "strategy", "batch", "lr", "samples/s", "efficiency", "hours", "at worst", "cost", "at worst")
    print_table((*header, "limited by"), [_row(each) for each in plan.choices])
    if plan.report.is_bound:
        echo("Nothing is chosen by a bound that no GPU reaches; give one GPU's --throughput. The least that could:")
    elif plan.chosen is None:
        echo("Nothing tried does it; this comes nearest:")
    choice = plan.chosen or plan.nearest
    found = choice.row.prediction
    per_node = plan.report.cluster.devices_per_node
    grown = found.samples != plan.recipe_batch
    print_pairs(
        {
            "GPUs": f"{choice.gpus} on {plan.report.cluster.title}; {-(-choice.gpus // per_node)} node(s)",
            "strategy": f"{choice.row.strategy}: {choice.reason}",
            **({} if choice.room is None else {"memory": choice.room.why}),
            "global batch": f"{found.samples:,}" + f" in place of the recipe's {plan.recipe_batch:,}" * grown,
            "learning rate": f"{choice.learning_rate:g}" + f" in place of the recipe's {plan.recipe_lr:g}" * grown,
            "hours": f"{shown_hours(choice.row.hours)}, at worst {shown_hours(choice.high_hours)}",
            **_cost(choice),
            **({"warning": choice.warning} if choice.warning else {}),
        }
    )
    echo(f"  Not predicted: one GPU ({plan.report.basis}), batch, price. Everything else is predicted.")
    for notice in plan.report.notices:
        echo(f"  note: {notice}")


def _cost(choice: Choice) -> dict[str, str]:
    if choice.row.cost is None or choice.high_cost is None:
        return {}
    return {"cost": f"${choice.row.cost:,.2f}, at worst ${choice.high_cost:,.2f}"}


def _row(choice: Choice) -> tuple[object, ...]:
    found, row = choice.row.prediction, choice.row
    return (
        choice.gpus,
        row.strategy,
        f"{found.samples:,}",
        f"{choice.learning_rate:g}",
        f"{found.rate:,.0f}",
        f"{found.efficiency:.1%}",
        shown_hours(row.hours),
        shown_hours(choice.high_hours),
        "" if row.cost is None else f"${row.cost:,.2f}",
        "" if choice.high_cost is None else f"${choice.high_cost:,.2f}",
        found.limit if choice.has_room else "memory: does not fit",
    )
