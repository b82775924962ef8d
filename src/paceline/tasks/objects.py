"""The task of `paceline.fit`: a network, data, a loss and metrics of your own, given as objects."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from paceline.checkpoint.weights import SavedWeights
from paceline.data.batch import Batch, Nested, identity, joined_along_samples, tensors_in
from paceline.data.image.pipeline import ImagePipeline, OpenedSplit, share_of_cores
from paceline.data.loaders.pytorch import LoaderBackend, ReadFailure
from paceline.data.objects.keyed import KeyedReader
from paceline.data.objects.purity import Reading, read_again
from paceline.data.objects.samples import Samples
from paceline.data.pipeline import Pipeline, Placement
from paceline.data.shard_order import ShardSizes
from paceline.data.slices import SampleWeights, evenly_spaced, first_samples, micro_batch
from paceline.errors import DataError, ModelError, PacelineError, RecipeError
from paceline.host.world import World
from paceline.learning.losses import note_own
from paceline.metrics.accumulator import Collector, Metric
from paceline.metrics.answers import Answers
from paceline.metrics.named import NamedMetrics
from paceline.optim.own import OwnSchedules, explained, may_refuse_gradients, own_optimizer, scheduled_twin
from paceline.parsing.plain_text import one_line
from paceline.plan import DataFacts, Plan
from paceline.plan.batching import micro_batch_size
from paceline.plan.rates import Schedules
from paceline.recipe.schema import Recipe
from paceline.recipe.training import Optimizer
from paceline.recipe.unused import all_but
from paceline.tasks.given_objects import Objects, fingerprint, named_objects, network_of, takes_model
from paceline.tasks.object_checks import contents_of, has_class_weights, is_mean, wrong_class
from paceline.tasks.own_code import RefusedBroadcast
from paceline.tasks.task import Model, Task
from paceline.tasks.unsaved_state import copied, unsaved

if TYPE_CHECKING:
    from paceline.prediction.predictor import Predictor
    from paceline.tasks.exportable import Exportable

_TARGET_NAMES = ("labels", "label", "targets", "target", "y")
_LOWER_IS_BETTER = ("loss", "error", "mae", "mse", "distance", "perplexity", "nll")
# Where a batch is read in less time, handing it over from another process takes longer.
_FAST_SECONDS = 0.005
_TRIED = 2
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_COMPARED, _FEWEST = 8, 4
_LOG = logging.getLogger("paceline.fit")
_CONSEQUENCE = "a resume, or another number of workers or processes, will not repeat this run exactly."


class Fit(Task):
    """Trains a network of your own on data of your own.

    Args:
        recipe: The recipe.
        objects: What was given; None for what the recipe's `objects` name.
    """

    def __init__(self, recipe: Recipe, objects: Objects | None = None) -> None:
        super().__init__(recipe)
        self.objects = named_objects(recipe) if objects is None else objects
        self.has_own_optimizer = self.objects.optimizer is not None
        self._world = World()
        self._takes_model = takes_model(self.objects.loss)
        self._each_loss = None if self._takes_model else one_by_one(self.objects.loss)
        self._means = {name: each for name, each in self.objects.metrics.items() if not _is_torchmetric(each)}
        self._whole = {name: each for name, each in self.objects.metrics.items() if name not in self._means}
        per = "weight" if self.objects.weights else None
        self.metrics = (
            Metric(name="loss", per=per),
            *(Metric(name=name, higher_is_better=_is_better_higher(name, each)) for name, each in self._means.items()),
            *NamedMetrics.of(self._whole).metrics,
        )

    # Data

    @cached_property
    def _readings(self) -> dict[bool, Reading]:
        found = {training: read_again(self._reader(training=training)) for training in self._splits}
        for each in found.values():
            if each.difference:
                _LOG.warning("paceline: warning: %s", one_line(f"{each.difference}; {_CONSEQUENCE}"))
        return found

    @property
    def _splits(self) -> dict[bool, Samples]:
        held_out = self.objects.held_out
        return {True: self.objects.train_set} | ({} if held_out is None else {False: held_out})

    def _reader(self, note: Callable[[int], None] | None = None, *, training: bool) -> KeyedReader:
        samples, seed = self._splits[training], self.recipe.seed
        return KeyedReader(samples, seed=seed, training=training, divide=self._divide, note=note)

    def _divide(self, batch: Any) -> tuple[Nested, Nested]:
        return (batch, ()) if self._takes_model else divide(batch)

    def sample_shards(self) -> ShardSizes | None:
        """Return the files of the training samples, if ``train_set`` names them."""
        return self._splits[True].shards

    def data_facts(self, world: World) -> DataFacts:
        """Read a few samples, and return how many there are."""
        self._world = world
        workers, reason = self._choose_workers(world)
        shared = next((each.shared for each in self._readings.values() if each.shared), "")
        if shared and workers:
            _LOG.warning("paceline: warning: %s", one_line(f"{shared}; {_CONSEQUENCE}"))
        digests = [each.digest for each in self._readings.values()]
        counts = [len(each) for each in self._splits.values()]
        description: dict[str, Any] = {"workers": workers, "samples": counts, "objects": self._fingerprints()}
        if all(digests):
            description["digest"] = "-".join(digests)
            description["contents"] = {
                samples.role: dict(self._readings[training].contents) or contents_of(samples, self.recipe.seed)
                for training, samples in self._splits.items()
            }
        if differences := [each.difference for each in self._readings.values() if each.difference]:
            description["not_repeatable"] = differences
        unused = all_but(["data.workers", "data.prefetch"], "the data are objects of yours")
        unused |= all_but(_OF_ANY_NETWORK, "the network is an object of yours", section="model")
        if self.has_own_optimizer:
            kept = ("optimizer.lr", "optimizer.lr_scaling", "optimizer.lr_reference_batch", *_CLIPPING)
            unused |= all_but(kept, "the optimizer is an object of yours", section="optimizer")
        if self.objects.schedule is not None:
            unused |= all_but([], "the schedule is an object of yours", section="schedule")
        return DataFacts(
            train_samples=counts[0],
            evaluation_samples=sum(counts[1:]),
            description=description,
            reasons={"data.workers": reason},
            unused=unused,
            left_out=tuple(sentence for each in self._splits.values() for sentence in each.left_out),
        )

    def _fingerprints(self) -> dict[str, str]:
        """Return digests of what no recipe tells, so that a resume can say what has changed."""
        given = {name: getattr(self.objects, name) for name in ("model", "loss", "metrics", "optimizer", "schedule")}
        given |= {"schedule_interval": self.objects.schedule_interval}
        given |= {"weights": self.objects.weights, "collate": [each.collate for each in self._splits.values()]}
        return {name: fingerprint(each) for name, each in given.items()}

    def _choose_workers(self, world: World) -> tuple[int, str]:
        requested = self.recipe.data.workers
        train = self.objects.train_set
        if isinstance(requested, int):
            return requested, "as the recipe says"
        if train.columns is not None:
            return 0, "tensors in memory need no loader processes"
        if train.workers is not None:
            return train.workers, "as the DataLoader says"
        if any(each.shared for each in self._readings.values()):
            return 0, "samples are read from an open file, whose position loader processes would share"
        seconds = self._readings[True].seconds
        batch = seconds and seconds * self.recipe.batch.global_size
        # With several processes, each measures another time, but all must choose the same number of workers.
        if batch is not None and batch < _FAST_SECONDS and world.world_size == 1:
            return 0, f"a batch is read in about {1000 * batch:.1f} ms"
        return share_of_cores(world)

    def open_pipeline(self, placement: Placement) -> Pipeline:
        """Open the stream of batches."""
        workers, _ = self._choose_workers(self._world)

        def split(*, training: bool) -> OpenedSplit:
            samples = self._splits.get(training, self.objects.train_set)

            def opened(_: Any) -> LoaderBackend:
                return LoaderBackend(
                    samples,
                    functools.partial(self._reader, training=training),
                    workers=0 if samples.columns is not None else workers,
                    prefetch=self.recipe.data.prefetch,
                    pin_memory=placement.device.type == "cuda",
                )

            return OpenedSplit(source=samples if training in self._splits else (), open=opened)  # type: ignore[arg-type]

        return ImagePipeline(
            train=split(training=True),
            evaluation=split(training=False),
            normalize=identity,
            placement=placement,
            has_workers=workers > 0,
        )

    def sample_weights(self) -> SampleWeights | None:
        """Return the weights that were given."""
        return None if self.objects.weights is None else self.objects.weights[0]

    # Network

    def build_model(self) -> nn.Module:
        """Return a copy of the network that was given, or one that the function makes."""
        return network_of(self.objects.model)

    def check_network(self, network: nn.Module) -> None:
        """Try the loss and the metrics on two samples, and the optimizer, without changing anything."""
        if any(isinstance(each, UninitializedParameter) for each in network.parameters()):
            raise ModelError("model has layers without sizes (Lazy…); call it once with a batch before.", key="model")
        if not any(each.requires_grad for each in network.parameters()):
            raise ModelError("model has no parameter that can be trained (requires_grad).", key="model")
        if any(each.is_meta for each in network.parameters()):
            return
        trial, compared = copy.deepcopy(network).train(), self._tried(_COMPARED, training=True)
        tried = self._with_loss(copied(self.objects.loss))
        optimizer = None
        if self.has_own_optimizer or self.objects.schedule is not None:
            optimizer = self.build_optimizer(trial, self.recipe.optimizer, torch.device("cpu"))
            if self.objects.schedule is not None:
                scheduled_twin(self.objects.schedule, optimizer)
        for training in self._splits:
            batch = self._tried(_TRIED, training=training)
            trial.train(training)
            score, method = (tried.loss, "loss") if training else (tried.score, "score")
            targets: Nested = ()
            with contextlib.suppress(ModelError):  # a loss of the model and the batch may need none
                targets = self._targets(batch)
            with torch.no_grad(), RefusedBroadcast(tried, method, targets):
                score(trial, batch)
        batches = self._tried(_TRIED, training=True), compared
        for each in unsaved(network, self.objects.loss, self._loss_with, batches):
            _LOG.warning("paceline: warning: %s", one_line(f"{each}; {_CONSEQUENCE}"))
        tried._check_mean(trial, compared)  # noqa: SLF001  # of this class
        if optimizer is not None and may_refuse_gradients(optimizer, trial):
            torch.autograd.backward(tried.loss(trial.train(), batches[0]))
            with explained("optimizer"):
                optimizer.step()

    def _loss_with(self, network: nn.Module, loss: Callable[..., Any], batch: Batch) -> Tensor:
        return self._with_loss(loss).loss(network, batch)

    def _with_loss(self, loss: Callable[..., Any]) -> Fit:
        other = copy.copy(self)
        other.objects = replace(self.objects, loss=loss)
        return other

    def _tried(self, count: int, *, training: bool) -> Batch:
        """Read a few samples: the last one tells whether `len()` is right, the extreme targets whether all fit."""
        samples = self._splits[training]
        extreme = [] if self._takes_model else _extreme_targets(samples)
        ids = dict.fromkeys([*extreme, *evenly_spaced(len(samples), count).tolist()])
        read = self._reader(training=training)[micro_batch(np.array([*ids][:count]))]
        if isinstance(read, Batch):
            return read
        hint = f"; its len() is {len(samples)}: make that the number of samples" if "IndexError" in read.message else ""
        raise DataError(f"{read.message}{hint}.") from None

    def _check_mean(self, trial: nn.Module, batch: Batch) -> None:
        """Check that a step's loss does not depend on how the step is divided.

        With one micro-batch in a step, the step is computed as in a plain loop, its smaller last batch included, and
        class weights are common: then it is only noted.

        Raises:
            ModelError: If it depends on it, and steps are divided here.
        """
        weights = None if self.objects.weights is None else self.objects.weights[0]
        weighing = np.ones(len(batch.ids), dtype=np.int64) if weights is None else weights[batch.ids]
        is_weighted = has_class_weights(self.objects.loss)
        if len(batch.ids) < _FEWEST or (not is_weighted and is_mean(self.loss, trial, batch, weighing)):
            return
        sizes = self.recipe.batch.sizes().values()
        parts = max(sizes) // micro_batch_size(self.recipe, self._world.world_size)
        found = (
            "loss is not the mean of its samples' losses (class weights, ignored targets, a sum or comparisons change "
            "it), so it depends on the size of micro-batches and the number of processes"
        )
        if parts > 1:
            raise ModelError(
                f"{found}, and a step has {parts} micro-batches here; return one value for each sample "
                "(reduction='none') and give weights=, or train with one process and without batch.micro_size.",
                key="loss",
                value=parts,
            )
        _LOG.warning("paceline: note: %s", one_line(f"{found}; each step has one micro-batch, as in a plain loop."))

    def build_optimizer(self, network: nn.Module, optimizer: Optimizer, device: torch.device) -> torch.optim.Optimizer:
        """Return the optimizer that was given, for this network; by default the recipe's."""
        if not self.has_own_optimizer:
            return super().build_optimizer(network, optimizer, device)
        return own_optimizer(self.objects.optimizer, network, optimizer.lr)

    def build_schedules(self, recipe: Recipe, plan: Plan, optimizer: torch.optim.Optimizer) -> Schedules:
        """Return the schedule that was given; by default the recipe's."""
        found = super().build_schedules(recipe, plan, optimizer)
        if self.objects.schedule is None:
            return found
        first_step = plan.epochs.first_step if self.objects.schedule_interval == "epoch" else None
        return OwnSchedules.of(self.objects.schedule, optimizer, first_step=first_step, base=found.learning_rate)

    # Loss and metrics

    def loss(self, model: Model, batch: Batch) -> Tensor:
        """Return the mean loss of a micro-batch."""
        _, loss = self._outputs_and_loss(model, batch, training=True)
        return self._mean(loss, batch)

    def _outputs_and_loss(self, model: Model, batch: Batch, *, training: bool) -> tuple[Any, Tensor]:
        if self._takes_model:
            return None, self._called("loss", self.objects.loss, model, batch.inputs)
        outputs = self._answer(model, batch.inputs)
        hint = functools.partial(wrong_class, outputs, batch, self._splits.get(training, self.objects.train_set))
        loss = self._called("loss", self.objects.loss, outputs, batch.targets, hint)
        note_own(outputs, batch.targets)
        return outputs, loss

    def _answer(self, model: Model, inputs: Nested) -> Any:
        try:
            return call(model, inputs)
        except PacelineError:
            raise
        except Exception as error:
            raise self._explained("the network", error, inputs, hint=unknown_names(model, inputs)) from error

    def _called(
        self, name: str, function: Callable[..., Any], first: Any, second: Any, hint: Callable[[], str] = str
    ) -> Any:
        try:
            return function(first, second)
        except PacelineError:
            raise
        except Exception as error:
            shown = (second,) if callable(first) else (first, second)
            raise self._explained(name, error, *shown, hint=hint()) from error

    def _explained(self, what: str, error: Exception, *arguments: Any, hint: str = "") -> Exception:
        if isinstance(error, torch.OutOfMemoryError):
            return error
        shapes = " and ".join(map(describe, arguments))
        text = " ".join(str(error).split()).removesuffix(".")
        if "dtype" in text and "float64" in shapes:
            text += "; NumPy's numbers are float64: give float32, for example x.astype('float32')"
        if "must be Tensor, not" in text:
            text += "; in a sample, give a tensor or an array of numbers, not a list"
        if "more than 1 value per channel" in text:
            count, key = len(self.objects.train_set), "batch.global_size"
            return ModelError(
                f"{what} cannot train on a single sample ({text}); choose another {key} or batch.micro_size, so that "
                f"no part of the {count} samples has only one.",
                key=key,
                value=self.recipe.batch.global_size,
            )
        return ModelError(f"{what} failed on {shapes}: {type(error).__name__}: {text}{hint}; correct it.", key=what)

    def _mean(self, loss: Any, batch: Batch) -> Tensor:
        """Return a loss as one number: itself, or the mean of one value for each sample."""
        count = len(batch.ids)
        if not isinstance(loss, Tensor) or not loss.is_floating_point():
            found = describe(loss)
            raise ModelError(f"loss returned {found}, but must return the batch's mean loss, a tensor.", key="loss")
        if loss.numel() == 1:
            return loss.reshape(())
        if loss.shape not in ((count,), (count, 1)):
            raise ModelError(
                f"loss returned {describe(loss)} for {count} samples; return the mean, or one value for each sample.",
                key="loss",
            )
        weights = self._weights_of(batch)
        flat = loss.reshape(count)
        return flat.mean() if weights is None else (flat * weights).sum() / weights.sum()

    def _weights_of(self, batch: Batch, *, training: bool = True) -> Tensor | None:
        weights = self.objects.weights
        chosen = None if weights is None else weights[0 if training else 1]
        if chosen is None:
            return None
        device = next((each.device for each in tensors_in(batch.inputs)), torch.device("cpu"))
        return torch.from_numpy(chosen[batch.ids]).to(device)

    def score(self, model: Model, batch: Batch) -> dict[str, Any]:
        """Return the loss and the metrics of each sample."""
        count = len(batch.ids)
        outputs, loss = self._outputs_and_loss(model, batch, training=False)
        mean = self._mean(loss, batch) if loss.numel() == 1 or self.objects.weights is None else loss
        values: dict[str, Any] = {"loss": loss.reshape(count) if loss.numel() == count > 1 else mean.expand(count)}
        if self._each_loss is not None and loss.numel() == 1 and self.objects.weights is None:
            values["loss"] = self._losses(outputs, batch, mean)
        if (weights := self._weights_of(batch, training=False)) is not None:
            values |= {"weight": weights, "loss": values["loss"] * weights}
        for name, metric in self._means.items():
            values[name] = self._values(name, metric, model, batch, outputs)
        if self._whole:
            values |= {"logit": self._outputs(model, batch, outputs), "label": self._targets(batch)}
        return values

    def _losses(self, outputs: Any, batch: Batch, mean: Tensor) -> Tensor:
        """Return each sample's loss, where their mean is the loss; else the loss for each sample."""
        assert self._each_loss is not None
        count = len(batch.ids)
        values = self._each_loss(outputs, batch.targets)
        if not isinstance(values, Tensor) or not values.ndim or len(values) != count:
            return mean.expand(count)
        each = values.reshape(count, -1).mean(dim=1)
        # With class weights or ignored targets the loss is no mean over samples. Nothing waits for the device.
        return torch.where(torch.isclose(each.mean(), mean, rtol=1e-4, atol=1e-6), each, mean)

    def _values(self, name: str, metric: Callable[..., Any], model: Model, batch: Batch, outputs: Any) -> Tensor:
        what, count = f"metrics[{name!r}]", len(batch.ids)
        if takes_model(metric):
            found = self._called(
                what, metric, model, batch.inputs if self._takes_model else (batch.inputs, batch.targets)
            )
        else:
            found = self._called(what, metric, self._outputs(model, batch, outputs), self._targets(batch))
        values: Tensor | None = None
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            values = torch.as_tensor(found)
        if values is None or values.numel() != count or (values.ndim == 0 and count > 1):
            raise ModelError(
                f"{what} returned {describe(found)} for {count} samples; return one value for each sample: the run "
                "takes the mean.",
                key=what,
            )
        return values.reshape(count)

    def _outputs(self, model: Model, batch: Batch, outputs: Any) -> Any:
        return outputs if outputs is not None else self._answer(model, divide(batch.inputs)[0])

    def _targets(self, batch: Batch) -> Any:
        return divide(batch.inputs)[1] if self._takes_model else batch.targets

    @property
    def gives_scores(self) -> bool:  # type: ignore[override]  # depends on what was given
        """Whether metrics of all held-out samples can be named."""
        return not self._takes_model

    def collectors(self) -> tuple[Collector, ...]:
        """Return what gathers the samples for torchmetrics."""
        return (NamedMetrics.of(self._whole),) if self._whole else ()

    def answers(self, model: Model, batch: Batch) -> Answers | None:
        """Return the predicted classes, if targets are class numbers and outputs are scores."""
        return None if self._takes_model else _classes(self._answer(model, batch.inputs), batch.targets)

    def predict(self, model: Model, batch: Batch) -> dict[str, Nested]:
        """Return the network's outputs and the targets, with the class of each if they are classes, for a file."""
        outputs = None if self._takes_model else self._answer(model, batch.inputs)
        found: dict[str, Nested] = {"output": outputs} if isinstance(outputs, Tensor) else {}
        if found and isinstance(batch.targets, Tensor):
            found["target"] = batch.targets
        if (classes := _classes(outputs, batch.targets)) is not None:
            found |= {"prediction": classes.predicted, "probability": classes.probability}
        return found

    def outputs(self, network: nn.Module, samples: Samples, batch_size: int) -> Any:
        """Return a network's outputs for samples with or without targets, in their order, on the CPU."""
        parts = self._parts(self._reader_of(self.objects.train_set)[first_samples(1)])
        reader, made = self._reader_of(samples), []
        with torch.no_grad():
            for first in range(0, len(samples), batch_size):
                ids = np.arange(first, min(first + batch_size, len(samples)))
                read = reader[micro_batch(ids)]
                batch = read.inputs if isinstance(read, Batch) else None
                if isinstance(read, ReadFailure):
                    raise DataError(read.message)
                has_targets = self._parts(read) == parts > 0
                made.append(self._answer(network, divide(batch)[0] if has_targets else without_wrapper(batch)))
        return joined_along_samples(made)

    def recall(self, saved: SavedWeights) -> None:
        """Need no data: the network is an object."""

    def predictor(self, saved: SavedWeights, device: torch.device) -> Predictor:
        """Refuse files: samples are objects.

        Raises:
            RecipeError: Always.
        """
        raise RecipeError(
            "the network of this run takes samples as objects, not files; call predict(data) of paceline.fit's result.",
            key="task",
            value="fit",
        )

    def exportable(self, saved: SavedWeights, target: str) -> Exportable:
        """Return the network, whose inputs are tensors of the shapes that the first and the last sample have."""
        from paceline.tasks.exportable import Exportable, inputs_of

        batch = self._tried(_TRIED, training=True)
        inputs = batch.inputs
        if self._takes_model:
            inputs = divide(inputs)[0] if self._parts(batch) else without_wrapper(inputs)
        network = self.trained(saved)
        return Exportable(network=network, inputs=inputs_of(network, inputs, target), longest={}, saved=saved)

    def _reader_of(self, samples: Samples) -> KeyedReader:
        return KeyedReader(samples, seed=self.recipe.seed, training=False)

    def _parts(self, read: Any) -> Any:
        """Return what distinguishes a batch with targets from one without; 0 if it has none."""
        batch = read.inputs if isinstance(read, Batch) else None
        if isinstance(batch, Mapping):
            return any(name in batch for name in _TARGET_NAMES)
        return len(batch) if isinstance(batch, list | tuple) and len(batch) > 1 else 0

    def description(self) -> dict[str, Any]:
        """Return the names of the classes, if the data set has them, as torchvision's do."""
        classes = getattr(self.objects.train_set.data, "classes", None)
        is_names = isinstance(classes, list | tuple) and all(isinstance(each, str) for each in classes)
        return {"class_names": list(classes)} if is_names and classes else {}


