"""Roofline formulas that a run needs: the minimum time of an operation, and the share of the peak that is achieved."""

from __future__ import annotations


def least_seconds(flops: float, bytes_moved: float, peak_flops_per_second: float, bytes_per_second: float) -> float:
    """Minimum time of an operation: its arithmetic or its memory traffic, whichever is longer.

    Source:
        Williams, Waterman and Patterson, CACM 52(4), 2009.
    """
    return max(flops / peak_flops_per_second, bytes_moved / bytes_per_second)


def utilisation(flops: float, seconds: float, peak_flops_per_second: float, devices: int = 1) -> float:
    """Achieved share of the devices' peak, in [0, 1]: MFU if ``flops`` are the model's.

    Source:
        Chowdhery et al., PaLM, arXiv:2204.02311, appendix B.
    """
    return flops / (seconds * peak_flops_per_second * devices)
