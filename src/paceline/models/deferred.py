"""Build a network that does not fit into one process, and compute its initial values tensor by tensor.

The network is built on torch's ``meta`` device, where tensors have shapes but no data, and the constructor's tensor
operations are recorded. Later the operations behind one tensor are replayed on real memory with the recorded state of
the random generator. Its values are bit-identical to those of a normal build, and only one tensor and its inputs exist
at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from paceline.errors import ModelError, PacelineError

# Operators that overwrite a tensor completely.
_OVERWRITING = frozenset({"normal_", "uniform_", "zero_", "fill_", "copy_", "exponential_", "random_", "bernoulli_"})
_IS_META: Any = vars(torch._C.TensorBase)["is_meta"].__get__  # noqa: SLF001  # the class whose attribute it is has no public name
_EMPTY = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})


class NotDeferrableError(ModelError):
    """The initial values of this network cannot be recomputed; it must be built in full."""


@dataclass(frozen=True)
class _TensorView:
    """A tensor as a view of a storage.

    Attributes:
        storage: Index of the storage.
        size: As in torch.
        stride: As in torch.
        offset: Elements before it.
        dtype: As in torch.
    """

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def of(self, storage: torch.UntypedStorage) -> Tensor:
        """Return the tensor at this place of a real storage."""
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True)
class _Operation:
    """A recorded operation: the operator, its arguments with places for tensors, and the places of its results."""

    operator: Any
    args: Any
    kwargs: Any
    output: Any
    reads: frozenset[int]
    writes: frozenset[int]
    makes: frozenset[int]
    draws: bool
    overwrites: int | None

    @property
    def name(self) -> str:
        """The operator's name without the overload."""
        return str(self.operator.__name__).partition(".")[0]


@dataclass
class InitialValues:
    """The initial values of a network's tensors, computed on request.

    Args:
        operations: Operations of the constructor.
        places: Place of each tensor, by name.
        state: State of torch's random generator before construction.
    """

    operations: list[_Operation]
    places: dict[str, _TensorView]
    state: Tensor
    _by_storage: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Index operations by the storages they write to."""
        for number, each in enumerate(self.operations):
            for storage in each.writes | each.makes:
                self._by_storage.setdefault(storage, []).append(number)

    @torch.no_grad()
    def __call__(self, name: str) -> Tensor:
        """Return the values of one parameter or buffer, on the CPU."""
        place = self.places[name]
        storages: dict[int, torch.UntypedStorage] = {}
        with torch.random.fork_rng(devices=[]):
            for number in self._needed(place.storage):
                if self.operations[number].draws:
                    torch.set_rng_state(self._states[number])
                _replay(self.operations[number], storages)
        return place.of(storages[place.storage])

    def check(self) -> None:
        """Check that all tensors can be recomputed.

        Raises:
            NotDeferrableError: If one cannot.
        """
        for name, place in self.places.items():
            needed = [self.operations[number] for number in self._needed(place.storage)]
            created = {storage for each in needed for storage in each.makes}
            missing = {storage for each in needed for storage in each.reads | each.writes} - created
            if missing or place.storage not in created:
                raise NotDeferrableError(f"{name} comes from a tensor whose creation was not recorded")
            if all(each.name in _EMPTY for each in needed) and place.size and 0 not in place.size:
                raise NotDeferrableError(f"{name} gets no values from the constructor")

    def _needed(self, storage: int) -> list[int]:
        """Return the indices of the operations that a storage's content depends on, in order."""
        needed: set[int] = set()
        queue = [(storage, len(self.operations))]
        visited: dict[int, int] = {}
        while queue:
            target, before = queue.pop()
            if visited.get(target, -1) >= before:
                continue
            visited[target] = before
            for number in self._origins(target, before):
                if number not in needed:
                    needed.add(number)
                    each = self.operations[number]
                    queue += [(other, number) for other in each.reads if other != each.overwrites]
                    queue += [(other, number + 1) for other in each.writes if other != target]
        return sorted(needed)

    def _origins(self, storage: int, before: int) -> Iterator[int]:
        """Return the operation that created a storage, and the writes since it was last overwritten."""
        overwritten = False
        for number in reversed([each for each in self._by_storage.get(storage, ()) if each < before]):
            each = self.operations[number]
            if storage in each.makes or not overwritten:
                yield number
            overwritten = overwritten or each.overwrites == storage

    @cached_property
    def _states(self) -> dict[int, Tensor]:
        """Return the generator's state before each random operation; runs all of them and discards the results."""
        states: dict[int, Tensor] = {}
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.state)
            for number, each in enumerate(self.operations):
                if each.draws:
                    states[number] = torch.get_rng_state()
                    _replay_without_effect(each)
        return states


