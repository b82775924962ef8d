"""`paceline estimate`: the memory of a run, before there is one."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from paceline.cli.options import (
    choose_processes,
    json_option,
    overrides_argument,
    present_gpus,
    recipe_argument,
    usable_gpus,
)
from paceline.cli.output import concluded, echo, print_json, print_pairs, print_table
from paceline.recipe.load import LoadedRecipe, load_recipe
from paceline.units import format_bytes, format_count

if TYPE_CHECKING:
    from paceline_advisor.memory.estimate import Fit, MemoryEstimate, Size
    from paceline_advisor.memory.replay import Peak
    from paceline_advisor.memory.savings import Saving


@click.command("estimate", short_help="Estimate the memory of a training step, on a device that need not be here.")
@recipe_argument
@overrides_argument
@click.option(
    "--device", metavar="NAME", help="A known GPU (h100, a100-80gb, …) or cpu (default: what a run would use)."
)
@click.option(
    "--processes",
    type=click.IntRange(min=1),
    metavar="N",
    help="Ranks of the run that is estimated; none is started (default: one per GPU, 1 on a CPU or with --device).",
)
@click.option("--expandable-segments", is_flag=True, help="As with PYTORCH_ALLOC_CONF=expandable_segments:True.")
@json_option
def command(
    recipe: str,
    overrides: tuple[str, ...],
    device: str | None,
    processes: int | None,
    expandable_segments: bool,
    as_json: bool,
) -> int:
    """Estimate the memory of RECIPE's steps and evaluation by what it is for, and say which batches fit which GPUs.

    They are done on tensors without numbers: nothing is trained, and no GPU is needed. Data are not read; where
    data.path is not set, data of a usual kind are assumed. PYTORCH_ALLOC_CONF is followed. Exit code 1 if the run does
    not fit.

    \b
    Examples:
      paceline estimate resnet50 --device h100
      paceline estimate deit_small --device a100-40gb --processes 8 batch.micro_size=128
      paceline estimate digits --device cpu --json
    """
    from paceline_advisor.memory.estimate import Asked, estimate

    loaded = load_recipe(recipe, overrides)
    asked = Asked(
        loaded=loaded,
        device=device,
        processes=_processes(processes, loaded, device),
        expandable=expandable_segments,
    )
    # The user's code runs in this process, and may print.
    with contextlib.redirect_stdout(sys.stderr):
        found = estimate(asked)
    code = concluded(passed=found.fits is not False)
    if as_json:
        print_json({"recipe": loaded.name, **found.to_json()})
    else:
        _show(loaded.name, found)
    return code


def _processes(asked: int | None, loaded: LoadedRecipe, device: str | None) -> int:
    if asked is None and device is not None:
        return 1
    gpus = usable_gpus(loaded.recipe.parallel.device, present_gpus()) if asked is None else 0
    return choose_processes(asked, gpus, loaded.recipe).count


def _show(name: str, found: MemoryEstimate) -> None:
    plan, peak = found.plan, found.peak
    echo(f"Memory of a training step of {name} on {found.device}")
    print_pairs(_subject(found))
    echo("\nAt its peak, by what it is for")
    rows = [(cause, format_bytes(size), f"{100 * size / peak.allocated:.1f} %") for cause, size in _causes(peak)]
    print_table(("cause", "memory", "share"), rows)
    if peak.largest:
        echo("\nLayers whose activations take the most")
        print_table(("layer", "memory"), [(layer or "(outside)", format_bytes(size)) for layer, size in peak.largest])
    echo("\nBy micro-batch")
    taken = ("takes if it can",) if peak.reserved is not None else ()
    print_table(("samples", "needs", *taken, ""), [_size_row(each, found) for each in found.sizes])
    echo()
    print_pairs(_largest(found))
    if found.devices:
        echo(f"\nLargest micro-batch on known GPUs, in {plan.precision}")
        rows = [
            (each.device, format_bytes(each.memory), _samples(each, found.asked_precision)) for each in found.devices
        ]
        print_table(("device", "memory", "samples"), rows)
        echo("(a few per cent more may fit on those other than the one asked for)")
    if found.savings:
        echo("\nWhat would save memory")
        print_table(("change", "needs then", "saves"), [_saving_row(each) for each in found.savings])
    verdict = found.verdict
    echo(f"\nOn {verdict.processes} processes: {verdict.strategy}, since {verdict.reason}.")
    for notice in found.notices:
        echo(f"note: {notice}")


def _subject(found: MemoryEstimate) -> dict[str, str]:
    plan, peak = found.plan, found.peak
    parts = f", {plan.accumulation_steps} to a step" if plan.accumulation_steps > 1 else ""
    lines = {
        "step": f"{plan.strategy}, {plan.world_size} process{'es' * (plan.world_size > 1)}, micro-batches of "
        f"{format_count(plan.micro_batch_size)}{parts}, {plan.precision}",
        "tensors at the peak": f"{format_bytes(peak.allocated)}, {_where(peak)}",
    }
    if "evaluation" in peak.parts:
        lines["of these"] = _parts(found)
    if peak.reserved is not None:
        lines["taken from the device"] = f"{format_bytes(peak.reserved)} (segments of PyTorch's allocator, if it can)"
    kind = "Python and libraries" if plan.device == "cpu" else "driver and libraries, an allowance"
    lines["beside them"] = f"{format_bytes(found.outside)} ({kind})"
    lines["in all"] = format_bytes(found.needed)
    if peak.reserved is not None:
        lines["needed at least"] = f"{format_bytes(found.least)} (PyTorch gives back what it keeps in reserve)"
    if found.memory is not None:
        lines["the device has"] = f"{format_bytes(found.memory)}: {_verdict(found, found.memory)}"
    return lines


def _verdict(found: MemoryEstimate, memory: int) -> str:
    left = memory - found.least
    if not found.fits:
        return f"it does not fit, {format_bytes(-left)} too few"
    if found.needed <= memory:
        return f"it fits, {format_bytes(left)} are left"
    given_back = format_bytes(found.needed - memory)
    return f"it fits, once PyTorch gives back what it keeps in reserve ({given_back} or more)"


def _parts(found: MemoryEstimate) -> str:
    """The peaks of the parts of a run, where they are not the same."""
    said = {"step": "a step", "evaluation": f"evaluation, batches of {format_count(found.plan.evaluation_batch_size)}"}
    return ", ".join(
        f"{format_bytes(found.peak.parts[part])} ({name})" for part, name in said.items() if part in found.peak.parts
    )


def _where(peak: Peak) -> str:
    at = f" in {peak.layer}" if peak.layer else ""
    return f"in the {peak.phase or 'first moment'}{at} ({peak.operation.split('.')[0]})"


def _causes(peak: Peak) -> Iterator[tuple[str, int]]:
    yield from sorted(peak.causes.items(), key=lambda each: -each[1])


def _size_row(size: Size, found: MemoryEstimate) -> tuple[str, ...]:
    fits = "" if size.fits is None else "fits" if size.fits else "does not fit"
    taken = (format_bytes(size.needed),) if found.peak.reserved is not None else ()
    return format_count(size.micro_batch), format_bytes(size.least), *taken, fits


def _largest(found: MemoryEstimate) -> dict[str, str]:
    if found.largest is None:
        return {}
    if found.largest == 0:
        return {"largest micro-batch": "none: not even one sample fits"}
    lines = {"largest micro-batch": f"{_count(found.largest)} samples"}
    if found.verified is not None:
        lines["checked by a step"] = f"{100 * (found.verified - 1):+.2f} % off"
    if found.micro_size is not None and not found.fits:
        plan = found.plan
        parts = plan.global_batch_size // (found.micro_size * plan.world_size)
        lines["so set"] = (
            f"batch.micro_size={found.micro_size}: {parts} micro-batches to a step; the global batch of "
            f"{format_count(plan.global_batch_size)} and the learning rate stay"
        )
    return lines


def _samples(fit: Fit, precision: str) -> str:
    if fit.largest is None:
        # What train.precision=auto takes there.
        instead = "" if precision == "auto" else "with train.precision=auto "
        return f"lacks this precision; {instead}a run there takes fp32: --device {fit.device}"
    return _count(fit.largest) if fit.largest else "none"


def _count(largest: int) -> str:
    from paceline_advisor.memory.job import MOST

    return format_count(largest) if largest < MOST else f"at least {format_count(MOST)}"


def _saving_row(saving: Saving) -> tuple[str, str, str]:
    if saving.needed is None:
        return saving.change, "-", saving.why_not
    saves = format_bytes(saving.saved) if saving.saved >= 0 else f"nothing: {format_bytes(-saving.saved)} more"
    return saving.change, format_bytes(saving.needed), saves
