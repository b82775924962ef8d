"""Criteria: which samples were trained on, when and by which rank?"""

from __future__ import annotations

from collections import Counter

from paceline_course.assignment import TRAINING_SAMPLES
from paceline_course.grading.findings import Finding, Runs, listing, with_processes
from paceline_course.grading.runs import Run


def once(runs: Runs) -> Finding:
    """Is every sample of the training set used exactly once per epoch, over all ranks?"""
    return runs.on_several(_once)


def disjoint(runs: Runs) -> Finding:
    """Do ranks share the samples of an epoch among them? A few that are repeated to fill up are for `once`."""
    return runs.on_several(_disjoint)


def order(runs: Runs) -> Finding:
    """Is the order another one in each epoch?"""
    return runs.on_several(_order)


def _once(run: Run) -> Finding:
    for epoch in range(run.epochs):
        used = Counter(s for rank in run.ranks for step in run.epoch_steps(epoch) for s in rank.steps[step].samples)
        where = f"In epoch {epoch} {with_processes(run)}"
        foreign = sum(count for sample, count in used.items() if sample < 0)
        if foreign:
            return Finding(
                f"{where}, {foreign} rows were trained on that are not samples of the training set as it is."
            )
        missing = [sample for sample in range(TRAINING_SAMPLES) if not used[sample]]
        repeated = sorted(sample for sample, count in used.items() if count > 1)
        if missing and repeated:
            return Finding(f"{where}, {len(missing)} samples were not used, and {len(repeated)} more than once.")
        if missing:
            return Finding(f"{where}, {len(missing)} of {TRAINING_SAMPLES} samples were not used: {listing(missing)}.")
        if repeated:
            return Finding(f"{where}, these samples were used more than once: {listing(repeated)}.")
    return Finding(seen={"samples in each epoch": TRAINING_SAMPLES})


def _disjoint(run: Run) -> Finding:
    for epoch in range(run.epochs):
        used = [{s for step in run.epoch_steps(epoch) for s in rank.steps[step].samples} for rank in run.ranks]
        for second in range(run.processes):
            for first in range(second):
                shared = used[first] & used[second]
                if len(shared) >= run.processes:
                    return Finding(
                        f"In epoch {epoch} {with_processes(run)}, ranks {first} and {second} trained on {len(shared)} "
                        f"samples in common, of {len(used[second])}."
                    )
    return Finding()


def _order(run: Run) -> Finding:
    epochs = [
        [frozenset(s for rank in run.ranks for s in rank.steps[step].samples) for step in run.epoch_steps(epoch)]
        for epoch in range(run.epochs)
    ]
    firsts = sorted(epochs[0][0])
    if firsts == list(range(len(firsts))) and len(firsts) > 1:
        return Finding(f"The first batch holds samples 0 to {firsts[-1]}: the training set was not shuffled.")
    for later in range(1, run.epochs):
        for epoch in range(later):
            if epochs[epoch] == epochs[later]:
                return Finding(
                    f"Epoch {later} {with_processes(run)} had the same batches as epoch {epoch}, in the same order."
                )
    return Finding()
