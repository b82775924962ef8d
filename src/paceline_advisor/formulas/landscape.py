"""Flatness of a minimum, and the loss barrier between two networks."""

from __future__ import annotations

import math
from collections.abc import Sequence


def keskar_sharpness(largest_loss: float, loss: float) -> float:
    """How much the loss can rise in a small box around the weights, in percent of one plus the loss there.

    Source:
        Keskar et al., On large-batch training for deep learning, arXiv:1609.04836, Metric 2.1.
    """
    if loss <= -1:
        raise ValueError(f"a loss of {loss:g} is not above -1")
    return 100 * (largest_loss - loss) / (1 + loss)


def keskar_box(weight: float, epsilon: float = 1e-3) -> float:
    """How far a weight may move to each side in that box.

    Source:
        Keskar et al., arXiv:1609.04836, equation 3; they take 1e-3 and 5e-4 for epsilon.
    """
    return epsilon * (abs(weight) + 1)


def loss_barrier(shares: Sequence[float], losses: Sequence[float]) -> float:
    """How far the loss rises above the straight line between two networks' losses, on the way from one to the other.

    Args:
        shares: Where each loss was measured: 0 is the first network, 1 the second; both must be among them.
        losses: The losses there.

    Returns:
        NaN if a loss on the way is none, or one of the two networks' is not finite.

    Source:
        Goodfellow et al., Qualitatively characterizing neural network optimization problems, arXiv:1412.6544, section
        3, for the way; Frankle et al., Linear mode connectivity, arXiv:1912.05671, equation 1, for the barrier, here
        against the line between the two losses and not their mean.
    """
    at = dict(zip(shares, losses, strict=True))
    if 0 not in at or 1 not in at:
        raise ValueError("both networks (0 and 1) must be among the shares")
    rises = [loss - ((1 - share) * at[0] + share * at[1]) for share, loss in at.items() if 0 <= share <= 1]
    # The largest of numbers and NaN would be whichever stands first.
    return math.nan if any(math.isnan(rise) for rise in rises) else max(rises)
