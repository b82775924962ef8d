"""`paceline diff`: the first step at which two runs differ, where in it, and why."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.command import Log
from paceline.errors import PacelineError, RunDirectoryError
from paceline.pages.page import Table
from paceline.pages.shown import Shown
from paceline.parsing.units import counted
from paceline.recipe.load import stored_recipe
from paceline.records.reader import read_environment, read_events, read_identity, read_json, read_recipe
from paceline.records.run_directory import existing_run
from paceline_advisor import Json, frozen
from paceline_advisor.commands import Diff
from paceline_advisor.launches import check_can_watch
from paceline_advisor.replay.causes import Cause, Side, recorded_causes
from paceline_advisor.replay.compare import (
    RecordFound,
    compare_records,
    compare_samples,
    first_state_difference,
    shared_positions,
)
from paceline_advisor.replay.engine import Engine, NotReplayedError, progress_bar
from paceline_advisor.replay.points import Point, Stretch, points_of
from paceline_advisor.replay.trace import Trace, Where, find, first_other_step, other_settings
from paceline_advisor.replay.verify import CannotTellError, held

# Shorter stretches are recorded in detail at once; of longer ones, only the step that differs.
_FEW_STEPS = 32
_RUNS = ("first", "second")
_OF_COMPUTATION = ("output", "loss", "random generator")


@frozen
class DiffReport:
    """How two runs differ.

    Attributes:
        runs: Both run directories.
        equal: Whether all that both recorded is equal; None if they share nothing to compare.
        until: The last step that was compared.
        checkpoint: The last equal checkpoint that both have; 0 for the start.
        last_equal: The last step that is known to be equal.
        first_different: The first step that is known to differ.
        where: The first known difference within that step.
        causes: Possible causes, the likeliest first.
        found: What was compared, and the result of each comparison.
        replayed: Why the steps were not computed again; empty if they were, or if that was not needed.
        seconds: Duration.
    """

    runs: tuple[Path, Path]
    equal: bool | None
    until: int = 0
    checkpoint: int = 0
    last_equal: int | None = None
    first_different: int | None = None
    where: Where | None = None
    causes: tuple[Cause, ...] = ()
    found: tuple[tuple[str, str], ...] = ()
    unreplayed: str = ""
    seconds: float = 0.0

    @property
    def is_exact(self) -> bool:
        """Whether the step before the first different one is known to be equal."""
        return self.first_different is not None and self.last_equal == self.first_different - 1

    def to_json(self) -> Json:
        """Return the report as one JSON object."""
        return {
            "runs": [str(each) for each in self.runs],
            "equal": self.equal,
            "compared_until_step": self.until,
            "last_equal_checkpoint": self.checkpoint,
            "last_equal_step": self.last_equal,
            "first_different_step": self.first_different,
            "exact": self.is_exact,
            "where": None if self.where is None else self.where.to_json(),
            "causes": [each.to_json() for each in self.causes],
            "compared": dict(self.found),
            "not_computed_again": self.unreplayed,
            "seconds": self.seconds,
        }

    @property
    def summary(self) -> str:
        """The result in one paragraph."""
        if self.equal is None:
            return "cannot tell: the runs share no checkpoint and no record of a step, so there is nothing to compare."
        if self.equal:
            return f"equal: all that both runs recorded up to step {self.until} is the same."
        step = f"at step {self.first_different}" if self.is_exact else f"after step {self.last_equal}"
        step += "" if self.is_exact else f", and by step {self.first_different}"
        place = "" if self.where is None else f", {self.where}"
        cause = f" The likeliest cause: {self.causes[0].evidence}." if self.causes else " No cause was found."
        why = f" The steps were not computed again: {self.unreplayed.rstrip('.')}." if self.unreplayed else ""
        return f"different: the runs part {step}{place}.{cause}{why}"

    def __paceline__(self) -> Shown:
        """Show the result, what was compared, and the causes."""
        blocks: list[Any] = [self.summary, Table(columns=("compared", "result"), rows=list(self.found))]
        if self.causes:
            rows = [(each.kind, each.key, each.evidence) for each in self.causes]
            blocks.append(Table(columns=("cause", "key", "evidence"), rows=rows))
        ok: bool | str | PacelineError = bool(self.equal) or ""
        if self.equal is None:
            ok = CannotTellError("the runs share nothing to compare; give two runs with common steps.")
        return Shown(title=f"Difference between {self.runs[0]} and {self.runs[1]}", blocks=blocks, ok=ok)


def diff(options: Diff, log: Log) -> DiffReport:
    """Find where two runs part, and why.

    Raises:
        PacelineError: If one of them is not a run, or is being trained.
    """
    check_can_watch("diff")
    started, paths = time.perf_counter(), (options.a, options.b)
    runs = [existing_run(each.absolute()) for each in paths]
    with contextlib.ExitStack() as locks:
        for run in {each.root.resolve(): each for each in runs}.values():
            locks.enter_context(held(run))
        first, second = (
            Side(
                run=each,
                recipe=stored_recipe(read_recipe(each), str(each.recipe)),
                plan=read_json(each.plan),
                environment=read_environment(each),
            )
            for each in runs
        )
        report = _Comparison(first, second, log).report(DiffReport(runs=paths, equal=None))
    return replace(report, seconds=time.perf_counter() - started)


class _Comparison:
    """The comparison of two runs: first of what they recorded, then of their steps, computed again."""

    def __init__(self, first: Side, second: Side, log: Log) -> None:
        self.sides, self.log = (first, second), log
        points = [_points(each) for each in self.sides]
        self.shared = {step: (points[0][step], points[1][step]) for step in sorted(points[0].keys() & points[1].keys())}
        self.points = points
        self.begin, self.unequal = self._last_equal()
        self.end = min(_last_position(each) for each in self.sides)

    def _last_equal(self) -> tuple[tuple[Point, Point] | None, int | None]:
        """Return the last equal points of both runs, and the position of the first unequal ones, if any."""
        begin = None
        for pair in self.shared.values():
            paths = [each.path for each in pair]
            if paths[0] is not None and paths[1] is not None and first_state_difference(paths[0], paths[1]) is not None:
                return begin, pair[0].position
            begin = pair
        return begin, None

    def report(self, report: DiffReport) -> DiffReport:
        """Fill in the report."""
        first, second = (each.run for each in self.sides)
        at = 0 if self.begin is None else self.begin[0].position
        record = compare_records(first, second, at, self.end, None, shared=True)
        samples = self._other_samples(at)
        after = [each for each in (self.unequal, record and record.position, samples and samples[0]) if each]
        earlier = None if after else compare_records(first, second, 0, at, None, shared=True)
        saved = [step for step in self.shared if step]
        records = shared_positions(first, second, self.end)
        report = replace(
            report,
            until=max(self.end, at),
            checkpoint=0 if self.begin is None else self.begin[0].step,
            found=(
                ("checkpoints", _told(counted(len(saved), "shared checkpoint"), self.unequal)),
                ("records", _told(counted(len(records), "shared step record"), record or earlier)),
                ("samples", _told("of each step", samples)),
            ),
        )
        if not after and earlier is None:
            return replace(report, equal=True if saved or records else None, last_equal=max(self.end, at))
        if not after:
            assert earlier is not None
            return self._only_recorded(report, earlier)
        bound = min(after)
        # A record holds what was computed before its step's update, which may be the first to differ.
        known = max([at, *(each - 1 for each in records if each < bound)])
        where = None
        if samples is not None and samples[0] == bound:
            where = Where(phase="data", tensor="samples")
        elif record is not None and record.position == bound:
            where = Where(phase="records", tensor=record.name)
        report = replace(report, equal=False, last_equal=known, first_different=bound, where=where)
        try:
            return self._replayed(report, bound)
        except NotReplayedError as error:
            report = replace(report, unreplayed=str(error))
        causes = [_weighted(each, data=0, code=1, recipe=2, environment=3) for each in self._causes(report)]
        report = replace(report, causes=_in_order([*causes, *_order(samples)]))
        if not report.causes or report.causes[0].kind != "data":
            return report
        # Other data show in the loss of the same step.
        last = bound - 1 if bound - 1 in records else known
        return replace(report, last_equal=last, where=Where(phase="data", tensor=report.causes[0].key))

    def _only_recorded(self, report: DiffReport, record: RecordFound) -> DiffReport:
        phase = "evaluation" if record.kind == "evaluation" else "records"
        report = replace(report, equal=False, last_equal=record.position - 1, first_different=record.position)
        report = replace(report, where=Where(phase=phase, tensor=record.name))
        evidence = (
            f"{record.cause.replace('was computed again', 'in the second run')}, while the weights after it are equal"
        )
        only = Cause(kind="records", key=record.name, evidence=evidence, rank=5)
        return replace(report, causes=_in_order([*self._causes(report), only]))

    def _other_samples(self, begin: int) -> tuple[int, str] | None:
        first, second = (each.run for each in self.sides)
        try:
            return compare_samples(first, second, begin)
        except RunDirectoryError as error:
            self.log(f"the ledgers were not compared: {error}")
            return None

    def _causes(self, report: DiffReport) -> list[Cause]:
        return [*recorded_causes(*self.sides, report.where, report.first_different or 0)]

    # Compute again

    def _replayed(self, report: DiffReport, bound: int) -> DiffReport:
        """Compute the steps from the last equal checkpoint again, in both runs, and compare them."""
        if self.begin is None:
            raise NotReplayedError("the runs share no checkpoint or start to begin from")
        stretches = [
            Stretch(begin=point, end=_end(points, bound)) for point, points in zip(self.begin, self.points, strict=True)
        ]
        begin = self.begin[0].position
        few = range(begin + 1, bound + 1) if bound - begin <= _FEW_STEPS else range(0)
        (one, wrong), (other, also_wrong) = (self._trace(number, each, few) for number, each in enumerate(stretches))
        position = first_other_step(one, other)
        if position is not None and position not in few:
            few = range(position, position + 1)
            ends = (replace(each, end=_end(self.points[n], position)) for n, each in enumerate(stretches))
            one, other = (self._trace(number, each, few)[0] for number, each in enumerate(ends))
        unlike = 0 if wrong else 1
        if wrong or also_wrong:
            trace = other if unlike else one
            again = self._trace(unlike, stretches[unlike], few)[0]
            if (varies := first_other_step(trace, again)) is not None:
                return self._nondeterministic(report, find(trace[varies], again[varies]), unlike)
        if position is None:
            return self._unexplained(report, (wrong, also_wrong))
        pair = one[position], other[position]
        step = pair[0][0]["step"]
        report = replace(report, where=find(*pair), last_equal=step - 1, first_different=step)
        told = f"equal up to step {step - 1}; step {step} differs, {report.where}"
        for which, differs in zip(_RUNS, (wrong, also_wrong), strict=True):
            told += f"; the {which} run differs here from what it recorded: {differs}" if differs else ""
        report = replace(report, found=(*report.found, ("computed again", told)))
        return replace(report, causes=_in_order(self._evident(report, pair)))

    def _trace(self, number: int, stretch: Stretch, detailed: range) -> tuple[Trace, str]:
        which = f"the {_RUNS[number]} run, {stretch}"
        with progress_bar(stretch.batches, self.log) as show:
            try:
                found = Engine.of(self.sides[number].run).trace(stretch, lambda done: show(done, ""), detailed)
            except (NotReplayedError, PacelineError) as error:
                raise NotReplayedError(f"{which}: {error}") from error
            show(stretch.batches, f"{which}: computed again")
        return found

    def _evident(self, report: DiffReport, pair: Sequence[Sequence[Json]]) -> list[Cause]:
        """Return the causes of a difference that both runs repeat here, so that versions and machine are not needed."""
        where, settings = report.where, [*other_settings(*pair)]
        assert where is not None
        is_content = where.phase == "data" and where.tensor != "samples"
        # A program's files were unchanged when it ran again; modules that recipes name ran in today's version.
        code = 0 if all(each.environment.get("program") for each in self.sides) else 4
        weights = {"data": 0 if is_content else 2, "code": code, "environment": 3}
        causes = [_weighted(each, **weights) for each in self._causes(report)]
        if is_content:
            causes.append(Cause(kind="data", key=where.samples[0], evidence=f"the {where}", rank=3))
        if settings:
            causes = [
                replace(each, evidence=f"{each.evidence}; {settings[0]}") if each.rank == 0 else each for each in causes
            ]
        if where.phase == "forward" and where.tensor not in _OF_COMPUTATION:
            name = f"{where.module}.{where.tensor}".strip(".")
            causes.append(Cause(kind="weights", key=name, evidence=f"{name} differs before the first step", rank=1))
        if where.tensor == "random generator":
            causes.append(Cause(kind="random", key="seed", evidence="the random generator differs", rank=2))
        if where.tensor == "samples":
            causes += _order((report.first_different or 0, f"other samples: {where}"))
        return causes

    def _nondeterministic(self, report: DiffReport, where: Where | None, number: int) -> DiffReport:
        evidence = f"the {_RUNS[number]} run computed again twice differs from itself, {where}"
        cause = Cause(kind="nondeterminism", key=where.module if where else "", evidence=evidence, rank=-1)
        others = [_weighted(each, code=1, environment=2, recipe=3) for each in self._causes(report)]
        return replace(
            report,
            where=where,
            causes=_in_order([cause, *others]),
            found=(*report.found, ("computed again", evidence)),
        )

    def _unexplained(self, report: DiffReport, wrong: Sequence[str]) -> DiffReport:
        """Explain a difference that computing again does not repeat: neither recipe nor data is the cause."""
        causes = [each for each in self._causes(report) if each.kind not in ("recipe", "data")]
        for which, differs in zip(_RUNS, wrong, strict=True):
            if differs:
                evidence = f"the {which} run's records do not follow from its recipe here: {differs}"
                causes.append(Cause(kind="weights", key=which, evidence=evidence, rank=4))
        causes = [_weighted(each, code=0, environment=1) for each in causes]
        found = (*report.found, ("computed again", "both runs are equal here"))
        return replace(report, causes=_in_order(causes), found=found)


def _points(side: Side) -> dict[int, Point]:
    identity = read_identity(side.run)
    parent = None if identity is None else identity.parent
    return {each.step: each for each in points_of(side.run, begin=int(parent["step"]) if parent else 0)[0]}


def _last_position(side: Side) -> int:
    events = read_events(side.run.events) if side.run.events.is_file() else ()
    return max((each.get("position", each["step"]) for each in events), default=0)


def _end(points: dict[int, Point], bound: int) -> Point:
    """Return the end of a stretch, with the recipe of the checkpoint that comes after, if there is one."""
    after = min((each for each in points.values() if each.position >= bound), key=lambda p: p.position, default=Point())
    return replace(after, step=bound, position=bound)


def _told(what: str, found: object) -> str:
    if found is None:
        return f"{what}: equal"
    if isinstance(found, int):
        return f"{what}: different at step {found}"
    return f"{what}: {found.cause if isinstance(found, RecordFound) else found[1]}"  # type: ignore[index]  # a pair


def _order(samples: tuple[int, str] | None) -> list[Cause]:
    return [Cause(kind="order", key="samples", evidence=samples[1], rank=2)] if samples else []


def _weighted(cause: Cause, **ranks: int) -> Cause:
    return replace(cause, rank=cause.rank + ranks.get(cause.kind, 0))


def _in_order(causes: Sequence[Cause]) -> tuple[Cause, ...]:
    return tuple(sorted(causes, key=lambda each: each.rank))
