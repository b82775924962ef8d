"""The interface of a task to the training loop, and the tasks by their names in recipes.

The trainer depends only on the task object; there is one loop, without flags or hooks. Your own task subclasses
:class:`Task`, or :class:`~paceline.tasks.image_classification.ImageClassification` to change a part.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from paceline import registry
from paceline.data.balance import SampleLengths
from paceline.data.batch import Batch, Nested
from paceline.data.class_balance import SampleClasses, weights_by_class
from paceline.data.pipeline import Pipeline, Placement
from paceline.data.slices import SampleWeights
from paceline.errors import RecipeError
from paceline.metrics.accumulator import Collector, Metric
from paceline.metrics.answers import Answers
from paceline.metrics.named import NamedMetrics
from paceline.plan import DataFacts
from paceline.recipe.running import Evaluate
from paceline.recipe.schema import Recipe
from paceline.records.events import StepEvent
from paceline.references import call_reference
from paceline.storage.addresses import is_address
from paceline.storage.cache import local_path
from paceline.world import World

Model = Callable[..., Any]

# Names that step records use; those of times end in _seconds.
_OF_RECORDS = {each.name for each in fields(StepEvent)} | {"event", "time", "mfu", "skipped_steps"}
_OF_RECORDS |= {"data_wait_fraction", "padding_fraction", "token_imbalance", "gradient_variance", "gradient_square"}
_BEGINNINGS = ("throughput_", "slowest_", "noise_scale")


class Task(ABC):
    """What is learned: the samples, the network, the loss and the metrics.

    Attributes:
        recipe: The recipe; each section may be used.
        metrics: What :meth:`score` and the collectors report, the loss first; may depend on the data.
        headline: The metric that ``evaluate.metric=auto`` stands for.
        unit: What :meth:`sample_weights` count, in the plural: ``tokens``; else what samples are called.
        gives_scores: Whether :meth:`score` gives ``logit`` and ``label`` too, for ``evaluate.metrics``.
    """

    metrics: tuple[Metric, ...] = (Metric(name="loss"),)
    headline: str = "loss"
    unit: str = "samples"
    gives_scores: bool = False

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    @abstractmethod
    def data_facts(self, world: World) -> DataFacts:
        """Open the data and return the plan's facts; no process group exists yet.

        Args:
            world: The processes planned for; only shares of the machine may depend on it, never samples.
        """

    def sample_weights(self) -> SampleWeights | None:
        """The weight of each training sample in a step's mean loss, int64 [samples], such as its tokens.

        By default None: each counts once. Known after :meth:`data_facts`, and a function of the data alone.
        """
        return None

    def sample_classes(self) -> SampleClasses | None:
        """The class of each training sample, int64 [samples], numbered as ``description()["class_names"]``.

        By default None: samples have no class, and `train.class_weights` and `data.sampling` have no effect. Known
        after :meth:`data_facts`. A loss that weighs classes divides by the batch's ``slice.mean_class_weight``.
        """
        return None

    def sample_sets(self) -> SampleClasses | None:
        """The data set of each training sample, int64 [samples], numbered as the keys of `data.mixture`.

        By default None: there is one set, and each sample is used once an epoch. Known after :meth:`data_facts`.
        """
        return None

    def weights_by_class(self, key: str) -> tuple[float, ...]:
        """The weight of each class by `train.class_weights` or `data.sampling`; empty: all samples are alike.

        Raises:
            RecipeError: If the recipe names an unknown class.
        """
        labels = self.sample_classes()
        asked = self.recipe.data.sampling if key == "data.sampling" else self.recipe.train.class_weights
        if labels is None or asked is None or asked == "uniform":
            return ()
        return weights_by_class(key, asked, labels, self.description()["class_names"])

    def sample_lengths(self) -> SampleLengths | None:
        """Length of each training sample, in tokens or another measure of its cost; by default None.

        Step records then report tokens, and if samples are padded to their micro-batch's longest, ``batch.balance``
        balances them. Known after :meth:`data_facts`, and a function of the data and the recipe alone.
        """
        return None

    def evaluation_lengths(self) -> SampleLengths | None:
        """The same of each held-out sample, so that the largest batch that is scored is known before it is read."""
        return None

    def sample_keys(self) -> NDArray[Any] | None:
        """Key to sort each step's samples by before they are cut into micro-batches, [samples], such as their shape.

        By default None: unsorted. Known after :meth:`data_facts`, and a function of the data alone.
        """
        return None

    def sample_costs(self) -> NDArray[Any] | None:
        """How much memory each training sample takes, [samples], in any unit: of a picture, how large it is shown.

        By default its weight. Memory trials use the samples that take most. Known
        after :meth:`data_facts`.
        """
        return self.sample_weights()

    def sample_sizes(self) -> NDArray[np.int64] | None:
        """Height and width of each training sample, [samples, 2], where a micro-batch is padded to its largest ones.

        By default None: all are alike. The largest micro-batch is then known before it is read, and tried out first.
        """
        return None

    def description(self) -> dict[str, Any]:
        """Further facts that a weights file needs, such as class names."""
        return {}

    @abstractmethod
    def open_pipeline(self, placement: Placement) -> Pipeline:
        """Make the stream of batches for this process."""

    @abstractmethod
    def build_model(self) -> nn.Module:
        """Build the network; called after :meth:`data_facts`, with torch seeded by the recipe's seed."""

    def first_weights(self, network: nn.Module) -> None:  # noqa: B027  # most need nothing
        """Set the initial weights that are computed from the training data; by default none.

        Called where a run begins, and before weights are taken from elsewhere; not for weights that are only scored. A
        function of the recipe and the data alone. The first process's weights are then sent to all.
        """

    def begins_from_data(self, network: nn.Module) -> bool:
        """Whether :meth:`first_weights` sets any of this network, which may be without numbers: it is then built whole.

        By default wherever a task has a :meth:`first_weights` of its own.
        """
        return type(self).first_weights is not Task.first_weights

    def check_network(self, network: nn.Module) -> None:  # noqa: B027  # most need nothing
        """Check, before training, that the network accepts its inputs; by default no check.

        Raises:
            PacelineError: If it does not; says what to change.
        """

    def prepare_training(self, placement: Placement) -> None:  # noqa: B027  # most need nothing
        """Prepare what only training needs, once the network is built; by default nothing.

        Args:
            placement: Where the model lives, and how batches are laid out.

        Raises:
            PacelineError: If that fails; nothing has been written by then.
        """

    @abstractmethod
    def loss(self, model: Model, batch: Batch) -> torch.Tensor:
        """Mean training loss over the batch's samples, a scalar; called under autocast.

        With :meth:`sample_weights` the mean is over what they count, and of a batch that weighs nothing it is anything
        finite.
        """

    def log(self, name: str, value: torch.Tensor | float) -> None:
        """Log a number of this micro-batch, from :meth:`loss`; step records and trackers have its mean.

        The mean is over the samples of all steps since the last record, on all ranks, each micro-batch weighted as in
        the loss. Nothing waits for the device. In evaluation nothing is logged.

        Args:
            name: Its name in records: a Python identifier that they do not use themselves.
            value: A scalar, the mean over the micro-batch's samples.

        Raises:
            ValueError: If the name is not an identifier, or records use it.
        """
        if not name.isidentifier() or name in _OF_RECORDS or name.endswith("_seconds") or name.startswith(_BEGINNINGS):
            raise ValueError(
                f"log({name!r}): records already use this name, or it is not an identifier; choose another."
            )
        if torch.is_grad_enabled():
            self.__dict__.setdefault("_logged", {})[name] = torch.as_tensor(value).detach().float().reshape(())

    def take_logged(self) -> dict[str, torch.Tensor]:
        """Return the values of :meth:`log` since the last call, float32 scalars by name."""
        found: dict[str, torch.Tensor] = self.__dict__.pop("_logged", {})
        return found

    @abstractmethod
    def score(self, model: Model, batch: Batch) -> dict[str, Any]:
        """One value per sample, a tensor [N], for each metric; called in evaluation mode, without gradients.

        What the divisors of means (:attr:`Metric.per`) are stands beside them, and whatever the collectors need. In 16
        bits weights are cast once for all batches: what changes them on the way is not seen.
        """

    def collectors(self) -> tuple[Collector, ...]:
        """Collectors for metrics that are not means, for one evaluation of one set of weights; by default none."""
        return ()

    def evaluated(self, model: Model) -> Model:
        """The network as evaluation and prediction call it; by default the network itself."""
        return model

    def predict(self, model: Model, batch: Batch) -> dict[str, Nested]:
        """One entry per sample, tensors [N, ...] or lists of N, for a predictions file; by default nothing."""
        return {}

    def answers(self, model: Model, batch: Batch) -> Answers | None:
        """The predicted class of each sample, for the confusion matrix and the kept examples.

        Called right after :meth:`score`, with the same model, which returns its last output again and nothing else.
        None,
        as by default, where samples do not have one label each.
        """
        return None

    def pictures(self, inputs: Nested) -> torch.Tensor | None:
        """A batch's inputs, of N samples, as pictures for people, uint8 [N, C, H, W]; by default none."""
        return None

    @property
    def measured(self) -> tuple[Metric, ...]:
        """The metrics, and those that the recipe names."""
        return (*self.metrics, *NamedMetrics(self.recipe.evaluate.metrics).metrics)

    def shown(self, batch: Batch) -> list[tuple[torch.Tensor, str]]:
        """A training batch as the network sees it, for the report: each picture, uint8 [C, H, W], with a caption.

        By default what :meth:`pictures` makes of the inputs, without captions.
        """
        found = self.pictures(batch.inputs)
        return [] if found is None else [(each, "") for each in found]


