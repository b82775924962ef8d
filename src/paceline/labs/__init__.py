"""What the notebooks of the course import: exercises that say whether they are done, commands run as in a shell."""

from paceline.labs.exercises import exercise
from paceline.labs.figures import use_style
from paceline.labs.shell import run

__all__ = ["exercise", "run", "use_style"]
