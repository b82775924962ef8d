"""Hyper-parameter search with Optuna: each trial is an ordinary run in its own directory.

``--output`` holds Optuna's journal and the run directories. The same command resumes a killed search, and the run that
was in progress resumes from its checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import optuna
from optuna.storages.journal import JournalFileBackend, JournalStorage
from optuna.storages.journal._file import LOCK_FILE_SUFFIX
from optuna.trial import TrialState
from yaml import YAMLError

from paceline.command import Log
from paceline.errors import RecipeError, RunDirectoryError, TrainingError
from paceline.host.world import World
from paceline.pages.page import Chart, Table
from paceline.pages.shown import Shown
from paceline.parsing.files import refuse_special_inputs
from paceline.parsing.plain_yaml import load_plain, resolve_values
from paceline.parsing.units import format_count
from paceline.plugins.references import is_code_trusted
from paceline.recipe.load import load_recipe, to_yaml
from paceline.recipe.schema import Recipe
from paceline.records.run_directory import RunDirectory
from paceline.tasks.facts import best_metric
from paceline.trainer.run_lock import RunLock
from paceline.trainer.subject import Subject
from paceline_advisor import Json, frozen
from paceline_advisor.bench.target import MetricTarget, TargetRun, train
from paceline_advisor.commands import Tune
from paceline_advisor.launches import check_can_watch

JOURNAL = "trials.log"
# If so many trials end and all of them fail, the recipe is at fault and not the values.
_FAILURES = 3
# Trials before pruning starts, which compares later ones with the median; and evaluations of a trial before it may be
# pruned.
_UNPRUNED_TRIALS, _UNPRUNED_EVALUATIONS = 4, 1

Search = Mapping[str, list[Any] | Json]
"""By recipe key: a list of choices, or a range with ``low``, ``high`` and optionally ``log`` or ``step``."""


def tune(options: Tune, log: Log) -> TuneReport:
    """Run the remaining trials, and report all of them.

    Raises:
        PacelineError: For a mistake in the recipe or the search, or an output of another search; before any trial.
        TrainingError: If three trials or more have ended, and all of them failed.
    """
    check_can_watch("tune")
    recipe = options.load().recipe
    search = read_search(options.search)
    # What a key must accept: all choices, or both ends.
    needed = {key: space if isinstance(space, list) else [space["low"], space["high"]] for key, space in search.items()}
    for key, value in ((key, value) for key, values in needed.items() for value in values):
        try:
            load_recipe(options.recipe, [*options.overrides, as_override(key, value)])
        except RecipeError as error:
            raise RecipeError(f"{options.search}: {key}: {value} is not valid: {error}") from error
    if recipe.evaluate.every is None:
        raise RecipeError("evaluate.every=off: trials are compared by their evaluations; give it an interval.")
    metric = best_metric(Subject.open(recipe, World(), "task").task)
    # No value meets it, so that each trial is followed to its end.
    unreachable = math.inf if metric.higher_is_better else -math.inf
    target = MetricTarget(metric.name, unreachable, less_is_better=not metric.higher_is_better)
    options.output.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        held.callback(RunLock(RunDirectory(options.output)).release)
        _mend_journal(options.output / JOURNAL, log)
        study = _open_study(options, recipe, search, target)
        # Trials that a killed search left running: their runs resume.
        for unfinished in study.get_trials(states=[TrialState.RUNNING]):
            if "run" in unfinished.user_attrs and unfinished.params:
                study.enqueue_trial(unfinished.params, user_attrs=unfinished.user_attrs)
            study.tell(unfinished.number, state=TrialState.FAIL)
        while (finished := len(_finished(study))) < options.trials:
            if options.load().recipe != recipe:
                raise RecipeError(f"{options.recipe} has changed since the search began; undo that, or search anew.")
            trial = study.ask()
            if "run" not in trial.user_attrs:
                trial.set_user_attr("run", f"trial-{len(_by_run(study)):03d}")
            values = {key: _suggested(trial, key, space) for key, space in search.items()}
            overrides = " ".join(as_override(key, value) for key, value in values.items())
            log(f"trial {finished + 1} of {options.trials}: {overrides}")
            log(f"  {_run_trial(options, study, trial, values, target)}")
            failed = _finished(study)
            if len(failed) >= _FAILURES and all("trouble" in each.user_attrs for each in failed):
                raise TrainingError(f"the first {len(failed)} trials failed: {failed[-1].user_attrs['trouble']}")
        return TuneReport(options=options, search=search, target=target, trials=_finished(study))


def read_search(path: Path) -> Search:
    """Read the search space.

    Raises:
        RecipeError: If the file is not a mapping of recipe keys to lists or ranges.
    """
    refuse_special_inputs(path)
    try:
        spaces = resolve_values(load_plain(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, YAMLError) as error:
        raise RecipeError(f"--search {path}: it cannot be read as YAML ({error}).") from error
    if not isinstance(spaces, dict) or not spaces:
        raise RecipeError(f"--search {path}: it must map recipe keys to values, such as optimizer.lr: [0.01, 0.1].")
    for key, space in spaces.items():
        if why := _why_no_space(space):
            raise RecipeError(
                f"--search {path}: {key}: {why}; give a list of choices, or {{low: A, high: B}} with log: true or "
                "step: C if needed."
            )
    return spaces


def _why_no_space(space: Any) -> str:
    if isinstance(space, list):
        plain = all(each is None or isinstance(each, bool | int | float | str) for each in space)
        return "" if space and plain else "a choice must be a number, a string, true, false or null"
    if not isinstance(space, dict) or not {"low", "high"} <= space.keys() <= {"low", "high", "log", "step"}:
        return f"found {space!r}"
    numbers = [space[name] for name in ("low", "high", "step") if name in space]
    if any(isinstance(each, bool) or not isinstance(each, int | float) for each in numbers):
        return f"found {space!r}, whose ends are not numbers"
    if not space["low"] < space["high"] or space.get("step", 1) <= 0:
        return f"found {space!r}, but low must be below high, and a step above 0"
    if space.get("log") and (space["low"] <= 0 or "step" in space):
        return f"found {space!r}, but log: true needs low above 0, and no step"
    return ""


def as_override(key: str, value: Any) -> str:
    """Format a value as ``KEY=VALUE``."""
    return f"{key}={value if isinstance(value, str) else json.dumps(value)}"


def _suggested(trial: optuna.Trial, key: str, space: list[Any] | Json) -> Any:
    if isinstance(space, list):
        return trial.suggest_categorical(key, space)
    low, high, step, in_log = space["low"], space["high"], space.get("step"), bool(space.get("log"))
    if all(isinstance(each, int) for each in (low, high, step or 1)):
        return trial.suggest_int(key, low, high, step=step or 1, log=in_log)
    return trial.suggest_float(key, low, high, step=step, log=in_log)


def _mend_journal(path: Path, log: Log) -> None:
    """Remove what a killed search left in Optuna's journal: its lock, and an incomplete last record.

    Raises:
        RunDirectoryError: If an earlier record is damaged.
    """
    path.with_name(f"{path.name}{LOCK_FILE_SUFFIX}").unlink(missing_ok=True)  # Optuna would wait for half a minute
    with path.open("ab+") as journal:
        journal.seek(0)
        lines = journal.readlines()
        whole = next((number for number, line in enumerate(lines) if not _is_record(line)), len(lines))
        if any(map(_is_record, lines[whole:])):
            raise RunDirectoryError(f"'{path}' is damaged in line {whole + 1}; give another --output, or remove it.")
        if whole < len(lines):
            journal.truncate(sum(map(len, lines[:whole])))
            log(f"{path}: its last record was incomplete and is removed; a trial without a result is repeated")


def _is_record(line: bytes) -> bool:
    try:
        return line.endswith(b"\n") and isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _open_study(options: Tune, recipe: Recipe, search: Search, target: MetricTarget) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        storage=JournalStorage(JournalFileBackend(str(options.output / JOURNAL))),
        study_name="paceline",
        direction="minimize" if target.less_is_better else "maximize",
        load_if_exists=True,
        pruner=optuna.pruners.MedianPruner(_UNPRUNED_TRIALS, _UNPRUNED_EVALUATIONS),
    )
    # Values drawn before a restart are not drawn again.
    study.sampler = optuna.samplers.TPESampler(seed=recipe.seed + len(study.trials))
    plain = json.dumps([to_yaml(recipe), dict(search), target.metric, options.processes], sort_keys=True)
    identity = hashlib.sha256(plain.encode()).hexdigest()
    if study.user_attrs.setdefault("search", identity) != identity:
        raise RunDirectoryError(
            f"'{options.output}' holds the trials of another search, recipe or metric; give another --output, or "
            "remove it."
        )
    study.set_user_attr("search", identity)
    return study


def _by_run(study: optuna.Study) -> dict[str, optuna.trial.FrozenTrial]:
    """Return the last trial of each run directory."""
    return {trial.user_attrs["run"]: trial for trial in study.trials if "run" in trial.user_attrs}


def _finished(study: optuna.Study) -> list[optuna.trial.FrozenTrial]:
    return [trial for trial in _by_run(study).values() if trial.state.is_finished()]


def _run_trial(
    options: Tune, study: optuna.Study, trial: optuna.Trial, values: Mapping[str, Any], target: MetricTarget
) -> str:
    """Train with these values, and report the result to the study and the user."""
    run, reported = TargetRun(seed=0), 0
    words = [options.recipe, *options.overrides, "checkpoint.mirror=null", "train.until=null"]
    words += [as_override(key, value) for key, value in values.items()]
    words += ["--processes", str(options.processes), *["--trust-code"] * is_code_trusted()]

    def is_worse() -> bool:
        nonlocal reported
        is_pruned = False
        for each in run.evaluations[reported:-1]:
            trial.report(_value_of(each, target), reported)
            reported, is_pruned = reported + 1, trial.should_prune()
        return is_pruned

    is_pruned = train(words, run, options.output / trial.user_attrs["run"], target, until=is_worse)
    value = _value_of(run.evaluations[-1], target) if run.evaluations else math.nan
    trial.set_user_attr("train_seconds", run.train_seconds)
    result = f"{target.metric} {value:.4g} after {run.train_seconds:.0f} s"
    if is_pruned:
        study.tell(trial, state=TrialState.PRUNED)
        return f"stopped early: {result}, worse than the median"
    if not run.trouble and math.isfinite(value):
        study.tell(trial, value)
        return result
    reason = run.trouble or "it was never evaluated"
    trial.set_user_attr("trouble", reason)
    study.tell(trial, state=TrialState.FAIL)
    return f"failed: {reason}"


def _value_of(evaluation: Mapping[str, Any], target: MetricTarget) -> float:
    value = evaluation.get(target.metric)
    worst = math.inf if target.less_is_better else -math.inf
    return worst if value is None else float(value)


@frozen
class TuneReport:
    """All trials of a search.

    Attributes:
        options: The command's options.
        search: The search space.
        target: The metric, and which direction is better.
        trials: Optuna's trials, each with its run directory in its ``user_attrs``.
    """

    options: Tune
    search: Search
    target: MetricTarget
    trials: Sequence[optuna.trial.FrozenTrial]

    @property
    def ranked(self) -> list[optuna.trial.FrozenTrial]:
        """Trials that ran to the end, best first."""
        ended = [each for each in self.trials if each.value is not None and each.state == TrialState.COMPLETE]
        return sorted(ended, key=lambda each: each.value or 0.0, reverse=not self.target.less_is_better)

    def to_json(self) -> Json:
        """Return the result as one JSON object."""
        return {
            "recipe": self.options.recipe,
            "metric": self.target.metric,
            "higher_is_better": not self.target.less_is_better,
            "best": self.ranked[0].user_attrs["run"] if self.ranked else None,
            "trials": [
                {
                    "run": each.user_attrs["run"],
                    "state": each.state.name.lower(),
                    "value": each.value if each.state == TrialState.COMPLETE else None,
                    "values": each.params,
                    "train_seconds": each.user_attrs.get("train_seconds"),
                    "trouble": each.user_attrs.get("trouble"),
                }
                for each in self.trials
            ],
        }

    def __paceline__(self) -> Shown:
        """Return the trials as a table, best first, and on a page each value against its metric."""
        ranked = self.ranked
        others = [each for each in self.trials if each not in ranked]
        keys = list(dict.fromkeys(key for each in self.trials for key in each.params))
        rows = [_row(each, keys) for each in (*ranked, *others)]
        blocks: list[Any] = [
            Table(columns=("run", self.target.metric, *keys, "seconds"), rows=rows, caption="Trials, the best first")
        ]
        if ranked:
            best = [as_override(key, value) for key, value in ranked[0].params.items()]
            command = shlex.join(["paceline", "train", self.options.recipe, *self.options.overrides, *best])
            runs = [str(self.options.output / each.user_attrs["run"]) for each in ranked[:3]]
            blocks += [f"Best: {command}", f"Compare: {shlex.join(['paceline', 'report', *runs])}"]
        return Shown(
            title="Hyper-parameter search",
            subtitle=f"{self.options.recipe}, {format_count(len(self.trials))} trials",
            blocks=blocks,
            on_page=[self._chart(key, ranked) for key in keys],
            ok=bool(ranked) or "no trial finished.",
        )

    def _chart(self, key: str, ranked: Sequence[optuna.trial.FrozenTrial]) -> Chart:
        values = [each.params.get(key) for each in ranked]
        is_log = isinstance(space := self.search.get(key), dict) and bool(space.get("log"))
        names = [each.user_attrs["run"] for each in ranked]
        points = {"mode": "markers", "x": values, "y": [each.value for each in ranked], "text": names}
        axis = {"title": key, "type": "log" if is_log else None}
        return Chart(
            title=f"{self.target.metric} by {key}",
            traces=[points],
            layout={"xaxis": axis, "yaxis": {"title": self.target.metric}},
            description=f"Each trial's last {self.target.metric} against its {key}.",
        )


def _row(trial: optuna.trial.FrozenTrial, keys: Sequence[str]) -> tuple[str, ...]:
    states = {"PRUNED": "stopped early", "FAIL": "failed"}
    value = states.get(trial.state.name, "") or f"{trial.value:.4g}"
    shown = [trial.params.get(key, "") for key in keys]
    texts = [f"{each:.4g}" if isinstance(each, float) else str(each) for each in shown]
    return (trial.user_attrs["run"], value, *texts, f"{trial.user_attrs.get('train_seconds', 0):.0f}")
