"""The interface between a task and the training loop, and tasks by their recipe names.

The trainer depends only on the task object; there is one loop, without flags or hooks. To write a task, subclass
:class:`Task`; to change a part of one, subclass a concrete task such as
:class:`~paceline.tasks.image_classification.ImageClassification`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from paceline.checkpoint.weights import SavedWeights, load_trained
from paceline.data.balance import SampleLengths
from paceline.data.batch import Batch, Nested
from paceline.data.class_sampling import SampleClasses, weights_by_class
from paceline.data.pipeline import Pipeline, Placement
from paceline.data.shard_order import ShardSizes
from paceline.data.slices import SampleIds, SampleWeights
from paceline.errors import DataError, ModelError, RecipeError
from paceline.host.world import World
from paceline.metrics.accumulator import Collector, Metric
from paceline.metrics.answers import Answers
from paceline.metrics.named import NamedMetrics
from paceline.optim.build import build_optimizer, build_schedules
from paceline.plan import DataFacts, Plan
from paceline.plan.rates import Schedules
from paceline.plugins.references import call_reference, is_ours
from paceline.plugins.registry import load
from paceline.recipe.model import ModelSection
from paceline.recipe.other_trainers import METHODS
from paceline.recipe.running import EvaluateSection
from paceline.recipe.schema import Recipe
from paceline.recipe.training import Optimizer
from paceline.records.events import StepEvent
from paceline.storage.addresses import is_address
from paceline.storage.cache import local_path

if TYPE_CHECKING:
    from paceline.data.image.datasets import ImageDataset
    from paceline.prediction.predictor import Predictor
    from paceline.tasks.exportable import Exportable
    from paceline.tasks.labelling import TrainedLabeller

Model = Callable[..., Any]
BatchMaker = Callable[[int], Batch]
"""Makes a micro-batch with a given number of samples."""
_CPU = torch.device("cpu")

# Reserved names of step records; names of durations end in _seconds.
_RESERVED_NAMES = {each.name for each in fields(StepEvent)} | {"event", "time", "mfu", "skipped_steps", "logged"}
_RESERVED_NAMES |= {"data_wait_fraction", "padding_fraction", "token_imbalance", "gradient_variance", "gradient_square"}
_RESERVED_PREFIXES = ("throughput_", "slowest_", "noise_scale")


def is_reserved(name: str) -> bool:
    """Whether a value of a step cannot be logged under a name: records use it, or it is not an identifier."""
    is_ours = name in _RESERVED_NAMES or name.endswith("_seconds") or name.startswith(_RESERVED_PREFIXES)
    return is_ours or not name.isidentifier()


class Task(ABC):
    """The learning problem: samples, network, loss and metrics.

    Attributes:
        recipe: The recipe; a task may read every section.
        metrics: Metrics of :meth:`score` and the collectors, the loss first; may depend on the data.
        headline: The metric that ``evaluate.metric=auto`` selects.
        unit: Plural unit of :meth:`sample_weights`, such as ``tokens``; otherwise the name of samples.
        gives_scores: Whether :meth:`score` also returns ``logit`` and ``label``, for ``evaluate.metrics``.
        is_own: Whether the class was defined outside of Paceline.
        learns: What is learned of a sample: its ``class``, or something else, such as ``numbers``.
        takes_sizes: Whether `data.evaluation_size` says at which size samples are scored.
        can_shorten: Whether :meth:`shorten` reduces the data.
        has_own_optimizer: Whether :meth:`build_optimizer` ignores the recipe's choice.
        why_not_sharded: Why FSDP cannot shard the network, as the rest of a sentence; empty if it can.
    """

    metrics: tuple[Metric, ...] = (Metric(name="loss"),)
    headline: str = "loss"
    unit: str = "samples"
    gives_scores: bool = False
    is_own: bool = False
    learns: str = "class"
    takes_sizes: bool = False
    can_shorten: bool = False
    has_own_optimizer: bool = False
    why_not_sharded: str = ""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.is_own = not is_ours(cls.__module__)

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    @abstractmethod
    def data_facts(self, world: World) -> DataFacts:
        """Open the data and return the plan's facts; called before the process group exists.

        Args:
            world: The planned processes; only resources may depend on it, never samples.
        """

    def sample_weights(self) -> SampleWeights | None:
        """The weight of each training sample in a step's mean loss, int64 [samples], such as its tokens.

        None, the default, weighs all samples equally. Available after :meth:`data_facts`; must depend on the data
        alone.
        """
        return None

    def sample_classes(self) -> SampleClasses | None:
        """The class of each training sample, int64 [samples], numbered as ``description()["class_names"]``.

        None, the default, means that samples have no class, so `train.class_weights` and `data.sampling` have no
        effect. Available after :meth:`data_facts`. A class-weighted loss divides by the batch's
        ``slice.mean_class_weight``.
        """
        return None

    def sample_sets(self) -> SampleClasses | None:
        """The data set of each training sample, int64 [samples], numbered as the keys of `data.mixture`.

        None, the default, means one data set, each sample used once per epoch. Available after :meth:`data_facts`.
        """
        return None

    def weights_by_class(self, key: str) -> tuple[float, ...]:
        """Return each class's weight for `train.class_weights` or `data.sampling`; empty if all samples are equal.

        Raises:
            RecipeError: If the recipe names an unknown class.
        """
        labels = self.sample_classes()
        requested = self.recipe.data.sampling if key == "data.sampling" else self.recipe.train.class_weights
        if labels is None or requested is None or requested == "uniform":
            return ()
        return weights_by_class(key, requested, labels, self.description()["class_names"])

    def sample_shards(self) -> ShardSizes | None:
        """Return the files that training samples are read from a few at a time; None, the default: in any order.

        Available after :meth:`data_facts`.
        """
        return None

    def sample_lengths(self) -> SampleLengths | None:
        """Return the length of each training sample, in tokens or another measure of cost; by default None.

        With lengths, step records report tokens; if samples are padded to the longest of their micro-batch,
        ``batch.balance`` balances them. Available after :meth:`data_facts`; must depend on the data and the recipe
        alone.
        """
        return None

    def evaluation_lengths(self) -> SampleLengths | None:
        """Return the length of each held-out sample, which tells the largest evaluation batch before it is read."""
        return None

    def sample_keys(self) -> NDArray[Any] | None:
        """Return sort keys, such as shapes, by which each step's samples are sorted into micro-batches, [samples].

        None, the default, leaves them unsorted. Available after :meth:`data_facts`; must depend on the data alone.
        """
        return None

    def sample_costs(self) -> NDArray[Any] | None:
        """Return the relative memory cost of each training sample, [samples], for example a picture's size.

        By default the sample weights. Memory trials use the most expensive samples. Available after :meth:`data_facts`.
        """
        return self.sample_weights()

    def sample_sizes(self) -> NDArray[np.int64] | None:
        """Return height and width of each training sample, [samples, 2], if micro-batches are padded to the largest.

        None, the default, means equal sizes. With sizes, the largest micro-batch is known before it is read, and is
        tried first.
        """
        return None

    def description(self) -> dict[str, Any]:
        """Return additional facts for the weights file, such as class names."""
        return {}

    @abstractmethod
    def open_pipeline(self, placement: Placement) -> Pipeline:
        """Open the stream of batches for this process."""

    @abstractmethod
    def build_model(self) -> nn.Module:
        """Build the network; called after :meth:`data_facts`, with torch seeded by the recipe's seed."""

    def check_published(self, model: ModelSection) -> bool:
        """Check, without a download, that published weights can be loaded; False if only loading them can tell.

        Raises:
            ModelError: If they are neither on this machine nor within reach, or cannot be used.
        """
        # Imported only where used: most runs start from their own weights.
        from paceline.models.build import check_published

        return check_published(model)

    def first_weights(self, network: nn.Module) -> None:  # noqa: B027  # most need nothing
        """Set the initial weights that are computed from the training data; by default none.

        Called when a run starts, before pretrained weights are loaded; not for weights that are only evaluated. Must
        depend on the recipe and the data alone. Rank 0's weights are then broadcast.
        """

    def begins_from_data(self, network: nn.Module) -> bool:
        """Whether :meth:`first_weights` changes this network (possibly on ``meta``), which is then built in full.

        By default true if the task overrides :meth:`first_weights`.
        """
        return type(self).first_weights is not Task.first_weights

    def check_network(self, network: nn.Module) -> None:  # noqa: B027  # most need nothing
        """Check, before training, that the network accepts its inputs; by default no check.

        Raises:
            PacelineError: If it does not; the message says what to change.
        """

    def build_optimizer(self, network: nn.Module, optimizer: Optimizer, device: torch.device) -> torch.optim.Optimizer:
        """Return the optimizer; by default the recipe's.

        Args:
            network: The network.
            optimizer: The recipe's section.
            device: The network's device.
        """
        return build_optimizer(network, optimizer, device)

    def build_schedules(self, recipe: Recipe, plan: Plan, optimizer: torch.optim.Optimizer) -> Schedules:
        """Return the optimizer's settings at each step; by default the recipe's."""
        return build_schedules(recipe, plan)

    def prepare_training(self, placement: Placement) -> None:  # noqa: B027  # most need nothing
        """Prepare what only training needs, after the network is built; by default nothing.

        Args:
            placement: Device of the model and layout of batches.

        Raises:
            PacelineError: If that fails; nothing has been written yet.
        """

    @abstractmethod
    def loss(self, model: Model, batch: Batch) -> torch.Tensor:
        """Return the mean training loss over the batch's samples, a scalar.

        In 16-bit precision only the call of ``model`` runs under autocast; its answer is converted to float32.

        With :meth:`sample_weights` the mean is weighted; for a batch of total weight 0 it may be any finite value.
        """

    def log(self, name: str, value: torch.Tensor | float, **others: Any) -> None:
        """Log a scalar of this micro-batch from within :meth:`loss`; step records and trackers get its mean.

        The mean is over the samples of all steps since the last record, on all ranks, weighted as in the loss. Does not
        wait for the device. Nothing is logged in evaluation.

        Args:
            name: Its name in records: a Python identifier that is not reserved.
            value: A scalar, the mean over the micro-batch's samples.
            others: Refused: other trainers' options, such as ``prog_bar``.

        Raises:
            ModelError: For an option.
            ValueError: If the name is not an identifier, or it is reserved.
        """
        if others:
            raise ModelError(
                f"log({name!r}) takes a name and a value, and no {', '.join(others)}: each number is in records, "
                "trackers and report."
            )
        if is_reserved(name):
            raise ValueError(
                f"log({name!r}): records already use this name, or it is not an identifier; choose another."
            )
        if torch.is_grad_enabled():
            self.__dict__.setdefault("_logged", {})[name] = torch.as_tensor(value).detach().float().reshape(())

    def pop_logged_values(self) -> dict[str, torch.Tensor]:
        """Return the values from :meth:`log` since the last call, float32 scalars by name."""
        logged: dict[str, torch.Tensor] = self.__dict__.pop("_logged", {})
        return logged

    @abstractmethod
    def score(self, model: Model, batch: Batch) -> dict[str, Any]:
        """Return per-sample values, a tensor [N] per metric; called in evaluation mode without gradients.

        Include the divisors of means (:attr:`Metric.per`) and the inputs of collectors. In 16-bit precision weights are
        cast once for all batches, so changes made during evaluation have no effect.
        """

    def collectors(self) -> tuple[Collector, ...]:
        """Return collectors for metrics that are not means, for one evaluation of one set of weights."""
        return ()

    def leave_out_collected(self, why: str) -> str:
        """Stop reporting collected metrics, which the held-out samples leave undefined; return the notice."""
        # Kept: the data may be opened again.
        names = self.__dict__.setdefault("_undefined", [each.name for each in self.metrics if each.is_collected])
        self.metrics = tuple(each for each in self.metrics if not each.is_collected)
        return f"{', '.join(names)}: undefined and not reported, since {why}; the lowest loss is the best evaluation"

    def evaluated(self, model: Model) -> Model:
        """Return the network as evaluation and prediction call it; by default the network itself."""
        return model

    def predict(self, model: Model, batch: Batch) -> dict[str, Nested]:
        """Return one entry per sample, tensors [N, ...] or lists of N, for a predictions file; by default nothing."""
        return {}

    def answers(self, model: Model, batch: Batch) -> Answers | None:
        """Return the predicted class of each sample, for the confusion matrix and the kept examples.

        Called right after :meth:`score` with a model that only returns its last output again. None, as by default,
        where samples do not have one label each.
        """
        return None

    def pictures(self, inputs: Nested) -> torch.Tensor | None:
        """Convert the inputs of N samples to displayable pictures, uint8 [N, C, H, W]; by default none."""
        return None

    @property
    def measured(self) -> tuple[Metric, ...]:
        """The task's metrics and those named in the recipe."""
        return (*self.metrics, *NamedMetrics(self.recipe.evaluate.metrics).metrics)

    def shown(self, batch: Batch) -> list[tuple[torch.Tensor, str]]:
        """Return a training batch as the network sees it, for the report: pictures, uint8 [C, H, W], with captions.

        By default the :meth:`pictures` of the inputs, without captions.
        """
        pictures = self.pictures(batch.inputs)
        return [] if pictures is None else [(each, "") for each in pictures]

    @property
    def has_known_shapes(self) -> bool:
        """Whether the shapes of all batches follow from the plan: :meth:`empty_batches` makes them without data."""
        return False

    def empty_batches(self, plan: Plan, placement: Placement, *, training: bool) -> BatchMaker:
        """Return a function that makes the largest micro-batches of training or evaluation from empty tensors.

        Called if :attr:`has_known_shapes`; other batches are estimated from a few samples that are read.
        """
        raise NotImplementedError  # a task that sets the attribute has its own

    def on_fake_tensors(self, networks: Sequence[nn.Module]) -> AbstractContextManager[Any] | None:
        """Return a context in which networks run on tensors without values; None, the default, if they need none."""
        return None

    def shorten(self, samples: int, evaluation_samples: int) -> None:
        """Reduce the open data to a few samples, evenly spaced over it and including the last one.

        Called if :attr:`can_shorten`.
        """
        raise NotImplementedError  # a task that sets the attribute has its own

    def data_digest(self, world: World) -> str | None:
        """Return the digest of the data; None if the task gives none."""
        return self.data_facts(world).description.get("digest")

    def adapt_to(self, saved: SavedWeights) -> None:  # noqa: B027  # most need nothing
        """Prepare to score trained weights, before the data is opened, such as by numbering classes as they do.

        Their description ``data`` holds what :meth:`data_facts` and :meth:`description` returned in training.

        Raises:
            DataError: If the recipe does not fit the weights.
        """

    def check_trained(self, saved: SavedWeights) -> None:  # noqa: B027  # most need nothing
        """Check that trained weights may be scored on the data, once it is open; by default no check.

        Raises:
            DataError: If the scores would be silently wrong.
        """

    def split_sizes(self) -> tuple[int, int] | None:
        """Return the counts of training and validation samples, if one can choose among them; else None.

        Call :meth:`score_only` before :meth:`train_only`, which numbers the training samples anew.
        """
        return None

    def score_only(self, ids: SampleIds, *, training: bool) -> None:
        """Score some training or validation samples, prepared as validation samples are, in place of the latter."""
        raise NotImplementedError  # only called where split_sizes() gives sizes; such a task has its own

    def train_only(self, ids: SampleIds) -> None:
        """Train on some of the training samples."""
        raise NotImplementedError  # only called where split_sizes() gives sizes; such a task has its own

    def score_holdout(self, trained: str) -> None:
        """Score what the run held out of training, instead of the validation data.

        Args:
            trained: The weights, for the message.

        Raises:
            RecipeError: If nothing was held out.
        """
        raise RecipeError(f"the task {task_name(self)} holds no training samples out; score it with --on validation.")

    def named_answers(self, line: Mapping[str, Any], classes: Sequence[str]) -> dict[str, Any]:
        """Return more columns of a held-out sample's line in a predictions file: by default the names of its classes.

        Args:
            line: The sample's ``id`` and what :meth:`predict` returned of it.
            classes: All class names; empty without classes.
        """
        numbers = {key: line.get(key) for key in ("prediction", "target")}
        if not classes or not all(isinstance(number, int) for number in numbers.values()):
            return {}
        return {f"{key}_class": classes[number] for key, number in numbers.items() if number is not None}

    def recall(self, saved: SavedWeights) -> None:
        """Take what the network depends on from the description of trained weights, instead of opening the data.

        By default opens the data.
        """
        self.data_facts(World())

    def trained(self, saved: SavedWeights, device: torch.device = _CPU) -> nn.Module:
        """Build the network of trained weights, in evaluation mode on a device."""
        self.recall(saved)
        network = self.build_model()
        load_trained(network, saved)
        return network.to(device).eval()

    def predictor(self, saved: SavedWeights, device: torch.device) -> Predictor:
        """Return what answers files or prompts with trained weights; by default labels images with their classes.

        Raises:
            PacelineError: If the task answers none.
        """
        return self._labeller(saved, device)

    def exported_predictor(
        self, saved: SavedWeights, run: Callable[[torch.Tensor], Mapping[str, torch.Tensor]]
    ) -> Predictor:
        """Return what answers files with an exported network; by default none does.

        Args:
            saved: The description in the file, without tensors.
            run: Returns the network's outputs by name.

        Raises:
            PacelineError: If the task answers none.
        """
        raise DataError(f"'{saved.path}' is not an image classifier or a detector, so it cannot label images.")

    def exportable(self, saved: SavedWeights, target: str) -> Exportable:
        """Return the network of trained weights with its inputs; by default normalised images.

        Args:
            saved: The weights.
            target: Requested format, for the message.

        Raises:
            PacelineError: If the inputs are unknown, or the format cannot express them.
        """
        from paceline.tasks.exportable import Exportable, Input

        data = saved.description("data")
        if not {"class_names", "targets"} & data.keys():
            raise RecipeError(
                f"{saved.path} does not say what its network's inputs are (task {data.get('task')}); --format {target} "
                "is for images, text and clicks; use --format safetensors."
            )
        labeller = self._labeller(saved, _CPU)
        # Single-view, even if the run was evaluated with several views.
        side = int(data.get("evaluation_size", data["image_size"]))
        images = Input("images", ("batch", int(data["channels"]), side, side), None, "normalised images, float32")
        return Exportable(network=labeller.network, inputs=(images,), longest={}, saved=saved, outputs=labeller.outputs)

    def _labeller(self, saved: SavedWeights, device: torch.device) -> TrainedLabeller:
        # Imported only where used: training needs none of it.
        from paceline.tasks.labelling import Outputs, TrainedLabeller

        outputs = Outputs.description(saved.description("data"))
        if outputs is None:
            raise DataError(
                f"{saved.path} holds no class names: its task does not classify images, so it cannot predict classes."
            )
        network = self.trained(saved)
        self.check_network(network)
        network.to(device)
        return TrainedLabeller(
            saved, outputs, network=network, answers=self.evaluated(network), recipe=self.recipe, device=device
        )

    def labelled_images(self) -> ImageDataset | None:
        """Return the images with one class each, on which a quantised network is calibrated and compared, if any."""
        return None

    def figures(self, model: Model) -> Sequence[tuple[torch.Tensor | str, str]]:
        """Return what an evaluated model draws or writes, such as samples that it generates; nothing by default.

        Called after each evaluation on the first process, with torch's random state seeded by the recipe, and not for
        sharded networks, which answer only to all processes together.

        Returns:
            Pictures for the report, uint8 [C, H, W], or texts for the log and the report, with captions.
        """
        return []


