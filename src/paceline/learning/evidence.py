"""What the records of a run say about its learning; no torch needed."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from paceline.errors import RunDirectoryError
from paceline.recipe.load import OWN_LOOP
from paceline.records.reader import read_events, read_json, read_plan, read_recipe
from paceline.records.run_directory import RunDirectory

Json = Mapping[str, Any]
_KINDS = ("step", "evaluation", "observation", "incident", "finish")
# Two-sided 99 %.
_Z = 2.6
# A loss below this share of its prior was learned.
_LEARNED = 0.98
_FEW = 20


@dataclass(frozen=True, kw_only=True)
class LossFit:
    """What a loss function was given, against the best answer that ignores the input.

    Attributes:
        figures: As :func:`~paceline.learning.losses.described` returns them.
    """

    figures: Json

    @property
    def of_classes(self) -> bool:
        """Whether a class is right or wrong."""
        return bool(self.figures["kind"] == "classes")

    @property
    def groups(self) -> int:
        """Independent samples."""
        return int(self.figures["groups"])

    @property
    def score(self) -> float:
        """Share of right answers, or the correlation of answers and targets."""
        score = float(self.figures["accuracy" if self.of_classes else "correlation"] or 0.0)
        return score if abs(score) <= 1 else 0.0  # numbers so large that sums of squares are inexact

    @property
    def chance(self) -> float:
        """The score of the best answer that ignores the input."""
        return float(self.figures["majority"]) if self.of_classes else 0.0

    @property
    def error(self) -> float:
        """Standard error of the score, at least that of a guess."""
        count = max(self.groups, 1)
        if not self.of_classes:
            return 1 / math.sqrt(count)
        guess = math.sqrt(self.chance * (1 - self.chance) / count)
        return max(float(self.figures["accuracy_error"] or 0.0), guess, 0.5 / count)

    @property
    def loss_share(self) -> float | None:
        """The loss as a share of that of the best answer that ignores the input; None if that is unknown."""
        loss, prior = self.figures.get("loss"), self.figures.get("prior")
        if not self.of_classes and self.figures["kind"] == "numbers":
            return None if self.figures["r2"] is None else 1 - float(self.figures["r2"])
        return None if loss is None or not prior else float(loss) / float(prior)

    @property
    def is_above_chance(self) -> bool:
        """Whether the score or the loss is certainly better than a guess."""
        share, certain = self.loss_share, self.score - _Z * self.error > self.chance
        if self.figures["kind"] == "numbers":
            # Answers to unrelated targets may still go along with others: both follow the inputs' main directions.
            return certain and (share is None or share < 0.95 or self.score > 0.4)
        if self.loss_share is None and self.of_classes and self.score + _Z * self.error < self.chance / 2:
            return True  # of a loss of the user, whose answers may be distances: the least one counts
        values = self.figures["labels" if self.of_classes else "values"]
        return certain or (share is not None and share < _LEARNED - 1 / math.sqrt(max(values, 1)) / 4)

    @property
    def reached(self) -> str:
        """The score with its interval, without that of a guess."""
        if self.of_classes:
            low, high = (100 * min(max(self.score + sign * 1.96 * self.error, 0), 1) for sign in (-1, 1))
            return f"{100 * self.score:.3g} % right ({low:.3g} to {high:.3g})"
        return str(self)

    def __str__(self) -> str:
        if self.of_classes:
            return f"{self.reached}, and {100 * self.chance:.3g} % by guessing"
        return f"a correlation of {self.score:.2g} between answers and targets (± {1.96 * self.error:.2g})"


@dataclass(frozen=True, kw_only=True)
class LearningEvidence:
    """The records of a run that tell whether it learns.

    Attributes:
        plan: The run's plan.
        recipe: Its recipe.
        steps: Step records.
        evaluations: Evaluations of the weights that count, oldest first.
        observations: Observed steps, oldest first.
        held_out: What the loss was given in the last evaluation, by loss function.
        copies: How many observed training samples were compared with the held-out ones, and how many are among them.
        matrix: The confusion matrix of the last evaluation, labels by predictions; empty if none was kept, or if there
            are more than a hundred classes.
        warning: The run's own warning, such as that it diverged.
    """

    plan: Json
    recipe: Json
    steps: Sequence[Json] = ()
    evaluations: Sequence[Json] = ()
    observations: Sequence[Json] = ()
    held_out: Mapping[str, Json] = field(default_factory=dict)
    copies: Mapping[str, int] = field(default_factory=dict)
    matrix: Sequence[Sequence[int]] = ()
    warning: str = ""

    @cached_property
    def full(self) -> list[Json]:
        """Steps that were observed in full."""
        return [each for each in self.observations if "blocks" in each]

    @cached_property
    def last(self) -> Json:
        """The last step that was observed in full."""
        return self.full[-1] if self.full else {}

    @cached_property
    def held(self) -> LossFit | None:
        """The held-out score; None without an evaluation whose loss is known."""
        return _fit(self.held_out)

    @cached_property
    def trained(self) -> LossFit | None:
        """The training score of the last observed steps together."""
        late = self._late()
        return _fit(_pooled([each["losses"] for each in late]))

    def _late(self) -> list[Json]:
        with_loss = [each for each in self.observations if each.get("losses")]
        if not with_loss:
            return []
        end = with_loss[-1]["step"]
        return [each for each in with_loss if each["step"] > max(0.9 * end, end - _FEW)]

    @cached_property
    def first_fit(self) -> LossFit | None:
        """The training score of the first observed step."""
        return _fit(self.observations[0].get("losses", {})) if self.observations else None

    @cached_property
    def losses(self) -> list[float]:
        """Training losses of the step records."""
        return [float(each["loss"]) for each in self.steps if each.get("loss") is not None]

    @cached_property
    def has_settled(self) -> bool:
        """Whether the training loss hardly falls any more: its last quarter brought less than a tenth of its fall."""
        count = len(self.losses) // 4
        if count < 1:
            return False
        first, third = self.losses[0], statistics.mean(self.losses[-2 * count : -count])
        last = statistics.mean(self.losses[-count:])
        return first - last < 0.02 * first or third - last < 0.1 * (first - last)

    @property
    def is_at_chance(self) -> bool:
        """Whether the held-out score is no better than a guess, as far as its interval tells."""
        return self.held is not None and not self.held.is_above_chance

    @cached_property
    def is_flat(self) -> bool:
        """Whether the training loss is no better than that of an answer that ignores the input."""
        if self.trained is None or (self.held is not None and self.held.is_above_chance):
            return False
        return not self.trained.is_above_chance and self.trained.groups >= _FEW

    @cached_property
    def is_stuck(self) -> bool:
        """Whether weights and loss hardly move; only where it is unknown what a guess would cost."""
        known = any(each is not None and each.loss_share is not None for each in (self.held, self.trained))
        if known or len(self.losses) < 2 or not self.full:
            return False
        half = len(self.losses) // 2
        early, late = statistics.mean(self.losses[:half]), statistics.mean(self.losses[half:])
        return self.moved < 1e-3 and early - late < max(0.01 * abs(early), statistics.pstdev(self.losses))

    @property
    def may_be_intended(self) -> bool:
        """Whether the program's own loop decides what to train, and how, and the outcome is not bad."""
        return self.recipe.get("task") == OWN_LOOP and not self.in_trouble

    @property
    def has_learned_little(self) -> bool:
        """Whether the held-out loss is hardly below that of a guess, after most of the run."""
        share = None if self.held is None else self.held.loss_share
        return share is not None and share > 0.75 and not self.is_early

    @property
    def is_early(self) -> bool:
        """Whether less than half of the run is done."""
        total, done = self.plan.get("total_steps"), self.steps[-1]["step"] if self.steps else 0
        return isinstance(total, int) and done < 0.5 * total

    @property
    def in_trouble(self) -> bool:
        """Whether something is wrong with the outcome; too early in a run nothing is."""
        return bool(self.warning) or (not self.is_early and (self.is_at_chance or self.is_flat or self.is_stuck))

    @property
    def outcome(self) -> str:
        """The outcome if it is bad, as a sentence without its end; empty otherwise."""
        held, trained = self.held, self.trained
        if not self.in_trouble:
            return ""
        if self.warning:
            said = self.warning.partition(";")[0].rstrip(".")
            return said[:1].upper() + said[1:]
        if self.is_at_chance and held is not None:
            return f"No better than chance on held-out samples, with {held}"
        if self.is_flat and trained is not None:
            return f"The training loss has not fallen below that of a guess, with {trained}"
        return f"The training loss has not clearly fallen, from {self.losses[0]:.4g} to {self.losses[-1]:.4g}"

    @cached_property
    def largest_update(self) -> float:
        """The largest update of an observed step, relative to the weights; the median over blocks."""
        return max((_median(each["update"] for each in one["blocks"].values()) for one in self.full), default=0.0)

    @cached_property
    def moved(self) -> float:
        """How far the weights have moved, relative to their size; of the block that moved farthest."""
        figures = (each["moved"] or 0.0 for one in self.full for each in one["blocks"].values())
        return max(figures, default=0.0)

    def value(self, key: str) -> Any:
        """Return a value of the recipe by its dotted key; None if it is off or not there."""
        found: Any = self.recipe.get(key)
        if found is None:
            found = self.recipe
            for part in key.split("."):
                found = found.get(part) if isinstance(found, Mapping) else None
        return None if found in ("off", False, (), []) else found


