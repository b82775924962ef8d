"""Short runs of a recipe, in this process or in several, that can be observed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from paceline.errors import RecipeError, TrainingError
from paceline.parsing.units import Duration
from paceline.plan import Plan
from paceline.plan.batching import with_valid_ghost_size
from paceline.recipe.layers import format_override, set_keys
from paceline.recipe.load import load_recipe, to_tree, to_yaml
from paceline.recipe.running import Parallel, Profile
from paceline.recipe.schema import Recipe
from paceline.recipe.training import BatchSection
from paceline.tasks.task import build_task
from paceline.trainer.process_settings import restore_torch_settings
from paceline.trainer.subject import Options
from paceline.trainer.train import train_recipe
from paceline_advisor import frozen
from paceline_advisor.apply import QUIET, with_values
from paceline_advisor.launches import CommandProcess, OverdueError, said
from paceline_advisor.prove.recorder import CONFIG_VARIABLE, REFERENCE, ObservedRun, RecorderConfig, RecordingTask

# Keys of ``parallel`` that only determine how several devices divide the work.
_OF_OTHER_MACHINES = (
    "strategy",
    "shard_size",
    "shard_modules",
    "reshard_after_forward",
    "gather_dtype",
    "gradient_compression",
    "static_graph",
    "affinity",
)


def portable(recipe: Recipe) -> Recipe:
    """Return the recipe without settings that need another machine or number of processes.

    Its results, steps and rates are the same.
    """
    defaults = {f"parallel.{key}": getattr(Parallel(), key) for key in _OF_OTHER_MACHINES}
    neutral = {
        "model.compile": False,
        "data.sampling": "uniform",
        "train.precision": "fp32",
        "train.float32_matmul": "auto",
        "train.deterministic": False,
        "parallel.device": "cpu",
        "telemetry.profile": Profile(),
    }
    return with_values(recipe, neutral | defaults)


def without_unneeded(recipe: Recipe) -> Recipe:
    """Return the neutral recipe, without settings that a short run does not need, or that would look like errors."""
    unneeded: dict[str, Any] = {
        "model.pretrained": False,
        "model.initialize_from": None,
        "model.initialize_partly": False,
        "model.unfreeze": {},
        "model.freeze_after": {},
        # Adapters are added after the network was made deterministic, so their dropout would remain.
        "model.adapters.dropout": 0.0,
        "data.augment.repeats": 1,
        "batch.growth": {},
        "optimizer.clip_adaptive": None,
        "train.until": None,
        "train.nonfinite": "stop",
        "evaluate.patience": None,
    }
    return with_values(portable(recipe), unneeded)


def unproved_settings(recipe: Recipe) -> list[str]:
    """Return the recipe's non-default settings that a proof leaves out, as overrides."""
    proved, defaults = without_unneeded(recipe), Recipe()
    return [
        format_override(recipe, key)
        for key in set_keys(to_tree(recipe))
        if key != "parallel.device"
        and format_override(recipe, key) not in (format_override(proved, key), format_override(defaults, key))
    ]


def unused(plans: Iterable[Plan]) -> dict[str, str]:
    """Return the keys that none of a recipe's neutral plans uses, with the reason, except those left out anyway."""
    first, *others = plans
    skipped = ("telemetry.profile.", *(f"parallel.{key}" for key in _OF_OTHER_MACHINES))
    return {
        key: why
        for key, why in first.unused.items()
        if not key.startswith(skipped) and all(key in other.unused for other in others)
    }


_LIMIT_SECONDS = 900.0
_EPOCHS = 2
_FULL_STEPS = 2
STEPS_PER_EPOCH = _FULL_STEPS + 1
"""Steps of an epoch of a short run."""
STEPS = _EPOCHS * STEPS_PER_EPOCH
"""Steps of a short run."""
TAIL_STEP = _FULL_STEPS
"""The first step, from 0, that uses the rest of an epoch."""
FULL_STEPS = (0, STEPS_PER_EPOCH)
"""The inspected steps with a full batch: the first, and the one after the first evaluation."""
_HELD_OUT = 37
_MICRO_BATCHES = (4, 3, 2, 1)
# Factor on the recipe's rate if BatchNorm is frozen: a network without norms cannot take steps of that size.
_TINY_RATE = 1e-3


