"""What the notebooks of the course import: exercises that say whether they are done, commands run as in a shell."""

from paceline_course.exercises import exercise
from paceline_course.figures import use_style
from paceline_course.shell import run

__all__ = ["exercise", "run", "use_style"]
