"""Step time by phase, waiting between ranks, and the bottleneck with what to change.

Computed from the step records alone, of a finished or running run. Each record holds means over the steps since the
previous record; they are averaged here, weighted by these steps. The first steps of each launch include one-time costs
and are left out if the launch has others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

from paceline.errors import RunDirectoryError
from paceline.pages.blocks import Table
from paceline.pages.shown import Shown
from paceline.parsing.units import counted
from paceline.records.reader import read_for_report, read_plan
from paceline.records.run_directory import existing_run
from paceline.telemetry.meter import PHASES, WARMUP_STEPS

# Minimum ratio to the other ranks' time, and minimum share of records, to report that ranks wait for one.
_SLOW_FACTOR, _SLOW_SHARE = 1.25, 0.75
# If the host spends this share of the device's time on launching its passes, the device waits for the host.
_LAUNCHING = 0.9
Record = Mapping[str, Any]
_STEPS = "steps"  # steps covered by a record; added to each
_RANK_KEYS = ("minimum", "median", "maximum")
_HIDDEN = {
    "communication": "communication cannot be separated from computing where weights are sharded: it is in forward and "
    "backward.",
    "h2d": "the task's own data pipeline does not report transfers to the device: they are in data_wait.",
}


@dataclass(frozen=True, kw_only=True)
class RankSpread:
    """Seconds per step of a phase, over the ranks.

    Attributes:
        minimum: Minimum over the ranks.
        median: Median over the ranks.
        maximum: Maximum over the ranks.
        most_rank: The rank that is slowest in most records.
    """

    minimum: float
    median: float
    maximum: float
    most_rank: int


@dataclass(frozen=True, kw_only=True)
class PhaseTime:
    """One phase of the step, on rank 0.

    Attributes:
        name: One of the step clock's phases.
        seconds: Mean per step.
        share: Share of the step, in [0, 1].
        over_ranks: None for a single process.
        launch_seconds: The same by the host's clock; None if ``seconds`` is the host's time already.
    """

    name: str
    seconds: float
    share: float
    over_ranks: RankSpread | None = None
    launch_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """Ranks that wait for one slow rank.

    Attributes:
        rank: The rank that the others wait for.
        phase: The phase in which it exceeds the others most.
        factor: Its seconds per step over the others'; median of the records.
        waiting_rank: The rank that waits longest.
        waiting_share: Share of a step that it waits, in [0, 1].
    """

    rank: int
    phase: str
    factor: float
    waiting_rank: int
    waiting_share: float


@dataclass(frozen=True, kw_only=True)
class Attribution:
    """Breakdown of a run's step time.

    Attributes:
        run_dir: The run.
        world_size: World size of its last launch.
        records: Number of step records used.
        steps: Number of steps they cover.
        step_seconds: Mean per step.
        median_step_seconds: Median of the records' means.
        phases: In the order of a step.
        waiting: Which ranks wait for which; None if unclear.
        bottleneck: The bottleneck, in a sentence; None if unclear.
        notes: What the records cannot show, one sentence each.
    """

    run_dir: Path
    world_size: int
    records: int
    steps: int
    step_seconds: float
    median_step_seconds: float
    phases: tuple[PhaseTime, ...]
    waiting: Waiting | None
    bottleneck: str | None
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the attribution as one JSON object."""
        return asdict(self) | {
            "run_dir": str(self.run_dir),
            "phases": {
                each.name: {key: value for key, value in asdict(each).items() if key != "name"} for each in self.phases
            },
        }

    def __paceline__(self) -> Shown:
        """Show the phases, the ranks that wait, and the bottleneck."""
        has_launches = any(each.launch_seconds is not None for each in self.phases)
        columns = ["phase", "ms per step", "share", *["ms of the host"] * has_launches]
        if self.world_size > 1:
            columns += ["least", "middle", "most over ranks", "whose"]
        total = PhaseTime(name="step", seconds=self.step_seconds, share=1.0)
        rows: list[Sequence[str]] = []
        for each in (*self.phases, total):
            row = [each.name, _ms(each.seconds), f"{each.share:.1%}"]
            if has_launches:
                row.append("" if each.launch_seconds is None else _ms(each.launch_seconds))
            if self.world_size > 1:
                ranks = each.over_ranks
                seconds = () if ranks is None else (ranks.minimum, ranks.median, ranks.maximum)
                row += [""] * 4 if ranks is None else [*map(_ms, seconds), f"rank {ranks.most_rank}"]
            rows.append(row)
        steps, records = counted(self.steps, "step"), counted(self.records, "record")
        mean, middle = _ms(self.step_seconds), _ms(self.median_step_seconds)
        lines = [f"{steps} in {records}: {mean} ms per step, in the middle record {middle} ms."]
        if self.waiting is not None and "waiting for rank" not in (self.bottleneck or ""):
            lines.append(
                f"Rank {self.waiting.waiting_rank} waits longest, and rank {self.waiting.rank} is waited for: it takes "
                f"{self.waiting.factor:.2f} times as long as the others, most of it in {self.waiting.phase}."
            )
        lines += [f"Note: {note}" for note in self.notes]
        lines.append(f"Bound by {self.bottleneck}" if self.bottleneck else "No single bottleneck stands out.")
        return Shown(blocks=(Table(columns=columns, rows=rows), *lines))


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}" if seconds < 0.01 else f"{1e3 * seconds:.1f}"


