"""Optimizers for embedding tables, of which a step uses few rows, and rules for sparse gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import ModelError, RecipeError
from paceline.optim.classes import EagerOptimizer, eager
from paceline.optim.parameter_groups import Groups, split_groups
from paceline.recipe.schema import Recipe
from paceline.recipe.training import Optimizer


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


def check_tables(network: nn.Module, recipe: Recipe, *, strategy: str, device: str) -> None:
    """Check that the recipe supports tables with a separate optimizer or sparse gradients.

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
    for choice, remedy in _sparse_conflicts(recipe, strategy, device).items():
        raise RecipeError(
            f"{choice} does not support sparse gradients (model.options={{sparse: true}}); {remedy}, or use dense ones."
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


def _sparse_conflicts(recipe: Recipe, strategy: str, device: str) -> dict[str, str]:
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
    # Rules that update every row in every step.
    if optimizer.tables == "same" and (optimizer.name != "sgd" or optimizer.momentum):
        name = f"optimizer.name={optimizer.name}" + f" with momentum {optimizer.momentum:g}" * (optimizer.name == "sgd")
        conflicts[name] = "set optimizer.tables to rowwise_adagrad or sparse_adam, use sgd with optimizer.momentum=0"
    elif optimizer.tables == "same" and optimizer.weight_decay > 0 and optimizer.decay_norm_and_bias:
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