@frozen
class Sizes:
    """Sizes of the short runs.

    An epoch has two complete steps and a tail whose micro-batches differ in size.

    Attributes:
        processes: Processes of the distributed run.
        micro_batches: Micro-batches of a step, over all processes.
        micro_batch: Samples of a micro-batch.
        samples: Training samples.
        evaluation_samples: Held-out samples; 0 if nothing is evaluated.
        evaluation_batch: Samples of an evaluation batch; the last one has fewer, if possible.
    """

    processes: int
    micro_batches: int
    micro_batch: int
    samples: int
    evaluation_samples: int
    evaluation_batch: int

    @classmethod
    def of(cls, samples: int, held_out: int, processes: int, *, all_held_out: bool = False) -> Sizes:
        """Return the sizes for a number of samples.

        Args:
            samples: Available training samples.
            held_out: Available held-out samples.
            processes: Processes of the distributed run.
            all_held_out: Whether to score all of them.

        Raises:
            RecipeError: If there are too few.
        """
        parts = 2 * processes if processes > 1 else 4
        for size in _MICRO_BATCHES:
            # At least two samples if possible, as BatchNorm may need them.
            tail = parts * min(2, size - 1) + 1 if size > 1 else parts - 1
            needed = _FULL_STEPS * parts * size + tail
            if needed <= samples:
                evaluated = held_out if all_held_out else min(held_out, _HELD_OUT * max(1, processes // 2))
                # Choose a batch that leaves a smaller last one, and unequal numbers per process, if possible.
                batches = list(range(max(2, min(8, evaluated // (2 * processes))), 1, -1))
                ragged = [each for each in batches if evaluated % each]
                unequal = [each for each in ragged if processes == 1 or -(-evaluated // each) % processes]
                return cls(
                    processes=processes,
                    micro_batches=parts,
                    micro_batch=size,
                    samples=needed,
                    evaluation_samples=evaluated,
                    evaluation_batch=[*unequal, *ragged, *batches][0],
                )
        raise RecipeError(
            f"there are {samples} training samples, but {parts} micro-batches a step need at least {needed} of them; "
            "give more data, or fewer --processes."
        )

    @property
    def global_batch(self) -> int:
        """Samples of a full step."""
        return self.micro_batches * self.micro_batch

    @property
    def tail(self) -> int:
        """Samples of an epoch's last step."""
        return self.samples - _FULL_STEPS * self.global_batch


def shortened(
    recipe: Recipe, sizes: Sizes, *, micro_batch: int, exact: bool = False, tiny_rate: bool = False
) -> Recipe:
    """Return the recipe for a short run on the CPU.

    Its batch is smaller, and there is no warm-up. Therefore the learning rate is reduced in proportion to the batch,
    unless the recipe has a scaling rule, which reduces it already.

    Args:
        recipe: The user's recipe.
        sizes: Sizes of the run.
        micro_batch: Samples of a micro-batch.
        exact: Whether the result must be bit-identical for any number of processes.
        tiny_rate: Whether to reduce the learning rate to a thousandth.
    """
    rate = recipe.optimizer.lr * (_TINY_RATE if tiny_rate else 1.0)
    if recipe.optimizer.lr_scaling == "none":
        rate *= min(1.0, sizes.global_batch / recipe.batch.global_size)
    base = without_unneeded(recipe)
    short = {
        **QUIET,
        "model": with_valid_ghost_size(base.model, micro_batch),
        "data.workers": 0 if recipe.data.backend in ("auto", "pytorch") else "auto",
        "batch": BatchSection(global_size=sizes.global_batch, micro_size=micro_batch),
        "optimizer.lr": rate,
        "train.duration": Duration(_EPOCHS, "epochs"),
        "evaluate.every": Duration(1, "epochs") if sizes.evaluation_samples else None,
        "evaluate.batch_size": sizes.evaluation_batch,
        "evaluate.keep_examples": 0,  # data kept for inspection is not part of the proof
        "parallel.exact": exact,
        "parallel.logical_ranks": "auto",
        # A separate check finds and names parameters without a gradient.
        "parallel.unused_parameters": "refuse" if exact else "allow",
    }
    return with_values(base, short)


@frozen
class Runner:
    """Runs one recipe in several ways.

    Attributes:
        recipe: The user's recipe.
        sizes: Sizes of the runs.
        scratch: Folder for all files.
        double: Whether the network computes in float64.
    """

    recipe: Recipe
    sizes: Sizes
    scratch: Path
    double: bool

    def config(self, name: str) -> RecorderConfig:
        """Return the settings of a run's recorder; creates its folder."""
        folder = self.scratch / name
        folder.mkdir()
        return RecorderConfig(
            task=self.recipe.task,
            folder=str(folder),
            samples=self.sizes.samples,
            evaluation_samples=self.sizes.evaluation_samples,
            kept_steps=(*FULL_STEPS, TAIL_STEP),
            double=self.double,
        )

    def here(self, name: str, *, micro_batch: int, alter: Callable[[nn.Module], None] | None = None) -> ObservedRun:
        """Run in this process.

        Args:
            name: Name of the run.
            micro_batch: Samples of a micro-batch.
            alter: May change the network before it is used; the learning rate is then reduced to a thousandth.

        Raises:
            PacelineError: If the recipe cannot be run at all.
            KeyboardInterrupt: If the run received a stop signal.
        """
        config = self.config(name)
        recipe = shortened(self.recipe, self.sizes, micro_batch=micro_batch, tiny_rate=alter is not None)
        recorders: list[RecordingTask] = []

        def make(asked: Recipe) -> RecordingTask:
            recorders.append(RecordingTask(build_task(asked), config, alter))
            return recorders[-1]

        trouble, path = "", self._write(config, recipe)
        try:
            with restore_torch_settings():
                result = train_recipe(load_recipe(path), Options(run_dir=path.parent / "run", task=make))
            if result.status == "stopped":
                raise KeyboardInterrupt  # the run handled the signal, which was meant for the whole proof
        except TrainingError as error:
            trouble = str(error)
        except Exception as error:
            if not recorders or not recorders[-1].notes.steps:
                raise
            trouble = f"{type(error).__name__}: {error}"
        folder = path.parent
        return ObservedRun(name=name, recipe=recipe, folder=folder, trouble=trouble, batches=recorders[-1].batches)

    def in_processes(self, name: str) -> ObservedRun:
        """Run as a command in several processes, each with its share of the micro-batches."""
        config = self.config(name)
        exact = self.recipe.parallel.exact
        recipe = shortened(self.recipe, self.sizes, micro_batch=self.sizes.micro_batch, exact=exact)
        path, processes = self._write(config, recipe), self.sizes.processes
        arguments = ["train", str(path), f"task={REFERENCE}", "--run-dir", str(path.parent / "run")]
        arguments += ["--processes", str(processes)]
        variables = {CONFIG_VARIABLE: json.dumps(asdict(config))}
        trouble = ""
        with CommandProcess(
            arguments, path.parent / "launch", limit_seconds=_LIMIT_SECONDS, variables=variables
        ) as launch:
            try:
                code = launch.wait()
                trouble = f"exit code {code}: {said(launch)}" if code else ""
            except OverdueError as error:
                trouble = str(error)
        return ObservedRun(name=name, recipe=recipe, folder=path.parent, processes=processes, trouble=trouble)

    def _write(self, config: RecorderConfig, recipe: Recipe) -> Path:
        path = Path(config.folder) / "short.yaml"
        path.write_text(to_yaml(recipe.without_mirror()), encoding="utf-8")
        return path
