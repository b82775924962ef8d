"""Criteria about training: gradients, weights, and the values that a program reports."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np

from paceline_course.assignment import VALIDATION_SAMPLES
from paceline_course.grading.runs import (
    CriterionResult,
    ProgramRun,
    Runs,
    Vector,
    accuracy_of_state,
    accuracy_of_vector,
    flat_state,
    listing,
    mean_loss_and_gradient,
    on_several,
    step_shares,
    with_processes,
)

# Ranks that do the same arithmetic agree bit by bit; adding float32 in another order changes far less than this.
_EQUAL_TOLERANCE = 1e-6
_RESULT_TOLERANCE = 1e-5
_GRADIENT_TOLERANCE = 1e-3  # relative, of the norm
_MOMENTUM = 0.9
_ROUNDING_TOLERANCE = 2e-7  # relative, of float32 weights after an addition
_STEP_TOLERANCE = 2e-4  # relative, of the norm; rounding of float32 causes a tenth of it


@on_several
def initial(run: ProgramRun) -> CriterionResult:
    """Check that all ranks start from the same weights."""
    return _same_on_ranks(run, [rank.steps[0].weights for rank in run.ranks], "before step 0")


def one_process(runs: Runs) -> CriterionResult:
    """Check that several processes give the result of one process with the same global batch."""
    alone = runs.complete("one").get("one")
    if alone is None:
        return CriterionResult("This could not be checked: the run with 1 process did not finish training.")
    return _as_one_process(runs, _final(alone, 0))


@on_several
def _as_one_process(run: ProgramRun, wanted: Vector) -> CriterionResult:
    gap = _gap(_final(run, 0), wanted)
    if gap > _RESULT_TOLERANCE:
        return CriterionResult(
            f"Final weights {with_processes(run)} differ by up to {gap:.2g} from those with 1 process."
        )
    return CriterionResult(seen={"largest difference": gap})


def explain_gradient(found: Vector, expected: Vector, before: Vector | None, processes: int) -> str:
    """Describe how a gradient differs from the expected one; empty if it does not.

    Args:
        found: The gradient that the optimizer received.
        expected: The gradient of the mean loss over the global batch.
        before: The gradient that the optimizer received in the previous step, if any.
        processes: World size.
    """
    size = float(np.linalg.norm(expected)) + 1e-12
    if np.linalg.norm(found - expected) <= _GRADIENT_TOLERANCE * size:
        return ""
    if not found.any():
        return "are all zero"
    if before is not None and np.linalg.norm(found - before - expected) <= _GRADIENT_TOLERANCE * size:
        return "still contain those of the previous step: they were not cleared"
    ratio = float(found @ expected) / size**2
    if np.linalg.norm(found - ratio * expected) > _GRADIENT_TOLERANCE * size * max(1.0, abs(ratio)):
        apart = float(np.linalg.norm(found - expected)) / size
        return f"differ from the gradient of the mean loss over the global batch by {apart:.0%} of its size"
    meanings = {processes: ": they were summed, not averaged", 1 / processes: ": they were divided once too often"}
    meaning = next(
        (text for factor, text in meanings.items() if abs(ratio - factor) < _GRADIENT_TOLERANCE * factor), ""
    )
    return f"are {ratio:.3g} times those of the mean over the global batch{meaning}"


@on_several
def gradient(run: ProgramRun) -> CriterionResult:
    """Check that each step uses the gradient of the mean loss over the global batch."""
    worst = 0.0
    for step in range(run.steps):
        shares = step_shares(run, step)
        if not any(samples for _, samples in shares):
            return CriterionResult(
                f"Step {step} {with_processes(run)} was made without a single sample of the training set."
            )
        taken = sum(len(samples) for _, samples in shares)
        if taken > run.batch:
            return CriterionResult(
                f"Step {step} {with_processes(run)} took {taken} samples over all ranks, "
                f"and the global batch is {run.batch}."
            )
        _, expected = mean_loss_and_gradient(shares)
        found = [rank.steps[step].gradients for rank in run.ranks]
        before = [rank.steps[step - 1].gradients for rank in run.ranks] if step else [None] * run.processes
        for rank, vector in enumerate(found):
            complaint = explain_gradient(vector, expected, before[rank], run.processes)
            if complaint:
                return CriterionResult(
                    f"Gradients at step {step} {with_processes(run)} {complaint}{_where(run, step, found)}."
                )
            worst = max(worst, float(np.linalg.norm(vector - expected)) / (float(np.linalg.norm(expected)) + 1e-12))
    return CriterionResult(seen={"largest relative difference": worst})


@on_several
def optimizer(run: ProgramRun) -> CriterionResult:
    """Check that each step changes the weights as SGD with momentum 0.9 does with its gradients and learning rate."""
    steps = run.ranks[0].steps
    velocity = np.zeros(len(steps[0].weights))
    for number, (step, after) in enumerate(pairwise(steps)):
        velocity = _MOMENTUM * velocity + step.gradients
        expected, found = -step.learning_rate * velocity, after.weights.astype(np.float64) - step.weights
        apart, size = float(np.linalg.norm(found - expected)), float(np.linalg.norm(expected)) + 1e-12
        if not apart <= _STEP_TOLERANCE * size + _ROUNDING_TOLERANCE * float(np.linalg.norm(step.weights)):
            return CriterionResult(
                f"Step {number} {with_processes(run)}, by {step.optimizer or 'the optimizer'}, did not change weights "
                f"as SGD with momentum {_MOMENTUM} does: the changes differ by {apart / size:.2%}.",
                seen={"relative difference": apart / size},
            )
    return CriterionResult()


def _where(run: ProgramRun, step: int, found: list[Vector]) -> str:
    if any(_gap(vector, found[0]) > _EQUAL_TOLERANCE for vector in found):
        return "; ranks have different gradients, so they were not combined"
    sizes = [len(member.steps[step].samples) for member in run.ranks]
    if step and len(set(sizes)) > 1 and sum(sizes) < run.batch:
        return f"; this batch is smaller: shares of {' and '.join(map(str, sizes))} samples must be weighted by size"
    return ""


@on_several
def same_weights(run: ProgramRun) -> CriterionResult:
    """Check that all ranks end with the same weights, and that the file contains them."""
    finding = _same_on_ranks(run, [_final(run, rank) for rank in range(run.processes)], "at the end")
    if finding.reason:
        return finding
    saved = flat_state(run.weights)
    if saved is None:
        return CriterionResult(
            f"The run {with_processes(run)} left no weights.safetensors that contains the network's weights by name."
        )
    gap = _gap(saved, _final(run, 0))
    if gap > _EQUAL_TOLERANCE:
        return CriterionResult(
            f"weights.safetensors {with_processes(run)} differs by up to {gap:.2g} from the ranks' final weights."
        )
    return CriterionResult(seen={"largest difference": gap})


def _same_on_ranks(run: ProgramRun, vectors: list[Vector], when: str) -> CriterionResult:
    for rank, vector in enumerate(vectors):
        gap = _gap(vector, vectors[0])
        if gap > _EQUAL_TOLERANCE:
            return CriterionResult(
                f"Weights of rank {rank} {when} {with_processes(run)} differ by up to {gap:.2g} from those of rank 0."
            )
    return CriterionResult()


def _final(run: ProgramRun, rank: int) -> Vector:
    weights = run.ranks[rank].final_weights
    return np.zeros(0, np.float32) if weights is None else weights


def _gap(first: Vector, second: Vector) -> float:
    if first.shape != second.shape:
        return float("inf")
    difference = np.abs(first.astype(np.float64) - second)
    return float(np.nan_to_num(difference, nan=np.inf).max(initial=0.0))


TARGET_ACCURACY = 90.0  # percent; the reference reaches at least 95
_LOSS_TOLERANCE = 1e-4
_NO_LOG = "there is no log.jsonl in the --output directory"
_HALF_A_SAMPLE = 50 / VALIDATION_SAMPLES


def validation(runs: Runs) -> CriterionResult:
    """Check that each validation sample is counted once, and that the logged accuracy is that of the weights."""
    every = runs.complete("one", "two", "three")
    if not runs.complete("two", "three"):
        return CriterionResult("This could not be checked: no run with 2 or 3 processes finished training.")
    findings = [_validation(run) for run in every.values()]
    return next((finding for finding in findings if finding.reason), findings[-1])


def batchnorm(runs: Runs) -> CriterionResult:
    """Check that BatchNorm's statistics are the same on all ranks in validation and in the file."""
    run = runs.complete("batchnorm").get("batchnorm")
    if run is None:
        return CriterionResult(
            "This could not be checked: the run of the network with BatchNorm did not finish training."
        )
    for rank, member in enumerate(run.ranks):
        if any(seen.training for seen in member.validations):
            return CriterionResult(
                f"Rank {rank} validated in training mode, where BatchNorm uses the statistics of the batch."
            )
    present = [(rank, member.validations[-1].statistics) for rank, member in enumerate(run.ranks) if member.validations]
    for rank, vector in present[1:]:
        gap = float(np.abs(vector - present[0][1]).max(initial=0.0))
        if gap > 1e-6:
            return CriterionResult(
                f"The means and variances of BatchNorm on rank {rank} differ by up to {gap:.2g} from those of rank "
                f"{present[0][0]} in the last validation: each rank used its own statistics."
            )
    saved = accuracy_of_state(run.weights)
    if saved is None:
        return CriterionResult(
            "The network with BatchNorm was not saved in weights.safetensors, with its weights by name."
        )
    logged = _logged(run, run.epochs - 1, "validation_accuracy")
    # If logged accuracies are wrong without BatchNorm too, the difference is not BatchNorm's.
    if (logged is None or not abs(saved - logged) <= _HALF_A_SAMPLE) and not validation(runs).reason:
        return CriterionResult(
            f"The saved network has an accuracy of {_percent(saved)}; the last one logged is {_percent(logged)}."
        )
    return CriterionResult()