def read_evidence(run: RunDirectory, warning: str | None = None) -> LearningEvidence:
    """Return the evidence in a run directory.

    Args:
        run: The directory.
        warning: The run's own warning; None for that of its summary.

    Raises:
        RunDirectoryError: If its records cannot be read.
    """
    if warning is None:
        warning = ""
        with contextlib.suppress(RunDirectoryError):
            details = read_json(run.summary).get("details")
            warning = str(details.get("warning", "")) if isinstance(details, Mapping) else ""
    events = list(read_events(run.events, kinds=_KINDS))
    return evidence_in(events, plan=read_plan(run), recipe=read_recipe(run), confusion=run.confusion, warning=warning)


def evidence_in(
    events: Iterable[Json], *, plan: Json, recipe: Json, confusion: Path, warning: str = ""
) -> LearningEvidence:
    """Return the evidence in events that have been read.

    Args:
        events: They, in order.
        plan: The run's plan.
        recipe: Its recipe, nested or by dotted keys.
        confusion: The file of the confusion matrix, which may be missing.
        warning: The run's own warning.
    """
    by_kind: dict[str, list[Json]] = {kind: [] for kind in _KINDS}
    for each in events:
        if each["event"] in by_kind:
            by_kind[each["event"]].append(each)
    matrix: Any = None
    if confusion.is_file():
        with contextlib.suppress(RunDirectoryError):
            matrix = read_json(confusion).get("matrix")
    evaluations, observed = by_kind["evaluation"], by_kind["observation"]
    weights = "ema" if any(each["weights"] == "ema" for each in evaluations) else "model"
    held = [each for each in observed if each["split"] == "validation"]
    if not warning and by_kind["finish"] and by_kind["finish"][-1]["status"] == "failed":
        found = [each for each in by_kind["incident"] if each["incident"].startswith("nonfinite_")]
        warning = str(found[-1]["message"]) if found else ""
    return LearningEvidence(
        plan=plan,
        recipe=recipe,
        steps=by_kind["step"],
        evaluations=[each for each in evaluations if each["weights"] == weights],
        observations=[each for each in observed if each["split"] == "train"],
        held_out=held[-1].get("losses", {}) if held else {},
        copies=held[-1].get("copies", {}) if held else {},
        matrix=matrix if isinstance(matrix, list) else (),
        warning=warning,
    )


