"""Published laws of batch size and data size."""

from __future__ import annotations


def accumulation_steps(global_batch_size: int, micro_batch_size: int, processes: int = 1) -> int:
    """Micro-batches per process that make up an optimizer step.

    Raises:
        ValueError: If the batch does not divide evenly.

    Source:
        NVIDIA, DeepLearningExamples, PyTorch/Classification/ConvNets/main.py, ``--optimizer-batch-size``.
    """
    steps, remainder = divmod(global_batch_size, micro_batch_size * processes)
    if remainder or not steps:
        raise ValueError(f"{processes} × {micro_batch_size} samples do not divide {global_batch_size}")
    return steps


def steps_ratio(noise_scale: float, batch: float) -> float:
    """Steps to reach a loss relative to the minimum: 1 + B_noise / B.

    Source:
        McCandlish et al., An empirical model of large-batch training, arXiv:1812.06162, section 2.2 and appendix D.1.
    """
    return 1 + noise_scale / batch


def examples_ratio(noise_scale: float, batch: float) -> float:
    """Examples to reach a loss relative to the minimum: 1 + B / B_noise.

    Source:
        McCandlish et al., arXiv:1812.06162, section 2.2 and appendix D.1.
    """
    return 1 + batch / noise_scale


def gradient_square(small_batch: float, small_square: float, large_batch: float, large_square: float) -> float:
    """Unbiased estimate of |G|² from the squared norms of the gradients of two batches.

    Source:
        McCandlish et al., arXiv:1812.06162, appendix A.1.
    """
    return (large_batch * large_square - small_batch * small_square) / (large_batch - small_batch)


def gradient_variance(small_batch: float, small_square: float, large_batch: float, large_square: float) -> float:
    """Unbiased estimate of tr(Σ), the variance of one sample's gradient, from two batches.

    Source:
        McCandlish et al., arXiv:1812.06162, appendix A.1.
    """
    return (small_square - large_square) / (1 / small_batch - 1 / large_batch)
