"""Criteria about a run: how it ends, resumes and writes, its samples, its learning rate and its speed."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.host.machine import available_cores
from paceline.host.processes import signal_name
from paceline_course.assignment import TRAINING_SAMPLES
from paceline_course.grading.runs import CriterionResult, ProgramRun, Runs, Vector, listing, on_several, with_processes

_LIMIT_MESSAGES = {
    "hang": "hung: no rank did anything for seconds, each waiting for another",
    "processor time": "did not end: it exceeded the limit of processor time",
    "processes": "started more processes than allowed",
    "time": "did not end within the time limit",
}
# Words in gloo's error messages.
_CONNECTION_ERRORS = ("closed by peer", "reset by peer", "Broken pipe", "gloo")
_FILE_ERRORS = ("FileNotFoundError", "FileExistsError", "OSError", "RuntimeError", "SafetensorError")
_RESULT_TOLERANCE = 1e-5


def ends(runs: Runs) -> CriterionResult:
    """Check that every run ends by itself at any number of processes."""
    for name in ("one", "two", "three", "batchnorm"):
        run = runs.get(name)
        if run is None:
            return CriterionResult("Some runs were skipped because earlier ones had failed.")
        if run.ended_for:
            return CriterionResult(
                f"The run {with_processes(run)} {_LIMIT_MESSAGES.get(run.ended_for, run.ended_for)}."
            )
        failure = _failure(run)
        if failure:
            return CriterionResult(f"The run {with_processes(run)} {failure}.")
        killed = [rank for rank, member in enumerate(run.ranks) if member.end is None]
        if killed:
            return CriterionResult(
                f"The run {with_processes(run)} stopped early on ranks {listing(killed)}{_by_signal(run, killed)}: "
                f"{run.last_line.rstrip('.') or 'it printed nothing'}."
            )
        counts = [len(member.steps) for member in run.ranks]
        if not all(counts):
            return CriterionResult(f"In the run {with_processes(run)}, not every rank made an optimizer step.")
        if len(set(counts)) > 1:
            return CriterionResult(f"The run {with_processes(run)} ended after {listing(counts)} steps on its ranks.")
    return CriterionResult()


def clean_exit(runs: Runs) -> CriterionResult:
    """Check that the exit code is 0 and the process group is destroyed."""
    found = runs.complete("one", "two", "three", "batchnorm")
    for run in found.values():
        codes = sorted({code for code in run.exit_codes if code > 0})
        if codes:
            return CriterionResult(f"The run {with_processes(run)} ended with exit code {codes[0]}.")
        if any(rank.end is not None and rank.end.has_process_group for rank in run.ranks):
            return CriterionResult(f"The run {with_processes(run)} ended without destroy_process_group().")
    if not runs.complete("two", "three"):
        return CriterionResult("This could not be checked: no run with 2 or 3 processes finished training.")
    return CriterionResult()


def one_writer(runs: Runs) -> CriterionResult:
    """Check that only one rank writes to the output directory."""

    for name in ("two", "three"):  # also if this made the program fail
        tried = runs.get(name)
        writers = _writers(tried) if tried is not None else {}
        if tried is not None and len(writers) > 1:
            files = sorted({file for files in writers.values() for file in files})
            return CriterionResult(
                f"{with_processes(tried).capitalize()}, ranks {listing(list(writers))} wrote: {listing(files)}."
            )

    return _some_writer(runs)


@on_several
def _some_writer(run: ProgramRun) -> CriterionResult:
    if not _writers(run):
        return CriterionResult(f"{with_processes(run).capitalize()}, no rank wrote anything to the output directory.")
    return CriterionResult()


def resume(runs: Runs) -> CriterionResult:
    """Check that a run killed in its second epoch resumes from the first's checkpoint, to the same weights."""
    whole, resumed = runs.complete("two").get("two"), runs.get("resumed")
    if whole is None or resumed is None:
        return CriterionResult("This could not be checked: the run with 2 processes did not finish training.")
    if not resumed.steps:
        return CriterionResult(f"Restarted after a kill, it made no step: {resumed.last_line or 'it printed nothing'}.")
    first = whole.epoch_steps(1).start
    begun = resumed.ranks[0].steps[0]
    if _is_same(begun.weights, whole.ranks[0].steps[0].weights):
        return CriterionResult("Restarted after a kill, it began with new weights: no checkpoint was loaded.")
    if not _is_same(begun.weights, whole.ranks[0].steps[first].weights):
        return CriterionResult("Restarted after a kill, it began with weights other than those after its first epoch.")
    for later in range(min(resumed.steps, whole.steps - first)):
        for rank in range(whole.processes):
            again, before = resumed.ranks[rank].steps[later], whole.ranks[rank].steps[first + later]
            if sorted(again.samples) != sorted(before.samples):
                return CriterionResult(
                    f"Step {first + later}, after a kill, used other samples than without a kill: "
                    "the position in the data was not restored."
                )
            if abs(again.learning_rate - before.learning_rate) > 1e-3 * before.learning_rate:
                return CriterionResult(
                    f"Step {first + later}, after a kill, had a learning rate of {again.learning_rate:.4g} "
                    f"instead of {before.learning_rate:.4g}."
                )
            if not _is_same(again.weights, before.weights):
                return CriterionResult(
                    f"The weights after a kill differ from step {first + later} on, although the samples are the same: "
                    "something the optimizer needs was not in the checkpoint, or differed between ranks."
                )
    reason = _difference_at_end(whole, runs.complete("again").get("again"))
    return CriterionResult(reason, seen={"steps compared": min(resumed.steps, whole.steps - first)})