def build_deferred(build: Callable[[], nn.Module]) -> tuple[nn.Module, InitialValues]:
    """Build a network without data, and the function that computes its initial values.

    Args:
        build: Builds it with torch's random generator, in the same state as for a normal build.

    Returns:
        The network on the ``meta`` device, except for tensors that the constructor puts elsewhere; and the values, by
        the names of parameters, buffers and other tensors of its modules.

    Raises:
        NotDeferrableError: If its values cannot be computed later; build it in full.
        PacelineError: Errors raised by ``build``.
    """
    recorder = _Recorder()
    state = torch.get_rng_state()
    try:
        with torch.device("meta"), _DeviceQuery(recorder), _record_truncated_normal(recorder), recorder:
            network = build()
    except PacelineError:
        raise
    except Exception as error:  # for example, a constructor that reads values
        raise NotDeferrableError(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from error
    if recorder.why_not or not torch.equal(torch.get_rng_state(), state):
        raise NotDeferrableError(recorder.why_not or "its constructor uses its own random generator")
    places = {name: recorder.place(tensor) for name, tensor in tensors_of(network) if tensor.is_meta}
    values = InitialValues(recorder.operations, places, state)
    values.check()
    return network, values


def tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a network's modules by name; shared parameters appear under each name."""
    for path, each in module.named_modules():
        own = chain(
            each.named_parameters(recurse=False, remove_duplicate=False),
            each.named_buffers(recurse=False, remove_duplicate=False),
            ((name, value) for name, value in vars(each).items() if isinstance(value, Tensor)),
        )
        for name, tensor in own:
            yield f"{path}.{name}" if path else name, tensor


class _DeviceQuery(TorchFunctionMode):
    """Detects a constructor that checks for the meta device and may then behave differently."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func == _IS_META:
            self._recorder.why_not = "its constructor behaves differently with tensors without values"
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _record_truncated_normal(recorder: _Recorder) -> Iterator[None]:
    """Record torch's truncated normal initialisation as one operation, since it redraws out-of-range values."""
    init: Any = torch.nn.init
    original = init._no_grad_trunc_normal_  # every caller goes through this function

    def taken_down(tensor: Tensor, *args: Any, generator: Any = None) -> Tensor:
        if tensor.device.type != "meta" or generator is not None:
            drawn_as_usual: Tensor = original(tensor, *args, generator=generator)
            return drawn_as_usual
        recorder.draw(original, tensor, args)
        return tensor

    init._no_grad_trunc_normal_ = taken_down  # during the construction only
    try:
        yield
    finally:
        init._no_grad_trunc_normal_ = original  # restored


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch gives its modes no types
    """Records operations on tensors without data."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives its modes no types
        self.operations: list[_Operation] = []
        self.why_not = ""
        self._numbers: dict[int, int] = {}
        # Keeps storages alive so that no address is reused; they take no memory.
        self._kept: list[torch.UntypedStorage] = []

    def place(self, tensor: Tensor) -> _TensorView:
        """Return a tensor's place in its storage."""
        storage = tensor.untyped_storage()
        key = int(storage._cdata)  # noqa: SLF001  # what torch's StorageWeakRef goes by
        if key not in self._numbers:
            self._numbers[key] = len(self._kept)
            self._kept.append(storage)
        number = self._numbers[key]
        return _TensorView(number, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run an operation, and record it if it touches these tensors."""
        options = kwargs or {}
        known = len(self._kept)
        recorded = tree_map(self._taken, (args, options))
        output = func(*args, **options)
        tensors = [each for each in (*tree_leaves((args, options)), *tree_leaves(output)) if isinstance(each, Tensor)]
        if not any(each.device.type == "meta" for each in tensors):
            return output
        if options.get("generator") is not None:
            self.why_not = f"{func.__name__} draws from its own random generator"
        after = tree_map(self._taken, output)
        reads = _storages(recorded)
        self.operations.append(
            _Operation(
                func,
                recorded[0],
                recorded[1],
                after,
                reads,
                writes=_written(func, *recorded),
                makes=frozenset(each for each in _storages(after) - reads if each >= known),
                draws=torch.Tag.nondeterministic_seeded in func.tags,
                overwrites=self._overwritten(func, args, recorded[0]),
            )
        )
        return output

    def draw(self, function: Any, tensor: Tensor, args: tuple[Any, ...]) -> None:
        """Record that a function fills a tensor with random numbers."""
        place = self.place(tensor)
        storages, overwrites = frozenset({place.storage}), place.storage if _is_all(tensor) else None
        self.operations.append(
            _Operation(
                function, (place, *args), {}, place, storages, storages, frozenset(), draws=True, overwrites=overwrites
            )
        )

    def _taken(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        # Real tensors may change before they are needed.
        return self.place(value) if value.device.type == "meta" else value.detach().clone()

    def _overwritten(self, func: Any, args: tuple[Any, ...], places: Any) -> int | None:
        """Return the storage that an operation overwrites completely, if any."""
        if str(func.__name__).partition(".")[0] not in _OVERWRITING or not isinstance(places[0], _TensorView):
            return None
        others = _storages((places[1:],))
        return places[0].storage if _is_all(args[0]) and places[0].storage not in others else None


def _is_all(tensor: Tensor) -> bool:
    """Whether a tensor covers its whole storage."""
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _storages(tree: Any) -> frozenset[int]:
    return frozenset(each.storage for each in tree_leaves(tree) if isinstance(each, _TensorView))


def _written(func: Any, args: Any, kwargs: Any) -> frozenset[int]:
    """Return the storages that an operator writes to, by its schema."""
    storages: set[int] = set()
    for index, argument in enumerate(func._schema.arguments):  # noqa: SLF001  # there is no other way to ask
        if argument.alias_info is not None and argument.alias_info.is_write:
            storages |= _storages(args[index] if index < len(args) else kwargs.get(argument.name))
    return frozenset(storages)


def _replay(operation: _Operation, storages: dict[int, torch.UntypedStorage]) -> None:
    """Run an operation on real memory and store its results."""
    args, kwargs = tree_map(lambda each: _real(each, storages), (operation.args, operation.kwargs))
    output = operation.operator(*args, **kwargs)
    places, real = tree_leaves(operation.output), tree_leaves(output)
    for place, tensor in zip(places, real, strict=True):
        if isinstance(place, _TensorView) and place.storage in operation.makes:
            storages.setdefault(place.storage, tensor.untyped_storage())


def _replay_without_effect(operation: _Operation) -> None:
    """Advance the generator by as many numbers as the operation draws."""
    sizes: dict[int, torch.UntypedStorage] = {}
    for place in tree_leaves((operation.args, operation.kwargs)):
        if isinstance(place, _TensorView):
            reach = place.offset + 1 + sum((n - 1) * s for n, s in zip(place.size, place.stride, strict=True))
            size = max(reach * place.dtype.itemsize, 0 if place.storage not in sizes else sizes[place.storage].nbytes())
            sizes[place.storage] = torch.zeros(size, dtype=torch.uint8).untyped_storage()
    _replay(operation, sizes)


def _real(value: Any, storages: Mapping[int, torch.UntypedStorage]) -> Any:
    if isinstance(value, _TensorView):
        return value.of(storages[value.storage])
    if isinstance(value, torch.device) and value.type == "meta":
        return torch.device("cpu")
    return value