def attribute_run(run_dir: Path) -> Attribution:
    """Attribute step time from the step records of a run's last world size, since the bottleneck depends on it.

    Raises:
        RunDirectoryError: If the directory holds no run, or one without a step record.
    """
    directory = existing_run(run_dir)
    if not directory.events.exists():
        return attribute_events(run_dir, (), read_plan(directory))
    events, notes = read_for_report(directory.events, kinds=("start", "step"))
    attribution = attribute_events(run_dir, events, read_plan(directory))
    return replace(attribution, notes=(*attribution.notes, *notes))


def attribute_events(run_dir: Path, events: Iterable[Mapping[str, Any]], plan: Mapping[str, Any]) -> Attribution:
    """Attribute step time from a run's ``start`` and ``step`` events.

    Raises:
        RunDirectoryError: If there is no step record among them.
    """
    world_size, records = _records(events)
    if not records:
        raise RunDirectoryError(
            f"the run in '{run_dir}' has written no step record yet; let it take more steps, or log more often with "
            "telemetry.log_every."
        )
    phases = tuple(_phases(records))
    mean = _mean(records, "step_seconds")
    waiting = _waiting(records)
    return Attribution(
        run_dir=run_dir,
        world_size=world_size,
        records=len(records),
        steps=sum(each[_STEPS] for each in records),
        step_seconds=mean,
        median_step_seconds=median(each["step_seconds"] for each in records),
        phases=phases,
        waiting=waiting,
        bottleneck=_bottleneck(records, waiting, plan),
        notes=tuple(_notes(records[-1])),
    )


def _records(events: Iterable[Record]) -> tuple[int, list[Record]]:
    """Return the records of each launch with the last world size, with their steps, and that size."""
    world_size, previous, is_first = 1, 0, True
    timed: list[Record] = []
    only_warmup: list[Record] = []
    for event in events:
        position = int(event.get("position", event["step"]))
        if event["event"] == "start":
            if event["world_size"] != world_size:
                world_size, timed, only_warmup = int(event["world_size"]), [], []
            previous, is_first = position, True
            continue
        steps, previous = position - previous, position
        if not event.get("step_seconds") or steps < 1:
            continue
        if event.get("throughput_samples_per_second") is None:
            only_warmup.append({**event, _STEPS: steps})
        else:
            timed.append({**event, _STEPS: max(steps - WARMUP_STEPS * is_first, 1)})
            is_first = False
    return world_size, timed or only_warmup