def atomic(runs: Runs) -> CriterionResult:
    """Check that a complete checkpoint remains when a rank is killed while it writes the next one."""
    whole, resumed, again = runs.get("two"), runs.get("resumed"), runs.get("again")
    if whole is None or resumed is None or not resumed.steps:
        return CriterionResult("This could not be checked: the program did not resume after a kill.")
    if _is_same(resumed.ranks[0].steps[0].weights, whole.ranks[0].steps[0].weights):
        return CriterionResult("This could not be checked: after a kill, the program started from the beginning.")
    if not any(code < 0 for code in resumed.exit_codes):
        return CriterionResult("After the restart, it wrote no checkpoint with torch.save or save_file.")
    if again is None or not again.steps:
        words = again.last_line if again is not None else ""
        return CriterionResult(
            f"Killed while writing a checkpoint, which was left half written, it could not start again: "
            f"{(words or 'it printed nothing').rstrip('.')}. Write to another file, then rename it."
        )
    if not _is_same(again.ranks[0].steps[0].weights, resumed.ranks[0].steps[0].weights):
        return CriterionResult("Killed while writing a checkpoint, it did not resume from the previous one.")
    return CriterionResult()


def inside(runs: Runs) -> CriterionResult:
    """Check that it writes only to its own directory."""
    paths = [path for run in runs.by_name.values() for rank in run.ranks for path in rank.refused]
    return (
        CriterionResult(f"It tried to write outside its directory: {listing(sorted(set(paths)))}.")
        if paths
        else CriterionResult()
    )


def _failure(run: ProgramRun) -> str:
    """Describe the first failure; that a rank lost contact only means that another rank had ended."""
    messages = {rank: member.end.message for rank, member in enumerate(run.ranks) if member.end and member.end.message}
    causes = {rank: text for rank, text in messages.items() if not any(word in text for word in _CONNECTION_ERRORS)}
    for rank, text in causes.items():
        writers = _writers(run)
        # Files that are missing or incomplete because another rank has written, renamed or removed them meanwhile.
        together = text.startswith(_FILE_ERRORS) and rank in writers and len(writers) > 1
        why = f"; ranks {listing(list(writers))} write the same files" if together else ""
        return f"failed on rank {rank} with {text.rstrip(': .')}{why}"
    return (
        "failed: ranks lost contact because they did not call the same collectives in the same order"
        if messages
        else ""
    )


def _difference_at_end(whole: ProgramRun, again: ProgramRun | None) -> str:
    """Describe how the end of the last restarted run differs from that of the run that was never killed."""
    first = whole.epoch_steps(1).start
    wanted = whole.steps - first
    if again is None or not _is_same(again.ranks[0].steps[0].weights, whole.ranks[0].steps[first].weights):
        return ""  # `atomic` reports this
    if again.steps != wanted:
        return f"Restarted after a kill, it made {again.steps} more steps; {wanted} were left."
    before, after = (run.ranks[0].final_weights for run in (whole, again))
    if before is None or after is None or not _is_same(before, after):
        return "Restarted after a kill, it ended with other weights than without the kill."
    epochs = {record.get("epoch") for record in again.log}
    missing = [epoch for epoch in range(again.epochs) if epoch not in epochs]
    return f"After a kill, the log has no line for epoch {listing(missing)}." if missing else ""


