"""Arithmetic and minimum memory traffic of one operator.

Arithmetic covers matrix products, convolutions and attention, with a multiplication and an addition per term, as for
MFU; other operators are counted by bytes only. Bytes are the minimum that an isolated operator must move: each of its
tensors once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

Part = Literal["", "input", "weight", "again"]

_aten = torch.ops.aten


@dataclass(frozen=True)
class Product:
    """A matrix product, or an operation that libraries compute as one: ``count`` times [m, k] by [k, n].

    Attributes:
        kind: ``matmul``, ``convolution`` or ``attention``.
        window: For a convolution, its kernel's number of pixels; one of the three sizes is this times channels.
    """

    m: int
    n: int
    k: int
    count: int = 1
    kind: str = "matmul"
    window: int = 1


@dataclass(frozen=True)
class OperatorWork:
    """The work of an operator or a part of it.

    Attributes:
        flops: Floating-point operations of its products.
        bytes_read: Bytes that it reads.
        bytes_written: Bytes that it writes.
        part: For a backward operator: the gradient of its input or of its weight, or recomputation (``again``).
        product: Its sizes if it is a matrix product.
        is_known: Whether it is certain to compute no other products.
    """

    flops: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    part: Part = ""
    product: Product | None = None
    is_known: bool = True


Rule = Callable[[tuple[Any, ...], dict[str, Any], Any], Iterator[OperatorWork]]


def operator_work(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Iterator[OperatorWork]:
    """Return the work of an operator call, part by part; nothing for views and allocations."""
    if not isinstance(func, OpOverload):  # a higher-order operator: the operators that it calls are not seen
        yield OperatorWork(0, nbytes((args, kwargs)), nbytes(out), is_known=False)
        return
    packet = func.overloadpacket
    if packet in _RULES:
        yield from _RULES[packet](args, kwargs, out)
    elif packet in flop_registry:  # operators that only torch counts, such as attention over several lengths
        flops = int(flop_registry[packet](*args, **kwargs, out_val=out))
        yield OperatorWork(flops, nbytes((args, kwargs)), nbytes(out))
    elif not (func.is_view or packet in _FREE or func.namespace in ("prim", "profiler")):
        yield _data_movement(func, args, kwargs, out)


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Return all tensors in nested lists, tuples and dictionaries."""
    return (each for each in tree_leaves(values) if isinstance(each, Tensor))


def nbytes(values: Any) -> int:
    """Return the bytes of all tensors in nested values, each once; expanded tensors count their stored data."""
    unique = {id(each): each for each in tensors_in(values)}
    return sum(map(_tensor_bytes, unique.values()))


def _tensor_bytes(tensor: Tensor) -> int:
    dense = tensor.numel() * tensor.element_size()
    try:
        return min(dense, tensor.untyped_storage().nbytes())
    except (RuntimeError, NotImplementedError):  # sparse tensors and others without a storage
        return dense


