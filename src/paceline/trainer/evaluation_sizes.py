"""At which size should these weights be evaluated? Several are tried on images that were not trained on.

A random crop shows things larger than a centre crop of the same size does, so that weights do better on images somewhat
larger than those they were trained on (Touvron et al. 2019). The size is chosen on training images that the run held
out: chosen on the validation images, it would be fitted to them, and their accuracy no longer an estimate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import PacelineError
from paceline.recipe.load import set_by
from paceline.trainer.evaluate_target import EvaluationReport, EvaluationRequest, evaluate_sizes


@dataclass(frozen=True, kw_only=True)
class SizeTrial:
    """One size, and how the weights did.

    Attributes:
        size: ``data.evaluation_size``, in pixels.
        report: What was measured.
    """

    size: int
    report: EvaluationReport

    @property
    def samples_per_second(self) -> float:
        """Images scored per second over all processes, reading and the first batch included."""
        return self.report.samples / self.report.seconds


@dataclass(frozen=True, kw_only=True)
class SizeSweep:
    """What several sizes come to.

    Attributes:
        trials: One for each size, in the order asked for.
        on: Which images were scored: ``holdout`` or ``validation``.
        metric: What decides: the top-1 accuracy, or the loss where there is none.
    """

    trials: tuple[SizeTrial, ...]
    on: str
    metric: str

    @property
    def best(self) -> SizeTrial:
        """The trial that did best; of equal ones the smallest, which costs least."""
        sign = -1 if self.metric == "loss" else 1
        return max(self.trials, key=lambda trial: (sign * trial.report.metrics[self.metric], -trial.size))

    def to_json(self) -> dict[str, Any]:
        """The sweep as one JSON object."""
        first = self.trials[0].report
        return {
            "path": str(first.path),
            "weights": first.weights,
            "on": self.on,
            "samples": first.samples,
            "metric": self.metric,
            "best_size": self.best.size,
            "left_out": list(first.left_out),
            "sizes": [
                {
                    "size": trial.size,
                    "seconds": trial.report.seconds,
                    "samples_per_second": trial.samples_per_second,
                    **trial.report.metrics,
                }
                for trial in self.trials
            ],
        }


def sweep_sizes(request: EvaluationRequest, sizes: Sequence[int]) -> SizeSweep:
    """Score saved weights at several sizes; a collective of all processes of the world this one finds itself in.

    Raises:
        PacelineError: If the target or the data are not usable, nothing was held out, or a size has no effect.
    """
    if "data.evaluation_size" in set_by(request.overrides):
        raise PacelineError("override 'data.evaluation_size' has no effect with --sizes, which says them. Remove it.")
    if len(set(sizes)) < len(sizes):
        raise PacelineError(f"--sizes={','.join(map(str, sizes))} names a size twice; name each once.")
    reports = evaluate_sizes(request, sizes)
    trials = tuple(SizeTrial(size=size, report=report) for size, report in zip(sizes, reports, strict=True))
    metric = "top1_accuracy" if "top1_accuracy" in reports[0].metrics else "loss"
    return SizeSweep(trials=trials, on=request.on, metric=metric)