def _fit(losses: Mapping[str, Json]) -> LossFit | None:
    """Return the loss that tells most: of classes, then of answers, then of numbers."""
    order = ("classes", "answers", "numbers")
    found = [each for each in losses.values() if each.get("kind") in order]
    return LossFit(figures=min(found, key=lambda each: order.index(each["kind"]))) if found else None


def _pooled(parts: Sequence[Mapping[str, Json]]) -> dict[str, Json]:
    """Return the figures of several steps together, weighed by their labels."""
    varied = [{name: each for name, each in part.items() if each and each["kind"] != "constant"} for part in parts]
    names = dict.fromkeys(name for part in varied for name in part)
    return {name: _mean([part[name] for part in varied if name in part]) for name in names}


def _mean(figures: Sequence[Json]) -> Json:
    def over(key: str) -> float | None:
        pairs = [(each["groups"], each[key]) for each in figures if each.get(key) is not None]
        total = sum(weight for weight, _ in pairs)
        return sum(weight * value for weight, value in pairs) / total if total else None

    whole = dict(figures[-1])
    whole |= {key: over(key) for key in whole if isinstance(whole[key], float | int) and key != "classes"}
    whole["groups"] = sum(each["groups"] for each in figures)
    whole["low"] = min((each["low"] for each in figures if each["low"] is not None), default=None)
    whole["high"] = max((each["high"] for each in figures if each["high"] is not None), default=None)
    if "accuracy_error" in whole:
        spread = sum((each["groups"] * (each["accuracy_error"] or 0)) ** 2 for each in figures)
        whole["accuracy_error"] = math.sqrt(spread) / max(whole["groups"], 1)
    return whole


def _median(values: Iterable[float | None]) -> float:
    known = [each for each in values if each is not None]
    return statistics.median(known) if known else 0.0
