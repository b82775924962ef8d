"""What is a student's training program worth? It is run and watched, never read."""

from paceline.labs.grading.grade import grade
from paceline.labs.grading.marks import Criterion, Marks

__all__ = ["grade", "Marks", "Criterion"]
