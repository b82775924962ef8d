"""Short runs of a file's recipe."""

from short_runs import _threads, train  # noqa: F401  # pytest finds fixtures here