def build_task(recipe: Recipe, maker: Callable[[Recipe], Task] | None = None) -> Task:
    """Build a task; data at an address are first copied to this host.

    Args:
        recipe: The recipe.
        maker: A task's class or another function of the recipe; by default, what the recipe names.

    Raises:
        RecipeError: If the name is unknown, or what it refers to is not a complete task.
        StorageError: If the data are remote and cannot be copied.
    """
    path = recipe.data.path
    if path is not None and is_address(path):
        recipe = replace(recipe, data=replace(recipe.data, path=local_path(path, key="data.path")))
    target = maker or load("tasks", recipe.task, RecipeError)
    name = recipe.task if maker is None else getattr(maker, "__name__", type(maker).__name__)
    if missing := sorted(getattr(target, "__abstractmethods__", ())):
        theirs = "".join(f"; {each} is {ours} here" for each, ours in METHODS.items() if hasattr(target, each))
        raise RecipeError(
            f"task '{name}' lacks the method(s) {', '.join(missing)}, which every paceline.Task needs{theirs}."
        )
    if isinstance(target, type) and issubclass(target, nn.Module):
        raise RecipeError(f"task '{name}' is a network, not a paceline.Task; paceline.fit trains it.")
    task = call_reference("task", name, target, RecipeError, recipe)
    if not isinstance(task, Task):
        raise RecipeError(f"task '{name}' gave a {type(task).__name__}, not a paceline.Task.")
    if not hasattr(task, "recipe"):
        raise RecipeError(f"task '{name}' has no recipe: its __init__ must call super().__init__(recipe).")
    return task


def task_name(task: Task) -> str:
    """Return the task's class as ``module:name``."""
    return f"{type(task).__module__}:{type(task).__qualname__}"


def check_supported(task: Task) -> None:
    """Refuse requests that the task does not support.

    Raises:
        RecipeError: If test-time augmentation is requested but the task does not apply it, or keep_examples is set but
            the task has no class predictions.
    """
    augment = task.recipe.evaluate.augment
    if augment != "none" and type(task).evaluated is Task.evaluated:
        raise RecipeError(
            f"evaluate.augment={augment} has no effect with the task {task_name(task)}, whose `evaluated` gives the "
            "network itself; leave it out, or override that method."
        )
    keep_examples = task.recipe.evaluate.keep_examples
    if keep_examples not in (0, EvaluateSection().keep_examples) and type(task).answers is Task.answers:
        raise RecipeError(
            f"evaluate.keep_examples={keep_examples} has no effect with the task {task_name(task)}, which does not say "
            "which class was predicted; leave it out, or override its method `answers`."
        )
