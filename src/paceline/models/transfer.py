"""Weights from another network, frozen parameters, and parameters that are trained only from or until a step.

Outside that span a parameter needs no gradient: nothing is computed for it, and the optimizer neither updates nor
decays it. Before the span, the optimizer has no state for it. The set of trained parameters depends on the step alone.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm

from paceline.classifier import classifier_layers
from paceline.errors import ModelError
from paceline.models.adapters import add_adapters, trained_with_adapters
from paceline.models.factories import mix_in
from paceline.models.recompute import recompute_blocks
from paceline.recipe.model import ModelSection

_NAMED = 4


def load_fitting(network: nn.Module, state: Mapping[str, Tensor], *, source: str) -> str:
    """Load the tensors whose names, shapes and dtypes match, and leave the others unchanged.

    Returns:
        Which tensors were loaded and which were not, in one sentence.

    Raises:
        ModelError: If none matches.
    """
    state_here = network.state_dict()
    fitting = {
        name: tensor
        for name, tensor in state.items()
        if name in state_here and tensor.shape == state_here[name].shape and tensor.dtype == state_here[name].dtype
    }
    if not any(name in fitting for name, _ in network.named_parameters()):
        raise ModelError(
            f"model.initialize_from: no parameter of {source} fits this network; its names are like "
            f"{_some(list(state))}, and the network's like {_some(list(state_here))}."
        )
    network.load_state_dict(fitting, strict=False)
    message = f"model.initialize_from: {len(fitting)} of {len(state_here)} tensors come from {source}"
    if left := [name for name in state_here if name not in fitting]:
        message += f"; {_some(left)} are newly initialised"
    if unused := [name for name in state if name not in fitting]:
        message += f"; {_some(unused)} of the source are not used"
    return message


def zero_classifier(network: nn.Module) -> None:
    """Reinitialise a linear classifier as torch does if its initial scale is more than twice as large.

    timm initialises the classifiers of EfficientNets and MobileNets by the number of classes alone. With a pretrained
    backbone, such weights give confidently wrong predictions, whose gradients destroy the pretrained features.
    """
    for name in classifier_layers(network):
        layer = network.get_submodule(name)
        if isinstance(layer, nn.Linear) and float(layer.weight.detach().std()) > 2 / math.sqrt(3 * layer.in_features):
            layer.reset_parameters()


def with_shared(network: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state with every name of a shared parameter, since files keep only one of them."""
    names: dict[int, list[str]] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    filled = dict(state)
    for shared in names.values():
        stored_name = next((name for name in shared if name in state), None)
        if stored_name is not None:
            filled |= {name: state[stored_name] for name in shared if name not in state}
    return filled


def adapt(network: nn.Module, model: ModelSection) -> None:
    """Apply a recipe's adapters and frozen parameters to a network.

    Raises:
        ModelError: If the network does not have such parameters, or does not support the request.
    """
    if model.adapters.rank is not None:
        add_adapters(network, model.adapters)
    if model.ghost_batch_norm is not None:
        normalise_in_groups(network, model.ghost_batch_norm, name=model.name)
    freeze(network, frozen_patterns(network, model), but=late_parameters(network, model))
    if model.activation_checkpointing is not None:
        recompute_blocks(network, model.activation_checkpointing, compiled=model.compile)


def freeze(network: nn.Module, patterns: Sequence[str], but: Collection[str] = ()) -> None:
    """Freeze parameters, and statistics, as of norms, whose parameters are all frozen, or would be if they had any.

    Args:
        network: The network; norms and spectral norms without trainable parameters are put into evaluation mode.
        patterns: Shell patterns of names. A later one wins; one that begins with ``!`` excludes.
        but: Parameters to exclude, whatever the patterns say.

    Raises:
        ModelError: If a pattern matches nothing.
    """
    if not patterns:
        return
    frozen = frozen_names(_names(network), patterns) - set(but)
    for name, parameter in network.named_parameters():
        if name in frozen:
            parameter.requires_grad = False
    for module, parameters in _with_statistics(network).items():
        if not any(each.requires_grad for each in parameters):
            module.eval()
    for module, names in _bare_norms(network).items():
        if frozen.issuperset(names):
            module.eval()


