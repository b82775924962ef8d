"""Find the largest micro-batch that this machine can train, by trials in separate processes.

A trial is a real run of two steps, with the recipe's task, network, optimizer, average and processes, and with an
evaluation if the recipe has one. If the run exceeds its memory, the size does not fit. Nothing of a trial remains, so
the next one starts from scratch.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from paceline.cli.options import choose_processes
from paceline.command import Log
from paceline.errors import ModelError, RunDirectoryError, TrainingError
from paceline.host.machine import memory_limit
from paceline.pages.shown import Shown
from paceline.parsing.units import Duration, format_bytes, format_count, format_seconds
from paceline.plan import MachineFacts
from paceline.plan.batching import micro_batch_size, with_valid_ghost_size
from paceline.plan.compute import resolve_evaluation_batch
from paceline.recipe.data import Progressive
from paceline.recipe.load import to_yaml
from paceline.recipe.schema import Recipe
from paceline.recipe.training import BatchSection
from paceline.records.reader import read_summary
from paceline.records.run_directory import RunDirectory
from paceline.telemetry.clock import peak_private_of
from paceline.trainer.fake_batch import with_placeholder_data
from paceline_advisor import Json, frozen, picked
from paceline_advisor.apply import QUIET, with_values, write_new
from paceline_advisor.commands import FindBatch
from paceline_advisor.launches import CommandProcess, check_alone, said
from paceline_advisor.memory.batch_trial import REFERENCE, TrialConfig
from paceline_advisor.memory.estimate import measure_run
from paceline_advisor.memory.job import SimulatedRun, machine_for, predicted
from paceline_advisor.memory.largest import largest_confirmed

# The first step creates the optimizer's state, and the second has it.
_STEPS = 2
_LOOK_SECONDS = 0.05
_LIMIT_SECONDS = 900.0
_REFUSED = (
    *("out of memory", "can't allocate memory", "Cannot allocate memory", "not enough memory", "MemoryError"),
    *("SIGKILL", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED"),
)
_TINY_RATE = 1e-9


@frozen
class SizeTrial:
    """A trial of one size.

    Attributes:
        micro_batch: Its size in samples.
        fits: Whether the run completed within its memory.
        peak: Peak memory of a process in bytes: allocated by PyTorch on a GPU, or resident without file pages on a CPU;
            None if it is unknown.
        why: Why it does not fit; otherwise empty.
        seconds: Its duration.
    """

    micro_batch: int
    fits: bool
    peak: int | None
    why: str
    seconds: float


@dataclass(kw_only=True)
class TrialRunner:
    """Settings and results of the trials of one recipe.

    Attributes:
        recipe: The recipe.
        processes: Processes of its run.
        share: Samples of a process in a step; smaller micro-batches are accumulated, also in the trial.
        memory: Bytes that each process may use; None for no limit.
        device_type: Type of the run's device.
        log: Receives a line for each trial.
        trials: The trials so far.
    """

    recipe: Recipe
    processes: int
    share: int
    memory: int | None
    device_type: str
    log: Log
    trials: list[SizeTrial] = field(default_factory=list)

    def fits(self, micro_batch: int) -> bool:
        """Return whether a size fits; each size is tried only once.

        Raises:
            TrainingError: If the run fails for a reason other than memory.
        """
        trial = next((each for each in self.trials if each.micro_batch == micro_batch), None)
        if trial is None:
            self.log(f"trying {micro_batch} samples")
            start_time = time.monotonic()
            # It contains sockets of loader processes, whose paths must be short.
            with tempfile.TemporaryDirectory(prefix="paceline-") as scratch:
                trial = self._tried(micro_batch, Path(scratch), start_time)
            self.trials.append(trial)
            took = "" if trial.peak is None else f", {format_bytes(trial.peak)}"
            outcome = f"fits{took}" if trial.fits else f"does not fit: {trial.why}"
            self.log(f"{micro_batch} samples: {outcome} ({format_seconds(trial.seconds)})")
        return trial.fits

    def _tried(self, micro_batch: int, scratch: Path, start_time: float) -> SizeTrial:
        parts = 2 if micro_batch < self.share else 1
        recipe = shortened(self.recipe, micro_batch, micro_batch * self.processes * parts)
        path, run_dir = scratch / "trial.yaml", scratch / "run"
        path.write_text(to_yaml(recipe.without_mirror()), encoding="utf-8")
        config = TrialConfig(
            task=self.recipe.task,
            samples=_STEPS * recipe.batch.global_size,
            evaluation_samples=resolve_evaluation_batch(self.recipe) * self.processes,
            memory=self.memory,
        )
        arguments = ["train", str(path), f"task={REFERENCE}", "--run-dir", str(run_dir)]
        arguments += ["--processes", str(self.processes)]
        peaks: dict[int, int] = {}
        with CommandProcess(
            arguments, scratch / "launch", limit_seconds=_LIMIT_SECONDS, variables=config.to_variable()
        ) as launch:
            reason = self._watch(launch, peaks)
            code = launch.process.poll()
            message = said(launch) if code else ""
            refused = any(each in launch.err for each in _REFUSED) or code in (-9, 137)
        peak = self._peak(run_dir, peaks) if code == 0 or reason else None
        if not reason and code == 0 and self._is_over(peak):
            reason = self._over(peak)
        if not reason and code:
            if not refused:
                raise TrainingError(f"a trial of {micro_batch} samples failed, but not for lack of memory: {message}")
            reason = "the device refused memory" if code != -9 else "the system killed it"
        return SizeTrial(
            micro_batch=micro_batch, fits=not reason, peak=peak, why=reason, seconds=time.monotonic() - start_time
        )

    def _watch(self, launch: CommandProcess, peaks: dict[int, int]) -> str:
        """Wait for a trial to end, or end it if a process exceeds its memory; return why it does not fit, if known.

        Raises:
            TrainingError: If it exceeds its time limit.
        """
        deadline = time.monotonic() + _LIMIT_SECONDS
        while launch.process.poll() is None:
            for pid in launch.ranks() if self.device_type == "cpu" else ():
                peaks[pid] = max(peaks.get(pid, 0), peak_private_of(pid))
            if self._is_over(max(peaks.values(), default=0)):
                launch.kill()
                return self._over(max(peaks.values()))
            if time.monotonic() > deadline:
                launch.kill()
                raise TrainingError(f"a trial had not ended after {_LIMIT_SECONDS:.0f} s, and was ended")
            time.sleep(_LOOK_SECONDS)
        return ""

    def _is_over(self, peak: int | None) -> bool:
        # On a GPU, PyTorch refuses allocations above the limit.
        return self.device_type == "cpu" and self.memory is not None and (peak or 0) > self.memory

    def _over(self, peak: int | None) -> str:
        return f"a process used {format_bytes(peak or 0)} of its {format_bytes(self.memory or 0)}"

    def _peak(self, run_dir: Path, peaks: dict[int, int]) -> int | None:
        if self.device_type == "cpu":
            return max(peaks.values(), default=None)
        with contextlib.suppress(RunDirectoryError):  # it was ended before it could report
            return read_summary(RunDirectory(run_dir)).peak_memory_bytes
        return None


def shortened(recipe: Recipe, micro_batch: int, global_size: int) -> Recipe:
    """Return the recipe for a trial: two steps of the same work, with any evaluation, that learn nothing."""
    steps = Duration(_STEPS, "steps")
    values = {
        **QUIET,
        "model": with_valid_ghost_size(recipe.model, micro_batch),
        "model.pretrained": False,
        "model.initialize_from": None,
        "model.initialize_partly": False,
        "model.compile": False,
        # In the end the whole network is trained, and images have their largest size.
        "model.frozen": () if recipe.model.unfreeze else recipe.model.frozen,
        "model.unfreeze": {},
        "model.freeze_after": {},  # it is trained until then
        "data.workers": 0 if recipe.data.backend in ("auto", "pytorch") else recipe.data.workers,
        "data.progressive": Progressive(),
        "batch": BatchSection(global_size=global_size, micro_size=micro_batch),
        "optimizer.lr": _TINY_RATE,
        "optimizer.lr_scaling": "none",
        "optimizer.lr_reference_batch": None,
        "train.duration": steps,
        "train.until": None,
        "train.nonfinite": "stop",
        "train.grad_scaler.init_scale": 1.0,  # steps must not be skipped
        "evaluate.every": None if recipe.evaluate.every is None else steps,
        "evaluate.patience": None,
        # By default, it would follow the trial's global batch, which is smaller than the run's.
        "evaluate.batch_size": resolve_evaluation_batch(recipe),
        "evaluate.keep_examples": 0,
        "parallel.logical_ranks": "auto",
    }
    return with_values(recipe, values)


# A trial takes seconds: sizes between two that differ by less than this fraction are skipped.
_ROUGHLY = 16


@frozen
class FoundBatch:
    """Result of the search.

    Attributes:
        name: Name of the recipe.
        recipe: The recipe with the proposed micro-batch.
        processes: Processes of the run.
        device: Its device.
        trials: The trials, in order.
        largest: The largest size that fits, in samples.
        refused: The smallest size that was tried and does not fit; None if all useful sizes fit.
        micro_size: The largest size that fits and divides a process's share of a step.
        accumulation_steps: Micro-batches per step and process.
        memory: Bytes available to each process; None for a whole GPU.
        share: Samples of a process in a step; larger micro-batches are not tried.
        expected: The largest size that fits by `paceline estimate`, for the same memory; None if it is unknown.
        estimated: Estimate of what was measured for the largest size, in bytes; None if there is none.
        why_not: Why there is no estimate; otherwise empty.
        applied: The file that the recipe was written to; None if none was requested.
    """

    name: str
    recipe: Recipe
    processes: int
    device: str
    trials: tuple[SizeTrial, ...]
    largest: int
    refused: int | None
    micro_size: int
    accumulation_steps: int
    memory: int | None
    share: int
    expected: int | None
    estimated: int | None
    why_not: str
    applied: Path | None = None

    @property
    def measured(self) -> int | None:
        """Peak memory of the largest size that fits, in bytes."""
        return next((each.peak for each in self.trials if each.micro_batch == self.largest and each.fits), None)

    @property
    def error(self) -> float | None:
        """Error of the estimate, relative to the measurement."""
        if self.estimated is None or not self.measured:
            return None
        return self.estimated / self.measured - 1

    def to_json(self) -> Json:
        """Return the result as one JSON object."""
        return {
            "recipe": self.name,
            **picked(self, "processes", "device", "micro_size", "accumulation_steps"),
            "memory_bytes": self.memory,
            "largest_micro_batch": self.largest,
            "refused_micro_batch": self.refused,
            "estimated_largest_micro_batch": self.expected,
            "global_size": self.recipe.batch.global_size,
            "learning_rate": self.recipe.optimizer.lr,
            "measured_peak_bytes": self.measured,
            "estimated_peak_bytes": self.estimated,
            "estimate_error": self.error,
            "why_no_estimate": self.why_not,
            "trials": [vars(each) for each in self.trials],
        }

    def __paceline__(self) -> Shown:
        """Show the size found, the resulting step, and its memory, measured and estimated."""
        recipe, parts = self.recipe, self.accumulation_steps
        limit = "all of its memory" if self.memory is None else f"{format_bytes(self.memory)} for each process"
        refused = "" if self.refused is None else f"; {format_count(self.refused)} do not"
        lines = {
            "fits": f"{format_count(self.largest)} samples{refused}",
            "so set": f"batch.micro_size={self.micro_size}",
            "a step": f"{format_count(recipe.batch.global_size)} samples = {self.processes} "
            f"process{'es' * (self.processes > 1)} x {parts} micro-batch{'es' * (parts > 1)} x {self.micro_size}; the "
            f"global batch and the learning rate of {recipe.optimizer.lr:g} stay",
        }
        if self.measured is not None:
            lines["measured"] = f"{format_bytes(self.measured)} with {format_count(self.largest)} samples"
        if self.estimated is not None:
            error = "" if self.error is None else f", {100 * self.error:+.1f} % off"
            lines["estimated"] = f"{format_bytes(self.estimated)}{error}"
        elif self.why_not:
            lines["estimated"] = f"no: {self.why_not}"
        if self.expected is not None:
            lines["by estimate"] = f"{format_count(self.expected)} samples fit{self._difference(self.expected)}"
        applied = [] if self.applied is None else [f"\nWritten to {self.applied}."]
        return Shown(title=f"Largest micro-batch of {self.name} on {self.device}, {limit}", blocks=[lines, *applied])

    def _difference(self, expected: int) -> str:
        """Describe why the estimate's largest size was not found by trying; empty if it lies where the trials end."""
        if self.refused is None and expected > self.largest:
            return f"; a process has {format_count(self.share)} samples of a step, and no more were tried"
        if self.largest <= expected < (self.refused or expected + 1):
            return ""
        return "; the trials decide, and on a CPU do not count pages of files"


