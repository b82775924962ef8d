"""On which processors are estimates held against what torch allocates?"""

from __future__ import annotations

import pytest


@pytest.fixture
def wide_vectors() -> None:
    """Skip where there is no AVX-512: convolutions take other scratch memory there than the estimate knows."""
    import torch

    if "AVX512" not in torch.backends.cpu.get_cpu_capability():
        pytest.skip("estimates are held to processors with AVX-512")
