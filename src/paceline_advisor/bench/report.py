"""Training throughput over batch sizes, devices, precisions and back-ends; and benchmark results.

A combination that cannot run is a row with the reason. Up to four combinations are interleaved, in table order, so that
neighbouring rows are compared fairly. Results are JSON for programs, Markdown and a page with a chart for people, with
machine and settings.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from paceline import __version__
from paceline.command import Log
from paceline.errors import PacelineError
from paceline.host.world import World
from paceline.metrics.intervals import rate_interval
from paceline.pages.page import Chart, Page, Section, Table, write_page
from paceline.pages.shown import Document, Shown
from paceline.parsing.units import format_bytes
from paceline.recipe.load import LoadedRecipe, load_recipe, to_tree
from paceline.recipe.schema import Recipe
from paceline.records.environment import capture_environment
from paceline.records.run_directory import make_folder, write_json, write_text
from paceline.trainer.subject import Subject
from paceline_advisor import Json, frozen, picked
from paceline_advisor.bench.comparison import FILE, FORMAT, compare
from paceline_advisor.bench.interleaved import Measurement, Part, Variant, run_interleaved
from paceline_advisor.bench.latency import measure_latency
from paceline_advisor.bench.target import run_to_target
from paceline_advisor.commands import Bench, BenchCompare
from paceline_advisor.traces import error_bars, trace

# Each keeps its data and network in memory while it waits for its turn.
_AT_ONCE = 4


_MACHINE = ("device_name", "torch", "cuda", "python", "platform", "command")
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


def measure_grid(options: Bench, log: Log) -> tuple[LoadedRecipe, list[Json]]:
    """Measure every combination; return the recipe, and one row per combination that is a distinct run.

    Raises:
        PacelineError: If the recipe itself is wrong, or this process may not start others.
    """
    loaded = options.load()
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
        changed: Json = {}
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
        plan = Subject.open(recipe, world, "plan").plan
    except PacelineError:
        return (cell.name,)
    data = (plan.data.get("backend"), plan.data.get("workers"))
    return (cell.part, plan.device, plan.precision, plan.global_batch_size, *data)


def _row(cell: Cell, processes: int) -> Json:
    """Return a combination as it appears in the result."""
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
    return {**first, **details, **_statistics([each for each in cell.measured if each.rounds], facts)}


def _statistics(successful: list[Measurement], facts: Mapping[str, Any]) -> Json:
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


Row = Mapping[str, Any]


@frozen
class BenchReport:
    """The result of one benchmark.

    Attributes:
        kind: ``throughput``, ``latency`` or ``time_to_target``.
        name: Name of the recipe, the run or the weights.
        recipe: The measured recipe.
        settings: How it was measured.
        rows: One row per measurement.
        notes: Notes needed to read the figures.
    """

    kind: str
    name: str
    recipe: Recipe
    settings: Mapping[str, Any]
    rows: Sequence[Row]
    notes: Sequence[str]

    def to_json(self) -> Json:
        """The result as one JSON object."""
        return {
            "format": FORMAT,
            "paceline": __version__,
            **picked(self, "kind", "name", "settings", "rows", "notes"),
            "recipe": to_tree(self.recipe),
            # Querying a GPU's name does not initialise it.
            "environment": capture_environment(
                {
                    "torch": torch.__version__,
                    "cuda": torch.version.cuda,
                    "device_name": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
                }
            ),
        }

    def __paceline__(self) -> Shown:
        """Show a row per measurement, and how to read them."""
        header, rows = self.table()
        return Shown(
            title=f"{self.name}: {self.kind.replace('_', ' ')}",
            blocks=[Table(columns=header, rows=rows), *(f"  {note}" for note in self.notes)],
            ok=any(row["times"] for row in self.rows) or "",
        )

    def table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Return header and rows as text."""
        columns = _COLUMNS[self.kind]
        used = [name for name, show in columns.items() if name in _ALWAYS or any(show(row) for row in self.rows)]
        return tuple(used), [tuple(columns[name](row) for name in used) for row in self.rows]

    def markdown(self) -> str:
        """Return the complete result as text."""
        header, rows = self.table()
        lines = [f"# {self.name}: {self.kind.replace('_', ' ')}", "", _bar(header), _bar(["---"] * len(header))]
        lines += [*map(_bar, rows), "", *(f"- {note}" for note in self.notes), ""]
        document = self.to_json()["environment"]
        settings = {
            "cpu": document["cpu"]["model"],
            "cores": document["cpu"]["usable_cores"],
            **{name: document.get(name) for name in _MACHINE},
            **self.settings,
        }
        for name, value in settings.items():
            if value not in (None, ()):
                lines.append(f"- {name}: {', '.join(map(str, value)) if isinstance(value, tuple) else value}")
        return "\n".join([*lines, ""])

    def write(self, folder: Path) -> list[Path]:
        """Write ``benchmark.json``, ``.md`` and, with a chart, ``.html``; return the files.

        Raises:
            RunDirectoryError: If the folder cannot be written.
        """
        make_folder(folder)
        json_file = folder / FILE
        write_json(json_file, self.to_json())
        write_text(json_file.with_suffix(".md"), self.markdown())
        written = [json_file, json_file.with_suffix(".md")]
        if (chart := self.chart()) is not None:
            page = Page(title=self.name, subtitle="paceline bench", sections=(Section(title="Speed", blocks=(chart,)),))
            written.append(write_page(json_file.with_suffix(".html"), page))
        return written

    def chart(self) -> Chart | None:
        """Return a chart of throughput over batch sizes; None without batch sizes."""
        rows = [row for row in self.rows if row.get("samples_per_second") is not None and row.get("batch_size")]
        if not rows:
            return None
        lines: dict[str, list[tuple[int, Any]]] = {}
        for row in rows:
            label = " ".join(str(row[key]) for key in ("device", "precision", "backend", "part") if row.get(key))
            lines.setdefault(label, []).append((int(row["batch_size"]), row["samples_per_second"]))
        return Chart(
            title="Throughput by batch size",
            traces=[_trace(label, sorted(line, key=itemgetter(0))) for label, line in lines.items()],
            layout={
                "xaxis": {"title": "batch size", "type": "category"},
                "yaxis": {"title": "samples per second", "rangemode": "tozero"},
            },
            description="Bars are 95 % intervals of the mean; a point without a bar was measured too few times.",
        )


