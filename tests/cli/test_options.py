"""What options of several commands have in common."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from calls import Call, command_names
from PIL import Image

import paceline
from paceline.cli.commands import command_of
from paceline.cli.main import run
from paceline.cli.options import FiniteRange, LocalPath


def _options(command: click.Command) -> Iterator[click.Parameter]:
    yield from command.params
    if isinstance(command, click.Group):
        for each in command.commands.values():
            yield from _options(each)


def test_every_number_typed_is_finite() -> None:
    """click's own numbers let nan and inf through, which end in a traceback or in a table of nan."""
    numbers = [
        (name, option)
        for name in command_names()
        for option in _options(command_of(name))
        if isinstance(option.type, click.types.FloatParamType)
    ]
    assert len(numbers) > 10
    assert not [f"{name} {option.opts}" for name, option in numbers if not isinstance(option.type, FiniteRange)]


def test_every_path_typed_may_begin_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [
        (name, option)
        for name in command_names()
        for option in _options(command_of(name))
        if isinstance(option.type, click.Path)
    ]
    assert len(paths) > 40
    assert not [f"{name} {option.opts}" for name, option in paths if not isinstance(option.type, LocalPath)]
    monkeypatch.setenv("HOME", "/home/anna")
    for typed, meant in (("~", "/home/anna"), ("~/r", "/home/anna/r"), ("r~", "r~"), ("./~", "~")):
        assert LocalPath().convert(typed, None, None) == Path(meant)


def test_no_folder_called_tilde_is_made(
    tmp_path: Path, paceline_here: Call, tiny: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    (home / "r.yaml").write_text("base: digits\ntelemetry: {report: no}\n")
    requested = (*tiny, "train.duration=1 steps", "evaluate.every=off", "checkpoint.every=1 steps")
    paceline_here("train", "~/r.yaml", *requested, "data.saved_split=~/split.json", "--run-dir=~/r1").ended(0)
    Image.new("L", (8, 8)).save(home / "x.png")
    assert paceline_here("predict", "~/r1", "~/x.png").code == 0
    weights = f"model.initialize_from=~/r1/checkpoints/step-{1:08d}"
    paceline.train("~/r.yaml", overrides=[*requested, weights], run_dir="~/r2", quiet=True)
    assert {path.name for path in home.iterdir()} >= {"r1", "r2", "split.json"}
    assert not (tmp_path / "~").exists()


def test_a_plan_tells_of_a_run_that_ends_early(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "digits", "--until", "7 steps", "--plan-only"]) == 0
    assert "after step 7 (train.until)" in capsys.readouterr().out
