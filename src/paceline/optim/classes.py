"""Optimizer classes: for embedding tables and filters, and those of libraries without torch's compiler.

torch disables ``torch.compile`` in some optimizer methods, and inserts a graph break around ``step``. Both load
``torch._dynamo`` at the first call, and with it sympy and torch.distributed.tensor. That is much of the time to the
first step, in every process, for a compiler that never compiles an optimizer here. The unwrapped methods work without
them.

A step uses few rows of an embedding table. A filter bank is a matrix with one row per output: Muon (Jordan et al.,
"Muon: An optimizer for hidden layers in neural networks", 2024) replaces its momentum by the nearest matrix with equal
singular values, found by a few Newton-Schulz iterations instead of a decomposition. The update then has equal size in
every direction, even where the gradient is small.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from paceline.errors import ModelError, RecipeError
from paceline.optim.parameter_groups import Groups, is_filter, split_groups
from paceline.recipe.schema import Recipe
from paceline.recipe.training import Optimizer

_Kind = TypeVar("_Kind", bound=torch.optim.Optimizer)

_made: dict[type, Any] = {}


class EagerOptimizer(torch.optim.Optimizer):
    """A base class for optimizers that are never compiled."""

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)


_METHODS = tuple(name for name in vars(EagerOptimizer) if not name.startswith("__"))


def eager(kind: type[_Kind]) -> type[_Kind]:
    """Return a class of the same name, rule, state and hooks whose methods do not load the compiler.

    Args:
        kind: A class of torch or another library. A class that overrides such a method is returned unchanged; so is the
            ``step`` of a class outside torch.
    """
    if any(getattr(kind, name) is not getattr(torch.optim.Optimizer, name) for name in _METHODS):
        return kind
    if kind not in _made:
        body: dict[str, Any] = {"__module__": kind.__module__, "__doc__": kind.__doc__}
        if kind.__module__.startswith("torch.optim."):
            body["step"] = torch.no_grad()(inspect.unwrap(kind.step))
        _made[kind] = type(kind.__name__, (EagerOptimizer, kind), body)
    subclass: type[_Kind] = _made[kind]
    return subclass


def tables_of(network: nn.Module) -> dict[str, Tensor]:
    """Return the weights of all embedding bags, by name."""
    return {
        f"{name}.weight": module.weight
        for name, module in network.named_modules()
        if isinstance(module, nn.EmbeddingBag)
    }


def has_sparse_gradients(network: nn.Module) -> bool:
    """Whether any table has sparse gradients."""
    return any(isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse for module in network.modules())


def use_dense_gradients(network: nn.Module) -> None:
    """Disable sparse gradients of all tables of a network."""
    for module in network.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.sparse = False


class RowwiseAdagrad(EagerOptimizer):
    """Adagrad (Duchi et al. 2011) with one number per table row: the sum of its gradients' mean squares.

    Unused rows stay unchanged, so sparse and dense gradients give the same result.
    """

    def __init__(self, params: Groups, *, lr: float, eps: float = 1e-10) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # no loss is given back
        """Update every row that has a gradient."""
        for group in self.param_groups:
            for table in group["params"]:
                if table.grad is not None:
                    self._update(table, table.grad, group)

    def _update(self, table: nn.Parameter, gradient: Tensor, group: Mapping[str, Any]) -> None:
        state = self.state[table]
        if not state:
            state["sum"] = torch.zeros(table.shape[0], dtype=table.dtype, device=table.device)
        total, eps = state["sum"], group["eps"]
        if not gradient.is_sparse:
            total.add_(gradient.square().mean(dim=1))
            table.addcdiv_(gradient, (total.sqrt() + eps).unsqueeze(1), value=-group["lr"])
            return
        gradient = gradient.coalesce()
        rows, values = gradient.indices()[0], gradient.values()
        of_rows = total.index_select(0, rows).add_(values.square().mean(dim=1))
        # After coalescing each row occurs once, so the order of additions cannot vary.
        total.index_copy_(0, rows, of_rows)
        updated = table.index_select(0, rows).addcdiv_(values, (of_rows.sqrt() + eps).unsqueeze(1), value=-group["lr"])
        table.index_copy_(0, rows, updated)


class CombinedOptimizer(EagerOptimizer):
    """Two optimizers combined into one: for tables and for the rest. Groups and state are one list and one mapping."""

    def __init__(self, of_tables: torch.optim.Optimizer, others: torch.optim.Optimizer) -> None:
        self._both = (others, of_tables)
        super().__init__([group for each in self._both for group in each.param_groups], {})
        self._share()

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # no loss is given back
        """Run one step of each."""
        for each in self._both:
            step: Any = type(each).step
            # Bypasses the hooks that torch calls around every optimizer's step (register_optimizer_step_pre_hook): the
            # pair counts as one optimizer.
            step.__wrapped__(each)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of both."""
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        begin = 0
        for each in self._both:
            end = begin + len(each.param_groups)
            each.param_groups, each.state = self.param_groups[begin:end], self.state
            begin = end


