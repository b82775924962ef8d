"""The optimizer of a recipe, its gradient clipping, its settings at each step, and the moving average of the weights.

The average is a second, named set of weights in addition to the trained ones.
"""

from __future__ import annotations

import copy
import inspect
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.errors import RecipeError
from paceline.optim.classes import combine_optimizers, eager, filters_and_rest, has_sparse_gradients
from paceline.optim.parameter_groups import parameter_groups
from paceline.optimizers import LIBRARY_OPTIMIZERS, RULES, UNSUPPORTED_OPTIMIZERS
from paceline.plan import Plan
from paceline.plan.rates import LearningRate, OptimizerSettings, Schedules
from paceline.plugins.registry import load
from paceline.recipe.schema import Recipe
from paceline.recipe.training import Optimizer


def build_optimizer(model: nn.Module, optimizer: Optimizer, device: torch.device) -> torch.optim.Optimizer:
    """Build an optimizer from torch, from timm if torch lacks it, or from a registered package.

    AdamW is fused, which saves 3 to 13 % of a step on a CPU (``benchmarks/fused.py``). It rounds differently from
    torch's default, but not with the number of threads. SGD is fused on CUDA only: on a CPU that gains nothing.

    Raises:
        RecipeError: If ``optimizer.options`` do not match the class, or the name does not give an optimizer.
        ModelError: If the network lacks requested groups.
    """
    groups = parameter_groups(model, optimizer)
    options = _settings(optimizer)
    # torch's fused SGD supports neither sharded tensors nor sparse gradients.
    spread = any(hasattr(each, "to_local") for each in model.parameters()) or has_sparse_gradients(model)
    can_fuse = all(each.is_floating_point() for each in model.parameters()) and "foreach" not in optimizer.options
    is_fast = optimizer.name == "adamw" or (optimizer.name == "sgd" and device.type == "cuda" and not spread)
    if device.type in ("cpu", "cuda") and can_fuse and is_fast:
        options["fused"] = True
    if optimizer.uses_sgd_for_rest:
        make: Any = filters_and_rest
    else:
        named = "timm.optim:RMSpropTF" if optimizer.eps_inside_sqrt else optimizer.name
        make = load("optimizers", named, RecipeError)
        make = eager(make) if inspect.isclass(make) and issubclass(make, torch.optim.Optimizer) else make
    others = partial(make, lr=optimizer.lr, **options | optimizer.options)
    try:
        built = others(groups) if optimizer.tables == "same" else combine_optimizers(model, optimizer, groups, others)
    except (TypeError, ValueError) as error:
        if not optimizer.options and optimizer.name in RULES:
            raise
        raise RecipeError(
            f"optimizer.options {optimizer.options} do not fit optimizer.name={optimizer.name}: {error}."
        ) from error
    if not isinstance(built, torch.optim.Optimizer):
        raise RecipeError(
            f"optimizer.name={optimizer.name} gave a {type(built).__name__}, not a torch.optim.Optimizer."
        )
    closure = inspect.signature(built.step).parameters.get("closure")
    needs_closure = closure is not None and closure.default is inspect.Parameter.empty
    if needs_closure or isinstance(built, torch.optim.SparseAdam):
        why = UNSUPPORTED_OPTIMIZERS["lbfgs" if needs_closure else "sparseadam"]
        raise RecipeError(f"optimizer.name={optimizer.name} is not supported: {why}.")
    is_ours = optimizer.name in RULES or optimizer.name in LIBRARY_OPTIMIZERS
    if optimizer.weight_decay and not is_ours and "weight_decay" not in built.defaults:
        raise RecipeError(
            f"optimizer.weight_decay={optimizer.weight_decay} has no effect: optimizer.name={optimizer.name} has no "
            "weight_decay among its defaults; set it to 0."
        )
    return built


def _settings(optimizer: Optimizer) -> dict[str, Any]:
    """Return the recipe's settings as keyword arguments of the class."""
    if optimizer.uses_sgd_for_rest:
        steps = {"steps": optimizer.newton_schulz_steps, "unit_filters": optimizer.unit_filters}
        filters, rest_settings = {"momentum": optimizer.momentum} | steps, {"momentum": optimizer.rest_momentum}
        return {"nesterov": optimizer.nesterov, "filters": filters, "rest": rest_settings}
    standard = {"betas": optimizer.moment_decay, "eps": optimizer.denominator_eps}
    arguments = {"trust_coefficient": "trust_coeff"}
    settings = {arguments.get(key, key): standard.get(key, getattr(optimizer, key)) for key in optimizer.rule.keys}
    return {**settings, **optimizer.rule.fixed}


def build_schedules(recipe: Recipe, plan: Plan) -> Schedules:
    """Build all schedules from the plan's numbers.

    Raises:
        RecipeError: If the momentum of another package's optimizer is scheduled: its initial value is unknown.
    """
    optimizer, schedule = recipe.optimizer, recipe.schedule
    moves = schedule.momentum.name != "constant" and optimizer.rule.has_momentum
    if moves and optimizer.name not in RULES:
        raise RecipeError(
            f"schedule.momentum.name={schedule.momentum.name} does not work with optimizer.name={optimizer.name}, "
            "which takes momentum in its own options; leave it out."
        )
    start = optimizer.momentum if optimizer.has("momentum") else optimizer.moment_decay[0]
    decay = schedule.weight_decay
    learning_rate = LearningRate.of(schedule, plan)
    learning_rate(plan.total_steps - 1)  # imports its shape now, not in the first step after the warm-up
    return Schedules(
        learning_rate=learning_rate,
        momentum=(schedule.momentum, start) if moves else None,
        weight_decay=None if decay.name == "constant" else (decay, optimizer.weight_decay),
    )