def accuracy(runs: Runs) -> CriterionResult:
    """Check that the network with BatchNorm reaches the target accuracy."""
    run = runs.get("batchnorm")
    found = accuracy_of_state(run.weights) if run is not None and run.weights else None
    if found is None or found < TARGET_ACCURACY:
        has = "none was saved" if found is None else f"the saved one has {_percent(found)}"
        reason = f"The target accuracy with BatchNorm is {TARGET_ACCURACY:g} % on the validation set, and {has}."
        return CriterionResult(reason, seen={"accuracy": found})
    return CriterionResult(seen={"accuracy": found})


@on_several
def loss(run: ProgramRun) -> CriterionResult:
    """Check that the logged loss is the mean over all samples of the epoch."""
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
            return CriterionResult(f"{with_processes(run).capitalize()}, {_NO_LOG}.")
        if found is None:
            return CriterionResult(f"The log {with_processes(run)} has no number train_loss for epoch {epoch}.")
        if not abs(found - expected) <= _LOSS_TOLERANCE * max(1.0, abs(expected)):
            return CriterionResult(
                f"The log {with_processes(run)} has a train_loss of {found:.6g} for epoch {epoch}; "
                f"the mean over all its samples is {expected:.6g}.",
                seen={"logged": found, "expected": expected},
            )
    return CriterionResult()


