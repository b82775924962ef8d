"""When is the next checkpoint due by the clock?"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

from paceline.recipe.running import Checkpoint
from paceline.units import TimeSpan, format_seconds

# With `auto`, before there is a save to be measured.
_FIRST_SECONDS = 60.0
_MARGIN_SECONDS = 60.0


def job_ends_at(environ: Mapping[str, str]) -> float | None:
    """Unix time at which Slurm ends this job, where it says so."""
    end = environ.get("SLURM_JOB_END_TIME", "")
    return float(end) if end.isdigit() and int(end) > 0 else None


def young_interval(cost_seconds: float, mtbf_seconds: float) -> float:
    """Training time between two checkpoints that loses least, to saves and to what failures undo, in seconds.

    First-order optimum of Young (1974), which Daly (2006) refines; the two differ by less than the cost itself as long
    as a save costs much less than the time between failures.

    Args:
        cost_seconds: For which training stands still per save.
        mtbf_seconds: Mean time between failures of the whole job.
    """
    return math.sqrt(2 * cost_seconds * mtbf_seconds)


class Cadence:
    """Tells the first rank when to wish for a checkpoint; all ranks agree on it as on a stop.

    Args:
        checkpoint: What the recipe asks for.
        ends_at: Unix time at which the job will be ended from outside; None if nobody says so.
        clock: Seconds that only grow.
    """

    def __init__(
        self, checkpoint: Checkpoint, *, ends_at: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._mtbf = checkpoint.mtbf.seconds
        self._is_auto = checkpoint.every == "auto"
        self._is_measured = False
        self._interval = _interval_of(checkpoint)
        self._saved_at = clock()
        self._write_seconds = 0.0
        self._ends_at = None if ends_at is None or checkpoint.every is None else clock() + ends_at - time.time()

    def is_due(self) -> bool:
        """Whether to save after this step."""
        now = self._clock()
        if self._ends_at is not None and now >= self._last_chance():
            return True
        return now - self._saved_at >= self._interval

    def saved(self, paused_seconds: float) -> str | None:
        """Note a save that has begun, and for how long training stood still; returns news of the cadence, if any."""
        now = self._clock()
        if self._ends_at is not None and now >= self._last_chance():
            self._ends_at = None  # one is enough
        self._saved_at = now
        if not self._is_auto:
            return None
        self._interval = max(young_interval(paused_seconds, self._mtbf), 2 * self._write_seconds)
        if self._is_measured:
            return None
        self._is_measured = True
        return (
            f"a checkpoint pauses training for {format_seconds(paused_seconds)}: there will be one every "
            f"{format_seconds(self._interval)} (checkpoint.every=auto)"
        )

    def wrote(self, seconds: float) -> None:
        """Note how long it took until a checkpoint was on the disk."""
        self._write_seconds = seconds

    def _last_chance(self) -> float:
        """When a save must begin to be whole before the job is ended."""
        assert self._ends_at is not None
        return self._ends_at - _MARGIN_SECONDS - 3 * self._write_seconds


def _interval_of(checkpoint: Checkpoint) -> float:
    match checkpoint.every:
        case TimeSpan() as span:
            return span.seconds
        case "auto":
            return _FIRST_SECONDS
        case _:
            return math.inf
