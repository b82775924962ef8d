"""An optimizer and a learning-rate scheduler of your own, given as objects."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from paceline.errors import PacelineError, RecipeError
from paceline.optim.classes import has_sparse_gradients
from paceline.parsing.arguments import check_made
from paceline.plan.rates import LearningRate, OptimizerSettings, Schedules

_TRIED_STEPS = 100_000


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Report an error in what was given by its name.

    Raises:
        RecipeError: Instead of the error.
    """
    try:
        yield
    except PacelineError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        raise RecipeError(f"{what} failed with {type(error).__name__}: {text}; correct it.", key=what) from error


def groups_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return an optimizer's parameter groups.

    Raises:
        RecipeError: If it has none, or one has no learning rate.
    """
    check_made("optimizer", optimizer, error=RecipeError)
    groups: list[dict[str, Any]] = optimizer.param_groups
    if not groups or not all("lr" in each for each in groups):
        raise RecipeError(
            f"optimizer={type(optimizer).__name__} has no param_groups with lr; its __init__ must call "
            "super().__init__(parameters, {'lr': lr}).",
            key="optimizer",
        )
    return groups


def own_optimizer(given: Any, network: nn.Module, lr: float | None) -> torch.optim.Optimizer:
    """Return an optimizer for a network.

    Args:
        given: A class, called with the parameters and ``lr``, or a function of the parameters.
        network: The network.
        lr: The learning rate of a class; None for its default.

    Raises:
        RecipeError: If it gives no optimizer that works for every step by itself.
    """
    parameters = [each for each in network.parameters() if each.requires_grad]
    with explained("optimizer"):
        is_class = inspect.isclass(given)
        built = given(parameters, **({} if lr is None else {"lr": lr})) if is_class else given(parameters)
    if not isinstance(built, torch.optim.Optimizer):
        raise RecipeError(
            f"optimizer gave a {type(built).__name__}, but it must give a torch.optim.Optimizer.", key="optimizer"
        )
    groups = groups_of(built)
    closure = inspect.signature(built.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise RecipeError(
            f"optimizer={type(built).__name__} computes the loss several times in a step, which a run cannot repeat; "
            "use another, for example AdamW.",
            key="optimizer",
        )
    held = [id(each) for group in groups for each in group["params"]]
    if {*held} != {*map(id, parameters)}:
        raise RecipeError(
            f"optimizer holds {len({*held} & {*map(id, parameters)})} of the {len(parameters)} parameters that are "
            f"trained, and {len({*held} - {*map(id, parameters)})} others; use those that it is called with, and set "
            "requires_grad=False for what should stay.",
            key="optimizer",
        )
    base = float(groups[0]["lr"])
    for group in groups:
        group["lr_factor"] = float(group["lr"]) / base if base else 1.0
    return built


def may_refuse_gradients(optimizer: torch.optim.Optimizer, network: nn.Module) -> bool:
    """Whether a first step can fail for the gradients' kind or shape; torch's optimizers take all dense ones."""
    is_torch = type(optimizer).__module__.startswith("torch.optim.")
    needs_sparse = isinstance(optimizer, torch.optim.SparseAdam)
    return not is_torch or needs_sparse or has_sparse_gradients(network)


@dataclass(frozen=True, kw_only=True)
class OwnSchedules(Schedules):
    """The learning rate, and what else moves in the parameter groups, of a torch scheduler that moves by itself.

    It is moved on a copy of the optimizer, so that a step's rate is a function of the step, and a resume needs no
    state.

    Attributes:
        rates: Moves the scheduler to a step.
    """

    rates: Callable[[int], OptimizerSettings]

    @classmethod
    def of(
        cls,
        make: Callable[[torch.optim.Optimizer], Any],
        optimizer: torch.optim.Optimizer,
        *,
        first_step: Callable[[int], int] | None,
        base: LearningRate,
    ) -> Self:
        """Return the schedule that a function makes.

        Args:
            make: Makes a torch scheduler from an optimizer.
            optimizer: The run's.
            first_step: The first step of an epoch, if the scheduler moves once per epoch; None if it moves at each
                step.
            base: The recipe's learning rate, of which only the number of steps is used.

        Raises:
            RecipeError: If it gives no such scheduler, or one that ends before the run.
        """
        scheduler, twin = scheduled_twin(make, optimizer)
        moved = _Moved(scheduler, twin, optimizer)
        ends: list[int] = []

        def at(step: int) -> OptimizerSettings:
            if first_step is None:
                return moved.to(step)
            while not ends or ends[-1] <= step:
                ends.append(first_step(len(ends) + 1))
            return moved.to(bisect_right(ends, step))

        at(min(base.total_steps, _TRIED_STEPS) - 1)  # a scheduler may be made for fewer steps than the run has
        return cls(learning_rate=base, rates=at)

    def at(self, step: int, position: int | None = None) -> OptimizerSettings:
        """Return the settings of optimizer step ``step`` (from 0)."""
        return self.rates(step)


def scheduled_twin(
    make: Callable[[torch.optim.Optimizer], Any], optimizer: torch.optim.Optimizer
) -> tuple[Any, torch.optim.Optimizer]:
    """Return the scheduler that a function makes for a copy of an optimizer, which shares its parameters, and the copy.

    Raises:
        RecipeError: If it gives no scheduler, or one that follows a metric.
    """
    shared = {id(each): each for group in optimizer.param_groups for each in group["params"]}
    twin = copy.deepcopy(optimizer, memo=dict(shared))
    for group in twin.param_groups:
        group.pop("initial_lr", None)
    with explained("schedule"):
        scheduler = make(twin)
    if not isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
        raise RecipeError(
            f"schedule gave a {type(scheduler).__name__}, but it must give a torch.optim.lr_scheduler.LRScheduler.",
            key="schedule",
        )
    if getattr(scheduler, "optimizer", twin) is not twin:
        raise RecipeError(
            "schedule moves another optimizer than the one that it is called with; use that.", key="schedule"
        )
    if "metrics" in inspect.signature(scheduler.step).parameters:
        raise RecipeError(
            f"schedule={type(scheduler).__name__} follows a metric, so that a step's learning rate would depend on "
            "when it was evaluated; use one that depends on the step, or stop early with evaluate.patience.",
            key="schedule",
        )
    return scheduler, twin


class _Moved:
    """A scheduler's settings by number of moves; each is computed once.

    Args:
        scheduler: Moves ``twin``.
        twin: A copy of the optimizer.
        optimizer: The run's.
    """

    def __init__(self, scheduler: Any, twin: torch.optim.Optimizer, optimizer: torch.optim.Optimizer) -> None:
        self._scheduler, self._twin = scheduler, twin
        self._first = [{key: _plain(value) for key, value in each.items()} for each in optimizer.param_groups]
        self._moving = {"lr"}
        self._settings: list[OptimizerSettings] = []
        self._settings.append(self._now())

    def to(self, moves: int) -> OptimizerSettings:
        while len(self._settings) <= moves:
            with warnings.catch_warnings(), explained("schedule"):
                warnings.simplefilter("ignore")  # this copy of the optimizer takes no steps
                try:
                    self._scheduler.step()
                except ValueError as error:
                    raise RecipeError(
                        f"schedule={type(self._scheduler).__name__} ends before the run: {error}; make it longer.",
                        key="schedule",
                    ) from error
            self._settings.append(self._now())
        return self._settings[moves]

    def _now(self) -> OptimizerSettings:
        groups = [{key: _plain(value) for key, value in each.items()} for each in self._twin.param_groups]
        for first, group in zip(self._first, groups, strict=True):
            self._moving |= {key for key in first if key != "params" and first[key] != group[key]}
            if not 0 <= group["lr"] < math.inf:
                raise RecipeError(
                    f"schedule={type(self._scheduler).__name__} gives the learning rate {group['lr']} after "
                    f"{len(self._settings)} moves; give a finite number from 0.",
                    key="schedule",
                    value=group["lr"],
                )
        moved = tuple({key: each[key] for key in sorted(self._moving & each.keys())} for each in groups)
        return OptimizerSettings(learning_rate=moved[0]["lr"], of_groups=moved)


def _plain(value: Any) -> Any:
    """Return a setting that can be compared, and kept while the optimizer changes its own."""
    return value.tolist() if isinstance(value, torch.Tensor) else value
