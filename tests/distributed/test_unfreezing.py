"""Several processes begin to train more of the network at the same step, and a resume around it changes no bit."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import paceline

SOURCE = str(Path(paceline.__file__).parents[1])
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
telemetry: {log_every: 1 steps, trackers: []}
"""
# Each rank trains several runs, one after the other: the processes meet anew for each.
PROGRAM = """
import json, os, sys
import paceline

folder, runs, answer = sys.argv[1], json.loads(sys.argv[2]), {}
for number, (name, overrides) in enumerate(runs):
    os.environ["PACELINE_RENDEZVOUS"] = f"file://{folder}/meet-{number}"
    done = paceline.train(f"{folder}/recipe.yaml", overrides=overrides, run_dir=f"{folder}/{name}", quiet=True)
    answer[name] = [done.summary.weights_sha256, done.summary.ema_sha256, done.summary.step]
print(json.dumps(answer))
"""


def train(folder: Path, processes: int, *runs: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    """Train several runs in several processes; returns each run's weights, average and step."""
    (folder / "recipe.yaml").write_text(RECIPE)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(PROGRAM), str(folder), json.dumps(runs)],
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={
                "PYTHONPATH": SOURCE,
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(processes),
                "LOCAL_WORLD_SIZE": str(processes),
                "PACELINE_RENDEZVOUS": "",
            },
        )
        for rank in range(processes)
    ]
    try:
        told = [process.communicate(timeout=120) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0] * processes, told
    answers = [json.loads(out.splitlines()[-1]) for out, _ in told]
    assert all(answer == answers[0] for answer in answers)
    found: dict[str, Any] = answers[0]
    return found


def test_a_resume_around_the_step_gives_the_same_bits(tmp_path: Path) -> None:
    """Three processes: with fewer, the order in which DDP's buckets are added up does not show."""
    pieces = [(f"until-{step}", {"train.until": f"{step} steps"}) for step in (2, 3, 4)]
    done = train(tmp_path, 3, ("whole", {}), *pieces, *((name, {}) for name, _ in pieces))
    assert done["whole"][2] == 6
    assert {name: found for name, found in done.items() if found != done["whole"]} == {}


@pytest.mark.thorough
@pytest.mark.parametrize("processes", [2])
def test_an_exact_run_does_not_depend_on_the_processes(tmp_path: Path, processes: int) -> None:
    exact = {"parallel.exact": True, "parallel.logical_ranks": 4, "batch.micro_size": "auto"}
    (tmp_path / "alone").mkdir()
    (tmp_path / "together").mkdir()
    alone = train(tmp_path / "alone", 1, ("run", exact))
    assert train(tmp_path / "together", processes, ("run", exact)) == alone