def apply_settings(optimizer: torch.optim.Optimizer, settings: OptimizerSettings) -> None:
    """Set the step's values on every parameter group."""
    for number, group in enumerate(optimizer.param_groups):
        group["lr"] = settings.learning_rate * group.get("lr_factor", 1.0)
        if settings.momentum is not None and group.get("momentum_moves", True):
            if "momentum" in group:
                group["momentum"] = settings.momentum
            elif "betas" in group:
                group["betas"] = (settings.momentum, *group["betas"][1:])
        if settings.weight_decay is not None and group.get("decay_moves", True):
            group["weight_decay"] = settings.weight_decay
        group.update(settings.of_groups[number] if settings.of_groups else {})


class Clipping:
    """Clips gradients as the recipe specifies, and measures them.

    Adaptive clipping skips the classifier, as its authors do (Brock et al. 2021, section 4.1), if the network
    identifies it (``get_classifier``, as in timm).
    """

    def __init__(self, network: nn.Module, optimizer: Optimizer) -> None:
        self._parameters = list(network.parameters())
        self._norm, self._value, self._adaptive = optimizer.clip_norm, optimizer.clip_value, optimizer.clip_adaptive
        head = getattr(network, "get_classifier", lambda: None)()
        heads = head if isinstance(head, tuple | list) else (head,)
        left_out = {id(each) for part in heads if isinstance(part, nn.Module) for each in part.parameters()}
        self._hidden = [each for each in self._parameters if id(each) not in left_out]

    @property
    def uses_norm(self) -> bool:
        """Whether clipping depends on the norm of the whole gradient."""
        return self._norm is not None

    def __call__(self, *, measure: bool) -> torch.Tensor | None:
        """Clip, and return the gradient's L2 norm before clipping, if measured, without a device sync."""
        if self._norm is not None:
            return _whole(nn.utils.clip_grad_norm_(self._parameters, self._norm))
        norm = None
        if measure:
            gradients = [each.grad for each in self._parameters if each.grad is not None]
            # A sparse gradient may repeat a row, once per use in the batch; their sum is the gradient.
            dense = [each.coalesce().values() if each.is_sparse else each for each in gradients]
            norm = _whole(nn.utils.get_total_norm(dense))
        if self._value is not None:
            nn.utils.clip_grad_value_(self._parameters, self._value)
        if self._adaptive is not None:
            from timm.utils import agc

            clip: Any = agc.adaptive_clip_grad
            clip(self._hidden, self._adaptive)
        return norm


def _whole(norm: torch.Tensor) -> torch.Tensor:
    """Return the norm over all ranks for sharded gradients. Collective in that case."""
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


class ExponentialMovingAverage:
    """Exponential moving average of a model's parameters and floating-point buffers, updated once per optimizer step.

    The decay at update *t* (from 0) is ``min(decay, (1 + t) / (10 + t))``, TensorFlow's ``num_updates`` rule, so that
    the initial weights do not dominate short runs. BatchNorm statistics are averaged like weights;
    integer buffers are copied.

    Attributes:
        module: A copy of the model that holds the averaged weights, in evaluation mode, without gradients.
        decay: The asymptotic decay, in [0, 1).
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.module = copy.deepcopy(model).eval().requires_grad_(requires_grad=False)
        self.decay = decay
        self._source = model

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move the average towards the model's weights after the optimizer step numbered ``step`` (from 0)."""
        weight = 1.0 - min(self.decay, (1 + step) / (10 + step))
        averaged, current = _floating(self.module), _floating(self._source)
        torch._foreach_lerp_(averaged, current, weight)
        for mean, value in zip(_others(self.module), _others(self._source), strict=True):
            # Keep -inf in masks: averaging it with itself would give NaN.
            is_average = mean.is_floating_point()
            mean.copy_(torch.where(mean == value, mean, torch.lerp(mean, value, weight)) if is_average else value)


def _floating(module: nn.Module) -> list[torch.Tensor]:
    parameters: list[Any] = list(module.parameters())
    if parameters and hasattr(parameters[0], "to_local"):
        # Either all are sharded or none; the average is sharded alike.
        parameters = [each.to_local() for each in parameters]
    statistics = [each for name, each in module.named_buffers() if _is_statistic(name)]
    return [each.detach() for each in (*parameters, *statistics) if each.is_floating_point()]


def _others(module: nn.Module) -> list[torch.Tensor]:
    """Return integer buffers, and those that may permanently hold infinity."""
    return [each for name, each in module.named_buffers() if not (each.is_floating_point() and _is_statistic(name))]


def _is_statistic(name: str) -> bool:
    return name.rpartition(".")[2].startswith("running_")
