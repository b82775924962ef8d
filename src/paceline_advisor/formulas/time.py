"""How long does a training take, and what does it cost?"""

from __future__ import annotations

import math
from collections.abc import Sequence

IMAGENET_TRAIN, IMAGENET_VALIDATION = 1_281_167, 50_000


def steps(samples: int, batch: int, epochs: float, *, drop_last: bool = True) -> int:
    """Optimizer steps of a training; with ``drop_last``, an epoch's last batch is used only if it is full.

    Source:
        cifar10-airbench, airbench94_muon.py (8 epochs of 50,000 in batches of 2,000: 200).
    """
    per_epoch = samples // batch if drop_last else math.ceil(samples / batch)
    return math.ceil(epochs * per_epoch)


def training_hours(samples_per_second: float, epochs: float = 90, samples: int = IMAGENET_TRAIN) -> float:
    """Hours of so many epochs at a throughput.

    Source:
        By definition; NVIDIA, DeepLearningExamples, PyTorch/Classification/ConvNets, "Training performance".
    """
    return samples * epochs / samples_per_second / 3600


def nvidia_printed_hours(
    samples_per_second: float, epochs: int = 90, train: int = IMAGENET_TRAIN, validation: int = IMAGENET_VALIDATION
) -> int:
    """Hours as NVIDIA's tables print them: training and validation at the same throughput, rounded up.

    Source:
        NVIDIA, DeepLearningExamples, PyTorch/Classification/ConvNets/resnet50v1.5/README.md, "~ h for 90 epochs".
    """
    return math.ceil(training_hours(samples_per_second, epochs, train + validation))


def minutes(seconds: float) -> float:
    """Seconds in minutes.

    Source:
        By definition.
    """
    return seconds / 60


def cost(seconds: float, price_per_hour: float, machines: float = 1) -> float:
    """Price of so many machines for so long.

    Source:
        DAWNBench, "Training cost"; stanford-futuredata/dawn-bench-entries.
    """
    return seconds / 3600 * price_per_hour * machines


def progressive_resizing_minutes(
    first_seconds: float,
    epoch_seconds: Sequence[float],
    epochs: Sequence[float],
    switch_seconds: float,
    final_seconds: float,
) -> float:
    """Minutes of a training whose images grow.

    Args:
        first_seconds: Time of the first epoch, which is slower: data is read, kernels are chosen.
        epoch_seconds: Time of an epoch at each size.
        epochs: Epochs at each size, without the first.
        switch_seconds: Time of a change of size.
        final_seconds: Time of the last evaluation.

    Raises:
        ValueError: If not every size has its epochs and their time.

    Source:
        libffcv/ffcv-imagenet, README.md and assets/agg.csv (ResNet-50, 88 epochs: 77.2 minutes).
    """
    if len(epoch_seconds) != len(epochs):
        raise ValueError(f"epoch_seconds has {len(epoch_seconds)} values and epochs {len(epochs)}: give one for a size")
    within = sum(count * each for count, each in zip(epochs, epoch_seconds, strict=True))
    return (first_seconds + within + switch_seconds * (len(epochs) - 1) + final_seconds) / 60


def dawnbench_seconds(total_seconds: float, validation_seconds: float, preparation_seconds: float) -> float:
    """Time by DAWNBench's rules: without validation, with preparing the data.

    Source:
        davidcpage/cifar10-fast, README.md (79 - 7 + 2 = 74 s).
    """
    return total_seconds - validation_seconds + preparation_seconds


def checkpoint_overhead(stall_seconds: float, interval_seconds: float) -> float:
    """Share of the time that checkpoints take which stall training once per interval, in [0, 1).

    Source:
        Mohan et al., CheckFreq, FAST 2021 (kept below 3.5 %).
    """
    return stall_seconds / (interval_seconds + stall_seconds)


def checkpoint_interval_seconds(save_seconds: float, seconds_between_failures: float) -> float:
    """Time between checkpoints that loses least: √(2 · save · between failures).

    Source:
        Young, A first order approximation to the optimum checkpoint interval, CACM 17(9), 1974.
    """
    return math.sqrt(2 * save_seconds * seconds_between_failures)
