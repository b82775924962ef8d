"""One figure of a run's memory: remembered but for noise, said of each process and of all, refused with a reason."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.errors import TrainingError
from paceline.host.machine import available_cores
from paceline.recipe.load import load_recipe
from paceline.telemetry.clock import family_bytes, proportional_bytes
from paceline.trainer.expected_memory import ExpectedMemory, forecast_apart

MIB = 2**20


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_a_second_measurement_gives_the_first_figure_unless_it_differs_by_more_than_noise() -> None:
    recipe = load_recipe("digits").recipe
    first = ExpectedMemory(600 * MIB, 600 * MIB, 1)
    assert first._agreed(recipe) == first
    assert ExpectedMemory(612 * MIB, 590 * MIB, 1)._agreed(recipe) == first
    larger = ExpectedMemory(640 * MIB, 640 * MIB, 1)
    assert larger._agreed(recipe) == larger
    assert first._agreed(recipe) == first, "6 per cent below what is known now"
    other = load_recipe("digits", {"batch.global_size": 512}).recipe
    assert larger._agreed(other) == larger


def test_a_damaged_file_is_replaced(tmp_path: Path) -> None:
    recipe, found = load_recipe("digits").recipe, ExpectedMemory(600 * MIB, 600 * MIB, 1)
    found._agreed(recipe)
    (path,) = (tmp_path / "paceline" / "memory").iterdir()
    for text in ("", "[]", '{"each": "many", "together": 1, "ranks": 1}', '{"each": 1}'):
        path.write_text(text)
        assert found._agreed(recipe) == found
    assert "many" not in path.read_text()


def test_each_and_all_are_said_where_there_are_several() -> None:
    assert ExpectedMemory(600 * MIB, 600 * MIB, 1).in_words(" of memory") == "600 MiB of memory"
    two = ExpectedMemory(700 * MIB, 900 * MIB, 2)
    assert two.in_words(" of memory") == "700 MiB of memory each, 900 MiB for all processes"
    assert ExpectedMemory(700 * MIB, 900 * MIB, 1).in_words() == "700 MiB, 900 MiB for all processes"


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="only Linux has these figures")
def test_a_fork_shares_what_it_does_not_write() -> None:
    held = bytearray(os.urandom(MIB)) * 64
    before = family_bytes(os.getpid())
    assert before >= len(held)
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.read(reader, 1)
        os._exit(0)
    both = family_bytes(os.getpid())
    assert proportional_bytes(child) > 0
    os.write(writer, b"x")
    os.waitpid(child, 0)
    for each in (reader, writer):
        os.close(each)
    assert both - before < len(held) / 2
    assert family_bytes(child) == 0


def test_more_processes_than_cores_are_not_started() -> None:
    count = available_cores() + 1
    with pytest.raises(TrainingError, match=f"the run has {count} processes, and this machine has {count - 1} cores"):
        forecast_apart(load_recipe("digits").recipe, count, print)


@pytest.mark.slow
def test_a_mistake_in_the_run_is_the_reason() -> None:
    recipe = load_recipe("image_folder", {"data.path": "/nowhere"}).recipe
    with pytest.raises(TrainingError, match="/nowhere"):
        forecast_apart(recipe, 1, print)
