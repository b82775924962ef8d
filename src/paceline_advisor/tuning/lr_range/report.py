"""What does a range test leave for people: a line in the terminal, a page with its curve, and its numbers?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.pages.page import Block, Chart, Page, Section, Table, Text, write_page
from paceline.records.run_directory import write_json
from paceline.units import format_count
from paceline_advisor.formulas.lr_range import MEDIAN

if TYPE_CHECKING:
    from paceline_advisor.tuning.lr_range.study import RangeTest

_BLOCKS = "▁▂▃▄▅▆▇█"
_WIDTH = 40
_METHOD = (
    "The recipe was trained for some steps as it begins, from its first weights, with a learning rate that rises from "
    "step to step (Smith 2015). The loss of a step is that before its update, over all its samples. The rules look at "
    "the smoothed losses, without the first tenth and the last five, with fastai's definitions. A rate is a place to "
    "begin from, not the best there is: what trains well to the end of a run is known only by training."
)


def sparkline(found: RangeTest) -> str:
    """The smoothed loss over the steps in one line; what has diverged is cut off at the first loss."""
    curve = found.averages
    count = min(_WIDTH, len(curve))
    shown = [curve[index * (len(curve) - 1) // max(1, count - 1)] for index in range(count)]
    low = min(shown)
    scale = (len(_BLOCKS) - 1) / max(shown[0] - low, 1e-12)
    return "".join(_BLOCKS[min(len(_BLOCKS) - 1, round((loss - low) * scale))] for loss in shown)


def write_report(folder: Path, found: RangeTest) -> list[Path]:
    """Write ``find-lr.json`` and ``find-lr.html`` into a folder that is there; the files written.

    Raises:
        RunDirectoryError: If they cannot be written.
    """
    document = folder / "find-lr.json"
    write_json(document, found.to_json())
    return [document, write_page(document.with_suffix(".html"), page(found))]


def page(found: RangeTest) -> Page:
    """The curve, what the rules say of it, and how it was made."""
    facts, sweep = found.facts, found.sweep
    processes = facts["world_size"]
    settings = {
        "rates": f"{sweep.lowest:g} to {sweep.highest:g}, {sweep.shape}",
        "steps": f"{format_count(len(found.rates))} of {format_count(sweep.steps)}: {found.ending_in_words}",
        "batch": f"{format_count(facts['global_batch_size'])} samples a step, {processes} "
        f"process{'es' * (processes > 1)}, micro-batches of {format_count(facts['micro_batch_size'])}",
        "smoothing": f"{sweep.smoothing:g}",
        "divergence": f"{sweep.divergence:g} times the best smoothed loss",
        "device": f"{facts['device_name']}, {facts['precision']}",
        "optimizer": f"{facts['optimizer']}, optimizer.lr={facts['optimizer_lr']:g} in the recipe",
    }
    rows = [
        (name, None if each.lr is None else f"{found.lr(name):g}", each.why_not or each.rule, each.source)
        for name, each in found.suggestions.items()
    ]
    told = Table(columns=("rule", "optimizer.lr", "why", "source"), rows=rows, caption="Suggested learning rates")
    blocks: list[Block] = [_chart(found), told, *(Text(note, kind="warning") for note in found.notes)]
    done = Table(columns=("what", "value"), rows=list(settings.items()), caption="Settings of the range test")
    return Page(
        title=f"Learning rates for {found.name}",
        subtitle=f"A range test of {format_count(len(found.rates))} steps on {facts['device_name']}.",
        sections=(Section(title="The curve", blocks=blocks), Section(title="The test", blocks=(Text(_METHOD), done))),
    )


def _chart(found: RangeTest) -> Chart:
    log = found.sweep.shape == "exponential"
    lowest = min(found.averages)
    # What has diverged would press the part that matters flat.
    top = found.averages[0] + 0.5 * (found.averages[0] - lowest) + 1e-9
    axis: dict[str, Any] = {"title": "learning rate", "type": "log" if log else "linear", "exponentformat": "power"}
    return Chart(
        title="Training loss as the learning rate rises",
        traces=[*_traces(found), *_beyond(found, top)],
        layout={
            "xaxis": axis,
            "yaxis": {"title": "loss", "range": [min(lowest, *found.losses) - 0.05 * abs(lowest), top]},
            "height": 420,
        },
        description=f"The smoothed loss goes from {found.averages[0]:.3g} to {lowest:.3g} at its lowest, at a rate of "
        f"{found.rates[found.averages.index(lowest)]:.3g}; {found.ending_in_words}.",
        wide=True,
    )


def _beyond(found: RangeTest, top: float) -> Iterator[dict[str, Any]]:
    """What lies above the axis, at its edge: how a test ended is part of what it shows."""
    above = [(rate, loss) for rate, loss in zip(found.rates, found.losses, strict=True) if loss > top]
    if above:
        yield {
            "x": [rate for rate, _ in above],
            "y": [top] * len(above),
            "customdata": [loss for _, loss in above],
            "hovertemplate": "rate %{x:.3g}: loss %{customdata:.3g}<extra></extra>",
            "name": "loss above the axis",
            "mode": "markers",
            "marker": {"size": 8, "symbol": "triangle-up-open"},
            "cliponaxis": False,
        }


def _traces(found: RangeTest) -> Iterator[dict[str, Any]]:
    rates = list(found.rates)
    yield {
        "x": rates,
        "y": list(found.losses),
        "name": "loss of each step",
        "mode": "markers",
        "marker": {"size": 4, "opacity": 0.5},
    }
    yield {"x": rates, "y": list(found.averages), "name": "smoothed", "mode": "lines"}
    symbols = ("circle-open", "star", "diamond", "triangle-up", "square", "x")
    for symbol, (name, each) in zip(symbols, found.suggestions.items(), strict=True):
        if each.lr is not None:
            yield {
                "x": [each.lr],
                "y": [float(np.interp(each.lr, rates, found.averages))],
                "name": name,
                "mode": "markers",
                "marker": {"size": 20 if name == MEDIAN else 12, "symbol": symbol},
            }
