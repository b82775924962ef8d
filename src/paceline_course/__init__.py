"""The course. Its notebooks import the checks of exercises, commands run as in a shell, and the style of figures."""

from paceline_course.exercises import exercise, use_answer
from paceline_course.figures import use_style
from paceline_course.shell import run

__all__ = ["exercise", "run", "use_answer", "use_style"]
