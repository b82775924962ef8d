"""Which tokens of a sample are hidden? A number that follows from its length, at places that are keyed by the sample.

As in BERT (Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers", 2018): of what is asked for, 80 %
is hidden, 10 % replaced by any token, and 10 % left as it is. The number is a function of the length alone, so that
every process knows what a whole global step asks for (docs/decisions/0050).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.data.random_draws import uniforms
from paceline.data.text.rows import NOTHING
from paceline.data.text.tokenizer import TokenIds

# Held-out samples are hidden alike in every run and epoch; these are no run's own draws.
EVALUATION_SEED = 0x6D61736B
_HIDDEN, _REPLACED = 0.8, 0.9


def masked_count(tokens: NDArray[np.int64], fraction: float) -> NDArray[np.int64]:
    """How many tokens are asked for in samples of so many, int64 [samples]: the share, rounded, and at least one."""
    counts: NDArray[np.int64] = np.maximum(1, np.floor(tokens * fraction + 0.5)).astype(np.int64)
    return counts


@dataclass(frozen=True, kw_only=True)
class Masking:
    """Hides tokens of a sample.

    Attributes:
        seed: Keys the draws.
        fraction: Share of the tokens that are asked for.
        mask: The id that hides one.
        vocabulary: Ids that may replace one.
        context: Most tokens of a sample.
    """

    seed: int
    fraction: float
    mask: int
    vocabulary: int
    context: int

    def __call__(self, tokens: TokenIds, *, epoch: int, sample: int) -> tuple[TokenIds, TokenIds]:
        """What the model sees, and what it is asked for, both int64 [T]; a function of (seed, epoch, sample)."""
        count = int(masked_count(np.array([len(tokens)]), self.fraction)[0])
        # The places' numbers come first, as many as a sample can have: what follows is keyed alike in all.
        drawn = uniforms(self.seed, epoch, np.array([sample]), self.context + 2 * count)[0]
        places = np.argsort(drawn[: len(tokens)], kind="stable")[:count]
        kinds, others = drawn[self.context :].reshape(2, count)
        seen, asked = tokens.copy(), np.full_like(tokens, NOTHING)
        asked[places] = tokens[places]
        seen[places[kinds < _HIDDEN]] = self.mask
        replaced = (kinds >= _HIDDEN) & (kinds < _REPLACED)
        seen[places[replaced]] = (others[replaced] * self.vocabulary).astype(np.int64)
        return seen, asked
