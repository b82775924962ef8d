"""The plan of a run: every number derived from a recipe, by one function, in one frozen value."""

from paceline.plan.build import Occasion, Plan, make
from paceline.plan.facts import DataFacts, MachineFacts, NetworkFacts, ParameterGroupFacts, ParameterNumbers, TaskFacts

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