def _validation(run: ProgramRun) -> CriterionResult:
    for epoch in range(run.epochs):
        where = f"After epoch {epoch} {with_processes(run)}"
        end = run.epoch_steps(epoch).stop
        passes = [seen for rank in run.ranks for seen in rank.validations if seen.step == end]
        counts = Counter(sample for seen in passes for sample in seen.samples)
        missing = VALIDATION_SAMPLES - len(counts)
        repeated = sorted(sample for sample, count in counts.items() if count > 1)
        if missing:
            return CriterionResult(
                f"{where}, {missing} of {VALIDATION_SAMPLES} samples of the validation set were not evaluated."
            )
        if repeated:
            return CriterionResult(
                f"{where}, these samples of the validation set were counted more than once: {listing(repeated)}."
            )
        found = _logged(run, epoch, "validation_accuracy")
        weights = run.ranks[0].steps[end].weights if end < run.steps else run.ranks[0].final_weights
        expected = None if weights is None else accuracy_of_vector(weights)
        if found is None or expected is None or not abs(found - expected) <= _HALF_A_SAMPLE:  # catches nan too
            says = f"the log says {_percent(found)}" if run.log else _NO_LOG
            return CriterionResult(f"{where}, {says}; with these weights the accuracy is {_percent(expected)}.")
    return CriterionResult(seen={"samples counted": VALIDATION_SAMPLES})


@on_several
def validation_shared(run: ProgramRun) -> CriterionResult:
    """Check that all ranks take part in validation."""
    validated = [sum(len(seen.samples) for seen in rank.validations) for rank in run.ranks]
    idle = [rank for rank, count in enumerate(validated) if count == 0]
    if idle:
        return CriterionResult(
            f"{with_processes(run).capitalize()}, ranks without any sample to validate: {listing(idle)}."
        )
    if max(validated) > 1.5 * sum(validated) / len(validated):
        return CriterionResult(
            f"{with_processes(run).capitalize()}, ranks validated {listing(validated)} samples: the shares are unequal."
        )
    return CriterionResult()


def _logged(run: ProgramRun, epoch: int, key: str) -> float | None:
    records = [record for record in run.log if record.get("epoch") == epoch]
    value = records[0].get(key) if len(records) == 1 else None
    if not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:  # an int of hundreds of digits
        return None


def _percent(value: float | None) -> str:
    return "no number" if value is None else f"{value:.2f} %"
