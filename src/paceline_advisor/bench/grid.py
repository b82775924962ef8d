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
from paceline_advisor.bench.interleaved import Measurement, Part, Variant, run_interleaved
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
    measured: list[Measurement] = field(default_factory=list)
    same: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Describe the measurement in words."""
        return f"{self.device} {self.precision} {self.backend} batch {self.batch_size} {self.part}"


def measure_grid(options: Bench, log: Callable[[str], None]) -> tuple[LoadedRecipe, list[dict[str, Any]]]:
    """Measure every combination; return the recipe, and one row per combination that is a distinct run.

    Raises:
        PacelineError: If the recipe itself is wrong, or this process may not start others.
    """
    loaded = load_recipe(options.recipe, options.overrides)
    cells = _once_each(list(_cells(options, loaded.recipe)), options)
    able = [(cell, cell.variant) for cell in cells if cell.variant is not None]
    for launch in range(options.launches):
        for start in range(0, len(able), _AT_ONCE):
            batch = able[start : start + _AT_ONCE]
            prefix = f"launch {launch + 1} of {options.launches}, " if options.launches > 1 else ""
            log(f"{prefix}{start + 1} to {start + len(batch)} of {len(able)} combinations")
            variants = {cell.name: variant for cell, variant in batch}
            measurements = run_interleaved(variants, rounds=options.rounds, block_seconds=options.seconds, log=log)
            for cell, _ in batch:
                cell.measured.append(measurements[cell.name])
    return loaded, [_row(cell, options.processes) for cell in cells]


def _cells(options: Bench, recipe: Recipe) -> Iterator[Cell]:
    choices = itertools.product(
        options.devices or (recipe.parallel.device,),
        options.batch_sizes or (recipe.batch.global_size,),
        options.precisions or (recipe.train.precision,),
        options.backends or (recipe.data.backend,),
    )
    for device, batch_size, precision, backend in choices:
        changed: dict[str, Any] = {}
        if options.devices:
            changed["parallel.device"] = device
        if options.batch_sizes:
            # The batch size is what a device is to process at once, whatever micro-batches the recipe used.
            changed |= {"batch.global_size": batch_size, "batch.micro_size": "auto", "batch.growth": None}
        if options.precisions:
            changed["train.precision"] = precision
        if options.backends:
            changed["data.backend"] = backend
        settings = [f"{key}={'null' if value is None else value}" for key, value in changed.items()]
        cell_recipe, refusal = None, ""
        try:
            cell_recipe = load_recipe(options.recipe, (*options.overrides, *settings)).recipe
        except PacelineError as error:
            refusal = str(error)
        for part in options.parts:
            variant = (
                None if cell_recipe is None else Variant(recipe=cell_recipe, part=part, processes=options.processes)
            )
            yield Cell(device, precision, backend, batch_size, part, variant, refusal)


def _once_each(cells: Sequence[Cell], options: Bench) -> list[Cell]:
    """Merge cells that resolve to the same run; the kept one lists the others' names."""
    choices = (options.devices, options.precisions, options.backends)
    if not any(len(names) > 1 and "auto" in names for names in choices):
        return list(cells)  # each has a different reason
    unique: dict[tuple[Any, ...], Cell] = {}
    for cell in cells:
        first = unique.setdefault(_identity(cell), cell)
        if first is not cell:
            first.same.append(cell.name)
    return list(unique.values())


def _identity(cell: Cell) -> tuple[Any, ...]:
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
    successful = [each for each in cell.measured if each.rounds]
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
    details = {
        "trouble": trouble or None,
        "out_of_memory": any(each.out_of_memory for each in cell.measured),
        "asked": cell.name,
        "same": cell.same,
        "threads": facts.get("threads_per_process"),
        **{key: facts.get(key) for key in _FACTS},
    }
    return {**first, **details, **_statistics(successful, facts)}


def _statistics(successful: list[Measurement], facts: Mapping[str, Any]) -> dict[str, Any]:
    if not successful:
        return {"samples_per_second": None, "times": []}
    times = [each.seconds_per_sample for each in successful]
    # Variation between launches shows only when launches are compared.
    rate = rate_interval([statistics.fmean(each) for each in times] if len(times) > 1 else times[0])
    steps = [seconds for each in successful for seconds in each.step_seconds]
    peaks = [each.peak_memory_bytes for each in successful if each.peak_memory_bytes is not None]
    joules = [each.joules_per_sample for each in successful]
    measured = [each for each in joules if each is not None]
    return {
        "samples_per_second": rate.to_json(),
        "step_seconds": {"median": statistics.median(steps), "minimum": min(steps), "maximum": max(steps)},
        "data_wait_fraction": statistics.fmean(each.data_wait_fraction or 0.0 for each in successful),
        "phases": {name: statistics.fmean(each.phases[name] for each in successful) for name in successful[0].phases},
        "peak_memory_bytes": max(peaks, default=None),
        "joules_per_sample": statistics.fmean(measured) if len(measured) == len(joules) else None,
        "energy_of": facts.get("energy_of") or None,
        "no_energy": facts.get("no_energy") or None,
        "warm_up_steps": successful[0].warm_up_steps,
        "warm_up_seconds": successful[0].warm_up_seconds,
        "steps_per_round": successful[0].rounds[0].steps,
        "alone": any(each.alone for each in successful),
        "times": times,
    }