def bench(options: Bench, log: Log) -> BenchReport:
    """Measure throughput, latency or the time to a target, for `paceline bench`.

    Raises:
        PacelineError: If the recipe is invalid, or nothing can be measured here.
    """
    if options.inference:
        kind, names = "latency", ["weights", "batch_sizes", "devices", "precisions", "seconds"]
        name, recipe, rows = measure_latency(options, log)
        notes = latency_notes(rows)
    elif options.to is not None:
        kind, names = "time_to_target", ["to", "runs", "price_per_hour", "processes"]
        loaded, rows = run_to_target(options, log)
        name, recipe, notes = loaded.name, loaded.recipe, target_notes(rows[0])
    else:
        kind, names = "throughput", ["batch_sizes", "devices", "precisions", "backends", "parts"]
        names += ["rounds", "launches", "processes", "seconds"]
        loaded, rows = measure_grid(options, log)
        name, recipe, notes = loaded.name, loaded.recipe, throughput_notes(rows)
    return BenchReport(
        kind=kind,
        name=name,
        recipe=recipe,
        settings=picked(options, *names),
        rows=rows,
        notes=notes,
    )


def compare_results(options: BenchCompare, _: Log) -> Document:
    """Compare two results or run directories, and show the change of each line with its interval and verdict.

    Raises:
        PacelineError: If one of them cannot be read, or they have no measurement in common.
    """
    comparison = compare(options.a, options.b, tolerance=options.tolerance / 100, confidence=options.confidence / 100)
    rows = []
    for line in comparison.lines:
        ratio = line.slower
        change = "" if ratio is None else f"{100 * (ratio.middle - 1):+.1f} %"
        interval = "" if ratio is None else f"{100 * (ratio.low - 1):+.1f} to {100 * (ratio.high - 1):+.1f} %"
        rows.append((line.name, change, interval, line.verdict, line.note))
    differences = comparison.differences.items()
    undecided = "  For rows without enough evidence, measure longer, with more --rounds or --launches."
    verdict = "B is slower" if comparison.regressed else "No slowdown was shown"
    shown = Shown(
        title="B compared with A",
        blocks=[
            Table(columns=("what", "time of B", "interval", "verdict", ""), rows=rows),
            *(f"  differs: {name} is {one} in A and {other} in B" for name, (one, other) in differences),
            *(f"  {note}" for note in comparison.notes),
            *([undecided] if comparison.undecided else []),
            f"  {verdict} by more than {100 * comparison.tolerance:g} %.",
        ],
        ok=not comparison.regressed or "",
    )
    return Document(document=comparison.to_json(), shown=shown)


