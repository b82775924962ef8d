"""Build a network whose weights do not fit into one process, and compute its first values tensor by tensor.

It is built on torch's ``meta`` device, where a tensor is a shape without numbers, and what the constructor does to its
tensors is taken down. Later the operations that made one tensor are done again, on real memory and with the state that
the random generator had: its values are those that the network would have had, to the bit, and no more than one tensor
and what it was made of is there at a time.
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

# What leaves nothing of what was there.
_OVERWRITING = frozenset({"normal_", "uniform_", "zero_", "fill_", "copy_", "exponential_", "random_", "bernoulli_"})
_IS_META: Any = vars(torch._C.TensorBase)["is_meta"].__get__  # noqa: SLF001  # the class whose attribute it is has no public name
_EMPTY = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})


class NotDeferrableError(ModelError):
    """The initial values of this network cannot be recomputed; it must be built whole."""


@dataclass(frozen=True)
class _Place:
    """A tensor as a part of a storage.

    Attributes:
        storage: Number of the storage.
        size: As torch's.
        stride: As torch's.
        offset: Elements before it.
        dtype: As torch's.
    """

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def of(self, storage: torch.UntypedStorage) -> Tensor:
        """The tensor at this place of a real storage."""
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True)
class _Operation:
    """What was done: the operator, with places for tensors of the network, and the places of what came of it."""

    operator: Any
    args: Any
    kwargs: Any
    answer: Any
    reads: frozenset[int]
    writes: frozenset[int]
    makes: frozenset[int]
    draws: bool
    overwrites: int | None

    @property
    def name(self) -> str:
        """Its operator's name without the overload."""
        return str(self.operator.__name__).partition(".")[0]


@dataclass
class FirstValues:
    """The values of a network's tensors before the first step, computed on request.

    Args:
        operations: What its constructor did.
        places: Where each tensor of it is, by name.
        state: Of torch's random generator, before.
    """

    operations: list[_Operation]
    places: dict[str, _Place]
    state: Tensor
    _by_storage: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Find out by storage who wrote to it."""
        for number, each in enumerate(self.operations):
            for storage in each.writes | each.makes:
                self._by_storage.setdefault(storage, []).append(number)

    @torch.no_grad()
    def __call__(self, name: str) -> Tensor:
        """One parameter's or buffer's values, on the CPU."""
        place = self.places[name]
        storages: dict[int, torch.UntypedStorage] = {}
        with torch.random.fork_rng(devices=[]):
            for number in self._needed(place.storage):
                if self.operations[number].draws:
                    torch.set_rng_state(self._states[number])
                _do(self.operations[number], storages)
        return place.of(storages[place.storage])

    def check(self) -> None:
        """Check that all of them can be recomputed.

        Raises:
            NotDeferrableError: If not.
        """
        for name, place in self.places.items():
            needed = [self.operations[number] for number in self._needed(place.storage)]
            made = {storage for each in needed for storage in each.makes}
            missing = {storage for each in needed for storage in each.reads | each.writes} - made
            if missing or place.storage not in made:
                raise NotDeferrableError(f"{name} comes from a tensor whose creation was not recorded")
            if all(each.name in _EMPTY for each in needed) and place.size and 0 not in place.size:
                raise NotDeferrableError(f"{name} gets no values from the constructor")

    def _needed(self, storage: int) -> list[int]:
        """Numbers of the operations that a storage's content comes from, in order."""
        taken: set[int] = set()
        asked = [(storage, len(self.operations))]
        seen: dict[int, int] = {}
        while asked:
            wanted, before = asked.pop()
            if seen.get(wanted, -1) >= before:
                continue
            seen[wanted] = before
            for number in self._origins(wanted, before):
                if number not in taken:
                    taken.add(number)
                    each = self.operations[number]
                    asked += [(other, number) for other in each.reads if other != each.overwrites]
                    asked += [(other, number + 1) for other in each.writes if other != wanted]
        return sorted(taken)

    def _origins(self, storage: int, before: int) -> Iterator[int]:
        """What made a storage, and what has been written to it since it was last overwritten."""
        overwritten = False
        for number in reversed([each for each in self._by_storage.get(storage, ()) if each < before]):
            each = self.operations[number]
            if storage in each.makes or not overwritten:
                yield number
            overwritten = overwritten or each.overwrites == storage

    @cached_property
    def _states(self) -> dict[int, Tensor]:
        """The generator's state before each operation that draws: all are done once, to no end."""
        found: dict[int, Tensor] = {}
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.state)
            for number, each in enumerate(self.operations):
                if each.draws:
                    found[number] = torch.get_rng_state()
                    _do_to_no_end(each)
        return found


