"""On which processors are estimates held against what torch allocates?"""

from __future__ import annotations

import pytest


@pytest.fixture
def wide_vectors() -> None:
    """Skip where there is no AVX-512.

    Kernels for narrower vectors take other scratch memory, which the estimate does not know. That it says so is tested
    on every processor (``test_kernels_that_nobody_has_watched_are_named``).
    """
    import torch

    if "AVX512" not in torch.backends.cpu.get_cpu_capability():
        pytest.skip("this processor's convolutions take memory that an estimate does not know, and says so: no AVX-512")
