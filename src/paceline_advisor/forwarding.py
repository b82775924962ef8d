"""Tasks and pipelines that stand for another one, and pass calls on to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def forwarded(name: str) -> Callable[..., Any]:
    """Return a method that calls the same method of the object's ``task``."""

    def forward(self: Any, *arguments: Any, **options: Any) -> Any:
        return getattr(self.task, name)(*arguments, **options)

    return forward


class PassesOn:
    """An object that passes on to another one what it does not define itself."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
