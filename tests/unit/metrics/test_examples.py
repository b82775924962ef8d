"""Which samples are kept, batch by batch, are those that looking at all of them at once would choose."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import precision_recall_fscore_support

from paceline.metrics.answers import Answers, Candidate, Confusion, Examples, choose
from paceline.metrics.confusion import confusion_document, scores_by_class


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


@pytest.mark.parametrize("classes", [7, 130])  # a matrix, and triples
def test_scores_of_classes_are_scikit_learns(classes: int) -> None:
    drawn = np.random.default_rng(classes)
    labels = drawn.integers(0, classes - 2, 900)  # the last but one is only answered, the last not even that
    labels[labels == 2] = 1
    predicted = np.where(drawn.random(900) < 0.4, drawn.integers(0, classes - 1, 900), labels)
    predicted[predicted == 0] = 3  # never answered
    confusion = Confusion()
    confusion.add(Answers.of(torch.eye(classes)[torch.from_numpy(predicted)], torch.from_numpy(labels)))
    triples, reliability = confusion.counts()
    found = scores_by_class(confusion_document(triples, [reliability], [f"c{each}" for each in range(classes)]))
    known = sorted({*labels.tolist(), *predicted.tolist()})
    columns = precision_recall_fscore_support(labels, predicted, labels=known, zero_division=0)
    theirs = {f"c{label}": row for label, row in zip(known, zip(*columns, strict=True), strict=True)}
    assert {each["class"] for each in found} == theirs.keys()
    for each in found:
        *shares, count = theirs[each["class"]]
        assert [each[name] / 100 for name in ("precision", "recall", "f1")] == pytest.approx(shares)
        assert each["count"] == count
    assert [each["f1"] for each in found] == sorted(each["f1"] for each in found)


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
