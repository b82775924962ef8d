"""What torchrun may start again, and again, must do the same each time."""

from __future__ import annotations

from pathlib import Path

import pytest

import paceline
from paceline.errors import LaunchError

RESTARTED = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "3",
}


@pytest.mark.parametrize(
    ("resume", "in_a_directory", "said"),
    [
        ("auto", False, "would start a new run each time; name a directory with --run-dir"),
        ("never", True, "each time they would apply --resume never;"),
        ("r/checkpoints/step-00000004", True, "each time they would apply --resume r/checkpoints/step-00000004;"),
    ],
)
def test_a_launch_that_would_lose_what_was_done_is_refused(
    tiny_recipe: Path, runs: Path, monkeypatch: pytest.MonkeyPatch, resume: str, in_a_directory: bool, said: str
) -> None:
    for name, value in RESTARTED.items():
        monkeypatch.setenv(name, value)
    run_dir = runs / "run" if in_a_directory else None
    with pytest.raises(LaunchError) as caught:
        paceline.train(tiny_recipe, run_dir=run_dir, resume=resume, quiet=True)
    assert said in str(caught.value)
    assert not (runs / "run").exists()
