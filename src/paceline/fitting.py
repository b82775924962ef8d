"""Training a network, data and a loss of your own, given as objects: :func:`paceline.fit`."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import numbers
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.utils.data import default_collate

from paceline.checkpoint.weights import load_trained
from paceline.errors import PacelineError, RecipeError, without_frames, wrong_kind
from paceline.optim.own import groups_of, own_optimizer
from paceline.parsing.arguments import folder, whole
from paceline.plugins.references import trusting_code
from paceline.recipe.load import Overrides, load_recipe, override_pairs
from paceline.tasks.given_objects import Objects, fingerprint, gather, network_of, take
from paceline.tasks.object_checks import naming_changes, naming_samples
from paceline.tasks.objects import Fit
from paceline.trainer.process_settings import restore_random_states
from paceline.trainer.result import TrainResult
from paceline.training import train

_LR = 1e-3
_BATCH = 64


class FitResult(TrainResult):
    """How a run of :func:`fit` ended."""

    @functools.cached_property
    def task(self) -> Fit:
        """The task that the objects became."""
        assert self.make_task is not None
        with trusting_code():  # the recipe names what was given, and nothing of it is imported
            return cast(Fit, self.make_task(load_recipe(self.run_dir).recipe))

    @functools.cached_property
    def model(self) -> nn.Module:
        """The network with the weights of its best evaluation, or the newest without one; in evaluation mode.

        A network that was given as an object is that object.
        """
        given = self.task.objects.model
        if not isinstance(given, nn.Module):
            return super().model
        load_trained(given, self._saved())
        return given.cpu().eval()

    def predict(self, data: Any, *, batch_size: int = 64) -> Any:
        """Return the network's outputs for samples, in their order, with or without targets.

        Args:
            data: Anything that :func:`fit` takes as data.
            batch_size: Samples for each call of the network.
        """
        size = whole("batch_size", batch_size, 1)
        collate = self.task.objects.train_set.collate
        samples = take(data, "data", None if collate is default_collate else collate)
        return self.task.outputs(self.model, samples, size)

    def export(self, output: str | Path, *, format: str = "safetensors") -> Path:  # noqa: A002  # the option of paceline export
        """Write the weights of :attr:`model` for other programs, and return the path.

        Args:
            output: The new file.
            format: ``safetensors``, ``onnx`` or ``torch-export``; the last two are compared with the network.

        Raises:
            PacelineError: If the format cannot hold the network, or the file exists.
        """
        from paceline.inference.export import ExportRequest, export
        from paceline.inference.formats import formats

        if not isinstance(format, str) or format not in formats():
            raise RecipeError(
                f"format is {format!r}; choose one of {', '.join(formats())}.", key="format", value=format
            )
        request = ExportRequest(
            target=self.run_dir,
            output=folder("output", output, error=RecipeError),
            form=format,
            best=self._has_best,
            task=self.make_task,
        )
        with trusting_code():
            export(request)
        return request.output


@without_frames
def fit(
    model: nn.Module | Callable[[], nn.Module],
    train_set: Any,
    held_out: Any = None,
    *,
    loss: Callable[..., Any] | None = None,
    metrics: Mapping[str, Any] | None = None,
    optimizer: Any = "adamw",
    lr: float | None = None,
    epochs: float | None = None,
    batch_size: int | None = None,
    seed: int | None = None,
    run_dir: str | Path | None = None,
    overrides: Overrides = (),
    collate: Callable[[list[Any]], Any] | None = None,
    weights: Any = None,
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
    schedule_interval: str = "step",
    processes: int = 1,
    callbacks: Sequence[object] = (),
    workers: int | str = "auto",
    resume: str = "auto",
    quiet: bool = False,
) -> FitResult:
    """Train your network on your data; the same call resumes a run that was interrupted, bit for bit.

    Everything of a recipe holds, as for :func:`train`: checkpoints, records, report, several processes. Before each
    ``train_set[i]`` the generators of Python, NumPy, torch and albumentations are seeded by seed, epoch and ``i``, so
    random transforms are the same with any number of workers and after any resume. Arithmetic is fp32 unless
    ``train.precision`` asks for less.

    Args:
        model: A module, or a function that makes one, whose initial weights ``seed`` then draws.
        train_set: A data set with ``len()`` and ``[i]``; a tuple or dict of tensors or arrays; a DataLoader, which is
            taken apart; or a function that makes one of these.
        held_out: The samples to score after each epoch, likewise; None for none.
        loss: ``loss(outputs, targets)``, the mean over the batch; or, with a first parameter called ``model``,
            ``loss(model, batch)`` with the batch as ``collate`` made it. A batch's last part is its targets, or the one
            called ``labels`` or ``targets`` in a dict; the others are the network's arguments.
        metrics: By name: a function of outputs and targets (or model and batch) that returns one value for each
            sample, or a metric of torchmetrics.
        optimizer: A recipe's name, such as ``adamw``; a class of torch; or a function of the parameters.
        lr: The peak learning rate; by default 0.001, or that of the function.
        epochs: Length of the run; by default 10.
        batch_size: Samples in a step, over all processes; by default the DataLoader's, or 64.
        seed: Seed of the order of samples, of random transforms and dropout; by default 0.
        run_dir: The run directory; by default a new one under ``runs/``.
        overrides: Any other key of a recipe, ``{"train.ema": 0.999}``.
        collate: Makes a batch of a list of samples; by default torch's function.
        weights: What each sample counts for in the loss, such as its tokens, where the loss is a mean over these:
            a function of a sample, or a pair of arrays of whole numbers for both data sets.
        schedule: A function from the optimizer to a scheduler of torch; by default the learning rate is constant.
        schedule_interval: ``step`` or ``epoch``: when the scheduler moves.
        processes: Number of processes on this machine.
        callbacks: As for :func:`train`.
        workers: Loader processes for each process; 0 reads in the training process.
        resume: As for :func:`train`.
        quiet: Show no progress.

    Raises:
        PacelineError: For every mistake, in one sentence, before the first step.

    Example:
        >>> result = paceline.fit(Net(), train_set, held_out, loss=F.cross_entropy, epochs=3, run_dir="runs/mine")
        >>> result.metrics["loss"], result.model
    """
    parts = {"model": model, "train_set": train_set, "held_out": held_out, "collate": collate, "weights": weights}
    parts |= {"loss": loss, "optimizer": _own_optimizer(optimizer, model), "schedule": schedule}
    chosen = _Overrides(overrides)
    with restore_random_states(None), chosen.naming_arguments():
        objects = gather(**parts, metrics=_checked_metrics(metrics), schedule_interval=schedule_interval)
        chosen.set("epochs", "train.duration", _duration(epochs))
        chosen.set("batch_size", "batch.global_size", batch_size, objects.train_set.batch_size or _BATCH)
        chosen.set("seed", "seed", seed)
        chosen.set("workers", "data.workers", None if workers == "auto" else workers)
        chosen.set("optimizer", "optimizer.name", optimizer if isinstance(optimizer, str) else None)
        _set_rate(chosen, objects, lr)
        if schedule is None:
            chosen.set("schedule", "schedule.name", None, "constant")
        given = parts | {"optimizer": None if isinstance(optimizer, str) else optimizer}
        names = {key: _name(value) for key, value in given.items() if value is not None}
        names |= {f"metrics.{key}": _name(value) for key, value in objects.metrics.items()}
        chosen.set("fit", "task", "fit")
        chosen.set("fit", "objects", names)
        with naming_samples(objects), naming_changes(objects, run_dir):
            trained = train(
                overrides=chosen.values,
                run_dir=run_dir,
                resume=resume,
                task=functools.partial(Fit, objects=objects),
                callbacks=callbacks,
                processes=processes,
                quiet=quiet,
            )
        result = FitResult(**vars(trained))
        if isinstance(model, nn.Module):
            result.model  # noqa: B018  # the object gets its weights, as with other trainers
    return result


def _duration(epochs: Any) -> str | None:
    """Return the length of a run as a recipe has it.

    Raises:
        RecipeError: If it is not a positive number.
    """
    if epochs is None:
        return None
    if isinstance(epochs, bool) or not isinstance(epochs, numbers.Real) or not 0 < float(epochs) < math.inf:
        raise RecipeError(f"epochs is {epochs!r}; give a number above 0.", key="epochs", value=epochs)
    return f"{epochs} epochs"


def _set_rate(chosen: _Overrides, objects: Objects, lr: float | None) -> None:
    """Set the peak learning rate: what was asked, a usual one, or that of a function.

    Raises:
        RecipeError: If it was given twice.
    """
    own = objects.optimizer
    if own is None or inspect.isclass(own):
        chosen.set("lr", "optimizer.lr", lr, _LR)
    elif lr is not None:
        raise RecipeError(f"lr={lr}, but optimizer is a function that sets it; leave one out.", key="lr", value=lr)
    else:
        chosen.set("the lr of optimizer", "optimizer.lr", _lr_of(own, objects.model))


_WORDS = (
    ("the defaults: ", ""),
    ("of another recipe", "with other arguments"),
    (", or repeat its own recipe: .*", ", or give the same again."),
    ("the data of (.*) has changed since .* restore them", r"train_set or held_out of \1 was another; give it"),
    ("another run directory", "another run_dir"),
    (r" \(paceline\.tasks\.objects:Fit\.sample_weights\)", ""),
    (r"(paceline\.tasks\.objects:)?\bFit\.", ""),
    (r"override '(\w+)': unknown key '\1'\. Did you mean '\1'\?", r"overrides has '\1'; give the argument \1."),
)


class _Overrides:
    """Overrides by key; an argument and an override of the same key are refused."""

    def __init__(self, overrides: Overrides) -> None:
        self.values = dict(override_pairs(overrides))
        self._arguments = {"data.path": "train_set", "digest": "train_set", "evaluate.metrics": "metrics"}

    @contextlib.contextmanager
    def naming_arguments(self) -> Iterator[None]:
        """Name arguments in the errors of the block, not the keys that they set."""
        try:
            yield
        except PacelineError as error:
            error.args = tuple(self._in_arguments(str(each)) for each in error.args)
            error.key = self._arguments.get(error.key or "", error.key)
            raise

    def _in_arguments(self, text: str) -> str:
        text = re.sub(r"\b[a-z]+\.[a-z_]+\b", lambda key: self._arguments.get(key[0], key[0]), text)
        for recipe_words, words in _WORDS:
            text = re.sub(recipe_words, words, text)
        return text

    def set(self, argument: str, key: str, value: Any, default: Any = None) -> None:
        """Set a key, unless it has no value and the overrides set it.

        Raises:
            RecipeError: If both do.
        """
        value = value.item() if isinstance(value, np.generic) else value
        if value is not None and key in self.values:
            raise RecipeError(f"{argument}={value} and overrides set {key}={self.values[key]}; leave one out.", key=key)
        if key not in self.values:
            self._arguments[key] = argument
        if value is not None or (default is not None and key not in self.values):
            self.values[key] = default if value is None else value


def _own_optimizer(optimizer: Any, model: Any) -> Any:
    """Return a class or function that makes the optimizer; None for a recipe's name."""
    if isinstance(optimizer, str):
        return None
    if isinstance(optimizer, torch.optim.Optimizer):
        return _remade(optimizer, model)
    if not callable(optimizer):
        raise wrong_kind("optimizer", optimizer, "a name such as 'adamw', a class or a function of the parameters")
    return optimizer


