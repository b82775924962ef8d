"""A GPU rehearsed without one: a device type of its own, whose tensors live in host memory.

torch's experimental backends in Python (``torch.utils.backend_registration``) dispatch every operator on such a tensor
to :func:`_run`, which runs it on the host. Whatever makes the host wait for a GPU is counted, with the functions of
Paceline that led to it.

Paceline's modules are imported with ``cuda`` replaced by this device's name, so the code for CUDA devices runs.

- Processes have one device each. Collectives run on gloo, on the host memory; DDP's reducer is torch's own.
- Memory is counted as the caching allocator counts allocated bytes, and may be limited.
- A network compiled with CUDA graphs runs uncompiled, under their rules: inside it, nothing may make the host wait, and
  its next call overwrites its answers and gradients.

Not covered: kernels and their results on a GPU, memory that the allocator reserves, streams that run at the same time
(collectives during the backward pass too), sharded weights, and torch's compiler. Of CUDA graphs, not covered are which
operators are captured, the addresses of inputs, and memory outside a graph's pool.
"""

from __future__ import annotations

# mypy: disable-error-code="attr-defined, no-untyped-call, no-any-return"
# torch gives no types for its interface to a device in Python.
import ast
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import threading
import time
import traceback
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch._C._distributed_c10d import ProcessGroupGloo, _create_work_from_future
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "rehearsed"
# Operators whose result depends on values: the host waits for the device.
_READS_VALUES = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2", "unique_dim"}
_MEMORY = 1 << 33  # bytes
_META = torch._C.DispatchKeySet(torch._C.DispatchKey.Meta)


class Wait(NamedTuple):
    """Something that makes the host wait for the device, and the functions of Paceline that led to it."""

    what: str
    functions: tuple[str, ...]


WAITS: list[Wait] = []
COPIES: list[tuple[str, bool]] = []
"""Copies to the device: the stream's name, and whether the host memory is page-locked."""


class Device:
    """What the device has done and holds.

    Attributes:
        operators: Operators that were started.
        is_recording: Whether a CUDA graph is being recorded.
        limit: Bytes that may be allocated.
        allocated: Bytes allocated now.
        peak: Most bytes allocated at once.
    """

    operators = 0
    is_recording = False
    limit = _MEMORY
    allocated = peak = 0


def _note(what: str) -> None:
    if Device.is_recording:
        raise RuntimeError(f"{what}: operation not permitted when stream is capturing")
    frames = traceback.extract_stack()
    if isinstance(threading.current_thread(), threading._DummyThread):  # autograd's, for which the main thread waits
        frames = [*traceback.extract_stack(sys._current_frames()[threading.main_thread().ident or 0]), *frames]
    WAITS.append(Wait(what, tuple(each.name for each in frames if "/src/paceline/" in each.filename)))


