"""Records of a correct program, computed here; each test changes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from paceline_course.grading.runs import End, ProgramRun, Rank, Runs, Step, Validation, Vector

EPOCHS, BATCH, RATE, WARMUP = 2, 145, 0.05, 3  # 578 = 3 x 145 + 143: four steps an epoch


@cache
def correct_run(processes: int) -> ProgramRun:
    """The run of a correct program."""
    from paceline_course.assignment import TRAINING_SAMPLES, VALIDATION_SAMPLES
    from paceline_course.grading.runs import accuracy_of_vector, mean_loss_and_gradient

    rng = np.random.default_rng(0)
    weights: Vector = (rng.standard_normal(64 * 32 + 32 + 32 * 10 + 10) * 0.1).astype(np.float32)
    steps: list[list[Step]] = [[] for _ in range(processes)]
    validations: list[list[Validation]] = [[] for _ in range(processes)]
    log = []
    velocity = np.zeros(len(weights), np.float32)
    for epoch in range(EPOCHS):
        order = np.random.default_rng(1 + epoch).permutation(TRAINING_SAMPLES).tolist()
        total = 0.0
        for begin in range(0, TRAINING_SAMPLES, BATCH):
            batch = order[begin : begin + BATCH]
            loss, gradient = mean_loss_and_gradient([(weights, batch)])
            done = len(steps[0])
            rate = RATE * BATCH / 32 * min(1.0, (done + 1) / WARMUP)
            for rank in range(processes):
                step = Step(tuple(batch[rank::processes]), rate, weights, gradient, seconds=0.01 * done)
                steps[rank].append(step)
            velocity = 0.9 * velocity + gradient
            weights = (weights - rate * velocity).astype(np.float32)
            total += loss * len(batch)
        for rank in range(processes):
            share = tuple(range(VALIDATION_SAMPLES))[rank::processes]
            validations[rank].append(
                Validation(len(steps[0]), share, training=False, statistics=np.zeros(4, np.float32))
            )
        accuracy = accuracy_of_vector(weights)
        log.append({"epoch": epoch, "train_loss": total / TRAINING_SAMPLES, "validation_accuracy": accuracy})
    ranks = [
        Rank(
            tuple(steps[r]),
            tuple(validations[r]),
            End(0, "", has_process_group=False, weights=weights),
            ("log.jsonl",) * (r == 0),
        )
        for r in range(processes)
    ]
    return ProgramRun(tuple(ranks), EPOCHS, BATCH, (0,) * processes, log=tuple(log), weights=named_weights(weights))


def named_weights(weights: Vector) -> dict[str, Vector]:
    """Weights by name, as in a file of the network ``plain``."""
    shapes = {"0.weight": (32, 64), "0.bias": (32,), "2.weight": (10, 32), "2.bias": (10,)}
    found, begin = {}, 0
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        found[name] = weights[begin : begin + size].reshape(shape)
        begin += size
    return found


def change_rank(run: ProgramRun, rank: int, **changes: Any) -> ProgramRun:
    """A copy of a run with one rank changed."""
    ranks = list(run.ranks)
    ranks[rank] = replace(ranks[rank], **changes)
    return replace(run, ranks=tuple(ranks))


def change_steps(run: ProgramRun, change: Callable[[int, int, Step], Step]) -> ProgramRun:
    """A copy of a run with each step changed by a function of rank, number and step."""
    ranks = [
        replace(member, steps=tuple(change(rank, number, step) for number, step in enumerate(member.steps)))
        for rank, member in enumerate(run.ranks)
    ]
    return replace(run, ranks=tuple(ranks))


@pytest.fixture
def correct() -> Callable[[int], ProgramRun]:
    """Runs of a correct program, by number of processes."""
    return correct_run


@pytest.fixture
def changed() -> Callable[..., ProgramRun]:
    """The function that changes steps."""
    return change_steps


@pytest.fixture
def rank_changed() -> Callable[..., ProgramRun]:
    """The function that changes a rank."""
    return change_rank


@pytest.fixture
def runs_with() -> Callable[..., Runs]:
    """``runs_with(two=run)``: correct runs with 1, 2 and 3 processes, with some replaced."""

    def build(**by_name: ProgramRun) -> Runs:
        return Runs({"one": correct_run(1), "two": correct_run(2), "three": correct_run(3), **by_name})

    return build