def _remade(optimizer: torch.optim.Optimizer, model: Any) -> Any:
    """Return a function that makes an optimizer like one that was given, for a copy of its network."""
    parameters = [*model.parameters()] if isinstance(model, nn.Module) else []
    held = {id(each) for group in groups_of(optimizer) for each in group["params"]}
    if not held <= {*map(id, parameters)}:
        raise RecipeError(
            "optimizer holds parameters that are not the model's; give a class or a function of the parameters.",
            key="optimizer",
        )
    # It is made for the parameters that are trained.
    places = {id(each): place for place, each in enumerate(each for each in parameters if each.requires_grad)}
    groups = [
        {**group, "params": [places[id(each)] for each in group["params"] if id(each) in places]}
        for group in optimizer.param_groups
    ]
    kind, defaults = type(optimizer), dict(optimizer.defaults)
    accepted = inspect.signature(kind).parameters

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        theirs = [{**group, "params": [parameters[place] for place in group["params"]]} for group in groups]
        return kind(theirs, **{key: value for key, value in defaults.items() if key in accepted})

    return make


def _lr_of(optimizer: Callable[..., Any], model: Any) -> float:
    """Return the learning rate that a function gives the optimizer's first group."""
    network = model if isinstance(model, nn.Module) else network_of(model)
    return float(own_optimizer(optimizer, network, None).param_groups[0]["lr"])


