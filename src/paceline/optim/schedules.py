"""Which learning rate at which step? Pure functions: nothing to save, nothing to resume wrongly."""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.recipe.plan import LearningRatePoint, Plan
from paceline.recipe.training import Optimizer, Schedule


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """The learning rate of a run as a function of the step.

    During the warm-up the rate rises linearly from ``peak / warmup_steps`` at step 0 to ``peak`` at step
    ``warmup_steps - 1``. After it, ``x`` runs from 0 to 1 over the remaining steps and the rate is

    * constant: ``peak``
    * linear: ``peak + (end - peak) * x``
    * cosine: ``end + (peak - end) * (1 + cos(pi * x)) / 2`` (Loshchilov and Hutter 2016, without restarts)
    * step: ``peak * gamma ** (number of milestones passed)``
    """

    name: str
    peak: float
    end: float
    gamma: float
    total_steps: int
    warmup_steps: int
    milestones: tuple[int, ...]

    @classmethod
    def of(cls, optimizer: Optimizer, schedule: Schedule, plan: Plan) -> LearningRate:
        """The schedule of a recipe with the plan's numbers."""
        return cls(
            name=schedule.name,
            peak=optimizer.lr,
            end=schedule.end_lr,
            gamma=schedule.gamma,
            total_steps=plan.total_steps,
            warmup_steps=plan.warmup_steps,
            milestones=plan.milestone_steps,
        )

    def __call__(self, step: int) -> float:
        """Learning rate used by the optimizer step numbered ``step``, from 0."""
        if step < self.warmup_steps:
            return self.peak * ((step + 1) / self.warmup_steps)
        progress = (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
        progress = min(progress, 1.0)
        match self.name:
            case "linear":
                return self.peak + (self.end - self.peak) * progress
            case "cosine":
                return self.end + (self.peak - self.end) * (1 + math.cos(math.pi * progress)) / 2
            case "step":
                return self.peak * self.gamma ** sum(step >= milestone for milestone in self.milestones)
        return self.peak

    def phases(self) -> tuple[LearningRatePoint, ...]:
        """The rate at each phase boundary, for the plan."""
        points = {0: "warmup" if self.warmup_steps else self.name}
        if self.warmup_steps:
            points[min(self.warmup_steps, self.total_steps - 1)] = f"{self.name} from the peak"
        for milestone in self.milestones:
            points[milestone] = "milestone"
        points[self.total_steps - 1] = "last step"
        return tuple(
            LearningRatePoint(step, self(step), phase)
            for step, phase in sorted(points.items())
            if step < self.total_steps
        )
