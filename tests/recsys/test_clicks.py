"""Recommendation against a plain PyTorch loop on the same samples: the same bits.

The loop below shares nothing with the trainer but the samples, their order and the network's class.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from calls import Call

import paceline
from paceline.data.order import epoch_order
from paceline.recipe.load import load_recipe
from paceline_recsys.networks import Dlrm
from paceline_recsys.sets.synthetic import open_clicks

RECIPE = """
seed: 3
task: recommendation
model: {name: dlrm, options: {embedding: 4, bottom: [8], top: [8], sparse: SPARSE}}
data:
  dataset: synthetic_clicks
  samples: 100
  recommendation: {dense_features: 3, categories: 4, max_rows: 30, evaluation_samples: 10}
batch: {global_size: 16, micro_size: MICRO}
optimizer: {name: sgd, lr: 0.1, momentum: 0.0}
schedule: {name: constant}
train: {duration: 14 steps, precision: fp32}
evaluate: {every: off}
checkpoint: {every: off}
parallel: {device: cpu, threads: 1}
telemetry: {log_every: 3 steps, trackers: [], report: off}
"""


def plain_loop(recipe: Any, *, sparse: bool, micro: int) -> dict[str, torch.Tensor]:
    data = open_clicks(recipe.data)
    torch.manual_seed(3)
    model = Dlrm(3, data.tables, embedding=4, bottom=(8,), top=(8,), sparse=sparse)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(14):
        epoch, position = divmod(step, 7)  # six steps of 16 samples, and one of four
        ids = epoch_order(3, epoch, 100)[position * 16 :][:16]
        for part in np.array_split(ids, 16 // micro):
            rows = data.train.read(part)
            logits = model(torch.from_numpy(rows.dense), torch.from_numpy(rows.categories))
            labels = torch.from_numpy(rows.labels).float()
            loss = F.binary_cross_entropy_with_logits(logits, labels) * (len(part) / len(ids))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("micro", [16, 4])
@pytest.mark.everyday
def test_the_same_bits_as_a_plain_loop(runs: Path, tmp_path: Path, weights: Call, sparse: bool, micro: int) -> None:
    path = tmp_path / "clicks.yaml"
    path.write_text(RECIPE.replace("SPARSE", str(sparse).lower()).replace("MICRO", str(micro)))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    trained = weights(paceline.train(path, run_dir=runs / "run", quiet=True))
    expected = plain_loop(load_recipe(path).recipe, sparse=sparse, micro=micro)
    torch.set_num_threads(threads)
    assert trained.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(trained[name], tensor), name
