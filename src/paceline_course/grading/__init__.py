"""Grade a student's training program by running and observing it; its source is never read."""

from paceline_course.grading.grade import grade
from paceline_course.grading.marks import Criterion, Marks

__all__ = ["grade", "Marks", "Criterion"]
