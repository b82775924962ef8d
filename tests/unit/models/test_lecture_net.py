"""Is it the lecture's network? By what the lecture prints of it."""

from __future__ import annotations

import pytest
import torch

from paceline.errors import ModelError
from paceline.models.lecture_net import lecture_net


def test_it_has_the_parameters_that_the_lecture_prints() -> None:
    network = lecture_net(10)
    assert sum(each.numel() for each in network.parameters()) == 120_078
    # "(post net.to) GPU max_memory_allocated: 0.481792 MB": torch's allocator rounds each tensor up to 512 bytes.
    rounded = sum(-(-each.numel() * 4 // 512) * 512 for each in network.parameters())
    assert rounded / 1e6 == 0.481792
    assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_with_six_channels_it_is_the_tutorials() -> None:
    assert sum(each.numel() for each in lecture_net(10, channels=6).parameters()) == 62_006
    with pytest.raises(ModelError, match="channels"):
        lecture_net(10, channels=0)
