"""Does a run with this micro-batch come to its end within its memory?"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from paceline.errors import RunDirectoryError, TrainingError
from paceline.recipe.batching import with_fitting_ghosts
from paceline.recipe.data import Progressive
from paceline.recipe.load import to_yaml
from paceline.recipe.plan import resolve_evaluation_batch
from paceline.recipe.running import Checkpoint, Telemetry
from paceline.recipe.schedule import Schedule
from paceline.recipe.schema import Recipe
from paceline.recipe.training import Batch
from paceline.records.reader import read_summary
from paceline.records.run_directory import RunDirectory
from paceline.telemetry.memory import peak_private_of
from paceline.trainer.preparation import without_mirror
from paceline.units import Duration, format_bytes, format_seconds
from paceline_advisor.launches import Launch, said
from paceline_advisor.memory.batch_trial import REFERENCE, Orders

# The first makes the optimizer's state, and the second has it.
_STEPS = 2
_LOOK_SECONDS = 0.05
_LIMIT_SECONDS = 900.0
_REFUSED = (
    *("out of memory", "can't allocate memory", "Cannot allocate memory", "not enough memory", "MemoryError"),
    *("SIGKILL", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED"),
)
_TINY_RATE = 1e-9


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One size, tried.

    Attributes:
        micro_batch: Samples.
        fits: Whether the run came to its end within its memory.
        peak: The most memory that a process of it took, in bytes: of a GPU what PyTorch allocated, of a CPU what was
            resident, pages of files left out; None if none lived to tell.
        why: Why it does not fit.
        seconds: What it took.
    """

    micro_batch: int
    fits: bool
    peak: int | None
    why: str
    seconds: float


@dataclass(kw_only=True)
class TrialGround:
    """Where trials of one recipe are made.

    Attributes:
        recipe: The recipe.
        processes: Of its run.
        share: Samples of a process in a step; fewer are made up for by accumulation, also in the trial.
        memory: Bytes that each process may take; None for what there is.
        device_type: Where it runs.
        say: Told of each trial.
        trials: Those made.
    """

    recipe: Recipe
    processes: int
    share: int
    memory: int | None
    device_type: str
    say: Callable[[str], None]
    trials: list[Trial] = field(default_factory=list)

    def fits(self, micro_batch: int) -> bool:
        """Try a size, once.

        Raises:
            TrainingError: If the run fails for another reason than memory.
        """
        known = next((each for each in self.trials if each.micro_batch == micro_batch), None)
        if known is None:
            begun = time.monotonic()
            # Sockets of loader processes lie in it, whose paths must be short.
            with tempfile.TemporaryDirectory(prefix="paceline-") as scratch:
                known = self._tried(micro_batch, Path(scratch), begun)
            self.trials.append(known)
            took = "" if known.peak is None else f", {format_bytes(known.peak)}"
            outcome = f"fits{took}" if known.fits else f"does not fit: {known.why}"
            self.say(f"{micro_batch} samples: {outcome} ({format_seconds(known.seconds)})")
        return known.fits

    def _tried(self, micro_batch: int, scratch: Path, begun: float) -> Trial:
        parts = 2 if micro_batch < self.share else 1
        recipe = shortened(self.recipe, micro_batch, micro_batch * self.processes * parts)
        path, run_dir = scratch / "trial.yaml", scratch / "run"
        path.write_text(to_yaml(without_mirror(recipe)), encoding="utf-8")
        orders = Orders(
            task=self.recipe.task,
            samples=_STEPS * recipe.batch.global_size,
            evaluation_samples=resolve_evaluation_batch(self.recipe, {}) * self.processes,
            memory=self.memory,
        )
        arguments = ["train", str(path), f"task={REFERENCE}", "--run-dir", str(run_dir)]
        arguments += ["--processes", str(self.processes)]
        seen: dict[int, int] = {}
        with Launch(
            arguments, scratch / "launch", limit_seconds=_LIMIT_SECONDS, variables=orders.to_variable()
        ) as launch:
            why = self._watch(launch, seen)
            code = launch.process.poll()
            told = said(launch) if code else ""
            refused = any(each in launch.err for each in _REFUSED) or code in (-9, 137)
        peak = self._peak(run_dir, seen) if code == 0 or why else None
        if not why and code == 0 and self._is_over(peak):
            why = self._over(peak)
        if not why and code:
            if not refused:
                raise TrainingError(f"a trial of {micro_batch} samples failed, and not for want of memory: {told}")
            why = "the device refused memory" if code != -9 else "the system ended it"
        return Trial(micro_batch=micro_batch, fits=not why, peak=peak, why=why, seconds=time.monotonic() - begun)

    def _watch(self, launch: Launch, seen: dict[int, int]) -> str:
        """Wait for a trial's end, and end it if a process takes more than it may; says so, else nothing."""
        deadline = time.monotonic() + _LIMIT_SECONDS
        while launch.process.poll() is None:
            for pid in launch.ranks() if self.device_type == "cpu" else ():
                seen[pid] = max(seen.get(pid, 0), peak_private_of(pid))
            if self._is_over(max(seen.values(), default=0)):
                launch.kill()
                return self._over(max(seen.values()))
            if time.monotonic() > deadline:
                launch.kill()
                raise TrainingError(f"a trial had not ended after {_LIMIT_SECONDS:.0f} s, and was ended")
            time.sleep(_LOOK_SECONDS)
        return ""

    def _is_over(self, peak: int | None) -> bool:
        # A GPU refuses what is too much by itself.
        return self.device_type == "cpu" and self.memory is not None and (peak or 0) > self.memory

    def _over(self, peak: int | None) -> str:
        return f"a process took {format_bytes(peak or 0)} of its {format_bytes(self.memory or 0)}"

    def _peak(self, run_dir: Path, seen: dict[int, int]) -> int | None:
        if self.device_type == "cpu":
            return max(seen.values(), default=None)
        with contextlib.suppress(RunDirectoryError):  # it was ended before it could say
            return read_summary(RunDirectory(run_dir)).peak_memory_bytes
        return None


