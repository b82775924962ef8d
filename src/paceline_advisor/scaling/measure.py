"""How long does a step really take here: on one device with the share it would have, and on all of them?"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from paceline.errors import TrainingError
from paceline.metrics.intervals import Interval, mean_interval
from paceline.recipe.batching import with_fitting_ghosts
from paceline.recipe.running import Parallel
from paceline.recipe.schema import Recipe
from paceline.recipe.training import Batch
from paceline_advisor.bench.interleaved import Measured, Variant, run_bursts
from paceline_advisor.formulas.parallel_step import SPREAD, OneDevice
from paceline_advisor.scaling.shares import Share

_BLOCK_SECONDS = 1.5
# Beyond this a step is called no steadier than it is: a few rounds say little of a spread.
_LEAST_DOUBT = 0.01


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """What runs took that took turns.

    Attributes:
        alone: One device's step with the share it has among so many, by their number.
        together: Samples per second of so many, by their number.
    """

    alone: Mapping[int, OneDevice]
    together: Mapping[int, Interval]


@dataclass(frozen=True, kw_only=True)
class Trials:
    """What is to be measured.

    Attributes:
        recipe: What is trained.
        alone: Shares to measure on one device.
        together: Shares to measure on as many devices as they are for.
        threads: Of each process, by the number of processes; empty where processes do not compute on cores.
        rounds: Turns of each.
    """

    recipe: Recipe
    alone: Mapping[int, Share]
    together: Mapping[int, Share]
    threads: Mapping[int, int]
    rounds: int


def measure(trials: Trials, say: Callable[[str], None]) -> Measurements:
    """Run them in turns.

    Raises:
        TrainingError: If one of them failed.
    """
    names = {size: f"1 process as one of {size}" for size in trials.alone if size > 1} | {1: "1 process"}
    variants = {names[size]: _variant(trials, share, 1) for size, share in trials.alone.items()}
    several = {size: share for size, share in trials.together.items() if size > 1}
    variants |= {f"{size} processes": _variant(trials, share, size) for size, share in several.items()}
    found = run_bursts(variants, rounds=trials.rounds, block_seconds=_BLOCK_SECONDS, say=say)
    for name, each in found.items():
        if not each.rounds:
            raise TrainingError(f"{name} could not be measured: {each.trouble or 'no round was finished'}")
    alone = {size: _one_device(found[names[size]], share) for size, share in trials.alone.items()}
    # One process is what the prediction begins with: it is no test of it.
    together = {size: _rate(found[f"{size} processes"]) for size in several}
    return Measurements(alone=alone, together=together)


def _variant(trials: Trials, share: Share, processes: int) -> Variant:
    recipe = trials.recipe
    own = share.micro_batch * share.passes
    parallel = recipe.parallel if processes > 1 else _for_one(recipe.parallel)
    if share.devices in trials.threads:
        parallel = replace(parallel, threads=trials.threads[share.devices])
    batch = Batch(global_size=own * processes, micro_size=share.micro_batch)
    model = with_fitting_ghosts(recipe.model, share.micro_batch)
    return Variant(recipe=replace(recipe, model=model, batch=batch, parallel=parallel), processes=processes)


def _for_one(parallel: Parallel) -> Parallel:
    return replace(parallel, strategy="auto", logical_ranks="auto", gradient_compression="none")


def _one_device(measured: Measured, share: Share) -> OneDevice:
    seconds = measured.step_seconds
    middle = statistics.median(seconds)
    spread = statistics.stdev(seconds) / middle if len(seconds) > 2 else SPREAD
    doubt = max(_LEAST_DOUBT, spread / len(seconds) ** 0.5)
    # Means over a block vary less than steps do, and the machine's drift is in them: neither is a step's own spread.
    return OneDevice(seconds=middle / share.passes, samples=share.micro_batch, doubt=doubt, spread=SPREAD)


def _rate(measured: Measured) -> Interval:
    return mean_interval(measured.samples_per_second)
