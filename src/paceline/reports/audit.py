"""The audit: each training sample was used exactly once per epoch, in the recipe's order.

Independent checks that use the run directory alone. *Records*: the events reach the run's end and each checkpoint from
which the run was resumed. *Counting*: over all ranks' ledgers, every sample of a finished epoch was used once (or found
broken once). *Order*: the samples of every step equal the pure function of (seed, epoch, step). If steps are balanced
by sample length, the run directory also holds the lengths.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.data.balance import SampleLengths
from paceline.data.class_sampling import ClassDraws
from paceline.data.order import StepGeometry
from paceline.data.shard_order import ShardSizes
from paceline.data.slices import SampleSlice
from paceline.errors import RunDirectoryError
from paceline.host.world import World
from paceline.pages.blocks import Table
from paceline.pages.shown import Shown
from paceline.parsing.units import format_count
from paceline.records.ledger import (
    Entry,
    EpochCount,
    LedgerEntry,
    LedgerStream,
    LedgerSummary,
    PositionEntry,
    count_epochs,
    digest_of,
    ledger_path,
    read_ledger,
    read_lengths,
)
from paceline.records.own_ledger import OwnLedger, count_own_epochs, read_own_ledger
from paceline.records.reader import read_identity, read_plan_to_resume, read_recipe, read_summary, wrong_records
from paceline.records.run_directory import RunDirectory, existing_run

_NAMED = 5
_MOST_IN_STEP = 2**26  # samples; more would take more memory than there may be


@dataclass(frozen=True, kw_only=True)
class AuditResult:
    """What the ledgers prove.

    Attributes:
        run_dir: The audited run.
        steps: Global batches that the run reports as used.
        samples_per_epoch: Training samples.
        epochs: Counts of each epoch.
        objections: Problems, one sentence each; empty if there are none.
        left_out: Data that never became samples, counted by reason in the run's plan, such as invalid lines.
        is_drawn: Whether samples were drawn with replacement (``data.sampling``, ``data.mixture``): duplicate and
            missing samples are then counted relative to the recipe's draws.
        has_order: Whether the order was audited too; a loop without a recipe has none to compare with.
    """

    run_dir: Path
    steps: int
    samples_per_epoch: int
    epochs: tuple[EpochCount, ...]
    objections: tuple[str, ...]
    left_out: Mapping[str, int] = field(default_factory=dict)
    is_drawn: bool = False
    has_order: bool = True

    @property
    def passed(self) -> bool:
        """Whether each sample was used exactly once per epoch, in order."""
        return not self.objections

    def to_json(self) -> dict[str, Any]:
        """Return the audit as one JSON object."""
        counted = LedgerSummary(samples_per_epoch=self.samples_per_epoch, epochs=self.epochs)
        return {
            "run_dir": str(self.run_dir),
            "passed": self.passed,
            "steps": self.steps,
            "objections": list(self.objections),
            "left_out": dict(self.left_out),
            "drawn_with_replacement": self.is_drawn,
            **counted.to_json(),
        }

    def __paceline__(self) -> Shown:
        """Show the counts of each epoch and the verdict."""
        lines = []
        for name, count in self.left_out.items():
            reason = name.replace("_", " ").removesuffix("s" if count == 1 else "")
            lines.append(f"left out: {format_count(count)} {reason}, which gave no sample")
        lines += [f"objection: {objection}" for objection in self.objections]
        if self.passed:
            order = ", in the recipe's order" * self.has_order
            noun = "draws (data.sampling or data.mixture)" if self.is_drawn else "samples"
            lines.append(
                f"Passed: over {format_count(self.steps)} steps each of {format_count(self.samples_per_epoch)} {noun} "
                f"was used{', or found broken,' * any(one.broken for one in self.epochs)} exactly once per "
                f"{'finished ' * any(not one.is_over for one in self.epochs)}epoch{order}."
            )
        rows = [
            (
                one.name,
                format_count(one.used),
                one.duplicates,
                one.missing,
                one.broken,
                "complete" if one.is_complete else ("WRONG" if one.is_over else "under way"),
            )
            for one in self.epochs
        ]
        table = Table(columns=("epoch", "used", "duplicates", "missing", "broken", ""), rows=rows)
        return Shown(blocks=(table, *lines), ok=self.passed)


def audit_run(run_dir: Path) -> AuditResult:
    """Audit the ledger of a stopped or completed run, or of a loop that used :class:`paceline.ledger.Ledger`.

    Raises:
        RunDirectoryError: If the directory does not hold a stopped or completed run, or such a ledger.
    """
    if (own := read_own_ledger(run_dir)) is not None:
        return _audit_own_ledger(run_dir, own)
    directory = existing_run(run_dir)
    plan, recipe = read_plan_to_resume(directory), read_recipe(directory)
    geometry = _geometry(plan, recipe)
    if not directory.summary.is_file():
        raise RunDirectoryError(
            f"the run in '{run_dir}' has not finished (no summary.json): it is still running, or was killed; run its "
            "train command again, to the end or to a stop, then audit it."
        )
    summary = read_summary(directory)
    if summary.status == "failed":
        raise RunDirectoryError(
            f"the run in '{run_dir}' failed and was not finished; run its train command again, then audit it."
        )
    epoch, within = divmod(summary.samples, geometry.samples)
    batch = geometry.epochs.phase_of_epoch(epoch).global_batch_size
    steps = geometry.epochs.first_step(epoch) + -(-within // batch)
    epochs: tuple[EpochCount, ...] = ()
    objections: list[str] = []
    try:
        identity = read_identity(directory)
        wrong = wrong_records(directory, None if identity is None else identity.id, steps=summary.step)
        objections += [f"{each}." for each in wrong]
        draws, over = _draws(directory, plan), geometry.epochs.completed(steps)
        geometry = replace(geometry, draws=draws, shards=_shards(directory, plan))
        counted = count_epochs(
            *(directory.ledger, geometry.samples), epochs_over=over, order=geometry.ids_at, is_drawn=draws is not None
        )
        epochs = counted.epochs
        objections += _wrong_counts(epochs, is_drawn=draws is not None)
        # Sample uses can be counted without lengths; their order cannot be checked.
        objections += _wrong_order(directory.ledger, replace(geometry, lengths=_lengths(directory, plan)), steps)
    except RunDirectoryError as error:
        objections = [*objections, str(error)]
    return AuditResult(
        run_dir=run_dir,
        steps=steps,
        samples_per_epoch=geometry.samples,
        epochs=epochs,
        objections=tuple(objections),
        left_out={
            name.removesuffix("_left_out"): each
            for name, each in plan.get("data", {}).items()
            if name.endswith("_left_out") and isinstance(each, int) and each
        },
        is_drawn=bool(plan.get("sampling") or plan.get("mixture")),
    )


def _audit_own_ledger(folder: Path, facts: OwnLedger) -> AuditResult:
    steps, epochs, gaps = count_own_epochs(folder, facts)
    return AuditResult(
        run_dir=folder,
        steps=steps,
        samples_per_epoch=facts.samples - facts.dropped,
        epochs=epochs,
        objections=(*gaps, *_wrong_counts(epochs, is_drawn=False)),
        has_order=False,
    )


def used_samples(run_dir: Path, rank: int) -> Iterator[LedgerEntry]:
    """Yield one rank's records with the ids of their samples; where positions are recorded, those of the order.

    Raises:
        RunDirectoryError: If the directory does not hold a run, its ledger is damaged, or other samples were used at
            recorded positions than those of the order.
    """
    directory = existing_run(run_dir)
    geometry = ledger_geometry(directory)
    path = ledger_path(directory.ledger, rank)
    for entry in read_ledger(path):
        if isinstance(entry, PositionEntry):
            ids = geometry.ids_at(entry.epoch, entry.first, entry.first + entry.samples)
            if digest_of(ids) != entry.digest:
                raise RunDirectoryError(
                    f"step {entry.step} in '{path}' used other samples than those of the order at its positions: the "
                    "digest does not match, so the samples are unknown."
                )
            yield LedgerEntry(entry.step, entry.epoch, ids, np.empty(0, dtype=np.int64))
        else:
            yield entry


def ledger_geometry(directory: RunDirectory) -> StepGeometry:
    """Return which samples lie at which position of each epoch's order.

    Raises:
        RunDirectoryError: If recipe or plan is damaged, or the lengths or classes that the order depends on are.
    """
    plan = read_plan_to_resume(directory)
    geometry = _geometry(plan, read_recipe(directory))
    lengths, shards = _lengths(directory, plan), _shards(directory, plan)
    return replace(geometry, draws=_draws(directory, plan), lengths=lengths, shards=shards)


def _lengths(directory: RunDirectory, plan: Mapping[str, Any]) -> SampleLengths | None:
    """Return the lengths used for balancing, if any.

    Raises:
        RunDirectoryError: If they are missing or have changed.
    """
    digest = plan.get("lengths_sha256")
    if digest is None:
        return None
    lengths = SampleLengths(tokens=read_lengths(directory.sample_lengths))
    if lengths.sha256 != digest:
        raise RunDirectoryError(
            f"'{directory.sample_lengths}' does not match the lengths used to balance the run: its sample order cannot "
            "be checked."
        )
    return lengths


def _shards(directory: RunDirectory, plan: Mapping[str, Any]) -> ShardSizes | None:
    """Return the files that samples are read from a few at a time, if they are.

    Raises:
        RunDirectoryError: If their sizes are missing or have changed.
    """
    facts = plan["data"].get("shards")
    if facts is None:
        return None
    shards = ShardSizes(sizes=read_lengths(directory.shard_sizes), window=int(facts["window"]))
    if shards.facts != facts:
        raise RunDirectoryError(
            f"'{directory.shard_sizes}' does not match the shards of the run: its sample order cannot be checked."
        )
    return shards


def _draws(directory: RunDirectory, plan: Mapping[str, Any]) -> ClassDraws | None:
    """Return the sampling with replacement, if any.

    Raises:
        RunDirectoryError: If the classes are missing or have changed.
    """
    weights, counts = tuple(plan.get("sampling", ())), tuple(plan.get("mixture", ()))
    if not weights and not counts:
        return None
    draws = ClassDraws(classes=read_lengths(directory.sample_classes), weights=weights, counts=counts)
    if draws.sha256 != plan.get("classes_sha256"):
        raise RunDirectoryError(
            f"'{directory.sample_classes}' does not match the classes used to draw samples: their order cannot be "
            "checked."
        )
    return draws


def _geometry(plan: Mapping[str, Any], recipe: Mapping[str, Any]) -> StepGeometry:
    """Return the geometry of the run's full steps; how a step is split over ranks does not matter here.

    Raises:
        RunDirectoryError: If recipe or plan is damaged.
    """
    try:
        geometry = StepGeometry(
            seed=int(recipe["seed"]),
            samples=int(plan["train_samples"]),
            global_batch_size=int(plan["global_batch_size"]),
            logical_ranks=1,
            repeats=int(recipe.get("data", {}).get("augment", {}).get("repeats", 1)),
            growth=tuple((int(p["first_epoch"]), int(p["global_batch_size"]), 1) for p in plan["batch_phases"][1:]),
        )
        if min(geometry.samples, geometry.global_batch_size) > _MOST_IN_STEP:
            raise ValueError(f"steps of {geometry.global_batch_size} samples")
        list(geometry.slices(0, World()))  # fails here with numbers that no run has
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise RunDirectoryError(
            f"the run's recipe.yaml or plan.json is damaged ({type(error).__name__}: {str(error)[:200]}); restore it "
            "from a copy."
        ) from error
    return geometry


def _wrong_counts(epochs: tuple[EpochCount, ...], *, is_drawn: bool) -> Iterator[str]:
    first, sample = ("the recipe's draws", "draw(s)") if is_drawn else ("its first", "sample(s)")
    for one in epochs:
        if one.duplicates:
            yield f"epoch {one.name}: {one.duplicates} use(s) of a sample beyond {first}."
        if one.missing and one.is_over:
            yield f"epoch {one.name}: {one.missing} {sample} were never used."


def _wrong_order(ledger: Path, geometry: StepGeometry, steps: int) -> Iterator[str]:
    mismatches = step = 0
    stream = LedgerStream(ledger)
    while stream.head is not None and step < steps:
        begin, step = step, step + 1
        if stream.head.step > step:  # not a loop over steps: a damaged file may claim any number of them
            step = min(stream.head.step - 1, steps)
            wrong: str | None = f"is not in the ledger{f', nor are those up to step {step}' * (step > begin + 1)}"
        else:
            (expected,) = geometry.slices(step - 1, World())
            wrong = _wrong_step(expected, stream.take(step=step))
        if wrong:
            mismatches += 1
            if mismatches <= _NAMED:
                yield f"step {begin + 1} {wrong}."
    if stream.head is not None:
        yield f"the ledger continues after step {steps}, where the run says it is."
    elif step < steps:
        yield f"the ledger ends after step {step}, and the run says it is at step {steps}."
    if mismatches > _NAMED:
        yield f"{mismatches - _NAMED} more step(s) used other samples than the recipe's order gives."


def _wrong_step(expected: SampleSlice, entries: Iterable[Entry]) -> str | None:
    """Return how the records of a step differ from its samples; None if they do not. Reads all of them."""
    parts: list[NDArray[np.int64]] = [np.empty(0, dtype=np.int64)]
    wrong = None
    for entry in entries:
        if isinstance(entry, LedgerEntry):
            parts += (entry.ids, entry.broken)
            continue
        if expected.first is not None and expected.first <= entry.first:
            begin = entry.first - expected.first
            parts.append(expected.ids[begin : begin + entry.samples])
        else:
            parts.append(parts[0])
        where = f"used positions {entry.first} to {entry.first + entry.samples - 1} of epoch {entry.epoch + 1}"
        if entry.epoch != expected.epoch or parts[-1].size != entry.samples:
            wrong = f"{where} out of order"
        elif digest_of(parts[-1]) != entry.digest:
            wrong = f"{where} with other samples than the order's, out of order: the digest does not match"
    used = np.concatenate(parts)
    if wrong or np.array_equal(used, expected.ids):
        return wrong
    used = np.sort(used)
    return None if np.array_equal(used, np.sort(expected.ids)) else _difference(used, expected.ids)


def _difference(used: NDArray[np.int64], expected: NDArray[np.int64]) -> str:
    missing, extra = np.setdiff1d(expected, used), np.setdiff1d(used, expected)
    parts = []
    if missing.size:
        parts.append(f"lacks sample {int(missing[0])}" + (f" and {missing.size - 1} more" if missing.size > 1 else ""))
    if extra.size:
        parts.append(
            f"used sample {int(extra[0])} out of order" + (f" and {extra.size - 1} more" if extra.size > 1 else "")
        )
    if not parts:
        parts.append("used a sample twice")
    return " and ".join(parts)
