"""The learning rate and weight decay of each parameter."""

from __future__ import annotations

import fnmatch
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from paceline.classifier import classifier_layers
from paceline.errors import ModelError
from paceline.plan import ParameterGroupFacts
from paceline.recipe.training import CLASSIFIER, Optimizer


@dataclass(frozen=True, kw_only=True)
class Treatment:
    """How the optimizer treats a parameter.

    Attributes:
        source: Reason: a pattern of ``optimizer.groups``, or the kind of parameter.
        lr_factor: Factor on the schedule's learning rate.
        weight_decay: Its weight decay.
        decay_moves: Whether ``schedule.weight_decay`` applies to it.
    """

    source: str
    lr_factor: float = 1.0
    weight_decay: float
    decay_moves: bool = True


Groups = list[dict[str, Any]]
"""Parameter groups in the format of torch's optimizers."""


def parameter_groups(model: nn.Module, optimizer: Optimizer) -> Groups:
    """Sort trainable parameters into groups for torch's optimizers; no group is empty.

    In addition to torch's keys a group has ``lr_factor`` and ``decay_moves``: whether its weight decay is scheduled.

    Raises:
        ModelError: If a pattern of the recipe matches nothing, or the network does not define its layers.
    """
    groups: dict[tuple[float, float, bool], list[nn.Parameter]] = {}
    named = dict(model.named_parameters())
    for name, treatment in treatments(model, optimizer).items():
        groups.setdefault((treatment.weight_decay, treatment.lr_factor, treatment.decay_moves), []).append(named[name])
    return [
        {"params": parameters, "weight_decay": decay, "lr_factor": factor, "decay_moves": moves}
        for (decay, factor, moves), parameters in sorted(groups.items(), key=lambda item: -item[0][0])
    ]


def split_groups(groups: Groups, is_first: Callable[[Tensor], bool]) -> tuple[Groups, Groups]:
    """Split groups by a predicate on parameters; empty groups are dropped."""
    split: tuple[Groups, Groups] = ([], [])
    for group in groups:
        for group_list, is_match in zip(split, (True, False), strict=True):
            if params := [each for each in group["params"] if is_first(each) == is_match]:
                group_list.append({**group, "params": params})
    return split


def is_filter(parameter: Tensor) -> bool:
    """Whether a parameter is a filter bank: any parameter of three or more dimensions."""
    return parameter.ndim >= 3


def describe_groups(
    model: nn.Module,
    optimizer: Optimizer,
    late_steps: Mapping[str, int] = MappingProxyType({}),
    passing: Mapping[str, int] = MappingProxyType({}),
) -> tuple[ParameterGroupFacts, ...]:
    """Count the parameters that are treated alike, for the plan.

    Args:
        model: The network.
        optimizer: The recipe's section.
        late_steps: Parameters that are frozen for the given number of first steps.
        passing: Parameters that are trained only for the given number of first steps.
    """
    named = dict(model.named_parameters())
    numbers: dict[tuple[Treatment, int, int | None], list[int]] = defaultdict(list)
    for name, treatment in treatments(model, optimizer).items():
        numbers[treatment, late_steps.get(name, 0), passing.get(name)].append(named[name].numel())
    return tuple(
        ParameterGroupFacts(
            parameters=each.source,
            tensors=len(counts),
            numbers=sum(counts),
            lr_factor=each.lr_factor,
            weight_decay=each.weight_decay,
            first_step=before + 1,
            last_step=last,
        )
        for (each, before, last), counts in numbers.items()
    )


