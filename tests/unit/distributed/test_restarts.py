"""Which failures are met by another start, and by how many ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.distributed.local_launch import Failure, last_step, next_size

KILLED = "rank 0 was ended by SIGKILL"


def after(sizes: tuple[int, ...], *failures: tuple[int, int], causes: tuple[str, ...] = ()) -> int | None:
    """What is started after failures given as (ranks, last step)."""
    named = causes or (KILLED,) * len(failures)
    return next_size(
        sizes, [Failure(size=size, step=step, cause=cause) for (size, step), cause in zip(failures, named, strict=True)]
    )


def test_a_single_size_is_started_again_as_long_as_it_gets_on() -> None:
    assert after((2,), (2, 5)) == 2
    assert after((2,), (2, -1)) == 2
    assert after((2,), (2, 5), (2, 6), (2, 7)) == 2


@pytest.mark.parametrize("step", [5, 3])
def test_the_same_failure_without_progress_ends_it(step: int) -> None:
    assert after((2,), (2, 5), (2, step)) is None


def test_another_failure_without_progress_does_not() -> None:
    assert after((2,), (2, 5), (2, 5), causes=(KILLED, "ZeroDivisionError: too many")) == 2


def test_fewer_go_on_and_all_are_tried_at_the_next_restart() -> None:
    assert after((4, 2, 1), (4, 5)) == 2
    assert after((4, 2, 1), (4, 5), (2, 9)) == 4
    assert after((4, 2, 1), (4, 5), (2, 9), (4, 12)) == 2


def test_ever_fewer_are_tried_without_progress_and_then_none() -> None:
    assert after((4, 2, 1), (4, 5), (2, 5)) == 1
    assert after((4, 2, 1), (4, 5), (2, 5), (1, 5)) is None
    assert after((4, 2, 1), (4, 5), (2, 9), (4, 9)) == 2


def test_how_far_a_run_came(tmp_path: Path) -> None:
    assert last_step(tmp_path) == -1
    lines = [json.dumps({"event": "step", "step": step, "time": 0}) for step in (3, 6)]
    (tmp_path / "events.jsonl").write_text("\n".join(lines) + '\n{"event": "st')
    assert last_step(tmp_path) == 6
