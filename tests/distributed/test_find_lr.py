"""A range test of two processes: all see the same losses, end at the same step, and leave the next training alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from calls import Call
from own_networks import OWN, network_that

pytestmark = pytest.mark.world_size(2)

FIND = ("find-lr", "recipe.yaml", "--lowest", "1e-4", "--highest", "10", "--steps", "40", "--seeds", "1", "--json")
# The loss explodes on one process only, and all of them hear of it.
SPOILED = 'if self.passes > 60 and os.environ["RANK"] == "1":\n    x = x * WORSE'


def test_two_processes_find_what_one_finds(studio: Path, run: Call, run_here: Call) -> None:
    """Exact, so that the numbers are those of one process to the bit."""
    exact = ("parallel.exact=true", "parallel.logical_ranks=4", "batch.micro_size=auto")
    alone = run_here(*FIND, *exact).document
    before = {path.name for path in studio.iterdir()}
    together = run(*FIND, *exact, "--processes", "2", where=studio).document
    assert {path.name for path in studio.iterdir()} - before <= {path.name for path in studio.glob("*.???")}
    assert (alone["world_size"], together["world_size"]) == (1, 2)
    for key in ("lrs", "losses", "smoothed", "stop"):
        assert together[key] == alone[key]
    suggested = [{name: each["lr"] for name, each in found["suggestions"].items()} for found in (alone, together)]
    assert suggested[0] == suggested[1]


@pytest.mark.parametrize(("worse", "reason"), [("1e4", "diverged"), ("float('nan')", "not_finite")])
@pytest.mark.thorough
def test_all_end_where_the_loss_of_one_is_spoiled(studio: Path, run: Call, worse: str, reason: str) -> None:
    (studio / "spoiled.py").write_text(network_that(SPOILED.replace("WORSE", worse)))
    model = ("model.name=spoiled:Net", *OWN, "optimizer.clip_norm=off")
    found = run(*FIND, *model, "--processes", "2", "--smoothing", "0.5", where=studio).document
    assert found["stop"]["reason"] == reason
    # Two micro-batches of each process a step, but for an epoch's last one: the 61st call is in the 31st step.
    assert 25 < found["stop"]["steps"] <= 33