def build_deferred(build: Callable[[], nn.Module]) -> tuple[nn.Module, FirstValues]:
    """Build a network without numbers, and what gives it its first values.

    Args:
        build: Builds it from torch's random generator, which stands as it would for the whole network.

    Returns:
        The network on the ``meta`` device, but for tensors that the constructor puts elsewhere; and the values, by the
        names of parameters, buffers and other tensors that its modules hold.

    Raises:
        NotDeferrableError: If its values cannot be worked out later: build it whole.
        PacelineError: Whatever ``build`` finds wrong.
    """
    recorder = _Recorder()
    state = torch.get_rng_state()
    try:
        with torch.device("meta"), _Asking(recorder), _truncation_taken_down(recorder), recorder:
            network = build()
    except PacelineError:
        raise
    except Exception as error:  # a constructor that looks at numbers, say
        raise NotDeferrableError(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from error
    if recorder.why_not or not torch.equal(torch.get_rng_state(), state):
        raise NotDeferrableError(recorder.why_not or "its constructor uses its own random generator")
    places = {name: recorder.place(tensor) for name, tensor in tensors_of(network) if tensor.is_meta}
    values = FirstValues(recorder.operations, places, state)
    values.check()
    return network, values


def tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that a network's modules hold, with its name: of parameters that are shared, each name."""
    for path, each in module.named_modules():
        own = chain(
            each.named_parameters(recurse=False, remove_duplicate=False),
            each.named_buffers(recurse=False, remove_duplicate=False),
            ((name, value) for name, value in vars(each).items() if isinstance(value, Tensor)),
        )
        for name, tensor in own:
            yield f"{path}.{name}" if path else name, tensor


class _Asking(TorchFunctionMode):
    """Notes that a constructor asks whether there are numbers: it may then do something else."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func == _IS_META:
            self._recorder.why_not = "its constructor behaves differently with tensors without values"
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _truncation_taken_down(recorder: _Recorder) -> Iterator[None]:
    """Take down torch's truncated normal distribution as one operation: it draws until all numbers are inside."""
    init: Any = torch.nn.init
    drawn = init._no_grad_trunc_normal_  # every way to it goes through here

    def taken_down(tensor: Tensor, *args: Any, generator: Any = None) -> Tensor:
        if tensor.device.type != "meta" or generator is not None:
            drawn_as_usual: Tensor = drawn(tensor, *args, generator=generator)
            return drawn_as_usual
        recorder.draw(drawn, tensor, args)
        return tensor

    init._no_grad_trunc_normal_ = taken_down  # for as long as the network is built
    try:
        yield
    finally:
        init._no_grad_trunc_normal_ = drawn  # as it was


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch gives its modes no types
    """Takes down what is done to tensors without numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives its modes no types
        self.operations: list[_Operation] = []
        self.why_not = ""
        self._numbers: dict[int, int] = {}
        # So that no address is given to another storage meanwhile; they take no memory.
        self._kept: list[torch.UntypedStorage] = []

    def place(self, tensor: Tensor) -> _Place:
        """Which part of which storage a tensor is."""
        storage = tensor.untyped_storage()
        key = int(storage._cdata)  # noqa: SLF001  # what torch's StorageWeakRef goes by
        if key not in self._numbers:
            self._numbers[key] = len(self._kept)
            self._kept.append(storage)
        number = self._numbers[key]
        return _Place(number, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Do an operation, and take it down if it is one of those."""
        given = kwargs or {}
        known = len(self._kept)
        before = tree_map(self._taken, (args, given))
        answer = func(*args, **given)
        tensors = [each for each in (*tree_leaves((args, given)), *tree_leaves(answer)) if isinstance(each, Tensor)]
        if not any(each.device.type == "meta" for each in tensors):
            return answer
        if given.get("generator") is not None:
            self.why_not = f"{func.__name__} draws from its own random generator"
        after = tree_map(self._taken, answer)
        reads = _storages(before)
        self.operations.append(
            _Operation(
                func,
                before[0],
                before[1],
                after,
                reads,
                writes=_written(func, *before),
                makes=frozenset(each for each in _storages(after) - reads if each >= known),
                draws=torch.Tag.nondeterministic_seeded in func.tags,
                overwrites=self._overwritten(func, args, before[0]),
            )
        )
        return answer

    def draw(self, function: Any, tensor: Tensor, args: tuple[Any, ...]) -> None:
        """Take down that a function fills a tensor with random numbers."""
        place = self.place(tensor)
        own, overwrites = frozenset({place.storage}), place.storage if _is_all(tensor) else None
        self.operations.append(
            _Operation(function, (place, *args), {}, place, own, own, frozenset(), draws=True, overwrites=overwrites)
        )

    def _taken(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        # What is real may change by the time it is needed.
        return self.place(value) if value.device.type == "meta" else value.detach().clone()

    def _overwritten(self, func: Any, args: tuple[Any, ...], places: Any) -> int | None:
        """The storage of which an operation leaves nothing, if it does so."""
        if str(func.__name__).partition(".")[0] not in _OVERWRITING or not isinstance(places[0], _Place):
            return None
        others = _storages((places[1:],))
        return places[0].storage if _is_all(args[0]) and places[0].storage not in others else None


def _is_all(tensor: Tensor) -> bool:
    """Whether nothing else is in its storage."""
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _storages(tree: Any) -> frozenset[int]:
    return frozenset(each.storage for each in tree_leaves(tree) if isinstance(each, _Place))


def _written(func: Any, args: Any, kwargs: Any) -> frozenset[int]:
    """Storages that an operator writes to, by its schema."""
    found: set[int] = set()
    for index, argument in enumerate(func._schema.arguments):  # noqa: SLF001  # there is no other way to ask
        if argument.alias_info is not None and argument.alias_info.is_write:
            found |= _storages(args[index] if index < len(args) else kwargs.get(argument.name))
    return frozenset(found)


def _do(operation: _Operation, storages: dict[int, torch.UntypedStorage]) -> None:
    """Do it on real memory; what it makes is noted."""
    args, kwargs = tree_map(lambda each: _real(each, storages), (operation.args, operation.kwargs))
    answer = operation.operator(*args, **kwargs)
    places, real = tree_leaves(operation.answer), tree_leaves(answer)
    for place, tensor in zip(places, real, strict=True):
        if isinstance(place, _Place) and place.storage in operation.makes:
            storages.setdefault(place.storage, tensor.untyped_storage())


def _do_to_no_end(operation: _Operation) -> None:
    """Draw as many numbers as it does."""
    sizes: dict[int, torch.UntypedStorage] = {}
    for place in tree_leaves((operation.args, operation.kwargs)):
        if isinstance(place, _Place):
            reach = place.offset + 1 + sum((n - 1) * s for n, s in zip(place.size, place.stride, strict=True))
            size = max(reach * place.dtype.itemsize, 0 if place.storage not in sizes else sizes[place.storage].nbytes())
            sizes[place.storage] = torch.zeros(size, dtype=torch.uint8).untyped_storage()
    _do(operation, sizes)


def _real(value: Any, storages: Mapping[int, torch.UntypedStorage]) -> Any:
    if isinstance(value, _Place):
        return value.of(storages[value.storage])
    if isinstance(value, torch.device) and value.type == "meta":
        return torch.device("cpu")
    return value
