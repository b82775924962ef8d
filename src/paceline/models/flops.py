"""Count a step's arithmetic and memory traffic by layer and phase.

A dispatch mode observes every operator of a step, on fake or real tensors, without changing it::

    with WorkCounter(network) as counter:
        loss = task.loss(network, batch)
        loss.backward()
        with counter.phase("optimizer"):
            optimizer.step()
    counter.work.model_flops

A forward operator belongs to the running module. A backward operator belongs to the forward operator whose gradient it
computes: autograd gives both the same sequence number.

Arithmetic covers matrix products, convolutions and attention, with a multiplication and an addition per term, as for
MFU; other operators are counted by bytes only. Bytes are the minimum that an isolated operator must move: each of its
tensors once.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.autograd.function import BackwardCFunction
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
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


PHASES = ("forward", "dgrad", "wgrad", "recompute", "loss", "optimizer")
SUM_OF_GRADIENTS = "(sum of gradients)"
"""Layer name for the sums that autograd adds where branches split; they belong to no module."""
# The model's arithmetic as used for MFU: recomputation does not count.
_OF_MODEL = ("forward", "dgrad", "wgrad", "loss")


@dataclass(frozen=True)
class Work:
    """The work of one operator in one layer and phase of a step, over all calls of the same shape.

    Attributes:
        layer: Name of the module; empty for the network itself and outside it; or ``SUM_OF_GRADIENTS``.
        phase: One of ``PHASES``: ``dgrad`` and ``wgrad`` are the backward pass's gradients of inputs and of weights.
        operator: Name of the operator.
        dtype: Dtype of its factors, or of its first floating-point tensor.
        product: Its sizes if it is a matrix product.
        is_counted: False if it may compute uncounted products.
        calls: Number of calls.
        flops: Floating-point operations of its products.
        bytes_read: Bytes that it must read.
        bytes_written: Bytes that it must write.
    """

    layer: str
    phase: str
    operator: str
    dtype: str
    product: Product | None
    is_counted: bool
    calls: int = 0
    flops: int = 0
    bytes_read: int = 0
    bytes_written: int = 0

    @property
    def bytes_moved(self) -> int:
        """Bytes read and written."""
        return self.bytes_read + self.bytes_written

    @property
    def intensity(self) -> float:
        """FLOP per byte."""
        return self.flops / self.bytes_moved if self.bytes_moved else 0.0


@dataclass(frozen=True)
class Uncounted:
    """An operator with unknown FLOPs.

    Attributes:
        operator: Its name.
        calls: Number of calls.
        share: Its share of the bytes that the step moves, in [0, 1].
    """

    operator: str
    calls: int
    share: float


@dataclass(frozen=True)
class StepWork:
    """All work of a step.

    Attributes:
        works: The work of each operator.
    """

    works: tuple[Work, ...]

    def flops(self, *phases: str) -> int:
        """Floating-point operations of the given phases; all if none is given."""
        return sum(each.flops for each in self.works if not phases or each.phase in phases)

    @property
    def model_flops(self) -> int:
        """Floating-point operations of the model: forward and backward pass, without recomputation."""
        return self.flops(*_OF_MODEL)

    @property
    def model_works(self) -> tuple[Work, ...]:
        """Operators of the model: forward and backward pass."""
        return tuple(each for each in self.works if each.phase in _OF_MODEL)

    @property
    def bytes_moved(self) -> int:
        """Bytes that all operators must read and write."""
        return sum(each.bytes_moved for each in self.works)

    def by_layer(self) -> dict[tuple[str, str], tuple[Work, ...]]:
        """Operators by layer and phase, in order of execution."""
        groups: dict[tuple[str, str], list[Work]] = defaultdict(list)
        for each in self.works:
            groups[each.layer, each.phase].append(each)
        return {key: tuple(each) for key, each in groups.items()}

    @property
    def uncounted(self) -> tuple[Uncounted, ...]:
        """Operators with unknown FLOPs, most bytes first."""
        calls: Counter[str] = Counter()
        moved: Counter[str] = Counter()
        for each in self.works:
            if not each.is_counted:
                calls[each.operator] += each.calls
                moved[each.operator] += each.bytes_moved
        total = max(1, self.bytes_moved)
        return tuple(Uncounted(name, calls[name], count / total) for name, count in moved.most_common())


@dataclass(frozen=True)
class _NodeOrigin:
    """Origin of a backward node: the module of its forward operator, and whether it used weights, or only weights."""

    layer: str
    phase: str
    uses_weights: bool
    is_of_weights: bool = False


_NOWHERE = _NodeOrigin("", "loss", uses_weights=False)
_WHERE_BRANCHES_PART = _NodeOrigin(SUM_OF_GRADIENTS, "forward", uses_weights=False)


class _ModeWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate it
    """Calls each operator and reports it."""

    supports_higher_order_operators = True

    def __init__(self, note: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Call the operator and record its work."""
        kwargs = kwargs or {}
        if func in _ABOUT_TENSORS:
            return NotImplemented
        # Without gradients, composite operators arrive undivided.
        if isinstance(func, OpOverload) and func not in _WHOLE and func._can_decompose():  # noqa: SLF001  # as torch's own counter does
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        out = func(*args, **kwargs)
        self._note(func, args, kwargs, out)
        return out


