"""What :func:`paceline.train` returns: a run that has ended, with its curves, mistakes and network."""

from __future__ import annotations

import html
import json
import tempfile
from collections.abc import Mapping, Sequence
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
from paceline.pages.page import Chart, Page, Section, Table
from paceline.parsing.arguments import folder
from paceline.parsing.files import SkippedItems
from paceline.parsing.units import format_count, format_metric, metric_title, metric_unit
from paceline.plugins.references import trusting_code
from paceline.recipe.load import Overrides
from paceline.records.events import Event
from paceline.records.reader import NO_METRICS, Summary, read_events, read_json, read_plan, read_recipe, read_summary
from paceline.records.run_directory import RunDirectory
from paceline.tasks.task import Task
from paceline.tasks.trained import TaskMaker, trained_recipe, trained_task
from paceline.trainer.evaluate_target import EvaluationReport, EvaluationRequest, evaluate_target
from paceline.trainer.process_settings import restore_random_states

_MAX_ROWS = 20


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
        return list(read_events(RunDirectory(self.run_dir).events, kinds=(kind,)))

    # Predictions of the last evaluation

    def mistakes(self, *, every: bool = False) -> list[dict[str, Any]]:
        """Return held-out samples with a wrong class, the most confident first, for ``pandas.DataFrame``.

        Args:
            every: Score the weights of :attr:`model` again and return all; by default, those that the last evaluation
                kept (``evaluate.keep_examples``).

        Raises:
            DataError: If the run has no held-out samples, or they do not have one class each.
        """
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
            classes = [*kept["classes"], None]  # -1, without an answer, is the last
            rows = [
                (each["sample"], each["name"], classes[each["label"]], classes[each["predicted"]], each["probability"])
                for each in kept["examples"]
            ]
        names = ("sample", "name", "label", "predicted", "probability")
        found = [dict(zip(names, row, strict=True)) for row in rows if row[2] != row[3]]
        return sorted(found, key=lambda each: -(each["probability"] or 0))

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
        """Show the loss curve and the evaluations in a notebook."""
        losses = [each["loss"] for each in self.history("step") if each["loss"] is not None]
        top, width = max([*losses, 1e-9]), 320
        points = " ".join(
            f"{width * i / max(len(losses) - 1, 1):.0f},{60 - 60 * loss / top:.1f}" for i, loss in enumerate(losses)
        )
        evaluations = self.history()
        names = [name for name in (evaluations[-1] if evaluations else {}) if name not in NO_METRICS]
        head = "".join(f"<th>{metric_title(name)}</th>" for name in names)
        rows = "".join(
            f"<tr><td>{each['epoch']}</td><td>{each['weights']}</td>"
            + "".join(f"<td>{'' if each.get(name) is None else format_metric(name, each[name])}</td>" for name in names)
            + "</tr>"
            for each in evaluations[-_MAX_ROWS:]
        )
        judged = f"<p>{html.escape(self.learning)}</p>" if self.learning else ""
        return (
            f"{judged}<p>{self.status.capitalize()} after {format_count(self.summary.step)} steps in "
            f"<code>{html.escape(str(self.run_dir))}</code></p>"
            f'<svg width="{width}" height="60" role="img" aria-label="training loss"><polyline points="{points}" '
            'fill="none" stroke="currentColor"/></svg>'
            f"<table><tr><th>epoch</th><th>weights</th>{head}</tr>{rows}</table>"
        )


def _curves(name: str, lines: Sequence[tuple[str, Sequence[Mapping[str, Any]]]]) -> Chart:
    """Return a metric of several lists of records, over steps."""
    traces = [
        {"name": title, "mode": "lines+markers", "x": [e["step"] for e in found], "y": [e[name] for e in found]}
        for title, records in lines
        if (found := [each for each in records if each.get(name) is not None])
    ]
    layout = {"xaxis": {"title": "step"}, "yaxis": {"title": metric_unit(name) or name}}
    return Chart(title=metric_title(name), traces=traces, layout=layout)
