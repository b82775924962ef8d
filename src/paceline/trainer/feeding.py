"""Measure which number of loader processes feeds a model best, on the run's own files before a long run begins.

A separate process measures, since loader processes must be forked before a process has threads and a GPU: ``python -m
paceline.trainer.feeding RECIPE MOST PARENT`` trains on real batches with one number of loader processes after another,
discards the weights, and prints the result. The result is cached where the plan finds it
(``data/image/feed_rates.py``).
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from paceline.data.batch import Batch
from paceline.data.image.feed_rates import FeedRates, needs_measuring, remember
from paceline.data.pipeline import Pipeline, Placement
from paceline.errors import PacelineError, TrainingError
from paceline.host.machine import available_cores
from paceline.host.processes import LOADER_GRACE_SECONDS, ProcessGroup, without_rank_variables
from paceline.host.world import World
from paceline.models.precision import Precision, set_float32_matmul
from paceline.plan import Plan
from paceline.recipe.load import load_recipe, stored_recipe, to_tree, to_yaml
from paceline.recipe.schema import Recipe
from paceline.tasks.facts import geometry_of
from paceline.tasks.task import Task
from paceline.trainer.network import build_network
from paceline.trainer.subject import Subject

# With fewer images, the run ends before the measurement has paid for itself.
_MIN_SAMPLES = 200_000
# Do not measure if it would take longer: the model is then slow, and the remaining cores can feed it.
_MAX_MEASURED_SECONDS = 45.0
_TIMEOUT_SECONDS = 120.0
_POLL_SECONDS = 0.2
_BURST_SECONDS = 1.5
_MIN_BATCHES = 3
_ROUNDS = 2
_MAX_WORKERS = 16  # the largest number that is ever chosen without measuring


def measure_feeding(subject: Subject) -> None:
    """Measure once which number of loader processes is best, if the recipe does not set it and the run is long.

    Errors are cached for a while, and the number then follows from the number of cores. It also does when several
    processes train, because they would have to agree.

    Args:
        subject: The run, up to its task. A requested stop ends the measurement early.
    """
    recipe, world, say = subject.recipe, subject.world, subject.display.message
    if recipe.data.workers != "auto" or world.world_size > 1:
        return
    plan = Subject.open(recipe, world, "plan", task=subject.task).plan
    is_long = plan.end * plan.global_batch_size >= _MIN_SAMPLES
    if plan.data.get("backend") != "pytorch" or not is_long or not needs_measuring(recipe):
        return
    say("measuring how many loader processes feed this model best: once, at most two minutes …")
    try:
        feeding, reason = _measure_in_process(recipe, plan, lambda: subject.stop.requested)
    except (OSError, ValueError, LookupError) as error:  # a full disk, or a custom network that prints
        feeding, reason = None, str(error)
    if subject.stop.requested:
        return
    remember(recipe, feeding, reason=reason)
    if feeding is None:
        say(f"not measured ({reason}): data.workers follows the number of cores")


def _measure_in_process(recipe: Recipe, plan: Plan, stopped: Callable[[], bool]) -> tuple[FeedRates | None, str]:
    """Return what the measuring process printed, or why it printed nothing."""
    environment = {
        name: value
        for name, value in without_rank_variables(os.environ).items()
        if not name.startswith(("SLURM_", "TORCHELASTIC_", "PACELINE_"))
    }
    environment["OMP_NUM_THREADS"] = str(plan.threads_per_process)
    # A single process with one rank's share of the work.
    overrides = {
        "model.pretrained": False,
        "model.initialize_from": None,
        "model.compile": False,
        "batch.micro_size": plan.micro_batch_size,
        "train.precision": "bf16" if plan.precision == "fp8" else plan.precision,
        "parallel": None,
        "parallel.device": plan.device,
        "parallel.threads": plan.threads_per_process,
    }
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_text(to_yaml(stored_recipe(to_tree(recipe), "", overrides)), encoding="utf-8")
        arguments = [str(path), str(min(available_cores(), _MAX_WORKERS)), str(os.getpid())]
        out, errors = Path(folder) / "out", Path(folder) / "errors"
        with ProcessGroup(grace_seconds=LOADER_GRACE_SECONDS) as group:
            child = group.start(
                [sys.executable, "-P", "-m", "paceline.trainer.feeding", *arguments],
                env=environment,
                stdout=out,
                stderr=errors,
            )
            if group.wait(_TIMEOUT_SECONDS, cancelled=stopped).reason:
                return None, "it was stopped"
        if child.code != 0:
            return None, child.exit_message
        output = out.read_text()
    result = json.loads(output.splitlines()[-1])
    return FeedRates({int(workers): rate for workers, rate in result["rates"].items()}, result["alone"]), ""


class _Trainer:
    """Runs forward and backward passes on the batches of a pipeline; the weights do not change."""

    def __init__(self, recipe: Recipe, task: Task, plan: Plan, placement: Placement) -> None:
        self._task, self._device = task, placement.device
        self._precision = Precision(plan.precision, placement.device, recipe.train.grad_scaler)
        self._network: nn.Module = build_network(recipe, task, placement)[0]
        task.prepare_training(placement)

    def rate(self, batches: Iterator[Batch], skipped: int) -> float:
        """Return images per second, after a few batches that were read ahead."""
        for _ in range(skipped):
            self._pass(next(batches))
        self._synchronize()
        start, images, count = time.perf_counter(), 0, 0
        while count < _MIN_BATCHES or time.perf_counter() - start < _BURST_SECONDS:
            images += self._pass(next(batches))
            count += 1
        self._synchronize()
        return images / (time.perf_counter() - start)

    def check_time(self, batch: Batch, passes: int) -> None:
        """Abandon a measurement that would take too long, judged by one timed pass after an untimed one."""
        for _ in range(2):
            start = time.perf_counter()
            self._pass(batch)
            self._synchronize()
            seconds = time.perf_counter() - start
        if seconds * passes > _MAX_MEASURED_SECONDS:
            raise TrainingError(f"a batch takes {seconds:.1f} s, too long to try several numbers")

    def _pass(self, batch: Batch) -> int:
        with self._precision.keeping_casts():
            loss = self._task.loss(self._precision.applied_to(self._network), batch)
        self._precision.backward(loss)
        self._network.zero_grad(set_to_none=True)
        return len(batch.ids)

    def _synchronize(self) -> None:
        if self._device.type != "cpu":
            torch.get_device_module(self._device).synchronize()


def _exit_with_parent(parent: int) -> None:
    """End when the waiting run ends, even if it is killed; loader processes then leave by themselves."""
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    os._exit(1)


def measure(recipe: Recipe, limit: int, parent: int) -> FeedRates:
    """Train on real batches with one number of loader processes after another, up to one per core.

    Args:
        recipe: The recipe to train.
        limit: The largest number.
        parent: Id of the process that waits for this one; this process ends when it does.
    """
    # Double the number each time; with few cores, try every number.
    numbers = sorted({0, limit, *(limit - 1,) * (limit <= 4), *(2**power for power in range(limit.bit_length() - 1))})
    by_workers = {count: replace(recipe, data=replace(recipe.data, workers=count)) for count in numbers}
    subjects = {count: Subject.open(each, World(), "plan") for count, each in by_workers.items()}
    first = subjects[numbers[0]]
    plan, placement = first.plan, Placement(device=first.device, channels_last=first.plan.channels_last)
    with contextlib.ExitStack() as stack:
        pipelines: dict[int, Pipeline] = {}
        for count, subject in subjects.items():
            pipelines[count] = stack.enter_context(contextlib.closing(subject.task.open_pipeline(placement)))
            # Fork all of them before starting any thread: a later fork would inherit its locks.
            pipelines[count].start(training=True, evaluation=False)
        threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()
        torch.set_num_threads(plan.threads_per_process)
        set_float32_matmul(plan.float32_matmul)
        trainer = _Trainer(recipe, first.task, plan, placement)
        geometry = geometry_of(recipe, plan, first.task)
        steps = plan.total_steps
        streams = {count: each.train_batches(geometry, 0, steps, World()) for count, each in pipelines.items()}
        # Exclude batches that loader processes hold ready, and the first pass at a size.
        skipped = {count: count * recipe.data.prefetch + 1 for count in numbers}
        batch = next(streams[0])
        trainer.check_time(batch, _ROUNDS * sum(each + _MIN_BATCHES for each in skipped.values()))
        rates = dict.fromkeys(numbers, 0.0)
        for _ in range(_ROUNDS):
            for count, stream in streams.items():
                # Take the faster round: other load on the machine only slows it down.
                rates[count] = max(rates[count], trainer.rate(stream, skipped=skipped[count]))
        alone = max(trainer.rate(iter(lambda: batch, None), skipped=1) for _ in range(_ROUNDS))
    return FeedRates(rates, alone)


if __name__ == "__main__":
    try:
        measured = measure(load_recipe(sys.argv[1]).recipe, int(sys.argv[2]), int(sys.argv[3]))
    except PacelineError as error:
        sys.exit(str(error))
    sys.stdout.write(json.dumps({"rates": measured.rates, "alone": measured.alone}))
