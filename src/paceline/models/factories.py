"""Call the model factory that a recipe names, built-in or the user's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from torch import nn

from paceline.errors import ModelError, did_you_mean
from paceline.plugins.references import is_reference, load_reference
from paceline.recipe.model import ModelSection

TORCHVISION = "torchvision:"
# Other weights than the newest, where a network's preprocessing fits only those.
BACKBONE_WEIGHTS = {"ssd300_vgg16": "IMAGENET1K_FEATURES"}
NO_WEIGHTS = "it has no published weights; model.initialize_from takes your own file"


def named_factory(model: ModelSection, own_models: Mapping[str, Callable[..., Any]]) -> Callable[..., Any] | None:
    """Return the factory of a built-in or user-defined name; None for any other name.

    Raises:
        ModelError: If a reference cannot be resolved, or pretrained weights are requested, which neither kind has.
    """
    if model.name not in own_models and not is_reference(model.name):
        return None
    if model.pretrained:
        message = "your own model loads its weights itself, or through model.initialize_from"
        why = NO_WEIGHTS if model.name in own_models else message
        raise ModelError(f"model.pretrained=true has no effect with model.name={model.name}: {why}.")
    factory: Callable[..., Any] = own_models.get(model.name) or load_reference(model.name, ModelError)
    return factory


def unknown_model(model: ModelSection, kind: str, known: Iterable[str], hint: str = "") -> ModelError:
    """Return the error for an unknown network name, with the nearest names.

    Args:
        model: The recipe's section.
        kind: The kind of network.
        known: Names of that kind.
        hint: Text about the known names; by default all are listed.
    """
    known = list(known)
    hint = hint or f"It is {', '.join(known)}, or your own package.module:factory."
    return ModelError(f"unknown {kind} '{model.name}'.{did_you_mean(model.name, known)} {hint}")


def no_weights(model: ModelSection, error: object, of: str = "") -> ModelError:
    """Return the error for unavailable pretrained weights."""
    return ModelError(
        f"model.pretrained=true: the published weights of {of}{model.name} could not be downloaded "
        f"({' '.join(str(error).split())[:200]}); set model.pretrained=false, or model.initialize_from to a local file."
    )


def check_options(network: str, rules: Iterable[tuple[str, object, object, str]]) -> None:
    """Reject out-of-range options of a built-in network.

    Args:
        network: Name of the network.
        rules: Name and value of each option, whether it is valid, and the rule.

    Raises:
        ModelError: Naming the first invalid option.
    """
    for name, value, holds, rule in rules:
        if not holds:
            raise ModelError(f"model.options.{name}={value}: {network} needs {name} {rule}; change it.")


_RULES: dict[Any, str] = {
    int: "a whole number",
    int | None: "a whole number",
    float: "a number",
    float | None: "a number",
    bool: "true or false",
    str: "text",
    Sequence[int]: "a list of whole numbers",
}


def check_types(model: ModelSection, factory: Callable[..., Any]) -> None:
    """Reject options of a built-in network whose type differs from the factory's annotation.

    Raises:
        ModelError: Naming the first invalid option.
    """
    for name, parameter in inspect.signature(factory, eval_str=True).parameters.items():
        if name not in model.options or parameter.kind is inspect.Parameter.VAR_KEYWORD:
            continue
        value, kind = model.options[name], parameter.annotation
        try:
            TypeAdapter(kind, config=ConfigDict(strict=True, allow_inf_nan=False)).validate_python(value)
        except ValidationError as error:
            rule = _RULES.get(kind) or error.errors()[0]["msg"].removeprefix("Input should be ")
            raise ModelError(f"model.options.{name}={value!r}: {model.name} needs {name} as {rule}.") from None


def call_factory(model: ModelSection, factory: Callable[..., Any], **sizes: Any) -> nn.Module:
    """Call a factory with the recipe's options, and with those sizes that it accepts.

    Raises:
        ModelError: If options are unknown or do not fit, or the result is not a network.
    """
    try:
        parameters = inspect.signature(factory).parameters
        takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
        known = [name for name in parameters if name not in sizes]
        unknown = [] if takes_all or is_reference(model.name) else [name for name in model.options if name not in known]
        if unknown:
            raise ModelError(
                f"model.options {unknown} are unknown to {model.name}.{did_you_mean(unknown[0], known)} It has "
                f"{', '.join(known)}."
            )
        if not is_reference(model.name):
            check_types(model, factory)
        network = factory(
            **{name: size for name, size in sizes.items() if takes_all or name in parameters}, **model.options
        )
    except (TypeError, ValueError) as error:
        raise ModelError(f"model.name={model.name}: model.options {model.options} do not fit: {error}.") from error
    if not isinstance(network, nn.Module):
        raise ModelError(
            f"model.name={model.name}: the factory returned a {type(network).__name__}, not a torch.nn.Module."
        )
    return network


def mix_in(modules: Iterable[nn.Module], mixin: type[nn.Module], **attributes: Any) -> None:
    """Prepend a mixin to the modules' classes, in place: parameters, buffers, names and copies are unchanged.

    Args:
        modules: Modules of the same class share one new class, so that they compile as one kind.
        mixin: Overrides their methods.
        attributes: Attributes of the new classes.
    """
    classes: dict[type[nn.Module], type[nn.Module]] = {}
    for module in modules:
        kind = type(module)
        if kind not in classes:
            classes[kind] = type(kind.__name__, (mixin, kind), {"__module__": kind.__module__, **attributes})
        module.__class__ = classes[kind]