def find_batch(options: FindBatch, log: Log) -> FoundBatch:
    """Find the largest micro-batch by doubling and bisecting.

    Args:
        options: The command.
        log: Receives a line for each trial.

    Raises:
        TrainingError: If not even one sample fits, or a trial fails for another reason.
        PacelineError: For mistakes that training would find before it starts.
    """
    loaded, memory = options.load(), options.memory
    processes = choose_processes(options.processes, loaded.recipe).count
    check_alone("find-batch")
    recipe, assumed = with_placeholder_data(loaded.recipe)
    if assumed:
        log(assumed)
    if recipe.model.compile:
        log("model.compile=true: tried uncompiled, because every size would be compiled again")
    machine, _ = machine_for(None, recipe, processes)
    if machine.device == "cpu" and memory is None:
        memory = _available(processes)
    # The samples of a process in a step, which micro-batches must divide.
    undivided = {"parallel.logical_ranks": "auto", "parallel.exact": False, "batch.micro_size": "auto"}
    share = micro_batch_size(with_values(recipe, undivided), processes)
    job, expected, why_not = _job(recipe, machine, processes, memory, log, measures=not assumed)
    runner = TrialRunner(
        recipe=recipe, processes=processes, share=share, memory=memory, device_type=machine.device, log=log
    )
    # Start at a quarter of the expected size, since trials that do not fit take longest; or with all if far more fit.
    start = 1 if expected is None else share if expected >= 2 * share else max(1, min(expected, share) // 4)
    low, high = search(runner.fits, start=start, most=share)
    if low == 0:
        raise TrainingError(
            f"not even one sample fits ({runner.trials[-1].why}); `paceline estimate` shows ways to save memory."
        )
    for divisor in (each for each in range(low + 1, high or 0) if share % each == 0):
        if not runner.fits(divisor):
            high = divisor
            break
        low = divisor
    micro = proposed(runner.fits, most=low, share=share)
    if micro == 0:
        raise TrainingError(f"no size that divides the {share} samples of a process fits, though {low} samples do.")
    estimated = None
    if job is not None:  # as a trial's peak is measured: all memory of a process, or PyTorch's allocations on a GPU
        estimated = job.needed(low) if job.plan.device == "cpu" else job.peak(low).allocated
    found = with_values(loaded.recipe, {"batch.micro_size": micro})
    if options.apply is not None:
        write_new(options.apply, to_yaml(found))
    return FoundBatch(
        name=loaded.name,
        recipe=found,
        processes=processes,
        device=machine.device_name,
        trials=tuple(runner.trials),
        largest=low,
        refused=high,
        micro_size=micro,
        accumulation_steps=recipe.batch.global_size // (micro * processes),
        memory=memory,
        share=share,
        expected=expected,
        estimated=estimated,
        why_not=why_not,
        applied=options.apply,
    )


def search(fits: Callable[[int], bool], *, start: int, most: int) -> tuple[int, int | None]:
    """Return the largest size that fits and the smallest that does not, at most a sixteenth apart.

    It doubles from ``start`` until a size does not fit, or halves until one does, and bisects between the two.

    Returns:
        The first is 0 if not even 1 fits; the second None if ``most`` does.
    """
    low, high, size = 0, None, max(1, min(start, most))
    while high is None or low == 0:
        if fits(size):
            low = size
            if high is not None or size == most:
                break
            size = min(2 * size, most)
        else:
            high = size
            if low or size == 1:
                break
            size //= 2
    while low and high is not None and high - low > max(1, low // _ROUGHLY):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low, high


def proposed(fits: Callable[[int], bool], *, most: int, share: int) -> int:
    """Return the largest size up to ``most`` that divides a process's share and fits; 0 if there is none."""
    return next((each for each in range(most, 0, -1) if share % each == 0 and fits(each)), 0)


def _job(
    recipe: Recipe, machine: MachineFacts, processes: int, memory: int | None, log: Log, *, measures: bool
) -> tuple[SimulatedRun | None, int | None, str]:
    """Return the memory estimator of the run with the largest size by `paceline estimate`, or why there is none."""
    log("running steps and an evaluation on fake tensors")
    try:
        with predicted(recipe, machine, processes) as job:
            if not (job.steps.is_linear or job.steps.is_scaled):
                return None, None, "its steps differ in more than size"
            outside, room = job.outside, job.plan.device_memory_bytes if memory is None else memory
            if machine.device == "cpu" and measures:
                measured, _ = measure_run(recipe, processes, log)
                job.measured(None if measured is None else measured.each)
            log("looking for the largest micro-batch")
            largest = None if room is None else largest_confirmed(job, room)[0]
            # Trials are measured without pages of files.
            job.outside = outside
            job.forget()
            return job, largest, ""
    except ModelError as error:
        return None, None, str(error)


def _available(processes: int) -> int | None:
    """Return the main memory, in bytes, that is available to each of the processes; None if unknown."""
    limits = [memory_limit()]
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        limits += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return min((each // processes for each in limits if each is not None), default=None)
