"""What is predicted of several processes over a link of known rate, beside what they take."""

from __future__ import annotations

from pathlib import Path

import pytest
import shaped

from paceline_advisor.clusters import Link
from paceline_advisor.formulas.scaling import Fabric

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.world_size(4)]


MEGABITS = 100.0


@pytest.fixture(autouse=True)
def links() -> None:
    if (reason := shaped.why_not()) is not None:
        pytest.skip(f"no link can be shaped here: {reason}")


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_a_sum_over_a_slow_link_takes_what_the_model_says(size: int, tmp_path: Path) -> None:
    message, rate = 2_000_000, MEGABITS * 1e6 / 8 * shaped.PAYLOAD
    measured = shaped.all_reduce_seconds(size, MEGABITS, message, tmp_path / "probe")
    fabric = Fabric(
        devices=size,
        per_node=1,
        within=Link(1e12, 0),
        network=Link(rate, shaped.LATENCY_SECONDS),
        algorithm="ring",
    )
    # Cores that others use too only make it slower; the shaped link cannot be faster than its rate.
    # benchmarks/scaling_shaped.py says how near it comes on a machine of its own.
    assert 0.5 * measured < fabric.all_reduce_seconds(message) < 1.1 * measured


def test_steps_over_a_slow_link_are_predicted(tmp_path: Path) -> None:
    (found,) = shaped.compare((4,), MEGABITS, tmp_path, steps=10, rounds=2)
    print(f"{found.prediction.seconds:.3f} s predicted, {found.measured_seconds:.3f} s measured")
    # The link bounds these steps: computing alone would be far from what they take, so the model of it is at work.
    assert found.prediction.limit == "communication"
    assert found.prediction.parts["computing"] < found.measured_seconds / 2
    # What is left is the machine's load, of which one process alone feels less. Wide, for cores that others use too:
    # benchmarks/scaling_shaped.py says how near it comes on a machine of its own.
    assert abs(found.error) < 0.6
