"""Re-export of the plan's facts under their original path, which data sets and tasks of other packages import."""

from paceline.plan.facts import DataFacts, MachineFacts

__all__ = ["DataFacts", "MachineFacts"]