def shortened(recipe: Recipe, micro_batch: int, global_size: int) -> Recipe:
    """The recipe for a trial: two steps of the same work, and an evaluation if it has any, that learn nothing."""
    lacks_file = recipe.data.backend in ("auto", "pytorch")
    steps = Duration(_STEPS, "steps")
    scaler = replace(recipe.train.grad_scaler, init_scale=1.0)  # no step is to be skipped
    return replace(
        recipe,
        model=replace(
            with_fitting_ghosts(recipe.model, micro_batch),
            pretrained=False,
            initialize_from=None,
            initialize_partly=False,
            compile=False,
            # In the end all of it is trained.
            frozen=() if recipe.model.unfreeze else recipe.model.frozen,
            unfreeze={},
            freeze_after={},  # until then it is trained
        ),
        # In the end images are as large as they get.
        data=replace(recipe.data, workers=0 if lacks_file else recipe.data.workers, progressive=Progressive()),
        batch=Batch(global_size=global_size, micro_size=micro_batch),
        optimizer=replace(recipe.optimizer, lr=_TINY_RATE, lr_scaling="none", lr_reference_batch=None),
        schedule=Schedule(name="constant"),
        train=replace(recipe.train, duration=steps, until=None, nonfinite="stop", grad_scaler=scaler),
        evaluate=replace(
            recipe.evaluate,
            every=None if recipe.evaluate.every is None else steps,
            patience=None,
            # Left open, it would follow the trial's global batch, which is smaller than the run's.
            batch_size=resolve_evaluation_batch(recipe, {}),
        ),
        checkpoint=Checkpoint(every=None, keep_best=False),
        parallel=replace(recipe.parallel, logical_ranks="auto"),
        telemetry=Telemetry(log_every=Duration(1, "steps"), trackers=()),
    )
