"""Which learning rate goes with a batch, and how does it begin?"""

from __future__ import annotations

import math


def linear_rate(batch: float, reference_rate: float = 0.1, reference_batch: float = 256) -> float:
    """Learning rate in proportion to the batch; Goyal et al. begin from 0.1 for 256.

    Source:
        Goyal et al., Accurate, large minibatch SGD, arXiv:1706.02677, section 2.1.
    """
    return reference_rate * batch / reference_batch


def square_root_rate(batch: float, reference_rate: float = 0.1, reference_batch: float = 256) -> float:
    """Learning rate that grows with the square root of the batch, as adaptive optimizers want it.

    Source:
        Krizhevsky, One weird trick for parallelizing convolutional neural networks, arXiv:1404.5997, section 5; Malladi
        et al., On the SDEs and scaling rules for adaptive gradient algorithms, arXiv:2205.10287.
    """
    return reference_rate * math.sqrt(batch / reference_batch)


def nvidia_rate(batch: float) -> float:
    """Learning rate of NVIDIA's ConvNets: 0.256 for a batch of 256, in proportion.

    Source:
        NVIDIA, DeepLearningExamples, PyTorch/Classification/ConvNets/resnet50v1.5/README.md, "Default configuration".
    """
    return linear_rate(batch, 0.256)


def nvidia_weight_decay(power: int = 15) -> float:
    """Weight decay of NVIDIA's ResNet-50, 2^-15; ResNeXt and SE-ResNeXt have 2^-14.

    Source:
        NVIDIA, DeepLearningExamples, PyTorch/Classification/ConvNets/resnet50v1.5/README.md, "Default configuration".
    """
    return 2.0**-power


def gradual_warmup(step: float, warmup_steps: float, peak_rate: float, first_rate: float = 0) -> float:
    """Learning rate that rises by the same amount at every step until the peak.

    Source:
        Goyal et al., arXiv:1706.02677, section 2.2 (from η to kη over 5 epochs).
    """
    return peak_rate if step >= warmup_steps else first_rate + (peak_rate - first_rate) * step / warmup_steps


def nvidia_warmup(epoch: int, warmup_epochs: int, peak_rate: float) -> float:
    """Learning rate of an epoch, from 0, of NVIDIA's warm-up: the first has peak / warm-up epochs.

    Source:
        NVIDIA, DeepLearningExamples, PyTorch/Classification/ConvNets/image_classification/optimizers.py.
    """
    return peak_rate * min(1.0, (epoch + 1) / warmup_epochs)


def step_rate(epoch: float, first_rate: float, factor: float = 0.1, first: int = 30, second: int = 60) -> float:
    """Learning rate that is divided by ten at two epochs and once more 20 epochs after the second (30, 60, 80).

    Source:
        Goyal et al., arXiv:1706.02677, section 5.1.
    """
    return first_rate * factor ** sum(epoch >= each for each in (first, second, second + 20))


def cosine_rate(step: float, total_steps: float, peak_rate: float, last_rate: float = 0) -> float:
    """Learning rate that falls as half a cosine.

    Source:
        Loshchilov and Hutter, SGDR, arXiv:1608.03983, equation 5.
    """
    return last_rate + (peak_rate - last_rate) * (1 + math.cos(math.pi * step / total_steps)) / 2


def effective_rate(learning_rate: float, momentum: float) -> float:
    """Learning rate that momentum comes to over many steps: lr / (1 - m).

    Source:
        Smith et al., Don't decay the learning rate, increase the batch size, arXiv:1711.00489, section 4.
    """
    return learning_rate / (1 - momentum)
