"""How does MLPerf turn runs into a result?"""

from __future__ import annotations

from collections.abc import Sequence

from paceline_advisor.formulas.time import IMAGENET_TRAIN


def olympic_mean(values: Sequence[float], dropped: int = 1) -> float:
    """Mean without the best and the worst.

    Raises:
        ValueError: If nothing is left.

    Source:
        MLCommons, training_policies, training_rules.adoc, "Benchmark results".
    """
    kept = sorted(values)[dropped : len(values) - dropped]
    if not kept:
        raise ValueError(f"{len(values)} values, of which the best {dropped} and the worst {dropped} are dropped")
    return sum(kept) / len(kept)


def reference_convergence_ratio(reference_epochs: Sequence[float], epochs: float) -> float:
    """Epochs of the reference's runs beside a submission's; above 1, the submission converged faster than allowed for.

    Source:
        MLCommons, mlperf_logging/rcp_checker (reference convergence points).
    """
    return olympic_mean(reference_epochs) / epochs


def images_per_second(epochs: float, minutes: float, images: int = IMAGENET_TRAIN, devices: int = 1) -> float:
    """Least throughput that a time to a number of epochs stands for, all that happens between included.

    Source:
        MLCommons, training results: epochs and run times of a submission's logs.
    """
    return epochs * images / (minutes * 60) / devices