_ADDING = frozenset({torch.ops.aten.add, torch.ops.aten.add_})
_OVER_SAMPLES = frozenset({torch.ops.aten.sum})
_WHOLE = frozenset({torch.ops.aten.linear.default})
# Queries about a tensor, which the tensor itself answers.
_ABOUT_TENSORS = frozenset({torch.ops.prim.device.default, torch.ops.aten.is_contiguous.default})


class WorkCounter:
    """Counts the work done in its context.

    Args:
        network: Network whose layers are tracked.
    """

    def __init__(self, network: nn.Module) -> None:
        self._names = {id(module): name for name, module in network.named_modules()}
        self._within: list[str] = []
        self._phase = ""
        self._origins: dict[int, _NodeOrigin] = {}
        self._parameters = dict(network.named_parameters())
        # Weak references, which also ensure that no address is reused while it is a key.
        self._weights = {ref.cdata: ref for ref in (_reference(each) for each in self._parameters.values()) if ref}
        self._found: dict[tuple[Any, ...], list[int]] = {}
        self._numbered = 0
        self._hooks = contextlib.ExitStack()
        self._failure: Exception | None = None

    @property
    def work(self) -> StepWork:
        """The work so far."""
        return StepWork(tuple(Work(*key, *sums) for key, sums in self._found.items()))

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count all work in this context for this phase, and for no layer."""
        previous, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = previous

    def __enter__(self) -> WorkCounter:
        enters = register_module_forward_pre_hook(self._enter_module)
        leaves = register_module_forward_hook(self._leave_module, always_call=True)
        self._numbered = next_node_number()
        self._hooks.callback(self._within.clear)
        self._hooks.callback(enters.remove)
        self._hooks.callback(leaves.remove)
        self._hooks.enter_context(_ModeWatch(self._try_to_note))
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._hooks.close()
        if self._failure is not None and kind is None:
            raise self._failure

    def _enter_module(self, module: nn.Module, _: Any) -> None:
        if id(module) in self._names:
            self._within.append(self._names[id(module)])

    def _leave_module(self, module: nn.Module, _: Any, __: Any) -> None:
        if id(module) in self._names and self._within:
            self._within.pop()

    def _number(self, end: int, origin: _NodeOrigin) -> None:
        """Assign this origin to all backward nodes created since the last call, up to a number."""
        for number in (*range(self._numbered, end), end - 1):
            self._origins.setdefault(number, origin)
        self._numbered = end

    def _try_to_note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Store an error for later: raised here, it would end the process where C++ calls the operator."""
        if self._failure is None:
            try:
                self._note(func, args, kwargs, out)
            except Exception as error:  # noqa: BLE001  # raised when the counter is left
                self._failure = error

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        tensors = list(tensors_in((args, kwargs)))
        from_weights = [(kept := _reference(each)) is not None and kept.cdata in self._weights for each in tensors]
        if tensors and all(from_weights):
            # Values computed from weights alone, such as a cast copy, count as weights.
            for each in filter(None, map(_reference, tensors_in(out))):
                self._weights.setdefault(each.cdata, each)
        node = torch._C._current_autograd_node()  # noqa: SLF001  # torch.utils.checkpoint asks so
        parts = list(operator_work(func, args, kwargs, out))
        if node is None or self._within or self._phase:
            weights = any(from_weights), bool(tensors) and all(from_weights)
            origin = self._forward_origin(again=node is not None, weights=weights)
            phases = [origin.phase] * len(parts)
        else:
            origin = _WHERE_BRANCHES_PART if _sums_gradients(func, args, kwargs, node) else self._origin_of(node)
            adds_up = getattr(func, "overloadpacket", None) in _OVER_SAMPLES
            phases = [_backward_phase(each, origin, any(from_weights), adds_up) for each in parts]
        dtype = next((str(each.dtype).removeprefix("torch.") for each in tensors if each.is_floating_point()), "")
        name = func.overloadpacket.__name__ if isinstance(func, OpOverload) else str(func)
        for part, phase in zip(parts, phases, strict=True):
            sums = self._found.setdefault((origin.layer, phase, name, dtype, part.product, part.is_known), [0, 0, 0, 0])
            for index, value in enumerate((1, part.flops, part.bytes_read, part.bytes_written)):
                sums[index] += value

    def _forward_origin(self, *, again: bool, weights: tuple[bool, bool]) -> _NodeOrigin:
        layer = self._within[-1] if self._within and not self._phase else ""
        if self._phase:
            phase = self._phase
        elif again:
            phase = "recompute"
        else:
            phase = "forward" if self._within else "loss"
        # A backward node created here has the number before the next one. In-place operators take more numbers, since
        # autograd first clones what their gradient needs and numbers the clone too.
        origin = _NodeOrigin(layer, "forward" if self._within else phase, *weights)
        self._number(next_node_number(), origin)
        return replace(origin, phase=phase)

    def _origin_of(self, node: Any) -> _NodeOrigin:
        if type(node).__name__ == "AccumulateGrad":
            name = next((name for name, each in self._parameters.items() if each is node.variable), "")
            return _NodeOrigin(name.rpartition(".")[0], "forward", uses_weights=True, is_of_weights=True)
        return self._origins.get(node._sequence_nr(), _NOWHERE)  # noqa: SLF001  # no public way; torch.fx uses it too


