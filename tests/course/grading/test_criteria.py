"""Each criterion is content with a right program, and says what it saw of a wrong one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from paceline_course.grading import on_run, on_training
from paceline_course.grading.marks import marking_sheet
from paceline_course.grading.on_run import Schedule, judge_throughput
from paceline_course.grading.runs import End, Step

SCHEDULE = Schedule(base_lr=0.05, warmup=3)

CONTENT = [
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


@pytest.mark.parametrize("criterion", CONTENT, ids=lambda one: getattr(one, "func", one).__name__)
def test_a_right_program_loses_nothing(criterion: Any, only: Any) -> None:
    assert criterion(only()).reason == ""


def test_what_was_not_run_earns_nothing_but_for_writing_nowhere(only: Any) -> None:
    from paceline_course.grading.runs import Runs

    earned = [item.name for item in marking_sheet(SCHEDULE) if item.mark(Runs({})).points]
    assert earned == ["inside"]
    assert sum(item.points for item in marking_sheet(SCHEDULE)) == 100


# -- samples


def repeat_first(rank: int, number: int, step: Step) -> Step:
    return replace(step, samples=(*step.samples[:-1], step.samples[0])) if rank == number == 0 else step


def test_a_sample_that_is_used_twice(only: Any, right: Any, changed: Any) -> None:
    two = changed(right(2), repeat_first)
    assert "1 samples were not used, and 1 more than once" in on_run.once(only(two=two)).reason
    assert on_run.disjoint(only(two=two)).reason == ""


def test_rows_that_are_not_of_the_training_set(only: Any, right: Any, changed: Any) -> None:
    def foreign(rank: int, number: int, step: Step) -> Step:
        return replace(step, samples=(*step.samples, -1, -5)) if number == 0 else step

    assert "4 rows" in on_run.once(only(two=changed(right(2), foreign))).reason


def test_an_epoch_too_few(only: Any, right: Any, rank_changed: Any) -> None:
    two = right(2)
    for rank in range(2):
        two = rank_changed(two, rank, steps=two.ranks[rank].steps[:4])
    three_epochs = replace(two, epochs=3)
    assert "In epoch 1 with 2 processes, 578 of 578" in on_run.once(only(two=three_epochs)).reason


def test_ranks_with_the_same_samples(only: Any, right: Any, changed: Any) -> None:
    whole = right(1).ranks[0].steps
    three = changed(right(3), lambda rank, number, step: replace(step, samples=whole[number].samples))
    assert "ranks 0 and 1 trained on 578 samples in common" in on_run.disjoint(only(three=three)).reason


def test_the_same_order_in_each_epoch(only: Any, right: Any, changed: Any) -> None:
    two = right(2)
    same = changed(two, lambda rank, number, step: replace(step, samples=two.ranks[rank].steps[number % 4].samples))
    assert "same batches as epoch 0" in on_run.order(only(two=same)).reason


def test_no_shuffling(only: Any, right: Any, changed: Any) -> None:
    def in_file_order(rank: int, number: int, step: Step) -> Step:
        begin = number % 4 * 145
        return replace(step, samples=tuple(range(begin, min(begin + 145, 578)))[rank::2])

    assert "samples 0 to 144" in on_run.order(only(two=changed(right(2), in_file_order))).reason


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
def test_gradients_of_another_size(factor: float, words: str, only: Any, right: Any, changed: Any) -> None:
    import re

    two = changed(right(2), lambda rank, number, step: replace(step, gradients=step.gradients * np.float32(factor)))
    assert re.search(words, on_training.gradient(only(two=two)).reason)


def test_gradients_that_were_not_combined(only: Any, right: Any, changed: Any) -> None:
    from paceline_course.grading.runs import mean_loss_and_gradient

    def own(rank: int, number: int, step: Step) -> Step:
        return replace(step, gradients=mean_loss_and_gradient([(step.weights, step.samples)])[1])

    reason = on_training.gradient(only(two=changed(right(2), own))).reason
    assert "differ from the gradient of the mean loss" in reason
    assert "not combined" in reason


def test_gradients_that_were_not_cleared(only: Any, right: Any, changed: Any) -> None:
    before = right(2).ranks[0].steps

    def kept(rank: int, number: int, step: Step) -> Step:
        return replace(step, gradients=step.gradients + before[0].gradients) if number == 1 else step

    assert "step 1 with 2 processes still contain" in on_training.gradient(only(two=changed(right(2), kept))).reason


@pytest.mark.parametrize(
    ("momentum", "decay", "is_right"), [(0.9, 0.0, True), (0.9, 1e-3, False), (0.0, 0.0, False), (0.8, 0.0, False)]
)
def test_steps_of_another_optimizer(
    momentum: float, decay: float, is_right: bool, only: Any, right: Any, changed: Any
) -> None:
    two = right(2)
    weights, velocity = [two.ranks[0].steps[0].weights], 0.0
    for step in two.ranks[0].steps:
        velocity = momentum * velocity + step.gradients + np.float32(decay) * weights[-1]
        weights.append((weights[-1] - step.learning_rate * velocity).astype(np.float32))
    other = changed(two, lambda rank, number, step: replace(step, weights=weights[number], optimizer="SGD()"))
    reason = on_training.optimizer(only(two=other)).reason
    assert (reason == "") is is_right, reason
    assert is_right or "by SGD(), did not change weights as SGD with momentum 0.9 does" in reason


def test_a_network_of_another_size_and_an_error_of_the_grader_are_told(only: Any, right: Any, changed: Any) -> None:
    larger = changed(
        right(2), lambda rank, number, step: replace(step, weights=np.zeros(2520, np.float32), gradients=step.gradients)
    )
    items = {item.name: item for item in marking_sheet(SCHEDULE)}
    said = items["gradient"].mark(only(two=larger)).reason
    assert said == "This could not be checked: the trained network has 2520 weights; the assignment's has 2410."
    broken = replace(items["gradient"], find=lambda runs: 1 / 0)
    assert "ZeroDivisionError" in broken.mark(only()).reason


def test_other_weights_at_the_beginning_and_at_the_end(only: Any, right: Any, changed: Any, rank_changed: Any) -> None:
    def shifted(rank: int, number: int, step: Step) -> Step:
        return replace(step, weights=step.weights + np.float32(0.25 * rank))

    assert "rank 1 before step 0" in on_training.initial(only(two=changed(right(2), shifted))).reason
    two = right(2)
    end = replace(two.ranks[1].end, weights=two.ranks[1].end.weights + np.float32(0.25))
    reason = on_training.same_weights(only(two=rank_changed(two, 1, end=end))).reason
    assert "rank 1 at the end with 2 processes differ by up to 0.25" in reason


@pytest.mark.parametrize("lost", [{}, {"module.0.weight": np.zeros(1, np.float32)}], ids=["no file", "other names"])
def test_no_file_of_weights(lost: Any, only: Any, right: Any) -> None:
    assert "no weights.safetensors" in on_training.same_weights(only(three=replace(right(3), weights=lost))).reason


def test_not_the_result_of_one_process(only: Any, right: Any, rank_changed: Any) -> None:
    two = right(2)
    for rank in range(2):
        end = replace(two.ranks[rank].end, weights=two.ranks[rank].end.weights + np.float32(1e-4))
        two = rank_changed(two, rank, end=end)
    assert "0.0001 from those with 1 process" in on_training.one_process(only(two=two)).reason
    nan = replace(two.ranks[0].end, weights=two.ranks[0].end.weights * np.float32("nan"))
    assert "inf" in on_training.one_process(only(two=rank_changed(two, 0, end=nan))).reason


# -- reports


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"train_loss": 9.0}, "train_loss of 9 for epoch 1"),
        ({"train_loss": float("nan")}, "train_loss of nan"),
        ({"train_loss": None}, "no number train_loss for epoch 1"),
    ],
)
def test_a_loss_that_is_not_the_mean(change: Any, words: str, only: Any, right: Any) -> None:
    two = right(2)
    log = (two.log[0], {**two.log[1], **change})
    assert words in on_training.loss(only(two=replace(two, log=log))).reason


def test_a_line_of_the_log_twice_is_not_believed(only: Any, right: Any) -> None:
    two = right(2)
    assert "no number" in on_training.loss(only(two=replace(two, log=(*two.log, two.log[0])))).reason


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        (lambda s: (*s, s[0]), "counted more than once: 1"),
        (lambda s: s[:-2], "2 of 301 samples"),
        (lambda s: (), "150 of"),
    ],
)
def test_validation_that_does_not_count_once(
    samples: Callable[[Any], Any], words: str, only: Any, right: Any, rank_changed: Any
) -> None:
    two = right(2)
    seen = [replace(one, samples=samples(one.samples)) for one in two.ranks[1].validations]
    assert words in on_training.validation(only(two=rank_changed(two, 1, validations=tuple(seen)))).reason


def test_an_accuracy_that_is_one_sample_off(only: Any, right: Any) -> None:
    three = right(3)
    log = ({**three.log[0], "validation_accuracy": three.log[0]["validation_accuracy"] + 100 / 301}, three.log[1])
    assert (
        "After epoch 0 with 3 processes, the log says"
        in on_training.validation(only(three=replace(three, log=log))).reason
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400, None, "97", [97.0]])
def test_an_accuracy_that_is_no_number(value: Any, only: Any, right: Any) -> None:
    two = right(2)
    log = ({**two.log[0], "validation_accuracy": value}, two.log[1])
    assert "the log says" in on_training.validation(only(two=replace(two, log=log))).reason
    assert "no log.jsonl" in on_training.validation(only(two=replace(two, log=()))).reason


def test_validation_of_one_rank(only: Any, right: Any, rank_changed: Any) -> None:
    two = rank_changed(right(2), 1, validations=())
    assert "without any sample to validate: 1" in on_training.validation_shared(only(two=two)).reason


def test_statistics_of_batchnorm(only: Any, right: Any, rank_changed: Any) -> None:
    two = right(2)
    assert on_training.batchnorm(only(batchnorm=two)).reason == ""
    assert "did not finish training" in on_training.batchnorm(only()).reason
    last = two.ranks[1].validations[-1]
    other = replace(last, statistics=last.statistics + np.float32(0.5))
    local = rank_changed(two, 1, validations=(*two.ranks[1].validations[:-1], other))
    assert "on rank 1 differ by up to 0.5" in on_training.batchnorm(only(batchnorm=local)).reason
    silent = replace(two, log=())
    assert "the last one logged is no number" in on_training.batchnorm(only(batchnorm=silent)).reason
    assert on_training.batchnorm(only(batchnorm=silent, two=silent)).reason == "", "no log at all has its own line"
    mode = rank_changed(two, 1, validations=(replace(last, training=True),))
    assert "training mode" in on_training.batchnorm(only(batchnorm=mode)).reason


def test_the_target(only: Any, right: Any) -> None:
    finding = on_training.accuracy(only(batchnorm=right(2)))
    assert "is 90 % on the validation set, and the saved one has" in finding.reason
    assert finding.seen["accuracy"] == pytest.approx(right(2).log[-1]["validation_accuracy"])


# -- learning rate and pace


@pytest.mark.parametrize(
    ("change", "scaled", "warmed"),
    [
        (lambda rate, number: rate * 32 / 145, "is 0.05; for a global batch of", ""),
        (lambda rate, number: 0.05 * 145 / 32, "", "100% of the full one; a linear warm-up of 3 steps has 33%"),
        (lambda rate, number: rate / 2 if number > 5 else rate, "At step 6 with 2 processes", ""),
    ],
    ids=["not scaled", "no warm-up", "another schedule later"],
)
def test_the_learning_rate(change: Any, scaled: str, warmed: str, only: Any, right: Any, changed: Any) -> None:
    two = changed(right(2), lambda rank, number, step: replace(step, learning_rate=change(step.learning_rate, number)))
    found = on_run.scaled(only(two=two), SCHEDULE).reason, on_run.warmup(only(two=two), SCHEDULE).reason
    assert [bool(text) for text in found] == [bool(scaled), bool(warmed)]
    assert scaled in found[0]
    assert warmed in found[1]


def test_pace() -> None:
    assert judge_throughput([0.010], [0.006, 0.006]).reason == ""
    assert "30% of its throughput" in judge_throughput([0.010], [0.003, 0.003]).reason
    busy = judge_throughput([0.010], [0.002, 0.004])
    assert (busy.reason, "too busy" in busy.note) == ("", True)
    assert judge_throughput([0.010, 0.004], [0.003, 0.003]).reason == "", "the better of two measurements counts"
    assert "2% of" in judge_throughput([0.2], [0.003, 0.006]).reason, "no noise explains that"
    assert "too busy" in judge_throughput([0.016], [0.0026, 0.0026], load=4.0).note
    assert "too busy" in judge_throughput([0.0078], [0.0039, 0.0037]).note, "49 % and 50 % cannot be told apart"
    assert judge_throughput([0.2], [0.003, 0.003], load=4.0).reason


# -- endings


def test_how_runs_end(only: Any, right: Any, rank_changed: Any) -> None:
    def reason(**changes: Any) -> str:
        return on_run.ends(only(batchnorm=right(2), three=replace(right(3), **changes))).reason

    assert reason() == ""
    assert "hung" in reason(ended_for="hang")
    assert "processor time" in reason(ended_for="processor time")

    def failing(*messages: str) -> str:
        three = right(3)
        for rank, message in enumerate(messages):
            three = rank_changed(three, rank, end=End(1, message, has_process_group=True, weights=None))
        return on_run.ends(only(batchnorm=right(2), three=three)).reason

    assert "rank 2 with ValueError: too few" in failing("RuntimeError: closed by peer", "", "ValueError: too few.")
    assert "did not call the same collectives" in failing("RuntimeError: Connection closed by peer")
    gone = rank_changed(right(3), 1, end=None)
    assert "stopped early on ranks 1" in on_run.ends(only(batchnorm=right(2), three=gone)).reason
    shorter = rank_changed(right(3), 1, steps=right(3).ranks[1].steps[:-1])
    assert "after 8, 7, 8 steps" in on_run.ends(only(batchnorm=right(2), three=shorter)).reason


def test_exit_codes_and_process_groups(only: Any, right: Any, rank_changed: Any) -> None:
    assert "exit code 1" in on_run.clean_exit(only(two=replace(right(2), exit_codes=(0, 1)))).reason
    end = replace(right(2).ranks[0].end, has_process_group=True)
    assert "destroy_process_group" in on_run.clean_exit(only(two=rank_changed(right(2), 0, end=end))).reason


def test_who_writes(only: Any, right: Any, rank_changed: Any) -> None:
    both = rank_changed(right(2), 1, written=("checkpoint.pt",))
    assert "ranks 0, 1 wrote: checkpoint.pt, log.jsonl" in on_run.one_writer(only(two=both)).reason
    failed = rank_changed(both, 1, end=End(1, "FileNotFoundError: checkpoint.tmp", False, None))
    assert "ranks 0, 1 wrote" in on_run.one_writer(only(two=failed)).reason
    assert "ranks 0, 1 write the same files" in on_run.ends(only(two=failed)).reason
    nobody = rank_changed(right(2), 0, written=())
    assert "no rank wrote" in on_run.one_writer(only(two=nobody)).reason
    outside = rank_changed(right(2), 0, refused=("/etc/passwd",))
    assert "/etc/passwd" in on_run.inside(only(two=outside)).reason


def test_going_on_after_a_kill(only: Any, right: Any, changed: Any, rank_changed: Any) -> None:
    two = right(2)

    def after(first: int) -> Any:
        run = two
        for rank in range(2):
            run = rank_changed(run, rank, steps=two.ranks[rank].steps[first:])
        return replace(run, exit_codes=(-9, -9))

    def resume(run: Any) -> str:
        return on_run.resume(only(resumed=run)).reason

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
        return on_run.atomic(only(resumed=resumed or after(4), again=again)).reason

    assert atomic(after(4)) == ""
    assert "could not start again" in atomic(after(8))
    assert "from the previous one" in atomic(after(0))
    assert "started from the beginning" in atomic(after(0), after(0))
    assert "wrote no checkpoint" in atomic(after(4), replace(after(4), exit_codes=(0, 0)))
