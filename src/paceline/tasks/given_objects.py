"""What `paceline.fit` was given, checked; or what the recipe of its run names."""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass
from enum import Enum
from os import PathLike
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.data.objects.parts import is_of_library, names_in_module
from paceline.data.objects.purity import bytes_of
from paceline.data.objects.samples import Samples, take_apart
from paceline.data.slices import SampleWeights
from paceline.errors import DataError, ModelError, PacelineError, RecipeError, wrong_kind
from paceline.optim.own import explained
from paceline.parsing.arguments import check_made
from paceline.plugins.references import is_reference, load_reference
from paceline.recipe.schema import Recipe

_SETTINGS = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, Enum)
_COLUMNS = (list, torch.Tensor, np.ndarray)
VALUES = (*_SETTINGS, tuple, torch.Tensor, np.ndarray)
"""What has no parts that may change without it."""
_MODEL_NAMES = {"model", "net", "network", "module"}


@dataclass(frozen=True, kw_only=True)
class Objects:
    """What `paceline.fit` was given; see there.

    Attributes:
        weights: Whole numbers that weigh the training samples in the loss, and the held-out samples; None: all alike.
        optimizer: Makes the optimizer from the network; None for the recipe's.
        schedule: Makes a torch scheduler from the optimizer; None for the recipe's.
        schedule_interval: ``step`` or ``epoch``: how often the scheduler moves.
    """

    model: nn.Module | Callable[[], nn.Module]
    train_set: Samples
    held_out: Samples | None
    loss: Callable[..., Any]
    metrics: Mapping[str, Any] = field(default_factory=dict)
    weights: tuple[SampleWeights, SampleWeights | None] | None = None
    optimizer: Any = None
    schedule: Any = None
    schedule_interval: str = "step"


def named_objects(recipe: Recipe) -> Objects:
    """Return the objects whose names a recipe holds.

    Raises:
        RecipeError: If one of them is in no module that can be imported.
    """
    found: dict[str, Any] = {}
    for key, name in recipe.objects.items():
        if not is_reference(name):
            raise RecipeError(
                f"this run's {key} is {name}, which no command can import; call paceline.fit again with the same "
                "objects, for its result's predict(data), evaluate() and export(path), or put it at the top of a "
                "module, where it or a function that makes it has a name.",
                key=f"objects.{key}",
                value=name,
            )
        value = load_reference(name, RecipeError)
        found[key] = value() if inspect.isclass(value) and (key == "loss" or key.startswith("metrics.")) else value
    if missing := [key for key in ("model", "train_set", "loss") if key not in found]:
        raise RecipeError(
            f"task=fit needs objects.{missing[0]}; runs of paceline.fit name it.", key=f"objects.{missing[0]}"
        )
    metrics = {key.removeprefix("metrics."): each for key, each in found.items() if key.startswith("metrics.")}
    return gather(**{key: each for key, each in found.items() if "." not in key}, metrics=metrics)


def gather(
    *,
    model: Any,
    train_set: Any,
    loss: Any,
    held_out: Any = None,
    metrics: Mapping[str, Any] | None = None,
    collate: Any = None,
    weights: Any = None,
    **others: Any,
) -> Objects:
    """Return what was given, with its data taken apart.

    Raises:
        PacelineError: If something is of the wrong kind.
    """
    if others.get("schedule_interval", "step") not in ("step", "epoch"):
        found = others["schedule_interval"]
        raise RecipeError(f"schedule_interval is {found!r}; choose 'step' or 'epoch'.", key="schedule_interval")
    if not (collate is None or callable(collate)):
        raise wrong_kind("collate", collate, "a function that makes a batch of a list of samples")
    train = take(train_set, "train_set", collate)
    scored = None if held_out is None else take(held_out, "held_out", collate)
    if not callable(model):
        raise wrong_kind("model", model, "a torch.nn.Module, or a function that makes one")
    if isinstance(model, torch.jit.ScriptModule):
        raise wrong_kind("model", model, "the module that it was made of, since TorchScript takes no hooks")
    check_made("model", model, error=ModelError)
    if isinstance(model, nn.Module) and any(each.is_meta for each in model.parameters()):
        raise RecipeError("model has no values (device meta); give it some, or a function that makes it.", key="model")
    _check_loss(loss, model)
    if (schedule := others.get("schedule")) is not None and not callable(schedule):
        kind = type(schedule).__name__ if isinstance(schedule, torch.optim.lr_scheduler.LRScheduler) else "StepLR"
        raise wrong_kind("schedule", schedule, f"a function of the optimizer: lambda optimizer: {kind}(optimizer, ...)")
    if metrics and scored is None:
        raise RecipeError(
            f"metrics has {', '.join(metrics)}, which are computed on held-out samples; give held_out.", key="metrics"
        )
    return Objects(
        model=model,
        train_set=train,
        held_out=scored,
        loss=loss,
        metrics=dict(metrics or {}),
        weights=None if weights is None else weigh(weights, train, scored),
        **others,
    )


