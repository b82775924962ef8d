"""The facts of a plan under their first address, which data sets and tasks of other packages import."""

from paceline.plan.facts import DataFacts, MachineFacts

__all__ = ["DataFacts", "MachineFacts"]
