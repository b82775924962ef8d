"""Short runs of a file's recipe, after which torch has as many threads as before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def train(recipe: Path, runs: Path) -> Callable[..., Any]:
    """``train("a", {...})`` trains as the test file's ``recipe`` says, in ``runs/a``."""

    def trainer(name: str, overrides: dict[str, Any] | None = None) -> Any:
        return paceline.train(recipe, overrides=overrides or {}, run_dir=runs / name, quiet=True)

    return trainer
