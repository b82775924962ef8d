"""Tasks and pipelines that stand for another one, and pass calls on to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.tasks.task import Task


def forwarded(name: str) -> Callable[..., Any]:
    """Return a method that calls the same method of the object's ``task``."""

    def forward(self: Any, *arguments: Any, **options: Any) -> Any:
        return getattr(self.task, name)(*arguments, **options)

    return forward


class TaskStandIn(Task):
    """A task that stands for another one, ``task``."""

    def __init__(self, task: Task) -> None:
        super().__init__(task.recipe)
        self.task = task
        self.metrics, self.headline, self.unit = task.metrics, task.headline, task.unit
        self.gives_scores = task.gives_scores


class PassesOn:
    """An object that passes on to another one what it does not define itself."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