Fit.is_own = True  # computed as written, and its mistakes are explained

_CLIPPING = ("optimizer.clip_norm", "optimizer.clip_value", "optimizer.clip_adaptive")
_OF_ANY_NETWORK = (
    *("model.compile", "model.compile_backend", "model.channels_last", "model.frozen", "model.unfreeze"),
    *("model.freeze_after", "model.initialize_from", "model.initialize_partly", "model.activation_checkpointing"),
    *("model.adapters", "model.ghost_batch_norm"),
)


def _is_torchmetric(metric: Any) -> bool:
    return hasattr(metric, "compute") and hasattr(metric, "update")


def _is_better_higher(name: str, metric: Any) -> bool:
    given = getattr(metric, "higher_is_better", None)
    return bool(given) if given is not None else not any(word in name.lower() for word in _LOWER_IS_BETTER)


def divide(batch: Any) -> tuple[Nested, Nested]:
    """Divide a batch into inputs and targets: the last of several parts, or the part of a dict with such a name.

    Raises:
        ModelError: If it has no targets.
    """
    if isinstance(batch, Mapping):
        name = next((each for each in _TARGET_NAMES if each in batch), None)
        if name is not None:
            return {key: value for key, value in batch.items() if key != name}, batch[name]
        found = (
            f"are dicts with {', '.join(map(repr, batch))}, and none of them is {' or '.join(map(repr, _TARGET_NAMES))}"
        )
    elif isinstance(batch, list | tuple) and len(batch) > 1:
        return (batch[0] if len(batch) == 2 else tuple(batch[:-1])), batch[-1]
    else:
        found = "have no targets"
    raise ModelError(f"the samples {found}; name one so, or give loss(model, batch), for the whole batch.", key="loss")


