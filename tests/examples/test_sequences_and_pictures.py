"""The transducer's loss and letter error against definitions that need no recursion."""

from __future__ import annotations

import importlib
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.thorough


@pytest.fixture
def rnnt(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("torchaudio", reason="the example needs it: pip install torchaudio")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    return importlib.import_module("rnnt")


def brute_force(logits: torch.Tensor, word: list[int], frames: int) -> float:
    """Sum the probabilities of all alignments: one blank ends each frame, and the last step is a blank."""
    logs, paths = logits.double().log_softmax(dim=-1), []
    for places in combinations(range(frames + len(word) - 1), len(word)):
        frame = said = 0
        total = torch.zeros((), dtype=torch.float64)
        for step in range(frames + len(word)):
            if step in places:
                total, said = total + logs[frame, said, word[said]], said + 1
            else:
                total, frame = total + logs[frame, said, 0], frame + 1
        paths.append(total)
    return -torch.stack(paths).logsumexp(dim=0).item()


def test_the_loss_sums_over_all_alignments_of_padded_sounds(rnnt: Any) -> None:
    logits = torch.randn(2, 4, 4, 1 + rnnt.LETTERS, generator=torch.Generator().manual_seed(0))
    words = torch.tensor([[3, 5, 0], [2, 0, 0]], dtype=torch.int32)
    counts = torch.tensor([[3, 2], [2, 1]], dtype=torch.int32)
    batch = SimpleNamespace(inputs=(torch.zeros(2, 4, 1), words), targets=counts)
    found = rnnt.Dictation(None).losses(lambda *_: logits, batch)
    wanted = [brute_force(logits[0], [3, 5], 3), brute_force(logits[1], [2], 2)]
    assert found.tolist() == pytest.approx(wanted, rel=1e-5)


def test_edits_are_the_fewest(rnnt: Any) -> None:
    assert [rnnt.edits([], [1, 2]), rnnt.edits([1, 2, 3], [2, 3]), rnnt.edits([1, 4, 3], [1, 2, 3])] == [2, 1, 1]
