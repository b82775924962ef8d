"""The losses and the search of examples against plain definitions."""

from __future__ import annotations

import importlib
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.thorough


@pytest.fixture
def rnnt(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("torchaudio", reason="needs torchaudio")
    monkeypatch.syspath_prepend(str(EXAMPLES))
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
    found = rnnt.Transcription(None).losses(lambda *_: logits, batch)
    wanted = [brute_force(logits[0], [3, 5], 3), brute_force(logits[1], [2], 2)]
    assert found.tolist() == pytest.approx(wanted, rel=1e-5)


def test_the_transcription_follows_the_most_probable_letters(rnnt: Any) -> None:
    """The predictor is as sure that a letter does not follow itself as the encoder is of its letters."""
    heard = torch.eye(1 + rnnt.LETTERS)[[0, 3, 0, 5, 5, 3]]
    heard[:, 0] += 0.5

    def predict(letter: torch.Tensor, state: Any = None) -> tuple[torch.Tensor, Any]:
        return -torch.eye(1 + rnnt.LETTERS)[letter] * (letter > 0)[..., None], state

    parts = {"encoder": lambda sound: (heard[None], None), "embedding": lambda letter: letter, "joiner": lambda x: x}
    network = SimpleNamespace(**parts, predictor=predict)
    assert rnnt.Transducer.transcribe(network, torch.zeros(1, 6, 1)) == [3, 5, 3]


def test_the_unet_s_loss_is_monai_s(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = pytest.importorskip("monai.losses", reason="needs monai")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    unet3d = importlib.import_module("unet3d")
    draws = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 4, 4, 4, generator=draws)
    classes = torch.randint(0, 2, (2, 1, 4, 4, 4), generator=draws)  # no tumour
    wanted = losses.DiceCELoss(softmax=True, include_background=False)(logits, unet3d.one_hot(classes))
    assert unet3d.losses(logits, classes).mean().item() == pytest.approx(wanted.item(), rel=1e-6)


def test_the_frechet_distance_is_zero_for_the_same_images_and_adds_a_shift(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("diffusers", reason="needs diffusers")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    distance = importlib.import_module("diffusion").frechet_distance
    images = torch.randn(200, 5, generator=torch.Generator().manual_seed(0)).double()
    assert distance(images, images) == pytest.approx(0, abs=1e-6)
    assert distance(images, images + 2) == pytest.approx(5 * 4)
    scatter = images.var(dim=0).sum().item()  # twice the spread: (2 - 1)^2 times the variances
    assert distance(images, 2 * images - images.mean(dim=0)) == pytest.approx(scatter)