def _with_statistics(network: nn.Module) -> dict[nn.Module, list[nn.Parameter]]:
    """Return the modules whose buffers a forward pass may change, such as norms, each with the parameters they serve.

    They are norms, other modules without children that have floating-point buffers, and spectral norms.
    """
    found: dict[nn.Module, list[nn.Parameter]] = {}
    for module in network.modules():
        if isinstance(module, ParametrizationList):
            originals = list(module.parameters(recurse=False))
            found |= {each: originals for each in module if any(True for _ in each.buffers())}
            continue
        hooks = module._forward_pre_hooks.values()  # noqa: SLF001  # torch lists hooks nowhere else
        parameters = [module.get_parameter(f"{each.name}_orig") for each in hooks if isinstance(each, SpectralNorm)]
        if not parameters and not any(True for _ in module.children()):
            parameters = list(module.parameters())
        if parameters and any(each.is_floating_point() for each in module.buffers(recurse=False)):
            found[module] = parameters
    return found


def _bare_norms(network: nn.Module) -> dict[_NormBase, tuple[str, str]]:
    """Return the norms without parameters, each with the names that patterns match: those its parameters would have."""
    return {
        module: (f"{name}.weight", f"{name}.bias")
        for name, module in network.named_modules()
        if isinstance(module, _NormBase) and not any(True for _ in module.parameters())
    }


def _names(network: nn.Module) -> list[str]:
    """Return the names of the norms without parameters, then those of the parameters."""
    return [*chain.from_iterable(_bare_norms(network).values()), *(name for name, _ in network.named_parameters())]


def frozen_patterns(network: nn.Module, model: ModelSection) -> tuple[str, ...]:
    """Return patterns of frozen parameters: with adapters, all others except the classifier; plus ``model.frozen``."""
    return (*(trained_with_adapters(network) if model.adapters.rank is not None else ()), *model.frozen)


def frozen_names(names: Sequence[str], patterns: Sequence[str]) -> set[str]:
    """Return the parameters that match ``model.frozen``.

    Raises:
        ModelError: If a pattern matches nothing.
    """
    frozen = dict.fromkeys(names, False)
    for pattern in patterns:
        matched = fnmatch.filter(frozen, pattern.removeprefix("!"))
        if not matched:
            raise ModelError(
                f"model.frozen: no parameter's name matches '{pattern}'. The last ones are "
                f"{', '.join(list(frozen)[-_NAMED:])}; a pattern may have * and ?."
            )
        frozen |= dict.fromkeys(matched, not pattern.startswith("!"))
    return {name for name, is_frozen in frozen.items() if is_frozen}


def late_parameters(network: nn.Module, model: ModelSection) -> dict[str, list[str]]:
    """Return the frozen parameters that ``model.unfreeze`` trains later, each with its matching patterns.

    Raises:
        ModelError: If a pattern matches no frozen parameter.
    """
    if not model.unfreeze:
        return {}
    frozen = frozen_names(_names(network), frozen_patterns(network, model))
    return _matched(
        "model.unfreeze: no frozen",
        sorted(frozen),
        model.unfreeze,
        f"it is for those that model.frozen={list(model.frozen)} keeps from being trained.",
    )


def temporary_parameters(network: nn.Module, model: ModelSection) -> dict[str, list[str]]:
    """Return the parameters that ``model.freeze_after`` trains only at first, each with its matching patterns.

    Raises:
        ModelError: If a pattern matches no trained parameter, or one that ``model.unfreeze`` trains later.
    """
    names = [name for module, names in _bare_norms(network).items() if module.training for name in names]
    names += (name for name, each in network.named_parameters() if each.requires_grad)
    hint = f"the last ones are {', '.join(names[-_NAMED:])}; a pattern may have * and ?."
    passing = _matched("model.freeze_after: no trained", names, model.freeze_after, hint)
    if both := sorted(passing.keys() & late_parameters(network, model).keys()):
        raise ModelError(f"model.freeze_after and model.unfreeze both mean {_some(both)}; use one of them for each.")
    return passing


