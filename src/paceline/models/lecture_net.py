"""The network of a public lecture's CPU-GPU comparison, to reproduce its table on any machine.

It is PyTorch's CIFAR-10 tutorial network with 128 instead of 6 channels after the first convolution. That gives the
lecture's 120,078 parameters: 9,728 and 51,216 in the convolutions, 48,120, 10,164 and 850 in the linear layers.
"""

from __future__ import annotations

from torch import nn

from paceline.models.factories import check_options


def lecture_net(num_classes: int, in_channels: int = 3, *, channels: int = 128) -> nn.Sequential:
    """Build the network, for images of 32x32 pixels.

    Args:
        num_classes: Width of the output.
        in_channels: Channels of the images.
        channels: Channels after the first convolution; 6 in the tutorial.

    Raises:
        ModelError: If the number of channels is not positive.

    Source: pytorch.org/tutorials, "Training a classifier"; CS C182 at Berkeley, autumn 2024, lecture 19 for its width.
    """
    check_options("lecture_net", [("channels", channels, channels >= 1, "at least 1")])
    return nn.Sequential(
        nn.Conv2d(in_channels, channels, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, num_classes),
    )
