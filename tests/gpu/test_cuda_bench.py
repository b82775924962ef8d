"""On a GPU, do runs that take turns measure the device, and is its own counter of energy read?"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from paceline.recipe.load import load_recipe
from paceline_advisor.bench.energy import EnergyCounter

GREEDY = """
import torch
import paceline


class Greedy(paceline.ImageClassification):
    def loss(self, model, batch):
        if batch.slice.step == 9:
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        return super().loss(model, batch)
"""


def test_runs_take_turns_on_one_device(tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline_advisor.bench.interleaved import Variant, run_interleaved

    (tmp_path / "greedy.py").write_text(GREEDY)
    monkeypatch.chdir(tmp_path)
    small = load_recipe(tiny_recipe, {"parallel.device": "cuda"}).recipe
    large = load_recipe(tiny_recipe, {"parallel.device": "cuda", "model.options.width": 512, "batch.global_size": 1024})
    greedy = load_recipe(tiny_recipe, {"parallel.device": "cuda", "task": "greedy:Greedy"}).recipe
    variants = {
        "small": Variant(recipe=small, part="compute"),
        "large": Variant(recipe=large.recipe, part="compute"),
        "greedy": Variant(recipe=greedy),
    }
    found = run_interleaved(variants, rounds=4, block_seconds=0.5)
    assert [found[name].trouble for name in ("small", "large")] == ["", ""]
    assert found["large"].facts["device"] == "cuda"
    assert min(found["large"].step_seconds) > max(found["small"].step_seconds)
    assert found["large"].peak_memory_bytes > found["small"].peak_memory_bytes > 0
    for each in found["large"].rounds:
        assert sum(each.phases.values()) <= 1.02 * each.step_seconds
    assert found["greedy"].out_of_memory
    assert found["greedy"].alone


def test_energy_grows_with_work() -> None:
    counter = EnergyCounter(torch.device("cuda", 0))
    if counter.unavailable_reason:
        pytest.skip(counter.unavailable_reason)
    before = counter.joules()
    matrix = torch.randn(8192, 8192, device="cuda")
    begun = time.perf_counter()
    while time.perf_counter() - begun < 1:
        torch.mm(matrix, matrix)
        torch.cuda.synchronize()
    after = counter.joules()
    assert before is not None
    assert after is not None
    # A second of hard work, of a board that takes tens to hundreds of watts.
    assert 10 < after - before < 2000
