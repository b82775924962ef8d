"""Orthogonalised updates for filters, and plain SGD for all other parameters.

Muon (Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024): a filter bank is a matrix with
one row per output. Its momentum is replaced by the nearest matrix with equal singular values, found by a few
Newton-Schulz iterations instead of a decomposition. The update then has equal size in every direction, even where the
gradient is small.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline.errors import ModelError
from paceline.optim.classes import CombinedOptimizer, EagerOptimizer, eager
from paceline.optim.parameter_groups import Groups, is_filter, split_groups

# Jordan et al. 2024: chosen so that small singular values grow fastest; they end between about 0.7 and 1.2.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_EPS = 1e-7


def orthogonalised(matrix: Tensor, steps: int) -> Tensor:
    """Return a matrix [m, n] with the same singular vectors and singular values near 1; zeros stay 0.

    Each iteration maps every singular value s to ``a s + b s^3 + c s^5``. Computed in bfloat16 on an accelerator, as by
    the authors; in the matrix's dtype on a CPU.

    Args:
        matrix: The matrix; its scale does not matter.
        steps: Number of iterations.
    """
    a, b, c = _COEFFICIENTS
    x = matrix if matrix.device.type == "cpu" else matrix.bfloat16()
    # Work on the smaller side to keep the products small; the largest singular value is at most the norm.
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = x.T if is_tall else x
    x = x / (x.norm() + _EPS)
    for _ in range(steps):
        square = x @ x.T
        x = a * x + torch.addmm(square, square, square, beta=b, alpha=c) @ x
    result: Tensor = (x.T if is_tall else x).to(matrix.dtype)
    return result


class OrthogonalSteps(EagerOptimizer):
    """Muon's update for parameters of three or more dimensions.

    Args:
        params: Groups of filters.
        lr: Size of the update along each direction.
        momentum: Momentum, as in SGD.
        nesterov: Whether to use Nesterov momentum.
        steps: Newton-Schulz iterations.
        unit_filters: Whether to scale a bank before every step to norm sqrt(outputs), that is, 1 per output.
    """

    def __init__(
        self, params: Groups, *, lr: float, momentum: float, nesterov: bool, steps: int, unit_filters: bool
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": 0.0}
        super().__init__(params, defaults | {"steps": steps, "unit_filters": unit_filters})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # no loss is given back
        """Update every filter bank that has a gradient."""
        for group in self.param_groups:
            for bank in group["params"]:
                if bank.grad is not None:
                    self._update(bank, bank.grad, group)

    def _update(self, bank: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, momentum = self.state[bank], group["momentum"]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(bank)
        buffer = state["momentum_buffer"].mul_(momentum).add_(gradient)
        ahead = gradient.add(buffer, alpha=momentum) if group["nesterov"] else buffer
        if group["unit_filters"]:
            bank.mul_(len(bank) ** 0.5 / (bank.norm() + _EPS))
        elif group["weight_decay"]:
            bank.mul_(1 - group["lr"] * group["weight_decay"])
        step = orthogonalised(ahead.reshape(len(bank), -1), group["steps"])
        bank.sub_(step.view(bank.shape) * group["lr"])


def filters_and_rest(
    groups: Groups,
    *,
    lr: float,
    nesterov: bool,
    filters: dict[str, Any],
    rest: dict[str, Any],
) -> torch.optim.Optimizer:
    """Return one optimizer that orthogonalises the updates of filters and applies SGD to the rest.

    Args:
        groups: Groups of all parameters (:func:`~paceline.optim.parameter_groups.parameter_groups`).
        lr: Learning rate of both; groups apply their factors.
        nesterov: Nesterov momentum of both.
        filters: Keyword arguments of :class:`OrthogonalSteps`.
        rest: Keyword arguments of torch's SGD.

    Raises:
        ModelError: If the network has no filters.
    """
    banks, others = split_groups(groups, is_filter)
    if not banks:
        raise ModelError(
            "optimizer.name=muon with optimizer.rest=sgd moves filters (parameters of three dimensions or more) by "
            "orthogonal steps, and this network trains none; use optimizer.rest=adamw, which does so for matrices."
        )
    orthogonal = OrthogonalSteps(banks, lr=lr, nesterov=nesterov, **filters)
    if not others:
        return orthogonal
    for group in others:
        group["momentum_moves"] = False  # schedule.momentum applies to the orthogonalised updates
    return CombinedOptimizer(orthogonal, eager(torch.optim.SGD)(others, lr=lr, nesterov=nesterov, **rest))
