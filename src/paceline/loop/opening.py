"""Open what a program gives to :class:`paceline.Loop`: its data, a plan, its processes and the run directory."""

from __future__ import annotations

import atexit
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, SupportsFloat

import torch
from torch.utils.data import DataLoader

from paceline.data.batch import Nested
from paceline.data.loaders.pytorch import LoaderBackend
from paceline.data.objects.keyed import KeyedReader
from paceline.data.objects.purity import read_again
from paceline.data.objects.samples import Collate, Samples, take_apart
from paceline.data.order import StepGeometry
from paceline.data.shard_order import describe_shards
from paceline.distributed.collectives import leave
from paceline.distributed.device import check_communication, choose_device, describe_machine
from paceline.distributed.environment import LaunchEnvironment, read_launch
from paceline.errors import LoopError, RecipeError, RunDirectoryError, did_you_mean
from paceline.host.world import World
from paceline.parsing.arguments import shown
from paceline.plan import DataFacts, Plan, make
from paceline.recipe.load import OWN_LOOP, LoadedRecipe, load_recipe
from paceline.records.reader import read_plan_to_resume, read_recipe
from paceline.reports.html.page import report_at_the_end
from paceline.telemetry.display import Display, choose_display
from paceline.telemetry.trackers import check_trackers
from paceline.trainer.programs import recorded_program, requested_replay
from paceline.trainer.run_dir_checks import has_trained
from paceline.trainer.subject import Options, Subject

_SETTINGS = (
    *("checkpoint.keep", "checkpoint.mtbf", "checkpoint.mirror", "checkpoint.mirror_patience"),
    *("checkpoint.mirror_wait", "parallel.backend", "parallel.timeout"),
    *("telemetry.log_every", "telemetry.trackers", "telemetry.report"),
)
# Others are opened again when they are evaluated.
_MOST_HELD_OUT = 8
# Recipe keys that are arguments here.
_ARGUMENTS = {
    "data.workers": "workers",
    "checkpoint.every": "checkpoint_every",
    "parallel.device": "device",
    "train.duration": "epochs",
}


@contextmanager
def _naming_arguments() -> Iterator[None]:
    """Name arguments in an error, instead of recipe keys."""
    try:
        yield
    except RecipeError as error:
        key = str(error.key)
        name = _ARGUMENTS.get(key, key)
        message = str(error).removeprefix("the defaults: ").replace(key, name, 1)
        raise LoopError(message, key=name, value=error.value, rule=error.rule) from None


@dataclass(frozen=True, kw_only=True)
class Given:
    """The arguments of :class:`paceline.Loop`."""

    run_dir: Path
    data: Any
    batch_size: int
    epochs: float
    seed: int
    workers: int
    collate: Collate | None
    checkpoint_every: str
    device: str
    overrides: Mapping[str, Any]

    @cached_property
    def replay(self) -> tuple[Path, dict[str, Any]] | None:
        """The directory and the settings of a study that computes the run again."""
        return requested_replay(self.run_dir)

    def _check(self) -> None:
        given: Any = self  # whatever their types should be
        is_number = isinstance(given.epochs, SupportsFloat) and not isinstance(given.epochs, bool)
        if not is_number or not 0 < float(given.epochs) < math.inf:
            message = f"epochs is {shown(given.epochs)}; give a number above 0."
            raise LoopError(message, key="epochs", value=given.epochs)
        if given.collate is not None and not callable(given.collate):
            message = f"collate is {shown(given.collate)}; give a function from a list of samples to a batch."
            raise LoopError(message, key="collate", value=given.collate)
        if not isinstance(given.overrides, Mapping):
            message = f"overrides is {shown(given.overrides)}; give a dict of recipe keys and values."
            raise LoopError(message, key="overrides", value=given.overrides)
        for key, value in given.overrides.items():
            if key not in _SETTINGS:
                raise LoopError(
                    f"overrides: found {key}, which is unknown or which your own loop decides; known are "
                    f"{', '.join(_SETTINGS)}.{did_you_mean(str(key), _SETTINGS, count=1)}",
                    key=str(key),
                    value=value,
                )

    def recipe(self) -> LoadedRecipe:
        """Return them as a recipe.

        Raises:
            LoopError: For a value that cannot be used, or a setting that a program's own loop decides.
        """
        self._check()
        keys = {
            "task": OWN_LOOP,
            "seed": self.seed,
            "batch.global_size": self.batch_size,
            "train.duration": f"{float(self.epochs)} epochs",
            "data.workers": self.workers,
            "checkpoint.every": str(self.checkpoint_every),
            "parallel.device": str(self.device),
        }
        with _naming_arguments():
            loaded = load_recipe(None, {**keys, **self.overrides, **(self.replay or (0, {}))[1]})
        origins = {key: origin for key, origin in loaded.origins.items() if key in self.overrides}
        return replace(loaded, name=self.run_dir.name, origins=origins)