def _data_movement(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OperatorWork:
    """Return the work of an operator that is counted by bytes."""
    packet, bytes_written = func.overloadpacket, nbytes(out)
    if next(tensors_in(out), None) is None:
        known = func._schema.arguments  # noqa: SLF001  # there is no other way to ask
        changed = {each.name for each in known if each.alias_info and each.alias_info.is_write}
        named = zip((each.name for each in known), args, strict=False)
        bytes_written = nbytes([value for name, value in (*named, *kwargs.items()) if name in changed])
    if packet in _WRITING:
        read = nbytes(args[1:])
    elif packet in _PICKING:
        read = bytes_written + nbytes([each for each in tensors_in((args[1:], kwargs)) if not each.is_floating_point()])
    else:
        read = nbytes((args, kwargs))
    is_known = func.namespace == "aten" and not _MULTIPLYING.search(packet.__name__)
    return OperatorWork(0, read, bytes_written, "weight" if packet in _OF_WEIGHTS else "", is_known=is_known)


def _matmul(first: int) -> Rule:
    """Return the work of the product of arguments ``first`` and ``first + 1``: [..., m, k] by [..., k, n]."""

    def rule(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Iterator[OperatorWork]:
        left, right = args[first], args[first + 1]
        m = left.shape[-2] if left.ndim > 1 else 1
        n = right.shape[-1] if right.ndim > 1 else 1
        product = Product(m, n, left.shape[-1], math.prod(left.shape[:-2]))
        yield OperatorWork(_flops(product), nbytes((args, kwargs)), nbytes(out), product=product)

    return rule


def _linear(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Iterator[OperatorWork]:
    inputs, weight = args[:2]
    product = Product(math.prod(inputs.shape[:-1]), weight.shape[0], weight.shape[1])
    yield OperatorWork(_flops(product), nbytes((args, kwargs)), nbytes(out), product=product)


def _flops(product: Product) -> int:
    return 2 * product.m * product.n * product.k * product.count


def _as_product(inputs: torch.Size, weight: torch.Size, outputs: torch.Size, phase: str) -> tuple[int, Product]:
    """Return a convolution's FLOPs, and its sizes as in NVIDIA's guide: one product per group.

    For a transposed convolution, input and output are swapped.
    """
    groups, window = inputs[1] // weight[1], weight[2:].numel()
    filters, channels, pixels = weight[0] // groups, weight[1], outputs[0] * outputs[2:].numel()
    sizes = {
        "forward": (pixels, filters, channels * window),
        "input": (inputs[0] * inputs[2:].numel(), channels, filters * window),
        "weight": (channels * window, filters, pixels),
    }
    return 2 * outputs.numel() * weight[1:].numel(), Product(*sizes[phase], groups, "convolution", window)


def _convolution(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Iterator[OperatorWork]:
    inputs, weight = args[:2]
    if _is_transposed(args, at=6):
        flops, product = _as_product(out.shape, weight.shape, inputs.shape, "input")
    else:
        flops, product = _as_product(inputs.shape, weight.shape, out.shape, "forward")
    yield OperatorWork(flops, nbytes((args, kwargs)), nbytes(out), product=product)


def _convolution_backward(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Iterator[OperatorWork]:
    gradient, inputs, weight = args[:3]
    transposed = _is_transposed(args, at=7)
    outer, inner = (gradient, inputs) if transposed else (inputs, gradient)
    parts: tuple[tuple[Part, str, Tensor, Any], ...] = (
        ("input", "forward" if transposed else "input", weight, out[0]),
        ("weight", "weight", inputs, out[1]),
    )
    for part, phase, other, found in parts:
        if found is not None:
            flops, product = _as_product(outer.shape, weight.shape, inner.shape, phase)
            written = nbytes(out[1:] if part == "weight" else found)
            yield OperatorWork(flops, nbytes((gradient, other)), written, part, product)


def _is_transposed(args: tuple[Any, ...], *, at: int) -> bool:
    return len(args) > at and args[at] is True


def _attention(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Iterator[OperatorWork]:
    scores, mixing = _attention_products(*args[:3])
    yield OperatorWork(_flops(scores) + mixing, nbytes(args[:3]), nbytes(out[0]), product=scores)


def _attention_backward(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Iterator[OperatorWork]:
    scores, mixing = _attention_products(*args[1:4])
    # Gradients of both factors of the scores and of the weighted sum; the scores are recomputed first.
    yield OperatorWork(_flops(scores), part="again", product=scores)
    yield OperatorWork(2 * (_flops(scores) + mixing), nbytes(args[:5]), nbytes(out), "input", scores)


def _attention_products(query: Tensor, key: Tensor, value: Tensor) -> tuple[Product, int]:
    """Return the product of the scores, and the FLOPs of the weighted sum of values."""
    count, rows, columns = math.prod(query.shape[:-2]), query.shape[-2], key.shape[-2]
    scores = Product(rows, columns, query.shape[-1], count, "attention")
    return scores, _flops(replace(scores, n=value.shape[-1], k=columns))


def _recurrent(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Iterator[OperatorWork]:
    """Count every weight matrix once per time step of every sequence."""
    steps = math.prod(args[0].shape[:2])
    weights = args[1] if isinstance(args[1], (list, tuple)) else args[1:3]
    flops = 2 * steps * sum(each.numel() for each in weights if each.ndim == 2)
    yield OperatorWork(flops, nbytes((args, kwargs)), nbytes(out))


def _recurrent_backward(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Iterator[OperatorWork]:
    for each in _recurrent(args, kwargs, out):
        yield OperatorWork(each.flops, each.bytes_read, each.bytes_written, "input")
        yield OperatorWork(each.flops, 0, 0, "weight")


def _packets(names: str) -> dict[Any, None]:
    """Return the operators of these names that exist in this torch."""
    return {getattr(_aten, name): None for name in names.split() if hasattr(_aten, name)}


_ATTENTION = """
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention
    _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention
    _scaled_dot_product_fused_attention_overrideable
    """
_CONVOLUTIONS = "convolution _convolution convolution_overrideable cudnn_convolution mkldnn_convolution"
_RULES: dict[Any, Rule] = {
    **dict.fromkeys(_packets("mm bmm mv dot vdot _int_mm _scaled_mm"), _matmul(0)),
    **dict.fromkeys(_packets("addmm addmv baddbmm addbmm _addmm_activation"), _matmul(1)),
    **dict.fromkeys(_packets("linear"), _linear),
    **dict.fromkeys(_packets(_CONVOLUTIONS), _convolution),
    **dict.fromkeys(_packets("convolution_backward convolution_backward_overrideable"), _convolution_backward),
    **dict.fromkeys(_packets(_ATTENTION), _attention),
    **dict.fromkeys(_packets(" ".join(f"{name}_backward" for name in _ATTENTION.split())), _attention_backward),
    **dict.fromkeys(_packets("mkldnn_rnn_layer _cudnn_rnn miopen_rnn"), _recurrent),
    **dict.fromkeys(_packets("mkldnn_rnn_layer_backward _cudnn_rnn_backward"), _recurrent_backward),
}

# Moves no bytes: a view or an allocation.
_FREE = _packets(
    """
    empty empty_like empty_strided empty_permuted new_empty new_empty_strided detach alias _unsafe_view _reshape_alias
    lift lift_fresh resize_ as_strided_ set_ requires_grad_ sym_size sym_stride sym_numel sym_storage_offset
    is_same_size _local_scalar_dense item _linalg_check_errors record_stream transpose_ t_ squeeze_ unsqueeze_
    swapaxes_ unsafe_split unsafe_chunk unsafe_split_with_sizes
    """
)
# Overwrites the first argument without reading it.
_WRITING = _packets(
    """
    copy_ zero_ fill_ uniform_ normal_ bernoulli_ random_ exponential_ _foreach_copy_ _foreach_zero_ zeros_like
    ones_like full_like rand_like randn_like new_zeros new_full new_ones bernoulli
    """
)
# Reads only the selected part of the first argument.
_PICKING = _packets("embedding index index_select gather take _unsafe_index")
_OF_WEIGHTS = _packets("embedding_dense_backward")
# torch's operators that compute products in other ways, by parts of their names.
_MULTIPLYING = re.compile(
    r"(^|_)[a-z]*m[mv](_|$)|matmul|convolution|conv(_|[1-3]d)|(^|_)linear(_|$)|linalg_(?!vector_norm|cross|check|diagonal)|"
    r"cholesky|solve|inverse|lstm(?!_cell)|gru(?!_cell)|rnn|attention|transformer|^_trilinear|dist_|euclidean|fft|ormqr|"
    r"geqrf|(^|_)lu_|^_sparse|quantize"
)