def _trace(label: str, line: Sequence[tuple[int, Mapping[str, float]]]) -> Json:
    """Return a line of (batch size, rate with its interval)."""
    bars = error_bars((rate["low"], rate["middle"], rate["high"]) for _, rate in line)
    return trace("lines+markers", label, [(size, rate["middle"]) for size, rate in line], error_y=bars)


def throughput_notes(rows: Sequence[Row]) -> list[str]:
    """Return notes for throughputs."""
    warm = [row["warm_up_seconds"] for row in rows if row.get("warm_up_seconds") is not None]
    notes = [
        "together: training as it is; compute: the first step's batches again and again; data: the batches alone",
        "in parentheses: the 95 % interval of the mean over rounds, or over launches where there are several",
    ]
    if warm:
        notes.append(f"each warmed up for {min(warm):.1f} to {max(warm):.1f} s before its first round")
    if any(row.get("alone") for row in rows):
        notes.append("some were measured alone, because memory ran out with the others")
    same = [[row["asked"], *row["same"]] for row in rows if row.get("same")]
    notes += [f"measured once, because they give the same run here: {', '.join(each)}" for each in same]
    loading_rows = [
        row for row in rows if row.get("workers") and row.get("workers_asked") == "auto" and row["part"] != "compute"
    ]
    choices = sorted({(row["workers"], row["workers_reason"]) for row in loading_rows})
    notes += [f"data.workers=auto: {workers} ({why})" for workers, why in choices]
    if any(
        row["processes"] == 1 and row["backend"] == "pytorch" and not row["workers_measured"] for row in loading_rows
    ):
        notes.append(
            "not measured yet: runs of 200,000 images or more would first measure which data.workers is fastest"
        )
    notes += _energy_notes(rows)
    if any(row["device"] == "cpu" and row.get("peak_memory_bytes") for row in rows):
        notes.append("peak memory on a CPU is the training process's main memory, libraries and data in it")
    return notes


def latency_notes(rows: Sequence[Row]) -> list[str]:
    """Return notes for latencies."""
    notes = [
        "a query is a batch of decoded images in main memory; timed until its probabilities are in main memory",
        "single stream: queries of one image (MLPerf reports the 90th percentile); multi stream: of eight (the 99th)",
        "offline: throughput with all images available from the start; MLPerf requires at least ten minutes of each",
    ]
    if any(row["times"] and row["scenario"] != "offline" and row["queries"] < 100 for row in rows):
        notes.append("with fewer than 100 queries, the 99th percentile is the slowest query")
    return [*notes, *_energy_notes(rows)]


