"""Fingerprints tell equal inputs from others."""

from __future__ import annotations

import numpy as np
import torch

from paceline.learning.copies import FingerprintCollector, Prints, count_copies, fingerprints

DRAWN = torch.Generator().manual_seed(0)
PICTURES = torch.randn(50, 3, 40, 40, generator=DRAWN)
TOKENS = torch.randint(1, 9, (50, 30), generator=DRAWN)


def prints(*batches: torch.Tensor) -> Prints:
    collector = FingerprintCollector()
    for each in batches:
        collector.add([each])
    return collector.prints()


def test_equal_samples_are_found_in_any_layout_and_batch() -> None:
    others = torch.randn(50, 3, 40, 40, generator=DRAWN)
    trained = torch.cat((others, PICTURES[:5])).contiguous(memory_format=torch.channels_last)
    held_out = prints(PICTURES[:20], PICTURES[20:])
    assert count_copies(prints(trained), held_out) == {"compared": 55, "equal": 5}
    assert count_copies(prints(others), held_out) == {"compared": 50, "equal": 0}
    assert count_copies(prints(others, others), held_out)["compared"] == 50


def test_a_changed_value_changes_the_fingerprint() -> None:
    changed = TOKENS.clone()
    changed[:, 7] += 1
    assert not set(prints(changed)) & set(prints(TOKENS))
    assert not set(prints(PICTURES.flip(3))) & set(prints(PICTURES))


def test_padding_does_not_count() -> None:
    padded = torch.nn.functional.pad(TOKENS, (0, 9))
    assert np.array_equal(prints(padded), prints(TOKENS))


def test_few_values_tell_nothing() -> None:
    assert fingerprints([torch.zeros(4, 3)]) is None
    assert fingerprints([torch.zeros(4, 3), torch.zeros(4, 5)]) is not None
    assert fingerprints([]) is None
    assert fingerprints([torch.zeros(())]) is None
    assert count_copies(prints(), prints(TOKENS)) == {}
