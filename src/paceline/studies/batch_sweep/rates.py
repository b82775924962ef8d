"""Which learning rates are tried with a batch, and to which rule do they belong?"""

from __future__ import annotations

import math
from typing import Literal, get_args

Rule = Literal["constant", "linear", "sqrt", "tuned"]
RULES: tuple[Rule, ...] = get_args(Rule)

# Around the square root rule, which lies between the other two; in steps of two a best one is off by 1.4 at most.
_TUNED = (0.25, 0.5, 1.0, 2.0, 4.0)


def rates_of(rule: Rule, batch: int, reference_batch: int, reference_rate: float) -> tuple[float, ...]:
    """Learning rates that a rule tries with a batch; one but for ``tuned``.

    Args:
        rule: How the rate follows the batch.
        batch: Samples in a step.
        reference_batch: The recipe's own.
        reference_rate: The rate with that.
    """
    ratio = batch / reference_batch
    factors = {"constant": (1.0,), "linear": (ratio,), "sqrt": (math.sqrt(ratio),)}
    tried = factors.get(rule, tuple(factor * math.sqrt(ratio) for factor in _TUNED))
    # Rounded, so that what two rules have in common is one rate, and is run once.
    return tuple(float(f"{reference_rate * factor:.6g}") for factor in tried)
