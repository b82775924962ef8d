"""Criteria: are gradients those of the mean over the global batch, and weights the same everywhere?"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from paceline_course.grading.expected import flat_state, mean_loss_and_gradient, step_shares
from paceline_course.grading.findings import Finding, Runs, with_processes
from paceline_course.grading.runs import Run, Vector

# Ranks that do the same arithmetic have the same bits; other orders of adding float32 differ by far less than this.
_SAME = 1e-6
_RESULT = 1e-5
_GRADIENT = 1e-3  # relative, of the norm
_MOMENTUM = 0.9
_ROUNDING = 2e-7  # relative, of float32 weights that are added to
_STEP = 2e-4  # relative, of the norm; float32 itself is a tenth of it


def initial(runs: Runs) -> Finding:
    """Do all ranks start from the same weights?"""
    return runs.on_several(
        lambda run: _same_on_ranks(run, [rank.steps[0].weights for rank in run.ranks], "before step 0")
    )


def gradient(runs: Runs) -> Finding:
    """Is each step made with the gradient of the mean loss over the global batch?"""
    return runs.on_several(_gradient)


def optimizer(runs: Runs) -> Finding:
    """Does each step change weights as SGD with momentum 0.9 does, given its gradients and its learning rate?"""
    return runs.on_several(_optimizer)


def same_weights(runs: Runs) -> Finding:
    """Do all ranks end with the same weights, and are they those in the file?"""
    return runs.on_several(_same_weights)


def one_process(runs: Runs) -> Finding:
    """Is the result with several processes that of one process with the same global batch?"""
    alone = runs.complete("one").get("one")
    if alone is None:
        return Finding("This could not be seen: the run with 1 process did not train to its end.")

    def check(run: Run) -> Finding:
        gap = _gap(_final(run, 0), _final(alone, 0))
        if gap > _RESULT:
            return Finding(f"Final weights {with_processes(run)} differ by up to {gap:.2g} from those with 1 process.")
        return Finding(seen={"largest difference": gap})

    return runs.on_several(check)


def explain_gradient(found: Vector, expected: Vector, before: Vector | None, processes: int) -> str:
    """Say how a gradient differs from what it should be; empty if it does not.

    Args:
        found: What the optimizer was given.
        expected: The gradient of the mean loss over the global batch.
        before: What the optimizer was given at the step before, if any.
        processes: World size.
    """
    size = float(np.linalg.norm(expected)) + 1e-12
    if np.linalg.norm(found - expected) <= _GRADIENT * size:
        return ""
    if not found.any():
        return "are all zero"
    if before is not None and np.linalg.norm(found - before - expected) <= _GRADIENT * size:
        return "still hold those of the step before: they were not cleared"
    ratio = float(found @ expected) / size**2
    if np.linalg.norm(found - ratio * expected) > _GRADIENT * size * max(1.0, abs(ratio)):
        apart = float(np.linalg.norm(found - expected)) / size
        return f"differ from the gradient of the mean loss over the global batch by {apart:.0%} of its size"
    meanings = {processes: ": they were summed, not averaged", 1 / processes: ": they were divided once too often"}
    meaning = next((text for factor, text in meanings.items() if abs(ratio - factor) < _GRADIENT * factor), "")
    return f"are {ratio:.3g} times those of the mean over the global batch{meaning}"


def _gradient(run: Run) -> Finding:
    worst = 0.0
    for step in range(run.steps):
        shares = step_shares(run, step)
        if not any(samples for _, samples in shares):
            return Finding(f"Step {step} {with_processes(run)} was made without a single sample of the training set.")
        taken = sum(len(samples) for _, samples in shares)
        if taken > run.batch:
            return Finding(
                f"Step {step} {with_processes(run)} took {taken} samples over all ranks, "
                f"and the global batch is {run.batch}."
            )
        _, expected = mean_loss_and_gradient(shares)
        found = [rank.steps[step].gradients for rank in run.ranks]
        before = [rank.steps[step - 1].gradients for rank in run.ranks] if step else [None] * run.processes
        for rank, vector in enumerate(found):
            complaint = explain_gradient(vector, expected, before[rank], run.processes)
            if complaint:
                return Finding(f"Gradients at step {step} {with_processes(run)} {complaint}{_where(run, step, found)}.")
            worst = max(worst, float(np.linalg.norm(vector - expected)) / (float(np.linalg.norm(expected)) + 1e-12))
    return Finding(seen={"largest relative difference": worst})


def _optimizer(run: Run) -> Finding:
    steps = run.ranks[0].steps
    velocity = np.zeros(len(steps[0].weights))
    for number, (step, after) in enumerate(pairwise(steps)):
        velocity = _MOMENTUM * velocity + step.gradients
        expected, found = -step.learning_rate * velocity, after.weights.astype(np.float64) - step.weights
        apart, size = float(np.linalg.norm(found - expected)), float(np.linalg.norm(expected)) + 1e-12
        if not apart <= _STEP * size + _ROUNDING * float(np.linalg.norm(step.weights)):
            return Finding(
                f"Step {number} {with_processes(run)}, of {step.optimizer or 'the optimizer'}, changed weights "
                f"otherwise than SGD with momentum {_MOMENTUM} would: the change is another by {apart / size:.2%}.",
                seen={"relative difference": apart / size},
            )
    return Finding()


def _where(run: Run, step: int, found: list[Vector]) -> str:
    if any(_gap(vector, found[0]) > _SAME for vector in found):
        return "; ranks have different gradients, so they were not combined"
    sizes = [len(member.steps[step].samples) for member in run.ranks]
    if step and len(set(sizes)) > 1 and sum(sizes) < run.batch:
        return (
            f"; its batch is smaller, with shares of {' and '.join(map(str, sizes))} samples, which count by their size"
        )
    return ""


def _same_weights(run: Run) -> Finding:
    finding = _same_on_ranks(run, [_final(run, rank) for rank in range(run.processes)], "at the end")
    if finding.reason:
        return finding
    saved = flat_state(run.weights)
    if saved is None:
        return Finding(
            f"There is no weights.safetensors {with_processes(run)} that holds the network's weights by their names."
        )
    gap = _gap(saved, _final(run, 0))
    if gap > _SAME:
        return Finding(
            f"weights.safetensors {with_processes(run)} differs by up to {gap:.2g} from what the ranks ended with."
        )
    return Finding(seen={"largest difference": gap})


def _same_on_ranks(run: Run, vectors: list[Vector], when: str) -> Finding:
    for rank, vector in enumerate(vectors):
        gap = _gap(vector, vectors[0])
        if gap > _SAME:
            return Finding(
                f"Weights of rank {rank} {when} {with_processes(run)} differ by up to {gap:.2g} from those of rank 0."
            )
    return Finding()


def _final(run: Run, rank: int) -> Vector:
    end = run.ranks[rank].end
    return np.zeros(0, np.float32) if end is None or end.weights is None else end.weights


def _gap(first: Vector, second: Vector) -> float:
    if first.shape != second.shape:
        return float("inf")
    difference = np.abs(first.astype(np.float64) - second)
    return float(np.nan_to_num(difference, nan=np.inf).max(initial=0.0))
