"""Roofline formulas: the maximum speed of an operation on a device, limited by arithmetic or memory."""

from __future__ import annotations

from typing import Literal

Phase = Literal["forward", "dgrad", "wgrad"]


def gemm_flops(m: int, n: int, k: int) -> int:
    """Floating-point operations of a product of [m, k] and [k, n]: one multiplication and one addition per term.

    Source:
        NVIDIA, Matrix Multiplication Background User's Guide, "Math And Memory Bounds".
    """
    return 2 * m * n * k


def gemm_bytes(m: int, n: int, k: int, bytes_per_element: float = 2) -> float:
    """Bytes that a product of [m, k] and [k, n] must move: both factors are read once, the product is written once.

    Source:
        NVIDIA, Matrix Multiplication Background User's Guide, "Math And Memory Bounds".
    """
    return bytes_per_element * (m * k + n * k + m * n)


def gemm_intensity(m: int, n: int, k: int, bytes_per_element: float = 2) -> float:
    """FLOP per byte of a product of [m, k] and [k, n]; with two bytes per element it is mnk / (mk + nk + mn).

    Source:
        NVIDIA, Matrix Multiplication Background User's Guide, "Math And Memory Bounds".
    """
    return gemm_flops(m, n, k) / gemm_bytes(m, n, k, bytes_per_element)


def linear_as_gemm(batch: int, inputs: int, outputs: int, phase: Phase = "forward") -> tuple[int, int, int]:
    """The (m, n, k) of a linear layer's product in one phase of a step.

    Source:
        NVIDIA, Linear/Fully-Connected Layers User's Guide, table 1.
    """
    match phase:
        case "forward":
            return outputs, batch, inputs
        case "dgrad":
            return inputs, batch, outputs
        case "wgrad":
            return inputs, outputs, batch


def convolution_output_size(size: int, kernel: int, stride: int = 1, padding: int = 0, dilation: int = 1) -> int:
    """Pixels along one side of a convolution's output.

    Source:
        Dumoulin and Visin, A guide to convolution arithmetic for deep learning, arXiv:1603.07285, relationship 15.
    """
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def convolution_as_gemm(
    batch: int, channels: int, size: int, filters: int, kernel: int, stride: int = 1, phase: Phase = "forward"
) -> tuple[int, int, int]:
    """The (m, n, k) of a square convolution as an implicit matrix product, with padding for size / stride pixels.

    Source:
        NVIDIA, Convolutional Layers User's Guide, table 1.
    """
    out = -(-size // stride)
    match phase:
        case "forward":
            return batch * out * out, filters, channels * kernel * kernel
        case "dgrad":
            return batch * size * size, channels, filters * kernel * kernel
        case "wgrad":
            return channels * kernel * kernel, filters, batch * out * out


def convolution_intensity(
    batch: int,
    channels: int,
    size: int,
    filters: int,
    kernel: int,
    stride: int = 1,
    groups: int = 1,
    bytes_per_element: float = 2,
) -> float:
    """FLOP per byte of a square convolution's forward pass, moving input, filters and output once each.

    With ``groups=channels`` (depthwise) it is at most kernel² / 2 with two bytes per element, whatever the batch.

    Source:
        NVIDIA, Convolutional Layers User's Guide, "Convolution Parameters"; groups divide the work and the filters.
    """
    out = -(-size // stride)
    outputs = batch * filters * out * out
    weights = filters * (channels // groups) * kernel * kernel
    flops = 2 * outputs * (channels // groups) * kernel * kernel
    return flops / (bytes_per_element * (batch * channels * size * size + weights + outputs))


def intensity(flops: float, bytes_moved: float) -> float:
    """FLOP per byte of any operation.

    Source:
        Williams, Waterman and Patterson, Roofline: an insightful visual performance model, CACM 52(4), 2009.
    """
    return flops / bytes_moved


def elementwise_intensity(
    operations: float = 1, inputs: float = 1, outputs: float = 1, bytes_per_element: float = 2
) -> float:
    """FLOP per byte of an elementwise operation: ReLU has 1 / (2 + 2) = 0.25.

    Source:
        NVIDIA, GPU Performance Background User's Guide, table 1.
    """
    return operations / (bytes_per_element * (inputs + outputs))


def pooling_intensity(kernel: int, stride: int = 1, bytes_per_element: float = 2) -> float:
    """FLOP per byte of pooling: kernel² operations per output, each output needing stride² inputs.

    Source:
        NVIDIA, GPU Performance Background User's Guide, table 1 (3x3 window, unit stride: 2.25).
    """
    return elementwise_intensity(kernel**2, inputs=stride**2, bytes_per_element=bytes_per_element)


def peak_flops_per_second(multiprocessors: int, ghz: float, fma_per_clock: float) -> float:
    """Peak rate: multiprocessors × clock × fused multiply-adds per clock and multiprocessor × 2.

    Source:
        NVIDIA, GPU Performance Background User's Guide, "GPU Architecture Fundamentals" (A100: 108, 1.41, 1024).
    """
    return multiprocessors * ghz * 1e9 * fma_per_clock * 2


def ridge_point(flops_per_second: float, bytes_per_second: float) -> float:
    """FLOP per byte above which arithmetic, and below which memory, limits an operation.

    Source:
        Williams, Waterman and Patterson, CACM 52(4), 2009; NVIDIA calls it the ops:byte ratio (V100: 125 T / 0.9 T).
    """
    return flops_per_second / bytes_per_second


def attainable_flops_per_second(flop_per_byte: float, peak_flops_per_second: float, bytes_per_second: float) -> float:
    """Maximum rate of an operation of this intensity: min(peak, intensity × bandwidth).

    Source:
        Williams, Waterman and Patterson, CACM 52(4), 2009.
    """
    return min(peak_flops_per_second, flop_per_byte * bytes_per_second)


def is_memory_bound(flop_per_byte: float, peak_flops_per_second: float, bytes_per_second: float) -> bool:
    """Whether memory limits an operation of this intensity.

    Source:
        NVIDIA, GPU Performance Background User's Guide, "Understanding Performance".
    """
    return flop_per_byte < ridge_point(peak_flops_per_second, bytes_per_second)


def sustained_flops_per_second(flops: float, seconds: float) -> float:
    """Achieved rate of a piece of work.

    Source:
        By definition; cifar10-airbench reports its runs this way (0.29 PFLOP in 2.59 s: 112 TFLOP/s).
    """
    return flops / seconds
