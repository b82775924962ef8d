"""Grading of a student's training program: it is run and watched, never read."""

from paceline_course.grading.grade import grade
from paceline_course.grading.marks import Criterion, Marks

__all__ = ["grade", "Marks", "Criterion"]