def _writers(run: ProgramRun) -> dict[int, tuple[str, ...]]:
    return {rank: member.written for rank, member in enumerate(run.ranks) if member.written}


def _by_signal(run: ProgramRun, ranks: Sequence[int]) -> str:
    codes = [run.exit_codes[rank] for rank in ranks if rank < len(run.exit_codes)]
    return f" with {signal_name(codes[0])}" if codes and codes[0] < 0 else ""


def _is_same(first: Vector, second: Vector) -> bool:
    return first.shape == second.shape and bool(np.allclose(first, second, rtol=0, atol=_RESULT_TOLERANCE))


@on_several
def once(run: ProgramRun) -> CriterionResult:
    """Check that every training sample is used exactly once per epoch, over all ranks."""
    for epoch in range(run.epochs):
        used = Counter(s for rank in run.ranks for step in run.epoch_steps(epoch) for s in rank.steps[step].samples)
        where = f"In epoch {epoch} {with_processes(run)}"
        foreign = sum(count for sample, count in used.items() if sample < 0)
        if foreign:
            return CriterionResult(
                f"{where}, {foreign} rows in the training batches are not samples of the training set."
            )
        missing = [sample for sample in range(TRAINING_SAMPLES) if not used[sample]]
        repeated = sorted(sample for sample, count in used.items() if count > 1)
        if missing and repeated:
            return CriterionResult(
                f"{where}, {len(missing)} samples were not used, and {len(repeated)} more than once."
            )
        if missing:
            return CriterionResult(
                f"{where}, {len(missing)} of {TRAINING_SAMPLES} samples were not used: {listing(missing)}."
            )
        if repeated:
            return CriterionResult(f"{where}, these samples were used more than once: {listing(repeated)}.")
    return CriterionResult(seen={"samples in each epoch": TRAINING_SAMPLES})


@on_several
def disjoint(run: ProgramRun) -> CriterionResult:
    """Check that ranks divide an epoch's samples; `once` reports a few samples repeated as padding."""
    for epoch in range(run.epochs):
        used = [{s for step in run.epoch_steps(epoch) for s in rank.steps[step].samples} for rank in run.ranks]
        for second in range(run.processes):
            for first in range(second):
                shared = used[first] & used[second]
                if len(shared) >= run.processes:
                    return CriterionResult(
                        f"In epoch {epoch} {with_processes(run)}, ranks {first} and {second} trained on {len(shared)} "
                        f"samples in common, of {len(used[second])}."
                    )
    return CriterionResult()


@on_several
def order(run: ProgramRun) -> CriterionResult:
    """Check that the order changes from epoch to epoch."""
    epochs = [
        [frozenset(s for rank in run.ranks for s in rank.steps[step].samples) for step in run.epoch_steps(epoch)]
        for epoch in range(run.epochs)
    ]
    firsts = sorted(epochs[0][0])
    if firsts == list(range(len(firsts))) and len(firsts) > 1:
        return CriterionResult(f"The first batch holds samples 0 to {firsts[-1]}: the training set was not shuffled.")
    for later in range(1, run.epochs):
        for epoch in range(later):
            if epochs[epoch] == epochs[later]:
                return CriterionResult(
                    f"Epoch {later} {with_processes(run)} had the same batches as epoch {epoch}, in the same order."
                )
    return CriterionResult()


BASE_BATCH = 32  # the batch size that the base learning rate is for
_LR_TOLERANCE = 1e-3
_MINIMUM_SHARE = 0.5
# Two measurements of the same loop's throughput differ by this factor even on a quiet machine.
_LEAST_NOISE = 1.25
# The load is that of the whole host, of which a container sees a part.
_MOST_NOISE = 4.0
# Runs made only if the first measurement was too slow: another process may have caused that.
THROUGHPUT_REPEATS = ("batchnorm-2", "batchnorm-3")


@dataclass(frozen=True)
class RequestedSchedule:
    """The requested learning rate schedule.

    Attributes:
        base_lr: Learning rate for a batch of 32.
        warmup: Steps until the full learning rate.
    """

    base_lr: float
    warmup: int

    def peak(self, batch: int) -> float:
        """Return the full learning rate for a batch size."""
        return self.base_lr * batch / BASE_BATCH