def _check_loss(loss: Any, model: Any) -> None:
    """Refuse what is not a loss.

    Raises:
        RecipeError: Saying what to give.
    """
    if loss is None and hasattr(model, "training_step"):
        raise RecipeError(
            "loss is missing, and the model has a training_step; give loss=lambda model, batch: "
            "model.training_step(batch, 0), and what its configure_optimizers makes as functions: optimizer=lambda "
            "parameters: …, schedule=lambda optimizer: ….",
            key="loss",
        )
    if loss is None:
        raise RecipeError(
            "loss is missing; give loss=torch.nn.functional.cross_entropy for classes, mse_loss for numbers, or, if "
            "the model returns its loss, loss=lambda model, batch: model(*batch).",
            key="loss",
        )
    if inspect.isclass(loss) or not callable(loss):
        raise wrong_kind("loss", loss, f"{loss.__name__}()" if callable(loss) else "a function such as F.cross_entropy")
    if isinstance(loss, nn.Module) and (own := [name for name, _ in loss.named_parameters()]):
        raise RecipeError(
            f"loss has its own parameters ({', '.join(own[:3])}), which would not be trained: make them part of the "
            "model, and give loss(model, batch).",
            key="loss",
        )


def network_of(given: Any) -> nn.Module:
    """Return a copy of the network that was given, or one that the function makes.

    Raises:
        ModelError: If it makes none.
    """
    try:
        network = copy.deepcopy(given) if isinstance(given, nn.Module) else given()
    except Exception as error:
        if isinstance(error, PacelineError | torch.OutOfMemoryError):
            raise
        # Copying a module without values raises the latter; other errors are of the user's own __deepcopy__.
        if isinstance(given, nn.Module) and not isinstance(error, NotImplementedError):
            raise
        raise ModelError(
            f"model failed with {type(error).__name__}: {error}; give a module with values, or a function that makes "
            "one without arguments.",
            key="model",
        ) from error
    if not isinstance(network, nn.Module):
        raise ModelError(
            f"model returned a {type(network).__name__}, but it must return a torch.nn.Module.", key="model"
        )
    check_made("model", network, error=ModelError)
    return network


def take(given: Any, role: str, collate: Any) -> Samples:
    """Return the samples of what was given as data, or of what the function makes.

    Raises:
        PacelineError: If it is no data.
    """
    with explained(role):
        made = given() if is_maker(given) else given
    if not (isinstance(made, PathLike) or hasattr(made, "__iter__") or hasattr(made, "__getitem__")):
        raise wrong_kind(role, made, "a data set with len() and [i], a tuple of tensors or arrays, or a DataLoader")
    return take_apart(_in_tensors(made, role) if collate is None else made, role, collate)


def _in_tensors(data: Any, role: str) -> Any:
    """Convert lists of numbers or tensors to tensors; return other data unchanged.

    Raises:
        DataError: If a column is no array of numbers, or columns are in a list.
    """
    columns = [*data.values()] if isinstance(data, dict) else data
    if not isinstance(columns, list | tuple) or not all(isinstance(each, _COLUMNS) for each in columns):
        return data
    if any(isinstance(each, torch.Tensor) and each.layout != torch.strided for each in columns):
        raise DataError(f"{role} has a sparse tensor; give its to_dense().", key=role)
    is_list = [isinstance(each, list) for each in columns]
    if isinstance(data, dict):
        return {key: _column(each, role) for key, each in data.items()}
    fewest = min((len(each) for each in columns if isinstance(each, list) or each.ndim), default=0)
    if not any(is_list) or fewest <= len(columns):
        return data  # as many rows as columns, or fewer: samples that are lists
    if isinstance(data, tuple):
        return tuple(_column(each, role) for each in data)
    if all(is_list) and len({type(each[0]) for each in data}) > 1:
        raise DataError(
            f"{role} is a list of {len(data)} lists; give a tuple of them, since a list holds samples.", key=role
        )
    return data


def _column(values: Any, role: str) -> Any:
    """Return one row for each value.

    Raises:
        DataError: If they are not numbers, or differ in shape.
    """
    if not isinstance(values, list):
        return values
    try:
        if values and isinstance(values[0], torch.Tensor | np.ndarray):
            return torch.stack([*map(torch.as_tensor, values)])
        return torch.tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        text = " ".join(str(error).split())
        raise DataError(
            f"{role} has a list that is no column of numbers ({text}); give arrays with one row for each sample, or a "
            "data set with len() and [i].",
            key=role,
        ) from None


def is_maker(data: Any) -> bool:
    """Whether data is a function that makes them, and not data."""
    return inspect.isfunction(data) or (inspect.isclass(data) and not hasattr(data, "__class_getitem__"))


