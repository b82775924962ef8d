"""Parameters that are trained only after a while, or for a while.

Before and after, a parameter needs no gradient: nothing is computed for it, the optimizer neither moves it nor lets it
decay, and before it has no state for it. What is trained is a function of the step alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from paceline.models.transfer import late_parameters, passing_parameters
from paceline.recipe.model import Model


def first_steps(network: nn.Module, model: Model, steps: Mapping[str, int]) -> dict[str, int]:
    """For each parameter that is trained late, how many steps are done before.

    Args:
        network: The network.
        model: The recipe's section.
        steps: The same for each pattern of ``model.unfreeze``; of those that match, the earliest counts.
    """
    found = late_parameters(network, model)
    return {name: min(steps[pattern] for pattern in patterns) for name, patterns in found.items()}


def last_steps(network: nn.Module, model: Model, steps: Mapping[str, int]) -> dict[str, int]:
    """For each parameter that is trained for a while only, how many steps train it.

    Args:
        network: The network, in which all that will ever be trained needs a gradient.
        model: The recipe's section.
        steps: The same for each pattern of ``model.freeze_after``; of those that match, the latest counts.
    """
    found = passing_parameters(network, model)
    return {name: max(steps[pattern] for pattern in patterns) for name, patterns in found.items()}


class Thawing:
    """Lets parameters be trained when their step has come, and no longer, and norms go on with their statistics.

    Args:
        network: The bare network, in which all that will ever be trained needs a gradient.
        first_steps: Parameters that are trained late; see :func:`first_steps`.
        last_steps: Parameters that are trained for a while only; see :func:`last_steps`.
        changed: Called after a change of what needs a gradient.
    """

    def __init__(
        self,
        network: nn.Module,
        first_steps: Mapping[str, int],
        last_steps: Mapping[str, int],
        changed: Callable[[], None],
    ) -> None:
        named = dict(network.named_parameters())
        self._spans = [(named[name], step, math.inf) for name, step in first_steps.items()]
        self._spans += [(named[name], 0, step) for name, step in last_steps.items()]
        moving = {id(parameter) for parameter, _, _ in self._spans}
        self._norms = [
            module
            for module in network.modules()
            if isinstance(module, _NormBase) and any(id(each) in moving for each in module.parameters())
        ]
        self._turns = sorted({*first_steps.values(), *last_steps.values()})
        self._passed = -1 if self._turns else 0
        self._changed = changed

    def at(self, step: int) -> bool:
        """See to it that exactly what is trained after so many steps needs a gradient; whether that is a change."""
        passed = sum(turn <= step for turn in self._turns)
        if passed == self._passed:
            return False
        self._passed = passed
        is_change = False
        for parameter, first, last in self._spans:
            is_trained = first <= step < last
            is_change |= parameter.requires_grad != is_trained
            parameter.requires_grad_(is_trained)
        for norm in self._norms:
            norm.train(any(each.requires_grad for each in norm.parameters()))
        if is_change:
            self._changed()
        return is_change