def without_wrapper(batch: Any) -> Nested:
    """Return inputs without targets: the only part of samples that have one, or all parts."""
    if isinstance(batch, list | tuple):
        return batch[0] if len(batch) == 1 else tuple(batch)
    return batch


def call(model: Model, inputs: Nested) -> Any:
    """Call a network: with a dict by name, and with several inputs one by one, where its ``forward`` takes them so."""
    forward = _forward_of(model)
    if isinstance(inputs, Mapping) and _fits(forward, **inputs):
        return model(**inputs)
    if isinstance(inputs, tuple | list) and _fits(forward, *inputs):
        return model(*inputs)
    return model(inputs)


def unknown_names(model: Model, inputs: Nested) -> str:
    """Name the parts of a batch that a network's ``forward`` does not take, as the end of a sentence."""
    forward = _forward_of(model)
    if not isinstance(inputs, Mapping) or _fits(forward, **inputs):
        return ""
    given, taken = (", ".join(map(repr, each)) for each in (inputs, forward.parameters))
    return f"; the network's forward takes {taken}, and the samples have {given}: give both the same names"


def _extreme_targets(samples: Samples) -> list[int]:
    """Return the samples with the smallest and the largest target, where all are at hand as one number a sample."""
    columns = samples.columns or []
    target = divide(columns)[1] if isinstance(columns, Mapping) or len(columns) > 1 else None
    if not isinstance(target, Tensor) or target.ndim != 1 or target.dtype == torch.bool or target.is_complex():
        return []
    return [int(target.argmin()), int(target.argmax())]


