"""Short runs of a recipe, in this process or in several, that can be watched."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from torch import nn

from paceline.errors import RecipeError, TrainingError
from paceline.plan import Plan
from paceline.plan.batching import with_fitting_ghosts
from paceline.recipe.layers import set_keys, spelled
from paceline.recipe.load import load_recipe, to_tree, to_yaml
from paceline.recipe.running import Checkpoint, Parallel, Profile, Telemetry
from paceline.recipe.schedule import Schedule
from paceline.recipe.schema import Recipe
from paceline.recipe.training import Batch
from paceline.tasks.task import build_task
from paceline.trainer.preparation import without_mirror
from paceline.trainer.process_settings import restore_torch_settings
from paceline.trainer.train import Options, train_recipe
from paceline.units import Duration
from paceline_advisor.launches import Launch, OverdueError, said
from paceline_advisor.prove.notes import ORDERS_VARIABLE, Observed, Orders
from paceline_advisor.prove.witness import REFERENCE, Witness

# What only says how the arithmetic is shared out, on machines that need not be this one.
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


def neutral(recipe: Recipe) -> Recipe:
    """The recipe without what another machine than this, or another number of processes, may be needed for.

    What it comes to, its steps and rates, is the same.
    """
    here = {key: getattr(Parallel(), key) for key in _OF_OTHER_MACHINES}
    return replace(
        recipe,
        model=replace(recipe.model, compile=False),
        data=replace(recipe.data, sampling="uniform"),
        train=replace(recipe.train, precision="fp32", float32_matmul="auto", deterministic=False),
        parallel=replace(recipe.parallel, device="cpu", **here),
        telemetry=replace(recipe.telemetry, profile=Profile()),
    )


def bare(recipe: Recipe) -> Recipe:
    """The same, also without what a short run has no use for, or cannot be told from a mistake in it."""
    found = neutral(recipe)
    # Dropout of the adapters' own: they come after the network was put to rest.
    adapters = replace(found.model.adapters, dropout=0.0)
    return replace(
        found,
        model=replace(
            found.model,
            pretrained=False,
            initialize_from=None,
            initialize_partly=False,
            unfreeze={},
            freeze_after={},
            adapters=adapters,
        ),
        data=replace(found.data, augment=replace(found.data.augment, repeats=1)),
        batch=replace(found.batch, growth={}),
        optimizer=replace(found.optimizer, clip_adaptive=None),
        train=replace(found.train, until=None, nonfinite="stop"),
        evaluate=replace(found.evaluate, patience=None),
    )


def set_aside(recipe: Recipe) -> list[str]:
    """What a recipe asks for, beyond the defaults, that a proof does without, as overrides say it."""
    left, usual = bare(recipe), Recipe()
    return [
        spelled(recipe, key)
        for key in set_keys(to_tree(recipe))
        if key != "parallel.device" and spelled(recipe, key) not in (spelled(left, key), spelled(usual, key))
    ]


def unused(plans: Iterable[Plan]) -> dict[str, str]:
    """The keys that none of a recipe's neutral plans uses, with the reason: but for those that are set aside anyway."""
    first, *others = plans
    aside = ("telemetry.profile.", *(f"parallel.{key}" for key in _OF_OTHER_MACHINES))
    return {
        key: why
        for key, why in first.unused.items()
        if not key.startswith(aside) and all(key in other.unused for other in others)
    }