def _mean(records: Sequence[Record], key: str) -> float:
    """Return the mean of a key over steps, not over records."""
    return fmean([each[key] for each in records], [each[_STEPS] for each in records])


def _phases(records: Sequence[Record]) -> Iterator[PhaseTime]:
    step_seconds = _mean(records, "step_seconds")
    for name in PHASES:
        if any(each.get(f"{name}_seconds") is None for each in records):
            continue
        seconds = _mean(records, f"{name}_seconds")
        launches = all(each.get(f"launch_{name}_seconds") is not None for each in records)
        yield PhaseTime(
            name=name,
            seconds=seconds,
            share=seconds / step_seconds if step_seconds else 0.0,
            over_ranks=_rank_spread(records, name),
            launch_seconds=_mean(records, f"launch_{name}_seconds") if launches else None,
        )


def _rank_spread(records: Sequence[Record], phase: str) -> RankSpread | None:
    spreads = []
    for each in records:
        ranks = each.get("rank_seconds")
        spread = ranks.get(phase) if isinstance(ranks, Mapping) else None
        if not isinstance(spread, Mapping) or any(spread.get(key) is None for key in (*_RANK_KEYS, "most_rank")):
            return None
        spreads.append({**spread, _STEPS: each[_STEPS]})
    slowest = Counter(each["most_rank"] for each in spreads)
    return RankSpread(**{key: _mean(spreads, key) for key in _RANK_KEYS}, most_rank=slowest.most_common(1)[0][0])


def _waiting(records: Sequence[Record]) -> Waiting | None:
    """Return which rank the others wait for, if it is the same in nearly all records and clearly slower."""
    slow = [each for each in records if None not in map(each.get, ("slowest_rank", "slowest_phase", "slowest_factor"))]
    communication = _rank_spread(records, "communication")
    if not slow or communication is None:
        return None
    rank, count = Counter(record["slowest_rank"] for record in slow).most_common(1)[0]
    of_rank = [record for record in slow if record["slowest_rank"] == rank]
    factor = median(record["slowest_factor"] for record in of_rank)
    if count < _SLOW_SHARE * len(records) or factor < _SLOW_FACTOR:
        return None
    return Waiting(
        rank=rank,
        phase=Counter(record["slowest_phase"] for record in of_rank).most_common(1)[0][0],
        factor=factor,
        waiting_rank=communication.most_rank,
        waiting_share=communication.maximum / _mean(records, "step_seconds"),
    )


def _notes(last: Record) -> Iterator[str]:
    for phase, sentence in _HIDDEN.items():
        if last.get(f"{phase}_seconds", 0.0) is None:
            yield sentence


# Minimum number of records, and the share of a step that a phase must reach in three of four of them.
_LEAST_RECORDS = 3
_LEAST_SHARES = {
    "data_wait": 0.10,
    "h2d": 0.10,
    "communication": 0.10,
    "optimizer": 0.30,
    "ema": 0.10,
    "logging": 0.05,
    "host": 0.15,
}
_COMPUTING = 0.75
# If the device lags the host by less than this share of a step, the device waits for the host.
_NO_LAG = 0.1


