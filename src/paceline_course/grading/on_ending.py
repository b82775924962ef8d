"""Criteria: does a program end well, write where it may, and go on after it was killed?"""

from __future__ import annotations

import signal
from collections.abc import Sequence

import numpy as np

from paceline_course.grading.findings import Finding, Runs, listing, with_processes
from paceline_course.grading.runs import End, Run, Vector

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
    """Does every run end by itself, whatever the number of processes?"""
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
    """Is the exit code 0 and the process group destroyed?"""
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
    """Does one rank alone write to the output directory?"""

    for name in ("two", "three"):  # also where that is what made the program fail
        tried = runs.get(name)
        writers = _writers(tried) if tried is not None else {}
        if tried is not None and len(writers) > 1:
            files = sorted({file for files in writers.values() for file in files})
            return Finding(
                f"{with_processes(tried).capitalize()}, ranks {listing(list(writers))} wrote: {listing(files)}."
            )

    def check(run: Run) -> Finding:
        if not _writers(run):
            return Finding(f"{with_processes(run).capitalize()}, no rank wrote anything to the output directory.")
        return Finding()

    return runs.on_several(check)


def resume(runs: Runs) -> Finding:
    """Does a run that was killed in its second epoch go on from the checkpoint of the first, to the same weights?"""
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
    """Is there still a whole checkpoint when a rank is killed while it writes the next?"""
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
    """Does it write in its own directory only?"""
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
