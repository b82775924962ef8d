"""Training throughput over batch sizes, devices, precisions and back-ends.

A combination that cannot run is a row with the reason. Up to four combinations are interleaved, in table order, so that
neighbouring rows are compared fairly.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.distributed.device import choose_device, describe_machine
from paceline.errors import PacelineError
from paceline.metrics.intervals import rate_interval
from paceline.recipe.load import LoadedRecipe, load_recipe
from paceline.recipe.schema import Recipe
from paceline.tasks.task import build_task
from paceline.trainer.preparation import plan_run
from paceline.world import World
from paceline_advisor.bench.interleaved import Measured, Part, Variant, run_bursts
from paceline_advisor.commands import Bench

# Each keeps its data and network in memory while it waits for its turn.
_AT_ONCE = 4


_FACTS = ("workers", "workers_asked", "workers_reason", "workers_measured", "parameters", "compile", "channels_last")


@dataclass
class Cell:
    """One combination.

    Attributes:
        device: As requested, like the others.
        variant: A recipe with these settings; None if there is none.
        refusal: Why there is no recipe.
        measured: The result of each launch.
        same: Other combinations that resolve to this one here, such as ``auto``; measured once.
    """

    device: str
    precision: str
    backend: str
    batch_size: int
    part: Part
    variant: Variant | None
    refusal: str
    measured: list[Measured] = field(default_factory=list)
    same: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Describe the measurement in words."""
        return f"{self.device} {self.precision} {self.backend} batch {self.batch_size} {self.part}"


def measure_grid(asked: Bench, say: Callable[[str], None]) -> tuple[LoadedRecipe, list[dict[str, Any]]]:
    """Measure every combination; return the recipe, and one row per combination that is a distinct run.

    Raises:
        PacelineError: If the recipe itself is wrong, or this process may not start others.
    """
    loaded = load_recipe(asked.recipe, asked.overrides)
    cells = _once_each(list(_cells(asked, loaded.recipe)), asked)
    able = [(cell, cell.variant) for cell in cells if cell.variant is not None]
    for launch in range(asked.launches):
        for start in range(0, len(able), _AT_ONCE):
            together = able[start : start + _AT_ONCE]
            which = f"launch {launch + 1} of {asked.launches}, " if asked.launches > 1 else ""
            say(f"{which}{start + 1} to {start + len(together)} of {len(able)} combinations")
            variants = {cell.name: variant for cell, variant in together}
            found = run_bursts(variants, rounds=asked.rounds, block_seconds=asked.seconds, say=say)
            for cell, _ in together:
                cell.measured.append(found[cell.name])
    return loaded, [_row(cell, asked.processes) for cell in cells]


def _cells(asked: Bench, recipe: Recipe) -> Iterator[Cell]:
    choices = itertools.product(
        asked.devices or (recipe.parallel.device,),
        asked.batch_sizes or (recipe.batch.global_size,),
        asked.precisions or (recipe.train.precision,),
        asked.backends or (recipe.data.backend,),
    )
    for device, batch_size, precision, backend in choices:
        changed: dict[str, Any] = {}
        if asked.devices:
            changed["parallel.device"] = device
        if asked.batch_sizes:
            # The batch size is what a device is to process at once, whatever micro-batches the recipe used.
            changed |= {"batch.global_size": batch_size, "batch.micro_size": "auto", "batch.growth": None}
        if asked.precisions:
            changed["train.precision"] = precision
        if asked.backends:
            changed["data.backend"] = backend
        given = [f"{key}={'null' if value is None else value}" for key, value in changed.items()]
        made, refusal = None, ""
        try:
            made = load_recipe(asked.recipe, (*asked.overrides, *given)).recipe
        except PacelineError as error:
            refusal = str(error)
        for part in asked.parts:
            variant = None if made is None else Variant(recipe=made, part=part, processes=asked.processes)
            yield Cell(device, precision, backend, batch_size, part, variant, refusal)


def _once_each(cells: Sequence[Cell], asked: Bench) -> list[Cell]:
    """Merge cells that resolve to the same run; the kept one lists the others' names."""
    choices = (asked.devices, asked.precisions, asked.backends)
    if not any(len(names) > 1 and "auto" in names for names in choices):
        return list(cells)  # each has a different reason
    kept: dict[tuple[Any, ...], Cell] = {}
    for cell in cells:
        first = kept.setdefault(_comes_to(cell), cell)
        if first is not cell:
            first.same.append(cell.name)
    return list(kept.values())


def _comes_to(cell: Cell) -> tuple[Any, ...]:
    """Return a cell with its ``auto`` values resolved here; unchanged if it cannot be planned."""
    if cell.variant is None:
        return (cell.name,)
    recipe, processes = cell.variant.recipe, cell.variant.processes
    world = World(world_size=processes, local_world_size=processes)
    try:
        machine = describe_machine(choose_device(recipe.parallel.device, world), processes=processes)
        plan = plan_run(recipe, build_task(recipe), machine, world)
    except PacelineError:
        return (cell.name,)
    data = (plan.data.get("backend"), plan.data.get("workers"))
    return (cell.part, plan.device, plan.precision, plan.global_batch_size, *data)


def _row(cell: Cell, processes: int) -> dict[str, Any]:
    """Return a combination as it appears in the result."""
    good = [each for each in cell.measured if each.rounds]
    facts = dict(cell.measured[0].facts) if cell.measured else {}
    first = {
        "device": facts.get("device", cell.device),
        "device_name": facts.get("device_name"),
        "precision": facts.get("precision", cell.precision),
        "backend": facts.get("backend") or cell.backend,
        "batch_size": cell.batch_size,
        "part": cell.part,
        "processes": processes,
    }
    trouble = cell.refusal or next((each.trouble for each in cell.measured if each.trouble), "")
    told = {
        "trouble": trouble or None,
        "out_of_memory": any(each.out_of_memory for each in cell.measured),
        "asked": cell.name,
        "same": cell.same,
        "threads": facts.get("threads_per_process"),
        **{key: facts.get(key) for key in _FACTS},
    }
    return {**first, **told, **_figures(good, facts)}


def _figures(good: list[Measured], facts: Mapping[str, Any]) -> dict[str, Any]:
    if not good:
        return {"samples_per_second": None, "times": []}
    times = [each.seconds_per_sample for each in good]
    # Variation between launches shows only when launches are compared.
    rate = rate_interval([statistics.fmean(each) for each in times] if len(times) > 1 else times[0])
    steps = [seconds for each in good for seconds in each.step_seconds]
    peaks = [each.peak_memory_bytes for each in good if each.peak_memory_bytes is not None]
    joules = [each.joules_per_sample for each in good]
    known = [each for each in joules if each is not None]
    return {
        "samples_per_second": rate.to_json(),
        "step_seconds": {"median": statistics.median(steps), "minimum": min(steps), "maximum": max(steps)},
        "data_wait_fraction": statistics.fmean(each.data_wait_fraction or 0.0 for each in good),
        "phases": {name: statistics.fmean(each.phases[name] for each in good) for name in good[0].phases},
        "peak_memory_bytes": max(peaks, default=None),
        "joules_per_sample": statistics.fmean(known) if len(known) == len(joules) else None,
        "energy_of": facts.get("energy_of") or None,
        "no_energy": facts.get("no_energy") or None,
        "warm_up_steps": good[0].warm_up_steps,
        "warm_up_seconds": good[0].warm_up_seconds,
        "steps_per_round": good[0].rounds[0].steps,
        "alone": any(each.alone for each in good),
        "times": times,
    }