def target_notes(row: Row) -> list[str]:
    """Return notes for times to a target."""
    notes = [
        "seconds are of training steps, from the first, by the step clock",
        "wall seconds are from the start of training, with evaluations and saving; neither includes opening the run",
        "the median and its 95 % interval, by Kaplan and Meier: runs that missed the target are censored",
    ]
    if row["cost"] is not None:
        notes.append(f"the cost is the wall seconds' at {row['price_per_hour']:g} an hour")
    if row["reached"] < row["runs"] and row["reached"]:
        notes.append(
            f"with a new start after each failure: {row['seconds_with_restarts']:,.1f} s of training a success"
        )
    return notes


def _energy_notes(rows: Sequence[Row]) -> list[str]:
    reasons = dict.fromkeys(row["no_energy"] for row in rows if row.get("no_energy"))
    counters = dict.fromkeys(row["energy_of"] for row in rows if row.get("energy_of"))
    return [f"energy is unknown: {why}" for why in reasons] + [f"energy of: {each}" for each in counters]


def _bar(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _interval(value: Mapping[str, Any] | None, digits: int = 1) -> str:
    """Format a value with the ends of its interval; an unbounded end is left open."""
    if value is None:
        return ""
    low, middle, high = (
        "–" if end is None or math.isinf(end) else f"{end:,.{digits}f}"
        for end in (value["low"], value["middle"], value["high"])
    )
    return middle if value["count"] < 2 else f"{middle} ({low} to {high})"


_ALWAYS = ("batch", "samples/s", "seconds to target")
Column = Callable[[Row], str]


def _text(key: str) -> Column:
    return lambda row: str(row.get(key) or "")


def _number_column(*keys: str, scale: float = 1, form: str = ",.2f", unit: str = "") -> Column:
    """Return a column of one value, nested in the row if there are two keys; empty if it is missing."""

    def show(row: Row) -> str:
        value: Any = row
        for key in keys:
            value = (value or {}).get(key)
        return "" if value is None else f"{scale * value:{form}}{unit}"

    return show


_FIRST = {"device": _text("device"), "precision": _text("precision")}
_RATE: dict[str, Column] = {"samples/s": lambda row: _interval(row["samples_per_second"])}
_LAST: dict[str, Column] = {
    "peak memory": lambda row: "" if (peak := row.get("peak_memory_bytes")) is None else format_bytes(peak),
    "J/sample": _number_column("joules_per_sample", form=".3g"),
    "trouble": _text("trouble"),
}
_COLUMNS: dict[str, dict[str, Column]] = {
    "throughput": {
        **_FIRST,
        "back-end": _text("backend"),
        "batch": _text("batch_size"),
        "part": _text("part"),
        **_RATE,
        "ms/step": _number_column("step_seconds", "median", scale=1e3),
        "workers": lambda row: str(row["workers"]) if row.get("workers") and row["part"] != "compute" else "",
        "data wait": _number_column("data_wait_fraction", scale=100, form=".0f", unit=" %"),
        **_LAST,
    },
    "latency": {
        **_FIRST,
        "scenario": _text("scenario"),
        "batch": _text("batch_size"),
        **_RATE,
        "mean ms": _number_column("latency_seconds", "mean", scale=1e3),
        **{f"{each} %": _number_column("latency_seconds", f"p{each}", scale=1e3) for each in (50, 90, 95, 99)},
        "queries": _text("queries"),
        **_LAST,
    },
    "time_to_target": {
        "target": lambda row: f"{row['metric']} {row['target']:g}",
        "runs": lambda row: str(row["runs"]),
        "reached": lambda row: str(row["reached"]),
        "seconds to target": lambda row: _interval(row["median_seconds"]),
        "wall seconds": lambda row: _interval(row["median_wall_seconds"]),
        "cost": lambda row: _interval(row["cost"], 4),
        "trouble": _text("trouble"),
    },
}
