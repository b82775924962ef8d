"""What is prepared for samples of unequal length: a plan that names them, and batches as large as the run's largest."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.data.pipeline import Placement
from paceline.host.world import World
from paceline.recipe.load import load_recipe
from paceline.tasks.facts import geometry_of
from paceline.tasks.task import build_task
from paceline.trainer.fake_batch import batch_maker, evaluation_batch_maker
from paceline.trainer.subject import Subject

CPU = torch.device("cpu")


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    sizes = np.clip(np.random.default_rng(0).lognormal(3, 1, 40), 5, 150).astype(int)
    for split, found in {"train": sizes, "val": np.sort(sizes)}.items():
        (tmp_path / split).mkdir()
        for number, size in enumerate(found):
            (tmp_path / split / f"{number:02}.txt").write_text("x" * size)
    return tmp_path


@pytest.mark.parametrize(("rows", "balance"), [("single", "true"), ("single", "false"), ("packed", "true")])
def test_a_stand_in_batch_is_as_large_as_the_largest(texts: Path, rows: str, balance: str) -> None:
    overrides = [
        "data.dataset=text_folder",
        f"data.path={texts}",
        f"data.text.rows={rows}",
        "data.text.context=64",
        f"batch.balance={balance}",
        "batch.global_size=16",
        "batch.micro_size=4",
    ]
    recipe = load_recipe("gpt-small-docs", overrides).recipe
    task = build_task(recipe)
    plan = Subject.open(recipe, World(), "plan", task=task).plan
    geometry = geometry_of(recipe, plan, task)
    assert (plan.lengths_sha256 is not None) == (rows == "single" and balance == "true")
    batch = batch_maker(task, plan, Placement(device=CPU))(4)
    tokens = batch.inputs["tokens"]
    assert len(tokens) == len(batch.targets) == 4
    assert tokens.shape == batch.targets.shape
    if rows == "packed":
        assert geometry.costliest(0, plan.total_steps) is None
        assert tokens.shape[1] == 64
        return
    largest, lengths = geometry.costliest(0, plan.steps_per_epoch), task.sample_lengths()
    assert largest is not None
    assert lengths is not None
    assert largest.positions <= tokens.numel() < largest.positions + 4 * 8
    widest = int(lengths.padded(np.arange(plan.train_samples)).max())
    assert batch_maker(task, plan, Placement(device=CPU))(10 * plan.train_samples).targets.shape[1] == widest
    # The longest held-out text is none of the first.
    scored = evaluation_batch_maker(task, plan, Placement(device=CPU))(8)
    assert scored.targets.shape == scored.inputs["tokens"].shape == (8, widest)
    pipeline = task.open_pipeline(Placement(device=CPU))
    pipeline.start(training=False, evaluation=True)
    widths = [each.targets.shape[1] for each in pipeline.evaluation_batches(8, World())]
    assert max(widths) == widest > widths[0]
