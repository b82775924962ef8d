"""What does it cost a step to know where its time goes?

The network of `overhead.py` trains with Paceline as it always does. Blocks of steps with the step clock and blocks
with one that does nothing take turns (A B A B …) in one run, so that a machine whose speed drifts slows both alike.

    python benchmarks/step_clock.py [--batch-size 64 4] [--blocks 40] [--steps 40]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hardware import spread, write_result

from paceline.recipe.load import load_recipe
from paceline.telemetry.clock import HostStepClock, StepClock
from paceline.telemetry.display import Display
from paceline.telemetry.meter import Totals
from paceline.trainer import build
from paceline.trainer.train import Options, train_recipe


class NoClock(StepClock):
    """Measures nothing."""

    _nothing = nullcontext()

    def start(self) -> None:
        """Begin nothing."""

    def span(self, phase: str) -> AbstractContextManager[None, None]:
        """Count nothing."""
        return self._nothing

    def paused(self) -> AbstractContextManager[None, None]:
        """Leave out nothing."""
        return self._nothing

    def set_phase(self, index: int) -> int:
        """Change nothing."""
        return index

    def end_step(self, samples: int) -> None:
        """Close nothing."""

    def _settle(self) -> None:
        """Nothing is outstanding."""


class TakingTurns(StepClock):
    """Hands everything on to one of two clocks; that costs both the same."""

    def __init__(self) -> None:
        self.clocks: tuple[StepClock, StepClock] = (HostStepClock(), NoClock())
        self.now = self.clocks[0]

    def start(self) -> None:
        """Begin."""
        self.now.start()

    def span(self, phase: str) -> AbstractContextManager[None, None]:
        """The span of the clock whose turn it is."""
        return self.now.span(phase)

    def paused(self) -> AbstractContextManager[None, None]:
        """Its pause."""
        return self.now.paused()

    def set_phase(self, index: int) -> int:
        """Change its phase."""
        return self.now.set_phase(index)

    def end_step(self, samples: int) -> None:
        """Close its step."""
        self.now.end_step(samples)

    def drain(self) -> dict[str, float | None]:
        """Its means."""
        return self.now.drain()

    @property
    def totals(self) -> Totals:
        """Those of the real one."""
        return self.clocks[0].totals

    def state_dict(self) -> dict[str, Any]:
        """That of the real one."""
        return self.clocks[0].state_dict()

    def _settle(self) -> None:
        """Nothing is outstanding."""


class Turns(Display):
    """Times blocks of steps, and lets the other clock go on at their ends."""

    def __init__(self, clock: TakingTurns, steps: int) -> None:
        self.clock, self.steps = clock, steps
        self.seconds: tuple[list[float], list[float]] = ([], [])
        self._begun = time.perf_counter()

    def advance(self, step: int) -> None:
        """Count a step."""
        if step % self.steps:
            return
        index = self.clock.clocks.index(self.clock.now)
        self.seconds[index].append(time.perf_counter() - self._begun)
        self.clock.now = self.clock.clocks[1 - index]
        self.clock.now.start()
        self._begun = time.perf_counter()


def measure(batch_size: int, blocks: int, steps: int) -> dict[str, Any]:
    """Ratio of the time with the clock to the time without, pair by pair."""
    overrides: Mapping[str, Any] = {
        "model.name": "lecture_net",
        "data.dataset": "overhead:noise",
        "model.channels_last": True,
        "train.precision": "fp32",
        # On a machine that does other things too, threads that wait for one another tell of those.
        "parallel.threads": 1,
        "train.ema": 0.99,
        "batch.global_size": batch_size,
        "optimizer.lr": 0.001,
        "schedule.name": "constant",
        "train.duration": f"{2 * (blocks + 1) * steps} steps",
        "evaluate.every": "off",
        "checkpoint.every": "off",
        "telemetry.log_every": f"{steps} steps",
    }
    clock = TakingTurns()
    turns = Turns(clock, steps)
    with tempfile.TemporaryDirectory() as scratch, patch.object(build, "build_step_clock", return_value=clock):
        recipe = Path(scratch) / "clock.yaml"
        recipe.write_text("task: image_classification\n")
        train_recipe(load_recipe(recipe, overrides), Options(run_dir=Path(scratch) / "run", display=turns))
    # The first block of either warms up.
    measured, unmeasured = (each[1:] for each in turns.seconds)
    ratios = [a / b for a, b in zip(measured, unmeasured, strict=False)]
    return {
        "batch_size": batch_size,
        "steps_per_block": steps,
        "ratio": spread(ratios),
        "measured_milliseconds_per_step": spread([1000 * each / steps for each in measured]),
        "unmeasured_milliseconds_per_step": spread([1000 * each / steps for each in unmeasured]),
    }


def cost_of_a_span() -> float:
    """Microseconds, the least of some rounds."""
    clock = HostStepClock()
    clock.start()
    costs = []
    for _ in range(50):
        started = time.perf_counter()
        for _ in range(1000):
            with clock.span("forward"):
                pass
        costs.append((time.perf_counter() - started) * 1e3)
    return min(costs)


def cost_of_a_step() -> float:
    """Microseconds for all that a step asks of the clock, the least of some rounds: what else a machine does adds."""
    clock = HostStepClock()
    clock.start()
    costs = []
    for _ in range(50):
        started = time.perf_counter()
        for _ in range(200):
            with clock.span("data_wait"), clock.span("h2d"):
                pass
            with clock.span("forward"):
                pass
            with clock.span("backward"):
                clock.switch("communication")
            for phase in ("optimizer", "ema"):
                with clock.span(phase):
                    pass
            clock.end_step(1)
        costs.append((time.perf_counter() - started) * 5e3)
    return min(costs)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the result files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, nargs="+", default=[64, 4])
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--dry-run", action="store_true", help="print, write no result files")
    options = parser.parse_args(arguments)
    span, step = cost_of_a_span(), cost_of_a_step()
    rows = [measure(size, options.blocks, options.steps) for size in options.batch_size]
    lines = [
        f"Batch {row['batch_size']}: {row['ratio']['median']:.4f} times the time per step without a clock (median of "
        f"{row['ratio']['runs']} pairs of blocks of {row['steps_per_block']} steps; {row['ratio']['minimum']:.3f} to "
        f"{row['ratio']['maximum']:.3f}; without {row['unmeasured_milliseconds_per_step']['median']:.2f} ms)."
        for row in rows
    ]
    lines.append(f"A span costs {span:.2f} µs, all that a step asks of the clock {step:.1f} µs.")
    print("\n".join(lines))
    if not options.dry_run:
        print(
            write_result(
                "step-clock", {"measurements": rows, "span_microseconds": span, "step_microseconds": step}, lines
            )
        )


if __name__ == "__main__":
    main()
