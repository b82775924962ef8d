"""What :func:`paceline.train` returns: a run that has ended, with its curves, mistakes and network."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from torch import nn

from paceline.checkpoint.weights import SavedWeights, read_weights
from paceline.distributed.device import choose_device
from paceline.errors import DataError, RecipeError
from paceline.host.world import World
from paceline.metrics.confusion import matrix_of
from paceline.pages.notebook import LineChart, notebook_html
from paceline.pages.page import Chart, Gallery, Page, Picture, Section, Table, Text
from paceline.parsing.arguments import folder
from paceline.parsing.files import SkippedItems
from paceline.parsing.units import format_count, format_metric, metric_title, metric_unit
from paceline.plugins.references import trusting_code
from paceline.recipe.load import Overrides
from paceline.records.events import INPUTS, Event
from paceline.records.reader import NO_METRICS, Summary, read_events, read_json, read_plan, read_recipe, read_summary
from paceline.records.run_directory import RunDirectory
from paceline.tasks.task import Task
from paceline.tasks.trained import TaskMaker, trained_recipe, trained_task
from paceline.trainer.evaluate_target import EvaluationReport, EvaluationRequest, evaluate_target
from paceline.trainer.process_settings import restore_random_states

_MAX_ROWS, _MAX_METRICS = 10, 6


@dataclass(frozen=True, kw_only=True)
class ConfusionMatrix:
    """How often held-out samples of each class were predicted as which.

    Attributes:
        classes: Names of the classes.
        counts: A row for each actual class, a column for each predicted one.
    """

    classes: Sequence[str]
    counts: Sequence[Sequence[int]]

    def to_json(self) -> dict[str, Any]:
        """Return it as one JSON object."""
        return {"classes": list(self.classes), "counts": [list(row) for row in self.counts]}

    def _repr_html_(self) -> str:
        rows = [(name, *row) for name, row in zip(self.classes, self.counts, strict=True)]
        return "".join(Table(columns=("actual \\ predicted", *self.classes), rows=rows).html())


class Mistakes(list[dict[str, Any]]):
    """Rows of wrong predictions, which a notebook shows as pictures, or as a table of those without any."""

    def __init__(self, rows: Iterable[dict[str, Any]], pictures: Mapping[int, str]) -> None:
        """Take the rows, and pictures as data URLs by sample."""
        super().__init__(rows)
        self._pictures = pictures

    def _repr_html_(self) -> str:
        shown = [each for each in self if each["sample"] in self._pictures]
        if not shown:
            rows = [(each["name"], each["label"], each["predicted"], _percent(each)) for each in self[:_MAX_ROWS]]
            caption = f"{len(self)} mistakes" + f", the first {_MAX_ROWS}" * (len(self) > _MAX_ROWS)
            return notebook_html(
                Table(columns=("name", "label", "predicted", "confidence"), rows=rows, caption=caption)
            )
        pictures = [
            Picture(
                data=self._pictures[each["sample"]],
                caption=f"{each['label']} → {each['predicted'] or 'no answer'} {_percent(each)}",
                alternative=each["name"],
            )
            for each in shown
        ]
        return notebook_html(Gallery(pictures=pictures, caption="Mistakes: label → predicted, confidence"))


def _percent(row: Mapping[str, Any]) -> str:
    return "" if row["probability"] is None else f"{row['probability']:.0%}"


@dataclass(frozen=True, kw_only=True, repr=False)
class TrainResult:
    """How a run ended.

    Attributes:
        status: ``completed``, or ``stopped``: interrupted, or at ``train.until`` (run the same again to resume).
        run_dir: The run directory.
        summary: Content of summary.json.
        was_complete: True if there was nothing left to do.
        make_task: Makes the task that was given in Python; None for that of the recipe.
    """

    status: str
    run_dir: Path
    summary: Summary
    was_complete: bool = False
    make_task: TaskMaker | None = field(default=None, compare=False)

    @classmethod
    def of(cls, run_dir: Path) -> Self:
        """Return the result of a run that has ended, from its directory."""
        summary = read_summary(RunDirectory(run_dir))
        return cls(status=summary.status, run_dir=run_dir, summary=summary)

    @property
    def metrics(self) -> Mapping[str, Any]:
        """The last evaluation's results, with more of them under ``best`` and ``last``."""
        return self.summary.metrics

    @property
    def learning(self) -> str:
        """Whether the run learned, and the likeliest cause if not, in a sentence; empty if nothing is wrong."""
        return str(self.summary.details.get("learning", {}).get("sentence", ""))

    def history(self, kind: str = "evaluation") -> list[dict[str, Any]]:
        """Return the run's records in order, for ``pandas.DataFrame(result.history())``.

        Args:
            kind: ``evaluation``, one for each set of weights, or ``step``, one every ``telemetry.log_every``; or
                another record's.

        Raises:
            RecipeError: If there are no such records.
        """
        kinds = [each.kind for each in Event.__subclasses__()]
        if kind not in kinds:
            raise RecipeError(f"kind is {kind!r}; choose one of {', '.join(kinds)}.", key="kind", value=kind)
        records = read_events(RunDirectory(self.run_dir).events, kinds=(kind,))
        return [{key: each[key] for key in each if key not in INPUTS} for each in records]

    # Predictions of the last evaluation

    def mistakes(self, *, every: bool = False) -> list[dict[str, Any]]:
        """Return held-out samples with a wrong class, the most confident first, for ``pandas.DataFrame``.

        A notebook shows their pictures.

        Args:
            every: Score the weights of :attr:`model` again and return all; by default, those that the last evaluation
                kept (``evaluate.keep_examples``).

        Raises:
            DataError: If the run has no held-out samples, or they do not have one class each.
        """
        pictures: Mapping[int, str] = {}
        if every:
            with tempfile.TemporaryDirectory(prefix="paceline-") as made:
                file = Path(made) / "answers.jsonl"
                self.evaluate(predictions=file)
                lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
            if not all(isinstance(line.get(key), int) for line in lines for key in ("target", "prediction")):
                raise self._no_classes(kept=False)
            pairs = [[line.get(f"{key}_class", str(line[key])) for key in ("target", "prediction")] for line in lines]
            rows = [
                (line["id"], line["sample"], *pair, line.get("probability"))
                for line, pair in zip(lines, pairs, strict=True)
            ]
        else:
            kept = self._kept("examples")
            pictures = {each["sample"]: each["image"] for each in kept["examples"] if "image" in each}
            classes = [*kept["classes"], None]  # -1, without an answer, is the last
            rows = [
                (each["sample"], each["name"], classes[each["label"]], classes[each["predicted"]], each["probability"])
                for each in kept["examples"]
            ]
        names = ("sample", "name", "label", "predicted", "probability")
        found = [dict(zip(names, row, strict=True)) for row in rows if row[2] != row[3]]
        return Mistakes(sorted(found, key=lambda each: -(each["probability"] or 0)), pictures)

    def confusion(self) -> ConfusionMatrix:
        """Return the confusion matrix of the last evaluation.

        Raises:
            DataError: If the run has no held-out samples, or they do not have one class each.
        """
        kept = self._kept("confusion")
        return ConfusionMatrix(classes=kept["classes"], counts=matrix_of(kept))

    def _kept(self, what: str) -> dict[str, Any]:
        """Return a file of the last evaluation."""
        run = RunDirectory(self.run_dir)
        path: Path = getattr(run, what)
        if not path.is_file():
            raise self._no_classes()
        return read_json(path)

    def _no_classes(self, *, kept: bool = True) -> DataError:
        """Return the error for a run without predicted classes, where they were ``kept``."""
        run = RunDirectory(self.run_dir)
        plan = read_plan(run)
        is_fit = "objects" in plan["data"]
        reason = "its held-out samples do not have one class each"
        if is_fit:
            reason += "; evaluate(predictions='held_out.jsonl') writes the output and the target of each"
        if plan.get("evaluation_samples") == 0:
            way = "give paceline.fit held_out" if is_fit else "set data.validation_fraction or add a val/ folder"
            reason = f"no samples are held out; {way}"
        elif not self.history():
            reason = "it has not been evaluated yet"
        elif kept and (read_recipe(run).get("evaluate") or {}).get("keep_examples") == 0:
            reason = "evaluate.keep_examples=0 keeps no predictions; call mistakes(every=True)"
        return DataError(f"the run in {self.run_dir} has no mistakes or confusion matrix: {reason}.")

    def plot(self) -> Page:
        """Return charts of the loss and of each metric over steps; a notebook shows them, and ``save(path)`` writes
        them as one HTML file.
        """
        steps, evaluations = self.history("step"), self.history()
        names = dict.fromkeys(name for each in evaluations for name in each if name not in NO_METRICS)
        charts = []
        for name in ("loss", *(each for each in names if each != "loss")):
            of_training = [("training", steps)] if name == "loss" else []
            weights = dict.fromkeys(each["weights"] for each in evaluations)
            lines = [(f"held-out, {each}", [e for e in evaluations if e["weights"] == each]) for each in weights]
            chart = _curves(name, [*of_training, *lines])
            charts += [chart] if chart.traces else []
        return Page(
            title=self.run_dir.name,
            subtitle=f"{self.status}, {format_count(self.summary.step)} steps",
            sections=(Section(title="Curves", blocks=charts),),
        )

    # The network

    @cached_property
    def model(self) -> nn.Module:
        """The network with the weights of its best evaluation, or the newest without one; in evaluation mode."""
        saved = self._saved()
        with trusting_code(), restore_random_states(None):  # training ran it too
            return self._task(saved).trained(saved)

    def predict(self, data: Any, *, batch_size: int = 64) -> Any:
        """Return a row for each input, in order, as :func:`paceline.predict` does, which has more options.

        Args:
            data: Paths of files or folders, pictures of Pillow, arrays of uint8 [height, width, channels], or texts for
                a language model; one or a list.
            batch_size: Inputs for each call of the network.

        Raises:
            PacelineError: If an input cannot be used, or the task predicts none.
        """
        from paceline.prediction.inputs import pictures_in, prompts_in, rows_of
        from paceline.prediction.predictor import Prompt, predict_ahead

        saved = self._saved()
        with trusting_code():
            predictor = self._task(saved).predictor(saved, choose_device("auto", World()))
        inputs = list(data) if isinstance(data, list | tuple) else [data]
        if prompts := prompts_in(predictor, inputs):
            return rows_of(predictor.reply(Prompt(text=each)) for each in prompts)
        pictures = pictures_in(predictor, inputs, SkippedItems())
        return rows_of(predict_ahead(predictor, pictures, top_k=predictor.usual_top_k, batch_size=batch_size))

    def evaluate(
        self, overrides: Overrides = (), *, weights: str = "auto", predictions: str | Path | None = None
    ) -> EvaluationReport:
        """Score the weights of :attr:`model` on held-out samples, in this process or the world that it belongs to.

        Args:
            overrides: Changes, such as ``{"data.path": "other-photos"}``.
            weights: ``auto``, ``model`` or ``ema``.
            predictions: A file for a line per sample, ``.jsonl`` or ``.csv``.

        Raises:
            PacelineError: If there are no held-out samples, or they cannot be scored.
        """
        request = EvaluationRequest(
            target=self.run_dir,
            overrides=overrides,
            weights=weights,
            best=self._has_best,
            trust_code=True,
            predictions=None if predictions is None else folder("predictions", predictions, error=RecipeError),
            task=self.make_task,
        )
        with trusting_code():
            return evaluate_target(request)

    @property
    def _has_best(self) -> bool:
        return (RunDirectory(self.run_dir).checkpoints / "best.json").is_file()

    def _saved(self) -> SavedWeights:
        return read_weights(self.run_dir, best=self._has_best)

    def _task(self, saved: SavedWeights) -> Task:
        make = self.make_task or trained_task(saved, trust_code=True)
        return make(trained_recipe(saved))

    # Shown

    def __repr__(self) -> str:
        values = {name: each for name, each in self.metrics.items() if isinstance(each, int | float)}
        figures = [f"{name} {each:.4g}{' %' if metric_unit(name) else ''}" for name, each in values.items()]
        status = self.status + " by a signal" * (self.summary.details.get("ending") == "signal")
        facts = ", ".join([status, f"step {self.summary.step}", *figures, str(self.run_dir)])
        return f"{type(self).__name__}({facts})"

    def _repr_html_(self) -> str:
        """Show curves of the loss and the main metric and the last evaluations in a notebook."""
        evaluations = self.history()
        scored = [each for each in evaluations if each["weights"] == evaluations[-1]["weights"]]
        main = str(read_plan(RunDirectory(self.run_dir)).get("headline", "loss"))
        charts = [
            LineChart(
                title=", ".join(filter(None, (metric_title(name), metric_unit(name)))),
                lines={"training": _points(name, records), "held-out": _points(name, scored)},
            )
            for name, records in {main: [], "loss": self.history("step")}.items()
        ]
        names = [name for name in (scored[-1] if scored else {}) if name not in NO_METRICS][:_MAX_METRICS]
        whose = " with the moving average of the weights" * (bool(scored) and scored[-1]["weights"] == "ema")
        more = f", the last {_MAX_ROWS} of {len(scored)}" * (len(scored) > _MAX_ROWS)
        table = Table(
            columns=("epoch", "step", *map(metric_title, names)),
            rows=[
                (str(each["epoch"]), str(each["step"]), *(_figure(name, each.get(name)) for name in names))
                for each in scored[-_MAX_ROWS:]
            ],
            caption=f"Evaluations of held-out samples{whose}{more}",
        )
        ended = f"{self.status.capitalize()} after {format_count(self.summary.step)} steps in `{self.run_dir}`."
        return notebook_html(Text(*filter(None, (self.learning, ended))), *charts, *[table] * bool(scored))


def _points(name: str, records: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Return the finite values of a metric, each with its step."""
    found = [(each["step"], each.get(name)) for each in records]
    return [(step, value) for step, value in found if value is not None and math.isfinite(value)]


def _figure(name: str, value: float | None) -> str | None:
    return None if value is None else format_metric(name, value)


def _curves(name: str, lines: Sequence[tuple[str, Sequence[Mapping[str, Any]]]]) -> Chart:
    """Return a metric of several lists of records, over steps."""
    traces = [
        {"name": title, "mode": "lines+markers", "x": [e["step"] for e in found], "y": [e[name] for e in found]}
        for title, records in lines
        if (found := [each for each in records if each.get(name) is not None])
    ]
    layout = {"xaxis": {"title": "step"}, "yaxis": {"title": metric_unit(name) or name}}
    return Chart(title=metric_title(name), traces=traces, layout=layout)