def _classes(outputs: Any, targets: Any) -> Answers | None:
    """Return the predicted classes, if targets are class numbers and outputs are scores."""
    is_score = isinstance(outputs, Tensor) and outputs.ndim == 2 and outputs.shape[1] > 1
    is_class = isinstance(targets, Tensor) and targets.ndim == 1 and targets.dtype in _INTEGERS
    return Answers.of(outputs, targets.long()) if is_score and is_class else None


def _forward_of(model: Model) -> inspect.Signature:
    """Return what a network's ``forward`` takes; cached answers of a network are a method of its wrapper."""
    return inspect.signature(getattr(getattr(model, "__self__", model), "forward", model))


def _fits(signature: inspect.Signature, *arguments: Any, **named: Any) -> bool:
    try:
        signature.bind(*arguments, **named)
    except TypeError:
        return False
    return True


def one_by_one(loss: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return a loss of torch as it gives one value for each sample; None for another function."""
    if isinstance(loss, nn.Module) and getattr(loss, "reduction", None) == "mean":
        each = copy.copy(loss)
        each.reduction = "none"  # type: ignore[assignment]  # a plain attribute of torch's losses
        return each
    takes = not isinstance(loss, nn.Module) and "reduction" in _parameters(loss)
    return functools.partial(loss, reduction="none") if takes else None


def _parameters(function: Callable[..., Any]) -> Mapping[str, Any]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def describe(value: Nested) -> str:
    """Describe a batch or an answer by its shapes and types."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {describe(each)}" for key, each in value.items()) + "}"
    if isinstance(value, tuple | list) and len(value) <= 4:
        return "(" + ", ".join(map(describe, value)) + ")"
    return f"a {type(value).__name__}"