@on_several
def scaled(run: ProgramRun, schedule: RequestedSchedule) -> CriterionResult:
    """Check that the learning rate is proportional to the global batch at any number of processes."""
    expected = schedule.peak(run.batch)
    found = _peak(run, schedule)
    for step in range(min(schedule.warmup + 1, run.steps - 1), run.steps):
        for rank, member in enumerate(run.ranks):
            later = member.steps[step].learning_rate
            if abs(found - expected) <= _LR_TOLERANCE * expected < abs(later - expected):
                return CriterionResult(
                    f"At step {step} {with_processes(run)} the learning rate of rank {rank} is {later:.4g}; "
                    f"after the warm-up it should stay at {expected:.4g}.",
                    seen={"learning rate": later, "expected": expected},
                )
    if not abs(found - expected) <= _LR_TOLERANCE * expected:
        return CriterionResult(
            f"After the warm-up {with_processes(run)} the learning rate is {found:.4g}; for a global batch of "
            f"{run.batch} it should be {schedule.base_lr:g} x {run.batch} / {BASE_BATCH} = {expected:.4g}.",
            seen={"learning rate": found, "expected": expected},
        )
    return CriterionResult(seen={"learning rate": found})


@on_several
def warmup(run: ProgramRun, schedule: RequestedSchedule) -> CriterionResult:
    """Check that the learning rate rises linearly over the first steps; `scaled` checks the rate it reaches."""
    peak = _peak(run, schedule)
    for step in range(min(schedule.warmup, run.steps)):
        expected = (step + 1) / schedule.warmup
        found = run.ranks[0].steps[step].learning_rate / max(peak, 1e-12)
        if abs(found - expected) > 0.01:
            return CriterionResult(
                f"At step {step} {with_processes(run)} the learning rate is {found:.0%} of the full one; "
                f"a linear warm-up of {schedule.warmup} steps has {expected:.0%}."
            )
    return CriterionResult()


def throughput(runs: Runs) -> CriterionResult:
    """Check that steps are at least half as fast as a bare loop's; not judged if the machine is too noisy."""
    programs = runs.complete("batchnorm", *THROUGHPUT_REPEATS)
    if "batchnorm" not in programs:
        return CriterionResult(
            "This could not be checked: the run of the network with BatchNorm did not finish training."
        )
    loops = runs.complete("pace-before", "pace-after")
    if len(loops) < 2:
        return CriterionResult(note="The bare loop could not be measured, so throughput was not judged.")
    times = [[_step_seconds(run) for run in found.values()] for found in (programs, loops)]
    return judge_throughput(times[0], times[1], load=os.getloadavg()[0] / available_cores())


def judge_throughput(programs: Sequence[float], loops: Sequence[float], *, load: float = 0.0) -> CriterionResult:
    """Compare a program's step times with the bare loop's, in seconds; each was measured once or more.

    Args:
        programs: Step times of the program; the best counts.
        loops: Step times of the bare loop; their mean counts.
        load: Runnable processes per core that may be used, which may have slowed only one of the two.
    """
    program, loop = min(programs), sum(loops) / len(loops)
    share, noise = loop / program, max(max(loops) / min(loops), min(load, _MOST_NOISE), _LEAST_NOISE)
    seen = {"step seconds": list(programs), "bare loop": list(loops), "share": share}
    if share >= _MINIMUM_SHARE:
        return CriterionResult(seen=seen)
    if share * noise >= _MINIMUM_SHARE:
        return CriterionResult(note="Throughput was not judged: the machine was too busy to measure it.", seen=seen)
    return CriterionResult(
        f"A step takes {1000 * program:.1f} ms, and {1000 * loop:.1f} ms in a bare loop: "
        f"{share:.0%} of its throughput; at least {_MINIMUM_SHARE:.0%} is required.",
        seen=seen,
    )


def _peak(run: ProgramRun, schedule: RequestedSchedule) -> float:
    """Return the learning rate after the warm-up: of all ranks, the one furthest from the expected rate."""
    rates = [rank.steps[min(schedule.warmup + 1, run.steps - 1)].learning_rate for rank in run.ranks]
    return max(rates, key=lambda rate: abs(rate - schedule.peak(run.batch)))


def _step_seconds(run: ProgramRun) -> float:
    """Return the first quartile of the step times: other programs on the machine delay the slower steps."""
    times = np.array([step.seconds for step in run.ranks[0].steps])
    return float(np.quantile(np.diff(times), 0.25)) if len(times) > 1 else float("inf")
