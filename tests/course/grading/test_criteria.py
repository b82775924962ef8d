"""Each criterion accepts a correct program, and describes what is wrong with another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from paceline_course.grading import on_run, on_training
from paceline_course.grading.marks import marking_sheet
from paceline_course.grading.on_run import RequestedSchedule, judge_throughput
from paceline_course.grading.runs import End, Step

SCHEDULE = RequestedSchedule(base_lr=0.05, warmup=3)

CRITERIA = [
    on_run.once,
    on_run.disjoint,
    on_run.order,
    on_training.initial,
    on_training.gradient,
    on_training.optimizer,
    on_training.same_weights,
    on_training.one_process,
    on_training.loss,
    on_training.validation,
    on_training.validation_shared,
    partial(on_run.scaled, schedule=SCHEDULE),
    partial(on_run.warmup, schedule=SCHEDULE),
    on_run.clean_exit,
    on_run.one_writer,
    on_run.inside,
]


@pytest.mark.parametrize("criterion", CRITERIA, ids=lambda one: getattr(one, "func", one).__name__)
def test_correct_program_loses_nothing(criterion: Any, runs_with: Any) -> None:
    assert criterion(runs_with()).reason == ""


def test_without_runs_only_inside_earns_points(runs_with: Any) -> None:
    from paceline_course.grading.runs import Runs

    assert [item.name for item in marking_sheet(SCHEDULE) if item.mark(Runs({})).points] == ["inside"]
    assert sum(item.points for item in marking_sheet(SCHEDULE)) == 100


# -- samples


def repeat_first(rank: int, number: int, step: Step) -> Step:
    return replace(step, samples=(*step.samples[:-1], step.samples[0])) if rank == number == 0 else step


def test_repeated_sample(runs_with: Any, correct: Any, changed: Any) -> None:
    two = changed(correct(2), repeat_first)
    assert "1 samples were not used, and 1 more than once" in on_run.once(runs_with(two=two)).reason
    assert on_run.disjoint(runs_with(two=two)).reason == ""


def test_rows_from_outside_the_training_set(runs_with: Any, correct: Any, changed: Any) -> None:
    def foreign(rank: int, number: int, step: Step) -> Step:
        return replace(step, samples=(*step.samples, -1, -5)) if number == 0 else step

    assert "4 rows" in on_run.once(runs_with(two=changed(correct(2), foreign))).reason


def test_missing_epoch(runs_with: Any, correct: Any, rank_changed: Any) -> None:
    two = correct(2)
    for rank in range(2):
        two = rank_changed(two, rank, steps=two.ranks[rank].steps[:4])
    three_epochs = replace(two, epochs=3)
    assert "In epoch 1 with 2 processes, 578 of 578" in on_run.once(runs_with(two=three_epochs)).reason


def test_ranks_with_the_same_samples(runs_with: Any, correct: Any, changed: Any) -> None:
    whole = correct(1).ranks[0].steps
    three = changed(correct(3), lambda rank, number, step: replace(step, samples=whole[number].samples))
    assert "ranks 0 and 1 trained on 578 samples in common" in on_run.disjoint(runs_with(three=three)).reason


def test_same_order_in_each_epoch(runs_with: Any, correct: Any, changed: Any) -> None:
    two = correct(2)
    same = changed(two, lambda rank, number, step: replace(step, samples=two.ranks[rank].steps[number % 4].samples))
    assert "same batches as epoch 0" in on_run.order(runs_with(two=same)).reason


def test_no_shuffling(runs_with: Any, correct: Any, changed: Any) -> None:
    def in_file_order(rank: int, number: int, step: Step) -> Step:
        begin = number % 4 * 145
        return replace(step, samples=tuple(range(begin, min(begin + 145, 578)))[rank::2])

    assert "samples 0 to 144" in on_run.order(runs_with(two=changed(correct(2), in_file_order))).reason


# -- weights


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (2.0, "2 times .* summed"),
        (0.5, "0.5 times .* divided once too often"),
        (0.7, "are 0.7 times"),
        (0.0, "all zero"),
    ],
)
def test_scaled_gradients(factor: float, words: str, runs_with: Any, correct: Any, changed: Any) -> None:
    import re

    two = changed(correct(2), lambda rank, number, step: replace(step, gradients=step.gradients * np.float32(factor)))
    assert re.search(words, on_training.gradient(runs_with(two=two)).reason)


def test_gradients_that_were_not_averaged(runs_with: Any, correct: Any, changed: Any) -> None:
    from paceline_course.grading.runs import mean_loss_and_gradient

    def local_gradient(rank: int, number: int, step: Step) -> Step:
        return replace(step, gradients=mean_loss_and_gradient([(step.weights, step.samples)])[1])

    reason = on_training.gradient(runs_with(two=changed(correct(2), local_gradient))).reason
    assert "differ from the gradient of the mean loss" in reason
    assert "not combined" in reason


def test_gradients_that_were_not_cleared(runs_with: Any, correct: Any, changed: Any) -> None:
    before = correct(2).ranks[0].steps

    def accumulate(rank: int, number: int, step: Step) -> Step:
        return replace(step, gradients=step.gradients + before[0].gradients) if number == 1 else step

    assert (
        "step 1 with 2 processes still contain"
        in on_training.gradient(runs_with(two=changed(correct(2), accumulate))).reason
    )


@pytest.mark.parametrize(
    ("momentum", "decay", "is_correct"), [(0.9, 0.0, True), (0.9, 1e-3, False), (0.0, 0.0, False), (0.8, 0.0, False)]
)
def test_wrong_optimizer(
    momentum: float, decay: float, is_correct: bool, runs_with: Any, correct: Any, changed: Any
) -> None:
    two = correct(2)
    weights, velocity = [two.ranks[0].steps[0].weights], 0.0
    for step in two.ranks[0].steps:
        velocity = momentum * velocity + step.gradients + np.float32(decay) * weights[-1]
        weights.append((weights[-1] - step.learning_rate * velocity).astype(np.float32))
    other = changed(two, lambda rank, number, step: replace(step, weights=weights[number], optimizer="SGD()"))
    reason = on_training.optimizer(runs_with(two=other)).reason
    assert (reason == "") is is_correct, reason
    assert is_correct or "by SGD(), did not change weights as SGD with momentum 0.9 does" in reason


def test_network_of_another_size_and_error_in_the_grader(runs_with: Any, correct: Any, changed: Any) -> None:
    larger = changed(
        correct(2),
        lambda rank, number, step: replace(step, weights=np.zeros(2520, np.float32), gradients=step.gradients),
    )
    items = {item.name: item for item in marking_sheet(SCHEDULE)}
    said = items["gradient"].mark(runs_with(two=larger)).reason
    assert said == "This could not be checked: the trained network has 2520 weights; the assignment's has 2410."
    broken = replace(items["gradient"], find=lambda runs: 1 / 0)
    assert "ZeroDivisionError" in broken.mark(runs_with()).reason


def test_ranks_with_different_weights(runs_with: Any, correct: Any, changed: Any, rank_changed: Any) -> None:
    def shifted(rank: int, number: int, step: Step) -> Step:
        return replace(step, weights=step.weights + np.float32(0.25 * rank))

    assert "rank 1 before step 0" in on_training.initial(runs_with(two=changed(correct(2), shifted))).reason
    two = correct(2)
    end = replace(two.ranks[1].end, weights=two.ranks[1].end.weights + np.float32(0.25))
    reason = on_training.same_weights(runs_with(two=rank_changed(two, 1, end=end))).reason
    assert "rank 1 at the end with 2 processes differ by up to 0.25" in reason


@pytest.mark.parametrize("lost", [{}, {"module.0.weight": np.zeros(1, np.float32)}], ids=["no file", "other names"])
def test_missing_weights_file(lost: Any, runs_with: Any, correct: Any) -> None:
    assert (
        "no weights.safetensors" in on_training.same_weights(runs_with(three=replace(correct(3), weights=lost))).reason
    )


def test_result_differs_from_one_process(runs_with: Any, correct: Any, rank_changed: Any) -> None:
    two = correct(2)
    for rank in range(2):
        end = replace(two.ranks[rank].end, weights=two.ranks[rank].end.weights + np.float32(1e-4))
        two = rank_changed(two, rank, end=end)
    assert "0.0001 from those with 1 process" in on_training.one_process(runs_with(two=two)).reason
    nan = replace(two.ranks[0].end, weights=two.ranks[0].end.weights * np.float32("nan"))
    assert "inf" in on_training.one_process(runs_with(two=rank_changed(two, 0, end=nan))).reason


# -- reports


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"train_loss": 9.0}, "train_loss of 9 for epoch 1"),
        ({"train_loss": float("nan")}, "train_loss of nan"),
        ({"train_loss": None}, "no number train_loss for epoch 1"),
    ],
)
def test_wrong_loss(change: Any, words: str, runs_with: Any, correct: Any) -> None:
    two = correct(2)
    log = (two.log[0], {**two.log[1], **change})
    assert words in on_training.loss(runs_with(two=replace(two, log=log))).reason


def test_repeated_log_line(runs_with: Any, correct: Any) -> None:
    two = correct(2)
    assert "no number" in on_training.loss(runs_with(two=replace(two, log=(*two.log, two.log[0])))).reason


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        (lambda s: (*s, s[0]), "counted more than once: 1"),
        (lambda s: s[:-2], "2 of 301 samples"),
        (lambda s: (), "150 of"),
    ],
)
def test_validation_samples_not_counted_once(
    samples: Callable[[Any], Any], words: str, runs_with: Any, correct: Any, rank_changed: Any
) -> None:
    two = correct(2)
    seen = [replace(one, samples=samples(one.samples)) for one in two.ranks[1].validations]
    assert words in on_training.validation(runs_with(two=rank_changed(two, 1, validations=tuple(seen)))).reason


def test_accuracy_that_is_one_sample_off(runs_with: Any, correct: Any) -> None:
    three = correct(3)
    log = ({**three.log[0], "validation_accuracy": three.log[0]["validation_accuracy"] + 100 / 301}, three.log[1])
    assert (
        "After epoch 0 with 3 processes, the log says"
        in on_training.validation(runs_with(three=replace(three, log=log))).reason
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400, None, "97", [97.0]])
def test_accuracy_that_is_not_a_number(value: Any, runs_with: Any, correct: Any) -> None:
    two = correct(2)
    log = ({**two.log[0], "validation_accuracy": value}, two.log[1])
    assert "the log says" in on_training.validation(runs_with(two=replace(two, log=log))).reason
    assert "no log.jsonl" in on_training.validation(runs_with(two=replace(two, log=()))).reason


def test_validation_on_one_rank(runs_with: Any, correct: Any, rank_changed: Any) -> None:
    two = rank_changed(correct(2), 1, validations=())
    assert "without any sample to validate: 1" in on_training.validation_shared(runs_with(two=two)).reason


def test_batchnorm_statistics(runs_with: Any, correct: Any, rank_changed: Any) -> None:
    two = correct(2)
    assert on_training.batchnorm(runs_with(batchnorm=two)).reason == ""
    assert "did not finish training" in on_training.batchnorm(runs_with()).reason
    last = two.ranks[1].validations[-1]
    other = replace(last, statistics=last.statistics + np.float32(0.5))
    local = rank_changed(two, 1, validations=(*two.ranks[1].validations[:-1], other))
    assert "on rank 1 differ by up to 0.5" in on_training.batchnorm(runs_with(batchnorm=local)).reason
    silent = replace(two, log=())
    assert "the last one logged is no number" in on_training.batchnorm(runs_with(batchnorm=silent)).reason
    assert on_training.batchnorm(runs_with(batchnorm=silent, two=silent)).reason == "", "no log at all has its own line"
    mode = rank_changed(two, 1, validations=(replace(last, training=True),))
    assert "training mode" in on_training.batchnorm(runs_with(batchnorm=mode)).reason


def test_target_accuracy(runs_with: Any, correct: Any) -> None:
    finding = on_training.accuracy(runs_with(batchnorm=correct(2)))
    assert "is 90 % on the validation set, and the saved one has" in finding.reason
    assert finding.seen["accuracy"] == pytest.approx(correct(2).log[-1]["validation_accuracy"])


# -- learning rate and throughput


@pytest.mark.parametrize(
    ("change", "scaled", "warmed"),
    [
        (lambda rate, number: rate * 32 / 145, "is 0.05; for a global batch of", ""),
        (lambda rate, number: 0.05 * 145 / 32, "", "100% of the full one; a linear warm-up of 3 steps has 33%"),
        (lambda rate, number: rate / 2 if number > 5 else rate, "At step 6 with 2 processes", ""),
    ],
    ids=["not scaled", "no warm-up", "another schedule later"],
)
def test_learning_rate(change: Any, scaled: str, warmed: str, runs_with: Any, correct: Any, changed: Any) -> None:
    two = changed(
        correct(2), lambda rank, number, step: replace(step, learning_rate=change(step.learning_rate, number))
    )
    found = on_run.scaled(runs_with(two=two), SCHEDULE).reason, on_run.warmup(runs_with(two=two), SCHEDULE).reason
    assert [bool(text) for text in found] == [bool(scaled), bool(warmed)]
    assert scaled in found[0]
    assert warmed in found[1]


def test_throughput() -> None:
    assert judge_throughput([0.010], [0.006, 0.006]).reason == ""
    assert "30% of its throughput" in judge_throughput([0.010], [0.003, 0.003]).reason
    busy = judge_throughput([0.010], [0.002, 0.004])
    assert (busy.reason, "too busy" in busy.note) == ("", True)
    assert judge_throughput([0.010, 0.004], [0.003, 0.003]).reason == "", "the better of two measurements counts"
    assert "2% of" in judge_throughput([0.2], [0.003, 0.006]).reason, "no noise explains that"
    assert "too busy" in judge_throughput([0.016], [0.0026, 0.0026], load=4.0).note
    assert "too busy" in judge_throughput([0.0078], [0.0039, 0.0037]).note, "49 % and 50 % cannot be told apart"
    assert judge_throughput([0.2], [0.003, 0.003], load=4.0).reason
    assert judge_throughput([0.1], [0.01, 0.01], load=16.0).reason, "that of a large host, in a small container"


# -- endings


def test_ends(runs_with: Any, correct: Any, rank_changed: Any) -> None:
    def reason(**changes: Any) -> str:
        return on_run.ends(runs_with(batchnorm=correct(2), three=replace(correct(3), **changes))).reason

    assert reason() == ""
    assert "hung" in reason(ended_for="hang")
    assert "processor time" in reason(ended_for="processor time")

    def failing(*messages: str) -> str:
        three = correct(3)
        for rank, message in enumerate(messages):
            three = rank_changed(three, rank, end=End(1, message, has_process_group=True, weights=None))
        return on_run.ends(runs_with(batchnorm=correct(2), three=three)).reason

    assert "rank 2 with ValueError: too few" in failing("RuntimeError: closed by peer", "", "ValueError: too few.")
    assert "did not call the same collectives" in failing("RuntimeError: Connection closed by peer")
    gone = rank_changed(correct(3), 1, end=None)
    assert "stopped early on ranks 1" in on_run.ends(runs_with(batchnorm=correct(2), three=gone)).reason
    shorter = rank_changed(correct(3), 1, steps=correct(3).ranks[1].steps[:-1])
    assert "after 8, 7, 8 steps" in on_run.ends(runs_with(batchnorm=correct(2), three=shorter)).reason


def test_exit_codes_and_process_groups(runs_with: Any, correct: Any, rank_changed: Any) -> None:
    assert "exit code 1" in on_run.clean_exit(runs_with(two=replace(correct(2), exit_codes=(0, 1)))).reason
    end = replace(correct(2).ranks[0].end, has_process_group=True)
    assert "destroy_process_group" in on_run.clean_exit(runs_with(two=rank_changed(correct(2), 0, end=end))).reason


def test_writers(runs_with: Any, correct: Any, rank_changed: Any) -> None:
    both = rank_changed(correct(2), 1, written=("checkpoint.pt",))
    assert "ranks 0, 1 wrote: checkpoint.pt, log.jsonl" in on_run.one_writer(runs_with(two=both)).reason
    failed = rank_changed(both, 1, end=End(1, "FileNotFoundError: checkpoint.tmp", False, None))
    assert "ranks 0, 1 wrote" in on_run.one_writer(runs_with(two=failed)).reason
    assert "ranks 0, 1 write the same files" in on_run.ends(runs_with(two=failed)).reason
    nobody = rank_changed(correct(2), 0, written=())
    assert "no rank wrote" in on_run.one_writer(runs_with(two=nobody)).reason
    outside = rank_changed(correct(2), 0, refused=("/etc/passwd",))
    assert "/etc/passwd" in on_run.inside(runs_with(two=outside)).reason


def test_resume_after_a_kill(runs_with: Any, correct: Any, changed: Any, rank_changed: Any) -> None:
    two = correct(2)

    def after(first: int) -> Any:
        run = two
        for rank in range(2):
            run = rank_changed(run, rank, steps=two.ranks[rank].steps[first:])
        return replace(run, exit_codes=(-9, -9))

    def resume(run: Any) -> str:
        return on_run.resume(runs_with(resumed=run)).reason

    assert resume(after(4)) == ""
    assert "no checkpoint was loaded" in resume(after(0))
    assert "other than those after its first epoch" in resume(after(2))
    assert "made no step" in resume(after(8))

    def drifting(rank: int, number: int, step: Step) -> Step:
        return replace(step, weights=step.weights + np.float32(0.01 * (number > 0)))

    assert "from step 5 on" in resume(changed(after(4), drifting))
    assert "other samples" in resume(
        changed(after(4), lambda r, n, s: replace(s, samples=two.ranks[r].steps[n].samples))
    )
    assert "learning rate" in resume(changed(after(4), lambda r, n, s: replace(s, learning_rate=1.0)))

    def atomic(again: Any, resumed: Any = None) -> str:
        return on_run.atomic(runs_with(resumed=resumed or after(4), again=again)).reason

    assert atomic(after(4)) == ""
    assert "could not start again" in atomic(after(8))
    assert "from the previous one" in atomic(after(0))
    assert "started from the beginning" in atomic(after(0), after(0))
    assert "wrote no checkpoint" in atomic(after(4), replace(after(4), exit_codes=(0, 0)))