def _bottleneck(records: Sequence[Record], waiting: Waiting | None, plan: Mapping[str, Any]) -> str | None:
    """Name the bottleneck: the cause of waiting for a rank, else the largest avoidable share, else computing."""
    timed = [each for each in records if each["step_seconds"] > 0]
    shares = {
        phase: [value / each["step_seconds"] for each in timed if (value := each.get(f"{phase}_seconds")) is not None]
        for phase in PHASES
    }
    if max(map(len, shares.values())) < _LEAST_RECORDS:
        return None
    if waiting is not None and waiting.waiting_share >= _LEAST_SHARES["communication"]:
        return (
            f"communication: {waiting.waiting_share:.0%} of a step of rank {waiting.waiting_rank} is spent waiting for "
            f"rank {waiting.rank}, which takes {waiting.factor:.1f} times as long as the others for its own part, most "
            f"of it in {waiting.phase}."
        )
    typical = {phase: median(each) if each else 0.0 for phase, each in shares.items()}
    # Reached by three in four records.
    dominant = {
        phase: typical[phase] for phase in _LEAST_SHARES if _quartiles(shares[phase])[0] >= _LEAST_SHARES[phase]
    }
    if dominant:
        largest = max(dominant, key=lambda phase: dominant[phase])
        return _SENTENCES[largest](plan).format(share=dominant[largest])
    lags = [lag for each in timed if (lag := _lag(each)) is not None]
    if len(lags) >= _LEAST_RECORDS and _quartiles(lags)[2] < _NO_LAG:
        return (
            "launching: the device finishes its work before the host launches more; use a larger "
            "batch.micro_size, or model.compile=true."
        )
    computing = typical["forward"] + typical["backward"]
    # If communication is not measured separately, the passes may include waiting.
    is_separate = bool(shares["communication"]) or plan.get("strategy") == "single"
    if computing >= _COMPUTING and is_separate:
        return f"computing: forward and backward passes take {computing:.0%} of a step; there is little else to gain."
    return None


def _lag(record: Record) -> float | None:
    """Return how far the device lags behind the host, in steps; None on a CPU."""
    device_seconds, launch_seconds = (
        sum(record.get(f"{prefix}{phase}_seconds") or 0.0 for phase in ("forward", "backward"))
        for prefix in ("", "launch_")
    )
    # A host that launches a pass well before the device finishes it does not hold the device back. This also holds if
    # the two synchronise at the end of each step, as with a loss scaler, where the lag tells nothing.
    if launch_seconds < _LAUNCHING * device_seconds:
        return 1.0
    lag: float | None = record.get("device_lag_seconds")
    return None if lag is None else lag / record["step_seconds"]


def _quartiles(shares: Sequence[float]) -> list[float]:
    return quantiles(shares) if len(shares) >= _LEAST_RECORDS else [0.0] * 3


def _data(plan: Mapping[str, Any]) -> str:
    data = plan.get("data", {})
    if data.get("backend") is None:
        advice = "the task's own pipeline makes them (its open_pipeline): let it read ahead, in other processes"
    elif data["backend"] not in ("memory", "synthetic"):
        advice = f"use more than data.workers={data.get('workers')}, or packed data (paceline pack)"
    else:
        advice = "vary images less, or let loader processes do it: data.backend=pytorch with data.workers"
    return "data: {share:.0%} of a step waits for batches; " + advice + "."


_SENTENCES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "data_wait": _data,
    "h2d": lambda plan: (
        "data: {share:.0%} of a step is spent on normalising and mixing batches; use a smaller data.image_size."
        if plan.get("device") == "cpu"
        else "data: {share:.0%} of a step waits for its batch to reach the device; use a smaller data.image_size, or "
        "check that nothing else uses the bus."
    ),
    "communication": lambda plan: (
        "communication: {share:.0%} of a step waits for the exchange of gradients; use more samples per process and "
        "step (batch.global_size)"
        + (", or send less (parallel.gradient_compression)." if plan.get("strategy") == "ddp" else ".")
    ),
    "optimizer": lambda _: (
        "optimizer: {share:.0%} of a step goes into clipping and the update; use a larger batch.global_size, so that "
        "there are fewer updates."
    ),
    "ema": lambda _: "moving average: it takes {share:.0%} of a step; use a larger batch.global_size.",
    "logging": lambda _: (
        "logging: {share:.0%} of a step goes into records; use a larger telemetry.log_every, or fewer "
        "telemetry.trackers."
    ),
    "host": lambda _: (
        "host: {share:.0%} of a step is spent in Python between its phases; use a larger batch.micro_size, so that "
        "there are fewer steps."
    ),
}
