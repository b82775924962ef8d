"""Criteria of a run: how it ends, resumes and writes, which samples it takes, its learning rate and its speed."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline_course.assignment import TRAINING_SAMPLES
from paceline_course.grading.runs import End, Finding, Run, Runs, Vector, listing, on_several, with_processes

_WHY = {
    "hang": "hung: for seconds no rank did anything, each waiting for another",
    "processor time": "did not end: it used up the processor time that it may have",
    "processes": "started more processes than it may",
    "time": "did not end in the time that it may have",
}
# In what gloo says.
_LOST_CONTACT = ("closed by peer", "reset by peer", "Broken pipe", "gloo")
_OF_FILES = ("FileNotFoundError", "FileExistsError", "OSError", "RuntimeError", "SafetensorError")
_RESULT = 1e-5


def ends(runs: Runs) -> Finding:
    """Check that every run ends by itself at any number of processes."""
    for name in ("one", "two", "three", "batchnorm"):
        run = runs.get(name)
        if run is None:
            return Finding("Not all runs were made, since the others had failed already.")
        if run.ended_for:
            return Finding(f"The run {with_processes(run)} {_WHY.get(run.ended_for, run.ended_for)}.")
        failure = _failure(run)
        if failure:
            return Finding(f"The run {with_processes(run)} {failure}.")
        killed = [rank for rank, member in enumerate(run.ranks) if member.end is None]
        if killed:
            return Finding(
                f"The run {with_processes(run)} broke off on ranks {listing(killed)}{_by_signal(run, killed)}: "
                f"{run.last_words.rstrip('.') or 'it said nothing'}."
            )
        counts = [len(member.steps) for member in run.ranks]
        if not all(counts):
            return Finding(f"The run {with_processes(run)} ended without a step of an optimizer on every rank.")
        if len(set(counts)) > 1:
            return Finding(f"The run {with_processes(run)} ended after {listing(counts)} steps on its ranks.")
    return Finding()


def clean_exit(runs: Runs) -> Finding:
    """Check that the exit code is 0 and the process group is destroyed."""
    found = runs.complete("one", "two", "three", "batchnorm")
    for run in found.values():
        codes = sorted({code for code in run.exit_codes if code > 0})
        if codes:
            return Finding(f"The run {with_processes(run)} ended with exit code {codes[0]}.")
        if any(rank.end is not None and rank.end.has_process_group for rank in run.ranks):
            return Finding(f"The run {with_processes(run)} ended without destroy_process_group().")
    if not runs.complete("two", "three"):
        return Finding("This could not be seen: no run with 2 or 3 processes trained to its end.")
    return Finding()


def one_writer(runs: Runs) -> Finding:
    """Check that only one rank writes to the output directory."""

    for name in ("two", "three"):  # also where that is what made the program fail
        tried = runs.get(name)
        writers = _writers(tried) if tried is not None else {}
        if tried is not None and len(writers) > 1:
            files = sorted({file for files in writers.values() for file in files})
            return Finding(
                f"{with_processes(tried).capitalize()}, ranks {listing(list(writers))} wrote: {listing(files)}."
            )

    return _some_writer(runs)


@on_several
def _some_writer(run: Run) -> Finding:
    if not _writers(run):
        return Finding(f"{with_processes(run).capitalize()}, no rank wrote anything to the output directory.")
    return Finding()


def resume(runs: Runs) -> Finding:
    """Check that a run killed in its second epoch resumes from the first's checkpoint, to the same weights."""
    whole, resumed = runs.complete("two").get("two"), runs.get("resumed")
    if whole is None or resumed is None:
        return Finding("This could not be seen: the run with 2 processes did not train to its end.")
    if not resumed.steps:
        return Finding(f"Started again after a kill, it made no step: {resumed.last_words or 'it said nothing'}.")
    first = whole.epoch_steps(1).start
    begun = resumed.ranks[0].steps[0]
    if _is_same(begun.weights, whole.ranks[0].steps[0].weights):
        return Finding("Started again after a kill, it began with new weights: no checkpoint was taken up.")
    if not _is_same(begun.weights, whole.ranks[0].steps[first].weights):
        return Finding("Started again after a kill, it began with weights that it did not have after its first epoch.")
    for later in range(min(resumed.steps, whole.steps - first)):
        for rank in range(whole.processes):
            again, before = resumed.ranks[rank].steps[later], whole.ranks[rank].steps[first + later]
            if sorted(again.samples) != sorted(before.samples):
                return Finding(
                    f"Step {first + later}, made after a kill, had other samples than without: "
                    "the place in the data was not restored."
                )
            if abs(again.learning_rate - before.learning_rate) > 1e-3 * before.learning_rate:
                return Finding(
                    f"Step {first + later}, made after a kill, had a learning rate of {again.learning_rate:.4g} "
                    f"instead of {before.learning_rate:.4g}."
                )
            if not _is_same(again.weights, before.weights):
                return Finding(
                    f"After a kill, weights are others from step {first + later} on, though samples are the same: "
                    "something that the optimizer needs was not in the checkpoint, or not the same on all ranks."
                )
    reason = _another_end(whole, runs.complete("again").get("again"))
    return Finding(reason, seen={"steps compared": min(resumed.steps, whole.steps - first)})