def treatments(model: nn.Module, optimizer: Optimizer) -> Mapping[str, Treatment]:
    """Return the treatment of each trainable parameter by name, in the network's order.

    Parameters of fewer than two dimensions are biases and normalisation scales (He et al. 2018, "Bag of tricks",
    section 3.1). They do not decay, nor do those that the network exempts, as in timm (position embeddings, class
    tokens).
    """
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    matched = {pattern: set(fnmatch.filter(trainable, pattern)) for pattern in optimizer.groups}
    source = {pattern: pattern for pattern in matched}
    if CLASSIFIER in matched and not matched[CLASSIFIER]:
        layers = classifier_layers(model)
        matched[CLASSIFIER] = {name for name in trainable if name.startswith(tuple(f"{each}." for each in layers))}
        source[CLASSIFIER] = f"{CLASSIFIER} ({', '.join(layers)})"
    for pattern, names in matched.items():
        if not names:
            raise ModelError(
                f"optimizer.groups: no trainable parameter's name matches '{pattern}'. The last ones are "
                f"{', '.join(list(trainable)[-4:])}; a pattern may have * and ?, and `{CLASSIFIER}` is the network's."
            )
    exempt = list(exempt_from_decay(model))
    factors = _layer_factors(model, optimizer.layer_decay)
    result = {}
    for name, parameter in trainable.items():
        is_free = not optimizer.decay_norm_and_bias and (
            parameter.ndim <= 1 or any(fnmatch.fnmatchcase(name, pattern) for pattern in exempt)
        )
        is_rest = optimizer.uses_sgd_for_rest and not is_filter(parameter)
        is_scaled = optimizer.unit_filters and not is_rest  # scaled before every step, which undoes any decay
        decays = not is_free and not is_scaled and optimizer.weight_decay > 0
        default = Treatment(
            source=_source(optimizer, decays=decays, is_rest=is_rest),
            lr_factor=factors.get(name, 1.0) * (optimizer.rest_lr_factor if is_rest else 1.0),
            weight_decay=optimizer.weight_decay if decays else 0.0,
            decay_moves=decays,
        )
        override = next((each for each, names in matched.items() if name in names), None)
        result[name] = default
        if override is not None:
            group = optimizer.groups[override]
            result[name] = replace(default, source=source[override], lr_factor=default.lr_factor * group.lr_factor)
            if group.weight_decay != "auto":
                result[name] = replace(result[name], weight_decay=group.weight_decay, decay_moves=False)
        if is_scaled and result[name].weight_decay > 0:
            raise ModelError(
                f"optimizer.groups: '{override}' gives the filter {name} weight decay, which "
                "optimizer.unit_filters=true undoes before every step; leave one of them out."
            )
    return result


def _source(optimizer: Optimizer, *, decays: bool, is_rest: bool) -> str:
    """Describe the kind of a parameter."""
    what = "all" if optimizer.weight_decay == 0 else "weights" if decays else "norms, biases and exempt"
    if not optimizer.uses_sgd_for_rest:
        return what
    return "all but filters, by sgd" if what == "all" and is_rest else f"{what}, by sgd" if is_rest else "filters"


def _layer_factors(model: nn.Module, layer_decay: float | None) -> Mapping[str, float]:
    if layer_decay is None:
        return {}
    matcher = getattr(model, "group_matcher", None)
    if not callable(matcher):
        raise ModelError(
            f"optimizer.layer_decay={layer_decay} needs a network that knows the order of its layers, and "
            f"{type(model).__name__} does not provide it (group_matcher, as in timm's networks); use optimizer.groups."
        )
    from timm.models import group_parameters

    layers = group_parameters(model, matcher(coarse=False), reverse=True)
    last = max(layers.values())
    return {name: layer_decay ** (last - layer) for name, layer in layers.items()}


def exempt_from_decay(model: nn.Module, prefix: str = "") -> Iterator[str]:
    """Return names, or shell patterns of names, from the network's ``no_weight_decay()``.

    Wrappers need not repeat the inner network's names: the outermost definition in each branch applies.
    """
    names = getattr(model, "no_weight_decay", None)
    if callable(names):
        yield from (prefix + name for name in names())
        return
    for child, module in model.named_children():
        yield from exempt_from_decay(module, f"{prefix}{child}.")
