"""The plan of a run: every number derived from a recipe, by one function, in one frozen value.

Names are loaded on first use: the order of samples needs ``plan.epochs`` and not the recipe.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.plan.build import Occasion, Plan, make
    from paceline.plan.facts import (
        DataFacts,
        MachineFacts,
        NetworkFacts,
        ParameterGroupFacts,
        ParameterNumbers,
        TaskFacts,
    )

__all__ = [
    "DataFacts",
    "MachineFacts",
    "NetworkFacts",
    "Occasion",
    "ParameterGroupFacts",
    "ParameterNumbers",
    "Plan",
    "TaskFacts",
    "make",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'paceline.plan' has no attribute '{name}'")
    home = "build" if name in ("Occasion", "Plan", "make") else "facts"
    return getattr(importlib.import_module(f"paceline.plan.{home}"), name)
