"""Which samples are kept, batch by batch, are those that looking at all of them at once would choose."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.metrics.answers import Answers, Candidate, Examples, choose


def all_of(answers: Answers, draws: np.ndarray, ids: np.ndarray) -> list[Candidate]:
    return [
        Candidate(
            sample=int(ids[row]),
            score=float(answers.probability[row] if wrong else np.float32(draws[row])),
            is_mistake=bool(wrong),
            label=int(answers.label[row]),
            predicted=int(answers.predicted[row]),
            probability=float(answers.probability[row]),
            label_probability=float(answers.label_probability[row]),
        )
        for row, wrong in enumerate((answers.predicted != answers.label).tolist())
    ]


@pytest.mark.parametrize(("wrong", "batch"), [(0.3, 7), (0.0, 50), (1.0, 16), (0.01, 3)])
def test_what_is_kept_on_the_way_is_the_best_of_all(wrong: float, batch: int) -> None:
    count, samples = 9, 400
    generator = torch.Generator().manual_seed(batch)
    ids = torch.randperm(samples, generator=generator).numpy()
    # Few distinct scores, so that equal ones are told apart by their numbers.
    scores = torch.randint(0, 12, (samples, 4), generator=generator).float()
    labels = scores.argmax(1)
    labels = torch.where(torch.rand(samples, generator=generator) < wrong, (labels + 1) % 4, labels)
    answers = Answers.of(scores, labels)
    draws = np.round(torch.rand(samples, generator=generator).double().numpy(), 1)
    shown = torch.arange(samples).to(torch.uint8).reshape(-1, 1, 1, 1).expand(-1, 3, 2, 2)
    kept = Examples(count, lambda pictures: pictures)
    for first in range(0, samples, batch):
        rows = slice(first, first + batch)
        kept.add(ids[rows], draws[rows], shown[rows], Answers.of(scores[rows], labels[rows]))
    expected = choose(all_of(answers, draws, ids), count)
    found = choose(kept.candidates(), count)
    assert found == expected
    for each in found:
        picture = kept.picture(each)
        assert picture is not None
        assert picture[0, 0, 0] == int(np.flatnonzero(ids == each.sample)[0]) % 256
