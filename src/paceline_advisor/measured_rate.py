"""A rate of several devices as a user gives it."""

from __future__ import annotations

import math
import re

from paceline_advisor import frozen


@frozen
class MeasuredRate:
    """A measured rate of several devices.

    Attributes:
        gpus: Their number.
        rate: Samples per second of all together.
    """

    gpus: int
    rate: float

    @classmethod
    def parse(cls, text: str) -> MeasuredRate:
        """Parse ``8:16621``.

        Raises:
            ValueError: If it is not a number of GPUs and a rate.
        """
        match = re.fullmatch(r"\s*(\d+)\s*:\s*(\d*\.?\d+(?:e[+-]?\d+)?)\s*", text)
        if match is None or int(match[1]) < 2 or not 0 < float(match[2]) < math.inf:
            raise ValueError(
                f"found {text!r}, but a measured rate is a number of GPUs, 2 or more, and their samples per second "
                "together: 8:16621"
            )
        return cls(gpus=int(match[1]), rate=float(match[2]))