def build_task(recipe: Recipe) -> Task:
    """Make the task a recipe names; data at an address are copied to this host first.

    Raises:
        RecipeError: If there is none of that name, or the reference does not give a task.
        StorageError: If the data lie at an address and cannot be copied.
    """
    path = recipe.data.path
    if path is not None and is_address(path):
        recipe = replace(recipe, data=replace(recipe.data, path=local_path(path, key="data.path")))
    task = call_reference("task", recipe.task, registry.load("tasks", recipe.task, RecipeError), RecipeError, recipe)
    if not isinstance(task, Task):
        raise RecipeError(f"task '{recipe.task}' gave a {type(task).__name__}, not a paceline.Task.")
    return task


def task_name(task: Task) -> str:
    """The task's class as ``module:name``."""
    return f"{type(task).__module__}:{type(task).__qualname__}"


def check_used_by(task: Task) -> None:
    """Refuse requests that the task does not support.

    Raises:
        RecipeError: If test-time augmentation is requested but the task does not apply it, or keep_examples is changed
            but the task names no classes.
    """
    asked = task.recipe.evaluate.augment
    if asked != "none" and type(task).evaluated is Task.evaluated:
        raise RecipeError(
            f"evaluate.augment={asked} has no effect with the task {task_name(task)}, whose `evaluated` gives the "
            "network itself; leave it out, or override that method."
        )
    kept = task.recipe.evaluate.keep_examples
    if kept not in (0, Evaluate().keep_examples) and type(task).answers is Task.answers:
        raise RecipeError(
            f"evaluate.keep_examples={kept} has no effect with the task {task_name(task)}, which does not say which "
            "class was predicted; leave it out, or override its method `answers`."
        )