class _Block:
    """The host memory of a device tensor, counted while the tensor's storage is alive."""

    is_overwritten = False

    def __init__(self, host: torch.UntypedStorage) -> None:
        self.host, self.size = host, 0
        size = -(-host.nbytes() // 512) * 512
        if Device.allocated + size > Device.limit:
            raise torch.OutOfMemoryError(f"{NAME} out of memory: {size} bytes, with {Device.allocated} allocated")
        self.size = size
        Device.allocated += size
        Device.peak = max(Device.peak, Device.allocated)

    def __del__(self) -> None:
        Device.allocated -= self.size


def _block(tensor: torch.Tensor) -> _Block:
    return tensor.untyped_storage().block


class _Stream:
    """A queue that has always finished."""

    def __init__(self, device: Any = None, name: str = "side") -> None:
        self.name = name

    def wait_stream(self, other: _Stream) -> None:
        """Do nothing: the other has finished."""

    def wait_event(self, event: _Event) -> None:
        """Do nothing: it has happened."""

    def synchronize(self) -> None:
        """Count a wait."""
        _note("Stream.synchronize")


_MAIN = _Stream(name="main")
_streams = [_MAIN]


class _Event:
    """A moment on the host's clock."""

    def __init__(self, **_: Any) -> None:
        self.seconds, self.operators = 0.0, 0

    def record(self, *_: Any) -> None:
        """Keep this moment."""
        self.seconds, self.operators = time.perf_counter(), Device.operators

    def wait(self, *_: Any) -> None:
        """Do nothing: it has happened."""

    def query(self) -> bool:
        """It has happened."""
        return True

    def synchronize(self) -> None:
        """Count a wait, unless the device has more to do meanwhile."""
        if self.operators == Device.operators:
            _note("Event.synchronize")

    def elapsed_time(self, end_event: _Event) -> float:
        """Return milliseconds."""
        return 1000 * (end_event.seconds - self.seconds)


class Backend(types.ModuleType):
    """``torch.rehearsed``: what Paceline uses of ``torch.cuda``."""

    Stream, Event = _Stream, _Event

    def __getattr__(self, name: str) -> Any:
        answers: dict[str, Any] = {
            "is_available": True,
            "is_initialized": True,
            "device_count": 1,
            "current_device": 0,
            "_is_in_bad_fork": False,
            "get_device_name": "a rehearsed GPU",
            "get_device_capability": (8, 0),
            "is_bf16_supported": True,
            "get_amp_supported_dtype": [torch.bfloat16, torch.float16],
            "max_memory_allocated": Device.peak,
            "mem_get_info": (_MEMORY - Device.allocated, _MEMORY),
            "get_device_properties": types.SimpleNamespace(total_memory=_MEMORY, uuid="0", multi_processor_count=1),
            "get_rng_state_all": [torch.zeros(8, dtype=torch.uint8)],
        }
        if name in answers:
            return lambda *_, **__: answers[name]
        if name in ("set_device", "manual_seed", "manual_seed_all", "set_rng_state_all", "init"):
            return lambda *_, **__: None
        raise AttributeError(name)

    def synchronize(self, device: Any = None) -> None:
        """Count a wait."""
        _note("synchronize")

    def set_per_process_memory_fraction(self, fraction: float, device: Any = None) -> None:
        """Limit what may be allocated."""
        Device.limit = int(fraction * _MEMORY)

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """Start a new peak."""
        Device.peak = Device.allocated

    def current_stream(self, device: Any = None) -> _Stream:
        """Return the innermost stream."""
        return _streams[-1]

    @contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        """Use a stream inside."""
        _streams.append(stream)
        try:
            yield
        finally:
            _streams.pop()


def _is_here(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == NAME


def _on_host(value: Any) -> Any:
    if _is_here(value):
        Device.operators += 1
        if (block := _block(value)).is_overwritten:
            raise RuntimeError("accessing tensor output of CUDAGraphs that has been overwritten by a subsequent run")
        geometry = value.storage_offset(), value.size(), value.stride()
        return torch.empty(0, dtype=value.dtype).set_(block.host, *geometry)
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == NAME else value


def _shaped(base: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a view of a device tensor's storage with the geometry of a host tensor."""
    geometry = like.size(), like.stride(), like.storage_offset()
    return torch.ops.aten.as_strided.default.redispatch(_META, base, *geometry)


def _to_device(host: torch.Tensor, *known: torch.Tensor) -> torch.Tensor:
    """Return the device tensor over a host tensor's storage: a view of a known one that has the same."""
    storage = host.untyped_storage()
    for each in known:
        if _block(each).host._cdata == storage._cdata:
            return _shaped(each, host)
    base = torch._C._acc.create_empty_tensor((storage.nbytes() // host.element_size(),), host.dtype)
    base.untyped_storage().block = _Block(storage)
    return _shaped(base, host)


def _run(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator on the host."""
    schema = operator._schema
    name = schema.name.removeprefix("aten::")
    given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    here = [each for each in given if _is_here(each)]
    away = [each for each in given if not _is_here(each) and each.dim()]
    is_index = name in ("index", "index_put_", "index_put")
    if name in _READS_VALUES or (is_index and (away or _has_mask(args))):
        _note(name)
    if away and not is_index:
        raise RuntimeError(f"{name}: expected all tensors to be on {NAME}, found one on {away[0].device}")
    args, kwargs = tree_map(_on_host, (args, kwargs))
    kwargs.pop("pin_memory", None)
    found = operator(*args, **kwargs)
    if any(each.alias_info is not None and each.alias_info.is_write for each in schema.returns):
        # In place: the operator returns its own arguments.
        hosts = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        mine = {id(host): each for host, each in zip(hosts, given, strict=True)}
        for host in hosts:
            if mine[id(host)].size() != host.size():  # an `out` that was empty
                mine[id(host)].data = _to_device(host)
        return tree_map(lambda out: mine[id(out)], found)
    return tree_map(lambda out: _to_device(out, *here) if isinstance(out, torch.Tensor) else out, found)


def _has_mask(args: Sequence[Any]) -> bool:
    return any(isinstance(each, torch.Tensor) and each.dtype == torch.bool for each in args[1] if each is not None)


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if not _is_here(target):
        if not (non_blocking and target.is_pinned()):
            _note("copy to the host")
    elif not _is_here(source):
        is_pinned = source.is_pinned()
        COPIES.append((_streams[-1].name, is_pinned))
        if source.numel() > 1 and not (is_pinned and non_blocking):
            _note("copy from pageable memory")
    _on_host(target).copy_(_on_host(source))
    return target


def _convolution(*args: Any) -> torch.Tensor:
    return _to_device(torch.ops.aten.convolution(*map(_on_host, args)))


def _convolution_backward(gradient: Any, inputs: Any, weight: Any, *rest: Any) -> Any:
    *geometry, mask = rest
    transposed, groups = geometry[3], geometry[5]
    bias = [weight.size(1) * groups if transposed else weight.size(0)] if mask[2] else None
    hosts = map(_on_host, (gradient, inputs, weight))
    found = torch.ops.aten.convolution_backward(*hosts, bias, *geometry, mask)
    return tuple(None if each is None else _to_device(each) for each in found)


def _as_strided(tensor: Any, size: Any, stride: Any, offset: int | None = None) -> torch.Tensor:
    at = tensor.storage_offset() if offset is None else offset
    return torch.ops.aten.as_strided.default.redispatch(_META, tensor, size, stride, at)


def _cast(name: str) -> Any:
    """Return an operator as autocast runs it: with floating-point arguments in the lower precision."""
    operator = getattr(torch.ops.aten, name)

    def run(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(NAME)
        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
        with torch._C._ExcludeDispatchKeyGuard(keys):
            cast = tree_map(
                lambda each: each.to(dtype) if isinstance(each, torch.Tensor) and each.is_floating_point() else each,
                (args, kwargs),
            )
            return operator(*cast[0], **cast[1])

    return run


class _Group(torch.distributed.ProcessGroup):
    """Collectives of device tensors, on the host memory behind them."""

    _device_types = (torch.device("privateuseone"),)

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self.gloo = ProcessGroupGloo(store, rank, size, timeout)

    def _get_backend(self, device: torch.device) -> ProcessGroupGloo:
        return self.gloo


def _collective(name: str) -> Any:
    def run(self: _Group, *args: Any, **options: Any) -> Any:
        getattr(self.gloo, name)(*tree_map(_on_host, args), **options).wait()
        future: Any = torch.futures.Future()
        future.set_result(args[0] if args else None)
        return _create_work_from_future(future)

    return run


for _name in ("allreduce", "broadcast", "allgather", "gather", "barrier", "all_gather_single", "all_to_all_single"):
    setattr(_Group, _name, _collective(_name))


_recorded: list[_Block] = []  # what the next call of a recorded network overwrites


def _compile(network: torch.nn.Module, *, options: dict[str, Any], **_: Any) -> Any:
    """Return the network under the rules of CUDA graphs."""
    assert options["triton.cudagraphs"]

    def call(*args: Any, **kwargs: Any) -> Any:
        for each in _recorded:
            each.is_overwritten = True
        _recorded.clear()
        trained = {name: each.view_as(each) for name, each in network.named_parameters() if each.requires_grad}
        for each in trained.values() if torch.is_grad_enabled() else ():
            each.register_hook(lambda gradient: _recorded.append(_block(gradient)))
        Device.is_recording = True
        try:
            answer = torch.func.functional_call(network, trained, args, kwargs)
        finally:
            Device.is_recording = False
        _recorded.extend(_block(each) for each in tree_leaves(answer) if _is_here(each))
        return answer

    return call


_libraries: list[Any] = []


def install() -> None:
    """Register the device, page-locked memory and the import of Paceline's modules under its name."""
    _setup_privateuseone_for_python_backend(NAME, Backend(f"torch.{NAME}"))
    every, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    _libraries.extend((every, aten))
    every.fallback(_run, "PrivateUse1")
    every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    aten.impl("_copy_from", _copy_from, "PrivateUse1")
    aten.impl("convolution_overrideable", _convolution, "PrivateUse1")
    aten.impl("convolution_backward_overrideable", _convolution_backward, "PrivateUse1")
    aten.impl("as_strided", _as_strided, "PrivateUse1")
    for name in ("linear", "conv2d", "matmul", "bmm", "scaled_dot_product_attention"):
        aten.impl(name, _cast(name), "AutocastPrivateUse1")
    torch.distributed.Backend.register_backend(NAME, _Group, devices=[NAME])
    torch.compile = _compile
    torch.version.rehearsed = None
    _lock_pages()
    sys.meta_path.insert(0, _Renamed())


def _lock_pages() -> None:
    """Keep a list of page-locked memory, which torch asks a device's library for."""

    def pin(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
        copy = tensor.clone()
        copy.untyped_storage().is_locked = True
        return copy

    def is_pinned(tensor: torch.Tensor, *_: Any) -> bool:
        return getattr(tensor.untyped_storage(), "is_locked", False)

    def factory(make: Any) -> Any:
        def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
            return pin(make(*args, **kwargs)) if pin_memory else make(*args, **kwargs)

        return made

    def copied(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        if not _is_here(tensor):
            return deepcopy(tensor, memo)
        copy = _to_device(_on_host(tensor.detach()).clone())
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        memo[id(tensor)] = torch.nn.Parameter(copy, tensor.requires_grad) if is_parameter else copy
        return memo[id(tensor)]

    tensor: Any = torch.Tensor
    deepcopy, tensor.__deepcopy__ = tensor.__deepcopy__, copied  # torch's reads the storage
    tensor.pin_memory, tensor.is_pinned = pin, is_pinned
    tensor.record_stream = lambda *_: None
    torch.empty, torch.empty_like = factory(torch.empty), factory(torch.empty_like)


class _Renaming(ast.NodeTransformer):
    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        return ast.copy_location(ast.Constant(NAME), node) if node.value == "cuda" else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        node.attr = {"cuda": NAME, "is_cuda": f"is_{NAME}"}.get(node.attr, node.attr)
        return node


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> types.CodeType:
        tree = _Renaming().visit(ast.parse(self.get_data(self.path)))
        return compile(ast.fix_missing_locations(tree), self.path, "exec")


class _Renamed(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if not fullname.startswith(("paceline.", "paceline_")):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
            where = spec.submodule_search_locations
            loader = _Loader(fullname, spec.origin)
            return importlib.util.spec_from_file_location(
                fullname, spec.origin, loader=loader, submodule_search_locations=where
            )
        return spec