def weigh(weights: Any, train: Samples, held_out: Samples | None) -> tuple[SampleWeights, SampleWeights | None]:
    """Return the weights of training and held-out samples, as whole numbers.

    Args:
        weights: A function of a sample, or one array; or a pair of arrays, for both sets.
        train: The training samples.
        held_out: The held-out samples.

    Raises:
        RecipeError: If they do not fit the samples.
    """
    if callable(weights):
        sets = (train,) if held_out is None else (train, held_out)
        with explained("weights"):
            counted = [np.array([weights(each.read(i)) for i in range(len(each))]) for each in sets]
    else:
        is_pair = isinstance(weights, tuple) or (
            isinstance(weights, list) and len(weights) == 2 and not isinstance(weights[0], int)
        )
        pair = weights if is_pair else (weights,)
        counted = [np.asarray(each) for each in pair]
    expected = [len(each) for each in (train, held_out) if each is not None]
    for role, array in zip(("train_set", "held_out"), counted, strict=False):
        if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
            raise RecipeError(
                f"weights for {role} are {array.dtype} {list(array.shape)}; give one whole number a sample.",
                key="weights",
            )
    if [len(each) for each in counted] != expected:
        numbers, samples = (" and ".join(map(str, each)) for each in (map(len, counted), expected))
        raise RecipeError(
            f"weights has {numbers} numbers for {samples} samples; give a function of a sample, or an array for each "
            "data set.",
            key="weights",
        )
    whole = [each.astype(np.int64) for each in counted]
    return whole[0], whole[1] if held_out is not None else None


def takes_model(function: Callable[..., Any]) -> bool:
    """Whether a loss or metric is called with the model and the batch: its first parameter has such a name."""
    try:
        parameters = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return False
    return bool(parameters) and parameters[0] in _MODEL_NAMES


def fingerprint(value: Any) -> str:
    """Return a digest of what code does, as far as can be seen.

    That is a function's code and the values it is bound to; and a module's layers and settings, without its weights.
    After a dash follows a digest of what its functions use of their module; earlier versions had none.
    """
    seen: dict[int, Any] = {}
    digests = [_digest(_text(value, seen))]
    if read := _read_by([each for each in seen.values() if isinstance(each, FunctionType)]):
        digests.append(_digest(str(read)))
    return "-".join(digests)


def _digest(text: str) -> str:
    text = re.sub(r" at 0x[0-9a-f]+", "", text)  # differs from process to process
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _read_by(functions: list[FunctionType]) -> list[tuple[str, str]]:
    """Return the values and functions of their module that functions of yours use by name."""
    found, known = [], [*functions]
    for function in known:
        for name, each in () if is_of_library(function.__code__) else names_in_module(function):
            is_theirs = isinstance(each, FunctionType) and each.__module__ == function.__module__
            if is_theirs and each not in known:
                known.append(each)
            if is_theirs or isinstance(each, VALUES):
                found.append((name, _text(each, {})))
    return found


def _text(value: Any, seen: dict[int, Any]) -> str:
    if isinstance(value, _SETTINGS):
        return repr(value)
    text = functools.partial(_text, seen=seen)
    if isinstance(value, tuple):
        return str([*map(text, value)])
    if isinstance(value, set | frozenset):
        return str(sorted(map(text, value)))
    if id(value) in seen:  # it may lead back to itself
        return "seen"
    seen[id(value)] = value  # kept, so that no other object gets this id
    if isinstance(value, CodeType):
        return f"{value.co_code.hex()} {value.co_names} {text(value.co_consts)}"
    if isinstance(value, torch.Tensor | np.ndarray):
        content = b"" if isinstance(value, nn.Parameter) else bytes_of(value)
        return hashlib.sha256(content).hexdigest()
    if isinstance(value, Mapping):
        return str({str(name): text(each) for name, each in value.items()})
    if isinstance(value, list):
        return str([*map(text, value)])
    if isinstance(value, nn.Module):
        own = vars(nn.Module()).keys()  # training and the registers of layers and weights
        settings = [{key: each for key, each in vars(part).items() if key not in own} for part in value.modules()]
        has_weights = any(True for _ in value.parameters())
        return f"{value!r} {text(settings)} {'' if has_weights else text(value.state_dict())}"
    return f"{getattr(value, '__qualname__', type(value).__qualname__)} {text(_bound(value))}"


def _bound(value: Any) -> tuple[Any, ...]:
    """Return what a function or an object that is called consists of; nothing of other objects, which may change."""
    if isinstance(value, type):
        return ()
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if isinstance(value, MethodType):
        return value.__func__, value.__self__
    if isinstance(value, FunctionType) and value.__globals__.get("__name__", "").startswith("torch."):
        return (getattr(value, "__wrapped__", None),)  # such as torch.compile's, which holds counters
    if isinstance(value, FunctionType):
        cells = [each.cell_contents for each in value.__closure__ or ()]
        return value.__code__, cells, value.__defaults__, value.__kwdefaults__
    is_own = callable(value) and not type(value).__module__.startswith("torch.")
    return (getattr(value, "__dict__", None),) if is_own or is_dataclass(value) else ()