def atomic(runs: Runs) -> Finding:
    """Check that a whole checkpoint remains when a rank is killed while it writes the next."""
    whole, resumed, again = runs.get("two"), runs.get("resumed"), runs.get("again")
    if whole is None or resumed is None or not resumed.steps:
        return Finding("This could not be seen: the program did not go on after a kill.")
    if _is_same(resumed.ranks[0].steps[0].weights, whole.ranks[0].steps[0].weights):
        return Finding("This could not be seen: after a kill, the program began anew.")
    if not any(code < 0 for code in resumed.exit_codes):
        return Finding("After it was started again, no checkpoint was seen to be written with torch.save or save_file.")
    if again is None or not again.steps:
        words = again.last_words if again is not None else ""
        return Finding(
            f"Killed while it wrote a checkpoint, which was left half written, it could not start again: "
            f"{(words or 'it said nothing').rstrip('.')}. Write beside it and rename."
        )
    if not _is_same(again.ranks[0].steps[0].weights, resumed.ranks[0].steps[0].weights):
        return Finding("Killed while it wrote a checkpoint, it did not start again from the one before.")
    return Finding()


def inside(runs: Runs) -> Finding:
    """Check that it writes only in its own directory."""
    paths = [path for run in runs.by_name.values() for rank in run.ranks for path in rank.refused]
    return Finding(f"It tried to write to {listing(sorted(set(paths)))}, and was not let.") if paths else Finding()


def _failure(run: Run) -> str:
    """Say what went wrong first: that a rank lost contact to another tells only that the other had gone."""
    messages = {rank: member.end.message for rank, member in enumerate(run.ranks) if member.end and member.end.message}
    telling = {rank: text for rank, text in messages.items() if not any(word in text for word in _LOST_CONTACT)}
    for rank, text in telling.items():
        writers = _writers(run)
        # Files that are gone, or not whole, because another rank has written, renamed or removed them meanwhile.
        together = text.startswith(_OF_FILES) and rank in writers and len(writers) > 1
        why = f"; ranks {listing(list(writers))} write the same files" if together else ""
        return f"failed on rank {rank} with {text.rstrip(': .')}{why}"
    return (
        "failed: ranks lost one another, for they did not make the same exchanges in the same order" if messages else ""
    )


def _another_end(whole: Run, again: Run | None) -> str:
    """Say how the run that was started last ended otherwise than the one that was never killed."""
    first = whole.epoch_steps(1).start
    wanted = whole.steps - first
    if again is None or not _is_same(again.ranks[0].steps[0].weights, whole.ranks[0].steps[first].weights):
        return ""  # which is for `atomic` to tell
    if again.steps != wanted:
        return f"Started again after a kill, it made {again.steps} more steps; {wanted} were left."
    ends = [run.ranks[0].end for run in (whole, again)]
    if any(not _is_same(first, second) for first, second in zip(*map(_weights, ends), strict=True)):
        return "Started again after a kill, it did not end with the weights that it has without one."
    epochs = {record.get("epoch") for record in again.log}
    missing = [epoch for epoch in range(again.epochs) if epoch not in epochs]
    return f"After a kill, the log has no line for epoch {listing(missing)}." if missing else ""


def _weights(end: End | None) -> list[Vector]:
    return [] if end is None or end.weights is None else [end.weights]


def _writers(run: Run) -> dict[int, tuple[str, ...]]:
    return {rank: member.written for rank, member in enumerate(run.ranks) if member.written}


def _by_signal(run: Run, ranks: Sequence[int]) -> str:
    codes = [run.exit_codes[rank] for rank in ranks if rank < len(run.exit_codes)]
    return f" with {signal.Signals(-codes[0]).name}" if codes and codes[0] < 0 else ""


def _is_same(first: Vector, second: Vector) -> bool:
    return first.shape == second.shape and bool(np.allclose(first, second, rtol=0, atol=_RESULT))


@on_several
def once(run: Run) -> Finding:
    """Check that every training sample is used exactly once per epoch, over all ranks."""
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


@on_several
def disjoint(run: Run) -> Finding:
    """Check that ranks divide an epoch's samples. A few that are repeated to fill up are left to `once`."""
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


@on_several
def order(run: Run) -> Finding:
    """Check that the order changes from epoch to epoch."""
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