def _checked_metrics(metrics: Mapping[str, Any] | None) -> dict[str, Any]:
    if metrics is not None and not isinstance(metrics, Mapping):
        raise wrong_kind("metrics", metrics, "a dict of functions by name")
    found = dict(metrics or {})
    for name, each in found.items():
        if name in ("weight", "label"):
            raise RecipeError(f"metrics has {name!r}, a name that scores use; choose another.", key="metrics")
        if not isinstance(name, str) or not name.isidentifier() or not callable(each):
            raise RecipeError(
                f"metrics has {name!r}: {type(each).__name__}; give a name of letters, digits and underscores, and a "
                "function or a metric of torchmetrics.",
                key="metrics",
            )
    return found


def _name(value: Any) -> str:
    """Return ``module:name`` of what can be imported; otherwise what it is."""
    if isinstance(value, nn.Module) and _is_plain(value):
        value = type(value)
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if isinstance(module, str) and isinstance(name, str):
        if module != "__main__" and name.isidentifier() and getattr(sys.modules.get(module), name, None) is value:
            return f"{module}:{name}"
        return f"{name} of {module}"
    kind = type(value)
    home = sys.modules.get(kind.__module__)
    for name, each in vars(home).items() if home is not None and kind.__module__ != "__main__" else ():
        if each is value:
            return f"{kind.__module__}:{name}"
    return f"a {kind.__name__} of {kind.__module__}"


def _is_plain(module: nn.Module) -> bool:
    """Whether a module is what its class makes without arguments, but for its weights."""
    try:
        with torch.random.fork_rng(devices=()):
            plain = type(module)()
    except Exception:  # noqa: BLE001  # it needs arguments
        return False
    shapes = [{name: each.shape for name, each in one.state_dict().items()} for one in (plain, module)]
    return shapes[0] == shapes[1] and fingerprint(plain) == fingerprint(module)