_LIMIT_SECONDS = 900.0
_EPOCHS = 2
_FULL_STEPS = 2
_HELD_OUT = 37
_MICRO_BATCHES = (4, 3, 2, 1)
# Of the recipe's rate, where BatchNorm is frozen: a network without norms cannot take steps of that size.
_CAREFUL = 1e-3


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much of everything the short runs have.

    An epoch is two whole steps and a tail whose micro-batches are of unequal size.

    Attributes:
        processes: Of the run in several.
        micro_batches: In a step, over all processes.
        micro_batch: Samples in one.
        samples: Training samples.
        evaluation_samples: Held-out samples; 0 if nothing is evaluated.
        evaluation_batch: Samples of a batch that is scored; the last one has fewer.
    """

    processes: int
    micro_batches: int
    micro_batch: int
    samples: int
    evaluation_samples: int
    evaluation_batch: int

    @classmethod
    def of(cls, samples: int, held_out: int, processes: int, *, all_held_out: bool = False) -> Sizes:
        """The sizes that so many samples allow.

        Args:
            samples: Training samples there are.
            held_out: Held-out samples there are.
            processes: Of the run in several.
            all_held_out: Whether all of them are to be scored.

        Raises:
            RecipeError: If there are too few.
        """
        parts = 2 * processes if processes > 1 else 4
        for size in _MICRO_BATCHES:
            # Of two samples and more where that can be, as BatchNorm may need.
            tail = parts * min(2, size - 1) + 1 if size > 1 else parts - 1
            used = _FULL_STEPS * parts * size + tail
            if used <= samples:
                scored = held_out if all_held_out else min(held_out, _HELD_OUT * max(1, processes // 2))
                # A batch that leaves a smaller last one, and not as many for each process, if there is such a one.
                batches = list(range(max(2, min(8, scored // (2 * processes))), 1, -1))
                ragged = [each for each in batches if scored % each]
                uneven = [each for each in ragged if processes == 1 or -(-scored // each) % processes]
                return cls(
                    processes=processes,
                    micro_batches=parts,
                    micro_batch=size,
                    samples=used,
                    evaluation_samples=scored,
                    evaluation_batch=[*uneven, *ragged, *batches][0],
                )
        raise RecipeError(
            f"there are {samples} training samples, but {parts} micro-batches a step need at least {used} of them; "
            "give more data, or fewer --processes."
        )

    @property
    def has_single_samples(self) -> bool:
        """Whether a micro-batch of the tail has one sample only, for want of more."""
        return self.tail < 2 * self.micro_batches

    @property
    def global_batch(self) -> int:
        """Samples of a whole step."""
        return self.micro_batches * self.micro_batch

    @property
    def tail(self) -> int:
        """Samples of an epoch's last step."""
        return self.samples - _FULL_STEPS * self.global_batch

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch."""
        return _FULL_STEPS + 1

    @property
    def steps(self) -> int:
        """Steps of a run."""
        return _EPOCHS * self.steps_per_epoch

    @property
    def tail_step(self) -> int:
        """The first step, from 0, that takes what is left of an epoch."""
        return _FULL_STEPS

    @property
    def whole_steps(self) -> tuple[int, ...]:
        """The steps that are looked at and take a whole batch: the first, and the one after the first evaluation."""
        return (0, _FULL_STEPS + 1)


def shortened(recipe: Recipe, sizes: Sizes, *, micro_batch: int, exact: bool = False, careful: bool = False) -> Recipe:
    """The recipe for a short run on the CPU.

    Its batch is smaller, and there is no warm-up: the rate is smaller in proportion, unless the recipe has a rule for
    that.

    Args:
        recipe: What the user asked.
        sizes: Of the run.
        micro_batch: Samples of a micro-batch.
        exact: Whether the run's bits are not to depend on the number of processes.
        careful: Whether steps are to be small.
    """
    rate = recipe.optimizer.lr * (_CAREFUL if careful else 1.0)
    if recipe.optimizer.lr_scaling == "none":
        rate *= min(1.0, sizes.global_batch / recipe.batch.global_size)
    reads_files = recipe.data.backend in ("auto", "pytorch")
    evaluates = sizes.evaluation_samples > 0
    left = bare(recipe)
    return replace(
        left,
        model=with_fitting_ghosts(left.model, micro_batch),
        data=replace(left.data, workers=0 if reads_files else "auto"),
        batch=Batch(global_size=sizes.global_batch, micro_size=micro_batch),
        optimizer=replace(left.optimizer, lr=rate),
        schedule=Schedule(name="constant"),
        train=replace(left.train, duration=Duration(_EPOCHS, "epochs")),
        evaluate=replace(
            left.evaluate,
            every=Duration(1, "epochs") if evaluates else None,
            batch_size=sizes.evaluation_batch,
            keep_examples=0,  # what is kept to be looked at is no part of what is proved
        ),
        checkpoint=Checkpoint(every=None, keep_best=False),
        parallel=replace(
            left.parallel,
            exact=exact,
            logical_ranks="auto",
            # Parameters without a gradient are found, and named, by a check of their own.
            unused_parameters="refuse" if exact else "allow",
        ),
        telemetry=Telemetry(log_every=Duration(1, "steps"), trackers=()),
    )


@dataclass(frozen=True, kw_only=True)
class Runner:
    """Runs one recipe in several ways.

    Attributes:
        recipe: What the user asked.
        sizes: How much of it is done.
        scratch: Where everything is written.
        double: Whether the network computes in float64.
    """

    recipe: Recipe
    sizes: Sizes
    scratch: Path
    double: bool

    def orders(self, name: str) -> Orders:
        """What the witness of a run is told; its folder is made."""
        folder = self.scratch / name
        folder.mkdir()
        return Orders(
            task=self.recipe.task,
            folder=str(folder),
            samples=self.sizes.samples,
            evaluation_samples=self.sizes.evaluation_samples,
            kept_steps=(*self.sizes.whole_steps, self.sizes.tail_step),
            double=self.double,
        )

    def here(self, name: str, *, micro_batch: int, alter: Callable[[nn.Module], None] | None = None) -> Observed:
        """Run in this process.

        Args:
            name: Of the run.
            micro_batch: Samples of a micro-batch.
            alter: May change the network before it is used.

        Raises:
            PacelineError: If the recipe cannot be run at all.
        """
        orders = self.orders(name)
        recipe = shortened(self.recipe, self.sizes, micro_batch=micro_batch, careful=alter is not None)
        witnesses: list[Witness] = []

        def make(asked: Recipe) -> Witness:
            witnesses.append(Witness(build_task(asked), orders, alter))
            return witnesses[-1]

        trouble, path = "", self._write(orders, recipe)
        try:
            with restore_torch_settings():
                result = train_recipe(load_recipe(path), Options(run_dir=path.parent / "run", task=make))
            if result.status == "stopped":
                raise KeyboardInterrupt  # the run has heard the signal; it was meant for all of this
        except TrainingError as error:
            trouble = str(error)
        except Exception as error:
            if not witnesses or not witnesses[-1].notes.steps:
                raise
            trouble = f"{type(error).__name__}: {error}"
        folder = path.parent
        return Observed(name=name, recipe=recipe, folder=folder, trouble=trouble, batches=witnesses[-1].batches)

    def in_processes(self, name: str) -> Observed:
        """Run as the command in several processes, each with its part of the micro-batches."""
        orders = self.orders(name)
        exact = self.recipe.parallel.exact
        recipe = shortened(self.recipe, self.sizes, micro_batch=self.sizes.micro_batch, exact=exact)
        path, processes = self._write(orders, recipe), self.sizes.processes
        arguments = ["train", str(path), f"task={REFERENCE}", "--run-dir", str(path.parent / "run")]
        arguments += ["--processes", str(processes)]
        variables = {ORDERS_VARIABLE: json.dumps(asdict(orders))}
        trouble = ""
        with Launch(arguments, path.parent / "launch", limit_seconds=_LIMIT_SECONDS, variables=variables) as launch:
            try:
                code = launch.wait()
                trouble = f"exit code {code}: {said(launch)}" if code else ""
            except OverdueError as error:
                trouble = str(error)
        return Observed(name=name, recipe=recipe, folder=path.parent, processes=processes, trouble=trouble)

    def _write(self, orders: Orders, recipe: Recipe) -> Path:
        path = Path(orders.folder) / "short.yaml"
        path.write_text(to_yaml(without_mirror(recipe)), encoding="utf-8")
        return path
