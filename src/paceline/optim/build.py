"""Which update rule moves the weights, and what is it set to at each step?"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.errors import RecipeError
from paceline.optim.eager import eager
from paceline.optim.muon import filters_and_rest
from paceline.optim.parameter_groups import parameter_groups
from paceline.optim.schedules import Courses, LearningRate, Settings
from paceline.optim.tables import has_sparse_gradients, paired
from paceline.recipe.optimizer import Optimizer
from paceline.recipe.plan import Plan
from paceline.recipe.schema import Recipe


def build_optimizer(model: nn.Module, optimizer: Optimizer, device: torch.device) -> torch.optim.Optimizer:
    """Build torch's own optimizer, or timm's of those that torch lacks.

    Those of torch that can be are fused on CUDA; on the CPU they are its default, which matches a plain loop's bits.

    Raises:
        RecipeError: If ``optimizer.options`` are not the class's.
        ModelError: If groups are asked for that the network does not have.
    """
    make, options = _choose(optimizer)
    # torch's fused SGD knows neither tensors that are spread over processes nor sparse gradients.
    spread = any(hasattr(each, "to_local") for each in model.parameters()) or has_sparse_gradients(model)
    if device.type == "cuda" and (optimizer.name == "adamw" or (optimizer.name == "sgd" and not spread)):
        options["fused"] = True
    groups = parameter_groups(model, optimizer)
    try:
        others = partial(make, lr=optimizer.lr, **options | optimizer.options)
        return others(groups) if optimizer.tables == "same" else paired(model, optimizer, groups, others)
    except (TypeError, ValueError) as error:
        if not optimizer.options:
            raise
        raise RecipeError(
            f"optimizer.options {optimizer.options} do not fit optimizer.name={optimizer.name}: {error}."
        ) from error


def _choose(asked: Optimizer) -> tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]:
    """The class, and its keyword arguments."""
    momentum: dict[str, Any] = {"momentum": asked.momentum}
    nesterov = momentum | {"nesterov": asked.nesterov}
    moments = {"betas": asked.moment_decay, "eps": asked.denominator_eps}
    match asked.name:
        case "sgd":
            return eager(torch.optim.SGD), nesterov
        case "adamw":
            return eager(torch.optim.AdamW), moments
        case "rmsprop":
            make = _of_timm("RMSpropTF") if asked.eps_inside_sqrt else eager(torch.optim.RMSprop)
            return make, momentum | {"alpha": asked.alpha, "eps": moments["eps"]}
        case "adafactor":
            return eager(torch.optim.Adafactor), {}
        case "lamb":
            # Its own clipping is off: optimizer.clip_norm is the one place for that.
            return _of_timm("Lamb"), moments | {"max_grad_norm": None}
        case "lars":
            return _of_timm("Lars"), nesterov | {"trust_coeff": asked.trust_coefficient, "eps": moments["eps"]}
        case "lion":
            return _of_timm("Lion"), {"betas": moments["betas"]}
        case "muon" if asked.moves_rest_by_sgd:
            steps = {"steps": asked.newton_schulz_steps, "unit_filters": asked.unit_filters}
            return filters_and_rest, {
                "nesterov": asked.nesterov,
                "filters": momentum | steps,
                "rest": {"momentum": asked.rest_momentum},
            }
        case "muon":
            return _of_timm("Muon"), nesterov | {"betas": moments["betas"]}


def _of_timm(name: str) -> Callable[..., torch.optim.Optimizer]:
    made: type[torch.optim.Optimizer] = getattr(importlib.import_module("timm.optim"), name)
    return eager(made)


def build_courses(recipe: Recipe, plan: Plan) -> Courses:
    """All that the schedule moves, with the plan's numbers."""
    asked, schedule = recipe.optimizer, recipe.schedule
    start = asked.moment_decay[0] if asked.name in ("adamw", "lamb", "lion") else asked.momentum
    moves = schedule.momentum.name != "constant" and asked.name != "adafactor"
    return Courses(
        learning_rate=LearningRate.of(schedule, plan),
        momentum=(schedule.momentum, start) if moves else None,
        weight_decay=None if schedule.weight_decay.name == "constant" else (schedule.weight_decay, asked.weight_decay),
    )


def apply_settings(optimizer: torch.optim.Optimizer, settings: Settings) -> None:
    """Give every group the step's values."""
    for group in optimizer.param_groups:
        group["lr"] = settings.learning_rate * group.get("lr_factor", 1.0)
        if settings.momentum is not None:
            if not group.get("momentum_moves", True):
                pass
            elif "momentum" in group:
                group["momentum"] = settings.momentum
            elif "betas" in group:
                group["betas"] = (settings.momentum, *group["betas"][1:])
        if settings.weight_decay is not None and group.get("decay_moves", True):
            group["weight_decay"] = settings.weight_decay