class SampleStream:
    """Samples of the program, as batches of its ``collate`` on the loop's device.

    Args:
        samples: The samples.
        seed: The loop's seed.
        training: Whether they are trained on.
        workers: Loader processes.
        device: Where the program computes.
    """

    def __init__(self, samples: Samples, *, seed: int, training: bool, workers: int, device: torch.device) -> None:
        self.samples = samples
        make_reader = partial(self._reader, samples, seed, training)
        # Forked before the process has threads that hold locks.
        pins = device.type == "cuda"
        self.backend = LoaderBackend(samples, make_reader, workers=workers, pin_memory=pins)
        self.reader = make_reader(None)

    @staticmethod
    def _reader(samples: Samples, seed: int, training: bool, note: Any) -> KeyedReader:
        # After its samples are read, a training step seeds the generators itself. An evaluation must restore them: its
        # step continues with them.
        return KeyedReader(samples, seed=seed, training=training, divide=_whole, note=note, restores=not training)


def _whole(batch: Any) -> tuple[Nested, Nested]:
    return batch, None


class LoopSubject(Subject):
    """The run of a program's own loop, with its directory and processes.

    Attributes:
        given: The program's arguments.
        source: The samples to train on.
        impurity: Why reading a sample again gives another one, as a sentence; empty on other ranks than the first.
    """

    def __init__(self, given: Given) -> None:
        launch, self.given, self.loaded = read_launch(os.environ), given, given.recipe()
        super().__init__(self.loaded.recipe, launch.world)
        with ExitStack() as undo:
            undo.push(self)
            self._open(launch)
            undo.pop_all()

    def _open(self, launch: LaunchEnvironment) -> None:
        given = self.given
        samples = take_apart(given.data, "dataset", given.collate)
        self._check_sizes(samples)
        self.display = choose_display(sys.stderr, live=False) if self.world.is_first else Display()
        run_dir = given.replay[0] if given.replay else given.run_dir
        self.options = Options(run_dir=run_dir, display=self.display, report=report_at_the_end)
        self.resumes, self.impurity = False, ""
        self.device = choose_device(self.recipe.parallel.device, self.world)
        check_communication(self.recipe.parallel.backend, self.device)
        check_trackers(self.recipe.telemetry.trackers, are_asked_for="telemetry.trackers" in self.loaded.origins)
        self.workers = given.workers or samples.workers or 0
        self.plan = self._planned(samples)
        self.geometry = StepGeometry(
            seed=self.recipe.seed,
            samples=len(samples),
            global_batch_size=given.batch_size,
            logical_ranks=self.world.world_size,
            shards=samples.shards,
        )
        self._held_out: dict[str, tuple[Any, SampleStream]] = {}
        self.source = self.open_source(samples, training=True)
        self.callback(self._close_sources)
        with recorded_program(launch):
            self._join(launch)

    def open_source(self, samples: Samples, *, training: bool) -> SampleStream:
        """Start reading samples."""
        seed, workers = self.recipe.seed, self.workers
        return SampleStream(samples, seed=seed, training=training, workers=workers, device=self.device)

    def open_held_out(self, held_out: Any, name: str) -> SampleStream:
        """Return the samples of an evaluation; closes those that it had before, if no other evaluation has them."""
        known = next((each for each in self._held_out.values() if each[0] is held_out), None)
        if known is None:
            collate = None if isinstance(held_out, DataLoader) else self.given.collate
            samples = take_apart(held_out, "held_out", collate)
            known = held_out, self.open_source(samples, training=False)
        unused = [self._held_out.pop(name, known)]
        self._held_out[name] = known
        if len(self._held_out) > _MOST_HELD_OUT:  # a name for each evaluation
            unused.append(self._held_out.pop(next(iter(self._held_out))))
        for before in unused:
            if all(each is not before for each in self._held_out.values()):
                before[1].backend.close()
        return known[1]

    def _close_sources(self) -> None:
        for source in (self.source, *(each for _, each in self._held_out.values())):
            source.backend.close()

    def _check_sizes(self, samples: Samples) -> None:
        size, count, ranks = self.given.batch_size, len(samples), self.world.world_size
        if size > count:
            raise LoopError(
                f"batch_size={size} is above the {count} samples of the data set; give at most {count}.",
                key="batch_size",
                value=size,
            )
        last = count % size or size
        if last < ranks:
            raise LoopError(
                f"batch_size={size} leaves {last} of {count} samples to an epoch's last step, and {ranks} ranks need "
                "one each; give another batch_size.",
                key="batch_size",
                value=size,
            )

    def _planned(self, samples: Samples) -> Plan:
        size, ranks = self.given.batch_size, self.world.world_size
        facts = {"task": OWN_LOOP, "samples": type(self.given.data).__name__, "workers": self.workers}
        if samples.shards is not None:
            facts["shards"] = samples.shards.facts
        with _naming_arguments():
            plan = make(
                self.recipe,
                world=World(),  # the ranks' shares of a step need not be equal
                data=DataFacts(train_samples=len(samples), evaluation_samples=0, description=facts),
                machine=describe_machine(self.device, processes=self.world.local_world_size),
            )
        return replace(
            plan,
            world_size=ranks,
            local_world_size=self.world.local_world_size,
            strategy="ddp" if ranks > 1 else "single",
            logical_ranks=ranks,
            micro_batch_size=-(-size // ranks),
            threads_per_process=torch.get_num_threads(),
            precision="own",
            reasons={},
            unused={},
        )

    def _check_agreement(self) -> None:
        super()._check_agreement()
        self.plan = self.collectives.on_rank_zero(self._compared)

    def _compared(self) -> Plan:
        """On the first rank: compare with the run in the directory; returns the plan with digests of some samples."""
        reading = read_again(self.source.reader)
        self.impurity = reading.difference or (reading.shared if self.workers else "")
        contents = dict(reading.contents) or ({"all": reading.digest} if reading.digest else {})
        if has_trained(self.directory):
            self._check_same_call(contents)
        return replace(self.plan, data={**self.plan.data, "contents": contents})

    def _check_same_call(self, contents: Mapping[str, str]) -> None:
        where, stored = f"'{self.directory.root}'", read_recipe(self.directory)
        if stored.get("task") != OWN_LOOP:
            raise RunDirectoryError(
                f"{where} holds a run of `paceline train` (task={stored.get('task')}), not of paceline.Loop; choose "
                "another run directory."
            )
        plan = read_plan_to_resume(self.directory)
        for name, before, now in (
            ("seed", stored.get("seed"), self.recipe.seed),
            ("batch_size", plan["global_batch_size"], self.plan.global_batch_size),
            ("a data set of length", plan["train_samples"], self.plan.train_samples),
            ("shards", *(describe_shards(each.get("shards")) for each in (plan["data"], self.plan.data))),
        ):
            if before != now:
                raise RunDirectoryError(
                    f"the run in {where} has {name.removeprefix('a ')} {before}, and here it is {now}; give the same, "
                    "or choose another run directory.",
                    key=name,
                    value=now,
                )
        before = plan["data"].get("contents", {})
        if any(contents.get(each, digest) != digest for each, digest in before.items()):
            raise RunDirectoryError(
                f"the run in {where} started with another data set: some of its samples were not the same; give that "
                "data set, or choose another run directory."
            )

    def _leave(self) -> None:
        # The program may still use its replicas when the loop has ended.
        atexit.register(leave)
