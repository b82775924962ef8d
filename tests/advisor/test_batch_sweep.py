"""A sweep over batch sizes: real tiny runs, each made once, that end at the target; and what they come to."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import PacelineError, RecipeError, RunDirectoryError
from paceline.pages.shown import write_result
from paceline.recipe.load import load_recipe
from paceline.recipe.schema import Recipe
from paceline_advisor.bench.target import MetricTarget, TargetRun, one_run
from paceline_advisor.commands import SweepBatch
from paceline_advisor.tuning.batch_sweep import (
    RUNS_FILE,
    SweepRun,
    Swept,
    knee_in_words,
    rates_of,
    steps_to,
    sweep_batch,
    table_rows,
    with_batch,
)

QUICK = (
    "model.options.width=4",
    "model.options.stages=1",
    "schedule.name=constant",
    "schedule.warmup=0%",
    "train.ema=off",
    "evaluate.every=5 steps",
)
TARGET = MetricTarget("top1_accuracy", 40)


def requested(tmp_path: Path, **changes: Any) -> SweepBatch:
    base = SweepBatch(
        recipe="digits",
        overrides=QUICK,
        to="top1_accuracy=40",
        batch_sizes=(32, 64),
        lr_rules=("linear", "sqrt"),
        seeds=1,
    )
    return replace(base, output=tmp_path, **changes)


def test_rules_start_from_the_recipes_own() -> None:
    assert rates_of("constant", 256, 64, 0.2) == (0.2,)
    assert rates_of("linear", 256, 64, 0.2) == (0.8,)
    assert rates_of("sqrt", 256, 64, 0.2) == (0.4,)
    assert rates_of("tuned", 256, 64, 0.2) == (0.1, 0.2, 0.4, 0.8, 1.6)
    assert all(rates_of(rule, 64, 64, 0.2)[0] == 0.2 for rule in ("constant", "linear", "sqrt"))


def test_runs_end_at_the_target_and_are_made_once(tmp_path: Path) -> None:
    message: list[str] = []
    swept = sweep_batch(requested(tmp_path), message.append)
    # Both rules have the recipe's own batch in common.
    assert [(run.batch, run.lr) for run in swept.runs.values()] == [(32, 0.1), (32, 0.141421), (64, 0.2)]
    assert all(run.reached and 0 < run.steps < 100 for run in swept.runs.values())
    assert len(message) == 3

    # Killed while it wrote the last line: that run is made again, and the others are not.
    book = tmp_path / RUNS_FILE
    lines = book.read_text().splitlines()
    book.write_text("\n".join([*lines[:-1], lines[-1][:20]]))
    again = sweep_batch(requested(tmp_path), message.append)
    assert message[3] == "2 of 3 runs are already done"
    assert len(message) == 5
    same = [replace(run, seconds=0) for run in again.runs.values()]
    assert same == [replace(run, seconds=0) for run in swept.runs.values()]

    with pytest.raises(PacelineError, match="another sweep"):
        sweep_batch(requested(tmp_path, to="top1_accuracy=41"))
    for damaged in ("[1, 2]", "[" * 100_000, "null", '{"target": 1}\n[]'):
        book.write_text(damaged + "\n")
        with pytest.raises(RunDirectoryError, match=RUNS_FILE):
            sweep_batch(requested(tmp_path))


def test_a_run_is_the_same_in_processes_of_its_own(tmp_path: Path) -> None:
    both = (*QUICK, "parallel.exact=true", "parallel.logical_ranks=2")
    here, present = (
        sweep_batch(
            requested(tmp_path / str(count), overrides=both, batch_sizes=(32,), lr_rules=("linear",), processes=count)
        )
        for count in (1, 2)
        if not (tmp_path / str(count)).mkdir()
    )
    assert [run.steps for run in here.runs.values()] == [run.steps for run in present.runs.values()]


def test_who_does_not_get_there_is_counted_as_such(tmp_path: Path) -> None:
    from paceline.parsing.units import Duration

    changes: dict[str, Any] = {"batch_sizes": (64,), "lr_rules": ("constant",), "longest": Duration(10, "steps")}
    # To stop on the way is of no use here, and is left out.
    changes["overrides"] = (*QUICK, "train.until=5 steps")
    swept = sweep_batch(requested(tmp_path, **changes, to="top1_accuracy=99.9"))
    (run,) = swept.runs.values()
    assert (run.reached, run.steps, run.evaluations, run.trouble) == (False, 10, 2, "")
    assert swept.rules[0].law is None
    assert "0 batch sizes" in knee_in_words(swept.rules[0])
    assert table_rows(swept.rules[0])[0][2:4] == ("0 of 1", "-")


def test_the_first_run_that_fails_ends_it(tmp_path: Path) -> None:
    with pytest.raises(PacelineError, match="cannot be cut"):
        sweep_batch(requested(tmp_path, overrides=(*QUICK, "parallel.logical_ranks=3")))
    with pytest.raises(RecipeError, match=r"evaluate\.every"):
        sweep_batch(requested(tmp_path, overrides=(*QUICK, "evaluate.every=off")))
    with pytest.raises(RecipeError, match=r"batch\.growth"):
        sweep_batch(requested(tmp_path, overrides=(*QUICK, "batch.growth.2=128")))


def test_a_batch_that_cannot_be_run_is_refused_before_the_first_run(tmp_path: Path) -> None:
    message: list[str] = []
    cut = (*QUICK, "batch.global_size=48", "batch.micro_size=48")
    with pytest.raises(RecipeError, match=r"--batch-sizes: a run with 64 is not possible: .*micro_size=48"):
        sweep_batch(requested(tmp_path, overrides=cut, batch_sizes=(48, 64)), message.append)
    with pytest.raises(
        RecipeError, match=r"--batch-sizes: a step of 5,000 samples cannot be made of an epoch of 1,438"
    ):
        sweep_batch(requested(tmp_path, overrides=QUICK, batch_sizes=(48, 5000)), message.append)
    assert message == []
    assert not (tmp_path / RUNS_FILE).exists()


def test_batch_norms_groups_follow_the_batch(tmp_path: Path) -> None:
    ghosts = (*QUICK, "model.ghost_batch_norm=32")
    swept = sweep_batch(requested(tmp_path, overrides=ghosts, batch_sizes=(16, 48, 64), lr_rules=("constant",)))
    assert [run.trouble for run in swept.runs.values()] == ["", "", ""]
    recipe = swept.loaded.recipe
    assert [with_batch(recipe, batch, 1).model.ghost_batch_norm for batch in (16, 48, 64)] == [None, 24, 32]
    (note,) = [note for note in swept.notes() if "ghost" in note]
    assert "of 48: " in note


def test_a_run_that_fails_later_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def limited(target: MetricTarget, recipe: Recipe, *, processes: int) -> TargetRun:
        if recipe.batch.global_size == 64:
            return TargetRun(seed=recipe.seed, trouble="no more shared memory")
        return one_run(target, recipe, processes=processes)

    monkeypatch.setattr("paceline_advisor.tuning.batch_sweep.one_run", limited)
    report = sweep_batch(requested(tmp_path, lr_rules=("constant",)))
    assert [(row.reached, row.steps is None) for row in report.rules[0].rows] == [(1, False), (0, True)]
    assert any("no more shared memory" in note for note in report.notes())
    monkeypatch.undo()
    message: list[str] = []
    assert all(
        run.reached for run in sweep_batch(requested(tmp_path, lr_rules=("constant",)), message.append).runs.values()
    )
    assert message[0] == "1 of 2 runs are already done"


@pytest.mark.parametrize(
    ("scores", "reached", "steps"),
    [((20, 60), True, 7.5), ((60,), True, 5), ((20, 30), False, 10), ((40.0, 40.0), True, 10)],
)
def test_steps_lie_between_two_evaluations(scores: Sequence[float], reached: bool, steps: float) -> None:
    evaluations = [{"step": 5 * number, "top1_accuracy": score} for number, score in enumerate(scores, start=1)]
    assert steps_to(TargetRun(seed=0, reached=reached, evaluations=evaluations), TARGET) == steps


def synthetic(knee: float = 100) -> Swept:
    """A sweep whose linear rule follows the law, and whose constant rule never gets there."""
    import math

    loaded = load_recipe("digits", ("schedule.name=constant",))
    runs = {}
    for batch in (16, 64, 256, 1024):
        for seed in range(3):
            for rule in ("linear", "constant"):
                (rate,) = rates_of("linear" if rule == "linear" else "constant", batch, 64, 0.2)
                steps = 50 * (1 + knee / batch) * math.exp(0.02 * (seed - 1))
                present = rule == "linear" or batch == 64
                run = SweepRun(
                    batch=batch,
                    lr=rate,
                    seed=seed,
                    reached=present,
                    steps=steps if present else 500,
                    samples_per_step=batch,
                    evaluations=9,
                    seconds=1,
                )
                runs[run.key] = run
    request = SweepBatch(
        recipe="digits",
        to="top1_accuracy=40",
        batch_sizes=(16, 64, 256, 1024),
        lr_rules=("linear", "constant"),
        seeds=3,
    )
    return Swept(options=request, target=TARGET, loaded=loaded, base_rate=0.2, runs=runs)


def test_the_knee_is_found_and_shown(tmp_path: Path) -> None:
    report = synthetic()
    linear, constant = report.rules
    assert linear.law is not None
    assert linear.law.critical_batch.middle == pytest.approx(100, rel=0.01)
    assert 100 in linear.law.critical_batch
    assert knee_in_words(linear).startswith("knee at 100 samples (")
    assert constant.law is None
    assert "1 batch sizes" in constant.why
    written = write_result(tmp_path, "sweep-batch", report)
    document = json.loads(written[0].read_text())
    assert document["rules"][0]["law"]["critical_batch"]["middle"] == pytest.approx(100, rel=0.01)
    assert "linear: law" in written[1].read_text()


@pytest.mark.parametrize(
    ("steps_of", "message"),
    [
        (lambda batch, _: 10 * batch**0.5, "knee below"),
        (lambda batch, seed: 1e4 / batch**0.5 * 30.0 ** (seed - 1), "on neither side"),
        (lambda batch, _: 1e6 / batch**1.2, "knee above"),
        (lambda batch, _: 50.0, "knee below"),
    ],
    ids=["rising", "no order", "falling", "level"],
)
def test_a_sweep_that_does_not_bound_its_knee_is_still_shown(
    steps_of: Callable[[int, int], float], message: str, tmp_path: Path
) -> None:
    swept = synthetic()
    runs = {key: replace(run, steps=steps_of(run.batch, run.seed)) for key, run in swept.runs.items()}
    report = replace(swept, options=replace(swept.options, lr_rules=("linear",)), runs=runs)
    assert message in knee_in_words(report.rules[0])
    assert all("nan" not in cell for row in table_rows(report.rules[0]) for cell in row)
    assert len(write_result(tmp_path, "sweep-batch", report)) == 2


def test_a_run_that_failed_does_not_say_how_many_samples_a_step_has() -> None:
    swept = synthetic()
    # 1,438 samples in two steps; of the first run, which failed, nothing but the batch is known.
    runs = {key: replace(run, samples_per_step=719) if run.batch == 1024 else run for key, run in swept.runs.items()}
    failed = next(key for key in runs if key[0] == 1024)
    changes: dict[str, Any] = {"reached": False, "steps": 0.0, "evaluations": 0, "trouble": "it broke"}
    runs[failed] = replace(runs[failed], samples_per_step=1024, **changes)
    linear = replace(swept, runs=runs).rules[0]
    row = linear.rows[-1]
    assert row.steps is not None
    assert row.samples == 719 * row.steps.middle
    assert "" not in table_rows(linear)[-1]


def test_the_best_rate_is_the_one_with_which_most_get_there() -> None:
    swept = synthetic()
    runs = {}
    for rate in rates_of("tuned", 64, 64, 0.2):
        for seed in range(3):
            present = rate in (0.2, 0.4) or (rate == 0.05 and seed == 0)
            steps = {0.05: 10.0, 0.2: 80.0, 0.4: 60.0}.get(rate, 500.0)
            run = replace(swept.runs[64, 0.2, 0], lr=rate, seed=seed, reached=present, steps=steps)
            runs[run.key] = run
    tuned = replace(swept, options=replace(swept.options, batch_sizes=(64,), lr_rules=("tuned",)), runs=runs)
    (row,) = tuned.rules[0].rows
    assert (row.lr, row.reached) == (0.4, 3)
