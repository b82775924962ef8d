"""Do several runs converge as a reference does? Read from their logs in MLPerf's format."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.errors import RunDirectoryError
from paceline.formulas.convergence import (
    RESNET_EPOCHS,
    RESNET_RUNS,
    Convergence,
    ReferencePoint,
    compare,
    pruned,
    reference_points,
)
from paceline.formulas.time import IMAGENET_TRAIN
from paceline.plain_json import load_json
from paceline.records.reader import read_json
from paceline.telemetry.mlperf_log import TOKEN

_FEWEST = 3


@dataclass(frozen=True, kw_only=True)
class LoggedRun:
    """What a log in MLPerf's format says of a run.

    Attributes:
        path: The log.
        global_batch_size: Samples per step.
        train_samples: Samples per epoch.
        arrived: Whether it reached its target.
        epochs: Until its last evaluation; 0 if there was none.
        accuracy: Of that evaluation, as a share of 1.
        seconds: From the start of its clock to its end.
    """

    path: Path
    global_batch_size: int
    train_samples: int
    arrived: bool
    epochs: float
    accuracy: float
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """The run as one JSON object."""
        return {**asdict(self), "path": str(self.path)}


@dataclass(frozen=True, kw_only=True)
class ConvergenceCheck:
    """Runs beside a reference.

    Attributes:
        runs: As their logs say.
        found: How they compare; None if they were not held against anything.
        remark: Why not, or what is to be known of the comparison; empty if nothing.
    """

    runs: tuple[LoggedRun, ...]
    found: Convergence | None = None
    remark: str = ""

    def to_json(self) -> dict[str, Any]:
        """The check as one JSON object."""
        compared = None if self.found is None else asdict(self.found)
        return {"runs": [run.to_json() for run in self.runs], "convergence": compared, "remark": self.remark}


def check_convergence(logs: Sequence[Path], reference: Path | None = None) -> ConvergenceCheck:
    """Hold the runs of several logs against reference points.

    Args:
        logs: Logs in MLPerf's format.
        reference: Points of one's own, as the published checker reads them: JSON objects by name, each with ``BS`` and
            ``Epochs to converge``. None is MLPerf's own, which are of ResNet-50 on ImageNet.

    Raises:
        RunDirectoryError: If a log or the reference cannot be read, a log is named twice, or the runs differ in their
            batch size.
    """
    # Read first: a misspelt path is told, also where there is nothing to hold against it.
    own = None if reference is None else read_reference(reference)
    runs = tuple(read_mlperf_log(path) for path in logs)
    if twice := next((path for path in logs if logs.count(path) > 1), None):
        raise RunDirectoryError(f"'{twice}' was named twice; name each run once.")
    sizes = {run.global_batch_size for run in runs}
    if len(sizes) > 1:
        told = ", ".join(f"{run.path} has {run.global_batch_size}" for run in runs)
        raise RunDirectoryError(f"runs are compared with a reference at one global batch size, and {told}.")
    if len(runs) < _FEWEST:
        why = f"found {len(runs)}, and reference points ask for {_FEWEST} runs or more"
        return ConvergenceCheck(runs=runs, remark=f"{why}, of which the fastest and the slowest are left out")
    others = {run.train_samples for run in runs} - {IMAGENET_TRAIN}
    if own is None and others:
        why = f"MLPerf's reference points are of ImageNet's {IMAGENET_TRAIN:,} training samples; found {min(others):,}"
        return ConvergenceCheck(runs=runs, remark=f"{why}: give points of your own (--reference)")
    points = pruned(reference_points(RESNET_EPOCHS)) if own is None else own
    found = compare(points, sizes.pop(), [run.epochs if run.arrived else math.inf for run in runs])
    few = f"MLPerf asks for {RESNET_RUNS} runs; found {len(runs)}" if len(runs) != RESNET_RUNS else ""
    return ConvergenceCheck(runs=runs, found=found, remark=few)


def read_mlperf_log(path: Path) -> LoggedRun:
    """Read what a log says of its run.

    Raises:
        RunDirectoryError: If it cannot be read, or lacks a line.
    """
    try:
        lines = [line[len(TOKEN) :] for line in path.read_text(encoding="utf-8").splitlines() if line.startswith(TOKEN)]
        said: dict[str, Mapping[str, Any]] = {each["key"]: each for each in map(load_json, lines)}
    except OSError as error:
        raise RunDirectoryError(f"Cannot read '{path}': {error.strerror}.") from error
    except (ValueError, TypeError, KeyError) as error:
        raise RunDirectoryError(f"'{path}' is no log in MLPerf's format: {error}.") from error
    try:
        last = said.get("eval_accuracy", {"value": 0.0, "metadata": {"epoch_num": 0}})
        return LoggedRun(
            path=path,
            global_batch_size=int(said["global_batch_size"]["value"]),
            train_samples=int(said["train_samples"]["value"]),
            arrived=said["run_stop"]["metadata"]["status"] == "success",
            epochs=round(float(last["metadata"]["epoch_num"]), 3),  # as the published checker of convergence does
            accuracy=float(last["value"]),
            seconds=(said["run_stop"]["time_ms"] - said["run_start"]["time_ms"]) / 1000,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RunDirectoryError(f"'{path}' is no whole log in MLPerf's format: {error} is missing or wrong.") from error


def read_reference(path: Path) -> list[ReferencePoint]:
    """Reference points of a file, pruned.

    Raises:
        RunDirectoryError: If it holds none.
    """
    document = read_json(path)
    try:
        epochs = {int(each["BS"]): [float(one) for one in each["Epochs to converge"]] for each in document.values()}
        return pruned(reference_points(epochs))
    except (KeyError, TypeError, ValueError) as error:
        raise RunDirectoryError(
            f"'{path}' holds no reference points: {type(error).__name__}: {error}; each is an object with BS and at "
            "least three numbers under 'Epochs to converge'."
        ) from error