def _backward_phase(part: OperatorWork, origin: _NodeOrigin, uses_weights: bool, adds_up: bool) -> str:
    """Return whether a backward operator computes the gradient of the layer's input or of its weights.

    Args:
        part: The backward operator.
        origin: The forward operator.
        uses_weights: Whether the backward operator uses weights.
        adds_up: Whether it may be the sum of a bias's gradient over samples.
    """
    if origin.phase in ("loss", "optimizer"):
        return origin.phase
    if part.part:
        return {"input": "dgrad", "weight": "wgrad", "again": "recompute"}[part.part]
    if origin.is_of_weights:
        return "wgrad"
    if origin.uses_weights and not uses_weights and (part.flops or adds_up):
        return "wgrad"
    return "dgrad"


def _sums_gradients(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], node: Any) -> bool:
    """Whether autograd adds the gradients of two branches, which it does after the last branch.

    torch's gradient formulas add no two tensors of the same shape, except for joint mean and variance.
    """
    if getattr(func, "overloadpacket", None) not in _ADDING or kwargs or len(args) != 2:
        return False
    name = type(node).__name__
    is_own = isinstance(node, BackwardCFunction) or name == "AccumulateGrad" or name.startswith(("VarMean", "StdMean"))
    return not is_own and all(isinstance(each, Tensor) for each in args) and args[0].shape == args[1].shape


def next_node_number() -> int:
    """Return the sequence number that autograd will give the next operator's backward node."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]  # noqa: SLF001  # as torch.fx


def _reference(tensor: Tensor) -> StorageWeakRef | None:
    try:
        return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # torch
    except (RuntimeError, NotImplementedError):
        return None
