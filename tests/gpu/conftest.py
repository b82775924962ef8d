"""All tests of this folder need a CUDA device, and are skipped, which is said, where there is none."""

from __future__ import annotations

import pytest
import torch


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark each test that is found here."""
    item.add_marker("gpu")
    item.add_marker(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))