def combine_optimizers(
    network: nn.Module, optimizer: Optimizer, groups: Groups, make: Callable[[Groups], torch.optim.Optimizer]
) -> torch.optim.Optimizer:
    """Combine the recipe's table optimizer with that of the other parameters.

    Args:
        network: The network with the tables.
        optimizer: The recipe's section.
        groups: Groups of all parameters (:func:`~paceline.optim.parameter_groups.parameter_groups`).
        make: Makes the optimizer of all other parameters.
    """
    numbers = {id(each) for each in tables_of(network).values()}
    tables, rest = split_groups(groups, lambda each: id(each) in numbers)
    if optimizer.tables == "rowwise_adagrad":
        of_tables: torch.optim.Optimizer = RowwiseAdagrad(tables, lr=optimizer.lr)
    else:
        shared_keys = ("params", "lr_factor")
        table_groups = [{key: value for key, value in group.items() if key in shared_keys} for group in tables]
        of_tables = eager(torch.optim.SparseAdam)(table_groups, lr=optimizer.lr)
    for group in of_tables.param_groups:
        # Neither optimizer applies weight decay.
        group |= {"weight_decay": 0.0, "decay_moves": False}
    return CombinedOptimizer(of_tables, make(rest)) if rest else of_tables


def check_tables(
    network: nn.Module, recipe: Recipe, *, strategy: str, device: str, has_own_optimizer: bool = False
) -> None:
    """Check that the recipe supports tables with a separate optimizer or sparse gradients.

    Args:
        network: The network.
        recipe: The recipe.
        strategy: The strategy of the plan.
        device: Its device.
        has_own_optimizer: Whether the recipe's optimizer is not used.

    Raises:
        ModelError: If the network has no tables.
        RecipeError: Naming the first unsupported setting.
    """
    optimizer = recipe.optimizer
    is_sparse = has_sparse_gradients(network)
    if optimizer.tables != "same":
        _check_own_rule(network, recipe, strategy, is_sparse=is_sparse)
    if not is_sparse:
        return
    for choice, remedy in _sparse_conflicts(recipe, strategy, device, has_own_optimizer=has_own_optimizer).items():
        raise RecipeError(
            f"{choice} does not support sparse gradients (sparse=True of an embedding); {remedy}, or use dense ones."
        )


def _check_own_rule(network: nn.Module, recipe: Recipe, strategy: str, *, is_sparse: bool) -> None:
    rule = f"optimizer.tables={recipe.optimizer.tables}"
    tables = tables_of(network)
    if not tables:
        raise ModelError(f"{rule}, but model.name={recipe.model.name} has no embedding tables (nn.EmbeddingBag).")
    if not any(each.requires_grad for each in tables.values()):
        raise ModelError(f"{rule}, but model.frozen leaves no embedding table to train.")
    if recipe.optimizer.tables == "sparse_adam" and not is_sparse:
        raise RecipeError(f"{rule} needs sparse gradients; set model.options={{sparse: true}}, or use rowwise_adagrad.")
    if strategy == "fsdp":
        raise RecipeError(
            f"{rule} needs whole tables, but parallel.strategy=fsdp shards them; use "
            "parallel.strategy=ddp, or optimizer.tables=same."
        )


def _sparse_conflicts(recipe: Recipe, strategy: str, device: str, *, has_own_optimizer: bool) -> dict[str, str]:
    """Return the settings that do not support sparse gradients, with a fix for each."""
    optimizer, parallel, leave = recipe.optimizer, recipe.parallel, "leave it out"
    conflicts: dict[str, str] = {}
    if strategy in ("exact", "fsdp"):
        what = "parallel.exact=true" if strategy == "exact" else "parallel.strategy=fsdp"
        conflicts[what] = "use parallel.strategy=ddp"
    elif strategy == "ddp" and device != "cpu":
        conflicts[f"parallel.strategy=ddp on {device}, whose collectives cannot add sparse tensors,"] = (
            "use one process"
        )
    # Rules that update every row in every step; the first step of an optimizer from outside is tried.
    has_one_rule = optimizer.tables == "same" and not has_own_optimizer
    if has_one_rule and (optimizer.name != "sgd" or optimizer.momentum):
        name = f"optimizer.name={optimizer.name}" + f" with momentum {optimizer.momentum:g}" * (optimizer.name == "sgd")
        conflicts[name] = "set optimizer.tables to rowwise_adagrad or sparse_adam, use sgd with optimizer.momentum=0"
    elif has_one_rule and optimizer.weight_decay > 0 and optimizer.decay_norm_and_bias:
        conflicts["optimizer.decay_norm_and_bias=true"] = leave
    clips = (f"clip_{kind}" for kind in ("norm", "value", "adaptive"))
    conflicts |= {f"optimizer.{clip}": leave for clip in clips if getattr(optimizer, clip) is not None}
    switched = {
        f"parallel.gradient_compression={parallel.gradient_compression}": parallel.gradient_compression != "none",
        "parallel.static_graph=true": parallel.static_graph,
        "telemetry.noise_scale": recipe.telemetry.noise_scale is not None,
        "model.compile=true": recipe.model.compile,
    }
    conflicts |= {choice: leave for choice, is_on in switched.items() if is_on}
    if recipe.train.precision in ("fp16", "fp8"):
        conflicts[f"train.precision={recipe.train.precision}"] = "use bf16 or fp32"
    return conflicts


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