def _matched(setting: str, names: Sequence[str], patterns: Iterable[str], hint: str) -> dict[str, list[str]]:
    """Return names with their matching patterns; raise an error for a pattern without matches."""
    matches: dict[str, list[str]] = {}
    for pattern in patterns:
        matched = fnmatch.filter(names, pattern)
        if not matched:
            raise ModelError(f"{setting} parameter's name matches '{pattern}'; {hint}")
        for name in matched:
            matches.setdefault(name, []).append(pattern)
    return matches


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def trained_spans(
    network: nn.Module, model: ModelSection, unfreeze_steps: Mapping[str, int], freeze_after_steps: Mapping[str, int]
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the first training step of late parameters, and the number of training steps of temporary ones.

    Args:
        network: The network, in which all parameters that are ever trained need a gradient.
        model: The recipe's section.
        unfreeze_steps: Step for each pattern of ``model.unfreeze``; the earliest matching pattern applies.
        freeze_after_steps: Step for each pattern of ``model.freeze_after``; the latest matching pattern applies.
    """
    late, passing = late_parameters(network, model), temporary_parameters(network, model)
    first = {name: min(unfreeze_steps[pattern] for pattern in patterns) for name, patterns in late.items()}
    last = {name: max(freeze_after_steps[pattern] for pattern in patterns) for name, patterns in passing.items()}
    return first, last


class FreezeSchedule:
    """Enables and disables the training of parameters, and of norm statistics, at their steps.

    Args:
        network: The unwrapped network, in which all parameters that are ever trained need a gradient.
        first_steps: Parameters that are trained late; see :func:`trained_spans`.
        last_steps: Parameters that are trained only at first; see :func:`trained_spans`.
        changed: Called after the set of trained parameters changes.
    """

    def __init__(
        self,
        network: nn.Module,
        first_steps: Mapping[str, int],
        last_steps: Mapping[str, int],
        changed: Callable[[], None],
    ) -> None:
        named, bare = dict(network.named_parameters()), _bare_norms(network)
        by_name = {name: (step, math.inf) for name, step in first_steps.items()}
        by_name |= {name: (0, step) for name, step in last_steps.items()}
        self._spans = [(named[name], *span) for name, span in by_name.items() if name in named]
        spans = {norm: [by_name[name] for name in names if name in by_name] for norm, names in bare.items()}
        self._bare_norms = {norm: found for norm, found in spans.items() if found}
        moving = {id(parameter) for parameter, _, _ in self._spans}
        self._norms = {
            module: parameters
            for module, parameters in _with_statistics(network).items()
            if any(id(each) in moving for each in parameters)
        }
        self._turns = sorted({*first_steps.values(), *last_steps.values()})
        self._passed = -1 if self._turns else 0
        self._changed = changed

    def at(self, step: int) -> bool:
        """Require gradients for exactly the parameters trained at this step; return whether that changed anything."""
        passed = sum(turn <= step for turn in self._turns)
        if passed == self._passed:
            return False
        self._passed = passed
        is_change = False
        for parameter, first, last in self._spans:
            is_trained = first <= step < last
            is_change |= parameter.requires_grad != is_trained
            parameter.requires_grad_(is_trained)
        for module, parameters in self._norms.items():
            module.train(any(each.requires_grad for each in parameters))
        for norm, spans in self._bare_norms.items():
            norm.train(any(first <= step < last for first, last in spans))
        if is_change:
            self._changed()
        return is_change


class _GhostBatchNorm(nn.Module):
    """BatchNorm that normalises by small groups of samples inside a large micro-batch.

    Ghost batch normalisation (Hoffer et al., "Train longer, generalize better", 2017, arXiv:1705.08741): a large batch
    keeps the noise of a small one. Mixed into a norm's class: parameters, buffers, names and copies stay unchanged.
    """

    _ghost_samples = 0

    def forward(self, inputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Normalise ``inputs``, [N, C, ...], group by group in training, and normally in evaluation.

        The running statistics are updated once per group with the norm's momentum: as from separate micro-batches, and
        as weighted in the paper.
        """
        groups = groups_of(len(inputs), self._ghost_samples)
        if not self.training or groups == 1:
            answer: Tensor = super().forward(inputs, *args, **kwargs)
            return answer
        normalise = super().forward
        # Slicing and concatenating along the samples keep the memory format.
        return torch.cat([normalise(group, *args, **kwargs) for group in inputs.tensor_split(groups)])


def groups_of(samples: int, group: int) -> int:
    """Return the number of nearly equal groups: none larger than requested, but each with at least two samples.

    Only the shorter micro-batches of an epoch's last step have groups of another size.
    """
    return max(1, min(-(-samples // group), samples // 2))


def normalise_in_groups(network: nn.Module, samples: int, *, name: str) -> None:
    """Make a network's BatchNorm layers normalise by groups of this many samples in training.

    Args:
        network: The network; its state_dict is unchanged.
        samples: Samples in a group, at least 2.
        name: Name of the network, for messages.

    Raises:
        ModelError: If it has no BatchNorm, or one with statistics synchronised across ranks.
    """
    norms = [(path, module) for path, module in network.named_modules() if isinstance(module, _BatchNorm)]
    if not norms:
        raise ModelError(
            f"model.ghost_batch_norm={samples} has no effect: model.name={name} has no BatchNorm; leave it out."
        )
    synced = [path for path, module in norms if isinstance(module, nn.SyncBatchNorm)]
    if synced:
        raise ModelError(
            f"model.ghost_batch_norm={samples}: model.name={name} has SyncBatchNorm ({synced[0]}), which normalises "
            "over all processes; remove one of the two."
        )
    mix_in((module for _, module in norms), _GhostBatchNorm, _ghost_samples=samples)
