"""Criteria: are the figures that a program reports true?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from paceline_course.assignment import VALIDATION_SAMPLES
from paceline_course.grading.expected import accuracy_of_state, accuracy_of_vector, mean_loss_and_gradient, step_shares
from paceline_course.grading.findings import Finding, Runs, listing, with_processes
from paceline_course.grading.runs import Run, Validation

TARGET_ACCURACY = 90.0  # percent; the reference reaches 95 and more
_LOSS = 1e-4
_NO_LOG = "there is no log.jsonl in the directory of --output"
_HALF_A_SAMPLE = 50 / VALIDATION_SAMPLES


def loss(runs: Runs) -> Finding:
    """Is the loss in the log the mean over all samples of the epoch?"""
    return runs.on_several(_loss)


def validation(runs: Runs) -> Finding:
    """Is every sample of the validation set counted once, and the accuracy in the log the one of these weights?"""
    every = runs.complete("one", "two", "three")
    if not runs.complete("two", "three"):
        return Finding("This could not be seen: no run with 2 or 3 processes trained to its end.")
    findings = [_validation(run) for run in every.values()]
    return next((finding for finding in findings if finding.reason), findings[-1])


def validation_shared(runs: Runs) -> Finding:
    """Do all ranks take part in validation?"""
    return runs.on_several(_validation_shared)


def batchnorm(runs: Runs) -> Finding:
    """Are the statistics of BatchNorm the same on all ranks when it counts?"""
    run = runs.complete("batchnorm").get("batchnorm")
    if run is None:
        return Finding("This could not be seen: the run of the network with BatchNorm was not trained to its end.")
    for rank, member in enumerate(run.ranks):
        if any(seen.training for seen in member.validations):
            return Finding(
                f"Rank {rank} validated in training mode, in which BatchNorm takes its statistics from the batch."
            )
    found = [_last_statistics(member.validations) for member in run.ranks]
    present = [(rank, vector) for rank, vector in enumerate(found) if vector is not None]
    for rank, vector in present[1:]:
        gap = float(np.abs(vector - present[0][1]).max(initial=0.0))
        if gap > 1e-6:
            return Finding(
                f"The means and variances of BatchNorm on rank {rank} differ by up to {gap:.2g} from those of rank "
                f"{present[0][0]} in the last validation: each rank used what it had seen itself."
            )
    saved = accuracy_of_state(run.weights)
    if saved is None:
        return Finding(
            "The network with BatchNorm was not saved as weights.safetensors, with its weights by their names."
        )
    logged = _logged(run, run.epochs - 1, "validation_accuracy")
    # Where logged accuracies are wrong anyway, they say nothing of BatchNorm.
    if (logged is None or not abs(saved - logged) <= _HALF_A_SAMPLE) and not validation(runs).reason:
        return Finding(
            f"The saved network has an accuracy of {_percent(saved)}; the last in the log is {_percent(logged)}."
        )
    return Finding()


def accuracy(runs: Runs) -> Finding:
    """Does the network with BatchNorm reach the target?"""
    run = runs.get("batchnorm")
    found = accuracy_of_state(run.weights) if run is not None and run.weights else None
    if found is None or found < TARGET_ACCURACY:
        has = "none was saved" if found is None else f"the saved one has {_percent(found)}"
        reason = f"The target of the network with BatchNorm is {TARGET_ACCURACY:g} % on the validation set, and {has}."
        return Finding(reason, seen={"accuracy": found})
    return Finding(seen={"accuracy": found})


def _loss(run: Run) -> Finding:
    for epoch in range(run.epochs):
        total, count = 0.0, 0
        for step in run.epoch_steps(epoch):
            shares = step_shares(run, step)
            samples = sum(len(part) for _, part in shares)
            if samples:
                total += mean_loss_and_gradient(shares)[0] * samples
                count += samples
        expected = total / max(count, 1)
        found = _logged(run, epoch, "train_loss")
        if not run.log:
            return Finding(f"{with_processes(run).capitalize()}, {_NO_LOG}.")
        if found is None:
            return Finding(f"The log {with_processes(run)} has no number train_loss for epoch {epoch}.")
        if not abs(found - expected) <= _LOSS * max(1.0, abs(expected)):
            return Finding(
                f"The log {with_processes(run)} has a train_loss of {found:.6g} for epoch {epoch}; "
                f"the mean over all its samples is {expected:.6g}.",
                seen={"logged": found, "expected": expected},
            )
    return Finding()


def _validation(run: Run) -> Finding:
    for epoch in range(run.epochs):
        where = f"After epoch {epoch} {with_processes(run)}"
        end = run.epoch_steps(epoch).stop
        passes = [seen for rank in run.ranks for seen in rank.validations if seen.step == end]
        counts = Counter(sample for seen in passes for sample in seen.samples)
        missing = VALIDATION_SAMPLES - len(counts)
        repeated = sorted(sample for sample, count in counts.items() if count > 1)
        if missing:
            return Finding(
                f"{where}, {missing} of {VALIDATION_SAMPLES} samples of the validation set were not looked at."
            )
        if repeated:
            return Finding(
                f"{where}, these samples of the validation set were counted more than once: {listing(repeated)}."
            )
        found = _logged(run, epoch, "validation_accuracy")
        weights = run.ranks[0].steps[end].weights if end < run.steps else _end_weights(run)
        expected = None if weights is None else accuracy_of_vector(weights)
        if found is None or expected is None or not abs(found - expected) <= _HALF_A_SAMPLE:  # nan is not true either
            says = f"the log says {_percent(found)}" if run.log else _NO_LOG
            return Finding(f"{where}, {says}; with these weights the accuracy is {_percent(expected)}.")
    return Finding(seen={"samples counted": VALIDATION_SAMPLES})


def _validation_shared(run: Run) -> Finding:
    looked = [sum(len(seen.samples) for seen in rank.validations) for rank in run.ranks]
    idle = [rank for rank, count in enumerate(looked) if count == 0]
    if idle:
        return Finding(f"{with_processes(run).capitalize()}, ranks without any sample to validate: {listing(idle)}.")
    if max(looked) > 1.5 * sum(looked) / len(looked):
        return Finding(
            f"{with_processes(run).capitalize()}, ranks validated {listing(looked)} samples: not a fair share each."
        )
    return Finding()


def _last_statistics(validations: tuple[Validation, ...]) -> Any:
    return validations[-1].statistics if validations else None


def _logged(run: Run, epoch: int, key: str) -> float | None:
    records: list[Mapping[str, Any]] = [record for record in run.log if record.get("epoch") == epoch]
    value = records[0].get(key) if len(records) == 1 else None
    if not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:  # an int of hundreds of digits
        return None


def _end_weights(run: Run) -> Any:
    end = run.ranks[0].end
    return None if end is None else end.weights


def _percent(value: float | None) -> str:
    return "no number" if value is None else f"{value:.2f} %"
