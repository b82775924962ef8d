"""What options of several commands have in common."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import click
import pytest

from paceline.cli.main import COMMANDS, run
from paceline.cli.options import FiniteRange


def _options(command: click.Command) -> Iterator[click.Parameter]:
    yield from command.params
    if isinstance(command, click.Group):
        for each in command.commands.values():
            yield from _options(each)


def test_every_number_typed_is_finite() -> None:
    """click's own numbers let nan and inf through, which end in a traceback or in a table of nan."""
    numbers = [
        (name, option)
        for name in COMMANDS
        for option in _options(importlib.import_module(f"paceline.cli.{name.replace('-', '_')}").command)
        if isinstance(option.type, click.types.FloatParamType)
    ]
    assert len(numbers) > 10
    assert not [f"{name} {option.opts}" for name, option in numbers if not isinstance(option.type, FiniteRange)]


def test_a_plan_tells_of_a_run_that_ends_early(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "digits", "--until", "7 steps", "--plan-only"]) == 0
    assert "after step 7 (train.until)" in capsys.readouterr().out
