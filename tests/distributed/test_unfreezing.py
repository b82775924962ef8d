"""Several processes train more, or less, of the network from the same step, and a resume around it changes no bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from calls import Call

# Two launches one after the other, each with the time that the fixture gives it.
pytestmark = [pytest.mark.thorough, pytest.mark.timeout(600)]

RECIPE = """
model:
  name: small_resnet
  options: {width: 4, stages: 1, depth: 1}
  frozen: ["*", "!classifier.*"]
  unfreeze: {"stages.*": 2 steps, "*": 4 steps}
data: {dataset: digits}
batch: {global_size: 96, micro_size: 8}
optimizer: {lr: 0.05, weight_decay: 0.1}
schedule: {name: constant}
train: {duration: 6 steps, precision: fp32, ema: 0.5}
evaluate: {every: off}
checkpoint: {every: 1 steps, keep: 10}
parallel: {device: cpu, threads: 1, bucket_cap_mb: 1}
telemetry: {log_every: 1 steps, trackers: [], report: off}
"""


# The speed runs' network and update rule, which begin from the images, and a bias that is trained for a while.
SPEED = """
model:
  name: speed_net
  options: {widths: [8, 8]}
  frozen: ["whitening.weight", "blocks.*.norms.*.weight"]
  freeze_after: {"whitening.bias": 3 steps}
data: {dataset: digits, augment: {flip: 0.5, alternate_flip: true}}
batch: {global_size: 96, micro_size: 8}
optimizer: {name: muon, rest: sgd, lr: 0.05, nesterov: true, unit_filters: true, rest_lr_factor: 10}
schedule: {name: linear}
train: {duration: 6 steps, precision: fp32}
evaluate: {every: off}
checkpoint: {every: 1 steps, keep: 10}
parallel: {device: cpu, threads: 1, bucket_cap_mb: 1}
telemetry: {log_every: 1 steps, trackers: [], report: off}
"""


@pytest.mark.parametrize(("recipe", "stops"), [(RECIPE, (2, 3)), (SPEED, (2, 3, 4))], ids=["unfreezing", "speed"])
def test_a_resume_around_the_step_gives_the_same_bits(
    tmp_path: Path, train_in_ranks: Call, recipe: str, stops: tuple[int, ...]
) -> None:
    """Three processes: with fewer, the order in which DDP's buckets are added up does not show."""
    pieces = [(f"until-{step}", {"train.until": f"{step} steps"}) for step in stops]
    done = train_in_ranks(tmp_path, recipe, 3, ("whole", {}), *pieces, *((name, {}) for name, _ in pieces))
    assert done["whole"][2] == 6
    assert {name: found for name, found in done.items() if found != done["whole"]} == {}


@pytest.mark.parametrize("recipe", [RECIPE, SPEED], ids=["unfreezing", "speed"])
def test_an_exact_run_does_not_depend_on_the_processes(tmp_path: Path, train_in_ranks: Call, recipe: str) -> None:
    exact = {"parallel.exact": True, "parallel.logical_ranks": 4, "batch.micro_size": "auto"}
    (tmp_path / "alone").mkdir()
    (tmp_path / "together").mkdir()
    alone = train_in_ranks(tmp_path / "alone", recipe, 1, ("run", exact))
    assert train_in_ranks(tmp_path / "together", recipe, 2, ("run", exact)) == alone
