"""Tasks that stand for another task: methods that pass their calls on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def forwarded(name: str) -> Callable[..., Any]:
    """Return a method that calls the same method of the object's ``task``."""

    def forward(self: Any, *arguments: Any, **options: Any) -> Any:
        return getattr(self.task, name)(*arguments, **options)

    return forward