BASE_BATCH = 32  # the batch that the base learning rate suits
_RELATIVE = 1e-3
_SHARE_OF_PACE = 0.5
# Measured twice, the same loop's pace differs by that much even on a quiet machine.
_LEAST_NOISE = 1.25
# Runs that are made only where the first measurement was too slow, for that may be somebody else's doing.
AGAIN = ("batchnorm-2", "batchnorm-3")


@dataclass(frozen=True)
class Schedule:
    """What the runs were asked for.

    Attributes:
        base_lr: Learning rate for a batch of 32.
        warmup: Steps until the full learning rate.
    """

    base_lr: float
    warmup: int

    def peak(self, batch: int) -> float:
        """Return the learning rate that suits a batch."""
        return self.base_lr * batch / BASE_BATCH


@on_several
def scaled(run: Run, schedule: Schedule) -> Finding:
    """Check that the learning rate is proportional to the global batch at any number of processes."""
    expected = schedule.peak(run.batch)
    found = _peak(run, schedule)
    for step in range(min(schedule.warmup + 1, run.steps - 1), run.steps):
        for rank, member in enumerate(run.ranks):
            later = member.steps[step].learning_rate
            if abs(found - expected) <= _RELATIVE * expected < abs(later - expected):
                return Finding(
                    f"At step {step} {with_processes(run)} the learning rate of rank {rank} is {later:.4g}; "
                    f"after the warm-up it stays {expected:.4g}.",
                    seen={"learning rate": later, "expected": expected},
                )
    if not abs(found - expected) <= _RELATIVE * expected:
        return Finding(
            f"After the warm-up {with_processes(run)} the learning rate is {found:.4g}; for a global batch of "
            f"{run.batch} it is {schedule.base_lr:g} x {run.batch} / {BASE_BATCH} = {expected:.4g}.",
            seen={"learning rate": found, "expected": expected},
        )
    return Finding(seen={"learning rate": found})


@on_several
def warmup(run: Run, schedule: Schedule) -> Finding:
    """Check that the learning rate rises evenly over the first steps, to whatever it reaches, right or not."""
    peak = _peak(run, schedule)
    for step in range(min(schedule.warmup, run.steps)):
        expected = (step + 1) / schedule.warmup
        found = run.ranks[0].steps[step].learning_rate / max(peak, 1e-12)
        if abs(found - expected) > 0.01:
            return Finding(
                f"At step {step} {with_processes(run)} the learning rate is {found:.0%} of the full one; "
                f"a linear warm-up of {schedule.warmup} steps has {expected:.0%}."
            )
    return Finding()


def throughput(runs: Runs) -> Finding:
    """Check that steps are at least half as fast as a bare loop's. Not judged on a machine too noisy to tell."""
    programs = runs.complete("batchnorm", *AGAIN)
    if "batchnorm" not in programs:
        return Finding("This could not be seen: the run of the network with BatchNorm was not trained to its end.")
    loops = runs.complete("pace-before", "pace-after")
    if len(loops) < 2:
        return Finding(note="The bare loop could not be measured, so throughput was not judged.")
    times = [[_step_seconds(run) for run in found.values()] for found in (programs, loops)]
    return judge_pace(times[0], times[1], crowding=os.getloadavg()[0] / (os.cpu_count() or 1))


def judge_pace(programs: Sequence[float], loops: Sequence[float], *, crowding: float = 0.0) -> Finding:
    """Compare the times of a step of a program with those of the bare loop, in seconds, each measured once or more.

    Args:
        programs: Of the program; the best counts.
        loops: Of the bare loop; their mean counts.
        crowding: How many processes there are for each core, which the other may have been spared by chance.
    """
    program, loop = min(programs), sum(loops) / len(loops)
    share, noise = loop / program, max(max(loops) / min(loops), crowding, _LEAST_NOISE)
    seen = {"step seconds": list(programs), "bare loop": list(loops), "share": share}
    if share >= _SHARE_OF_PACE:
        return Finding(seen=seen)
    if share * noise >= _SHARE_OF_PACE:
        return Finding(
            note="The machine was too busy to tell these throughputs apart, so this was not judged.", seen=seen
        )
    return Finding(
        f"A step takes {1000 * program:.1f} ms, and {1000 * loop:.1f} ms in a bare loop: "
        f"{share:.0%} of its throughput, where {_SHARE_OF_PACE:.0%} are asked for.",
        seen=seen,
    )


def _peak(run: Run, schedule: Schedule) -> float:
    """Return the learning rate after the warm-up; every rank should have the same."""
    rates = [rank.steps[min(schedule.warmup + 1, run.steps - 1)].learning_rate for rank in run.ranks]
    return max(rates, key=lambda rate: abs(rate - schedule.peak(run.batch)))


def _step_seconds(run: Run) -> float:
    """Return what the faster quarter of steps stay below: another program's turn on the processor delays the others."""
    times = np.array([step.seconds for step in run.ranks[0].steps])
    return float(np.quantile(np.diff(times), 0.25)) if len(times) > 1 else float("inf")
