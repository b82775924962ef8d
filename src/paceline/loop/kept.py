"""The state of a program's loop: modules and other objects that are kept, and what changes without being kept."""

from __future__ import annotations

import gc
import re
import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.checkpoint.state import (
    Component,
    OptimizerComponent,
    State,
    bare_module,
    check_inventory,
    has_state,
)
from paceline.checkpoint.weights import weights_sha256
from paceline.distributed.collectives import Collectives
from paceline.distributed.data_parallel import BUFFER_SYNC, has_training_buffers
from paceline.errors import LoopError
from paceline.parsing.arguments import check_made, shown

Replica = nn.parallel.DistributedDataParallel
_RESERVED = ("progress", "window", "clock")
# Kinds of objects whose change is seen although they were not given.
_WATCHED = (nn.Module, Optimizer, LRScheduler, torch.amp.GradScaler)
_Marks = tuple[Any, ...]
ADVICE = "Prepare and keep the same objects as when it was saved, or let their load_state_dict take it."
_USED = "paceline_used"  # the version of a gradient that its optimizer has used, an attribute of the tensor
_SPARSE = "sparse"


class _Object:
    """An object of the program with a state that may be of another shape each time."""

    def __init__(self, target: Component, name: str) -> None:
        self._target, self._name, self.state_dict = target, name, target.state_dict

    def check_state_dict(self, state: State, /) -> None:
        """Accept any state: the object checks what it loads."""

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Load it; a module must have taken all of it, as it was saved."""
        try:
            self._target.load_state_dict(state)
        finally:
            if isinstance(self._target, nn.Module):
                check_inventory(self.state_dict(), state, f"component {self._name!r}", ADVICE)


class _Optimizer(OptimizerComponent):
    """An optimizer with the gradients that its next step may use."""

    advice = "Give it the parameters and groups that it had when it was saved, before the loop; add none in the body."

    def __init__(self, optimizer: Optimizer, kept: Kept) -> None:
        super().__init__(optimizer)
        self._kept = kept

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, and gradients by the number of their parameter."""
        gradients = _unused_gradients(self.optimizer)
        if self._kept.loses_gradients:  # what one rank has of them is wrong on the others
            gradients = dict.fromkeys(gradients)
        return {**super().state_dict(), "gradients": gradients}

    def load_state_dict(self, state: State, /) -> None:
        """Load them."""
        gradients = state.get("gradients", {})  # checkpoints of earlier versions have none
        super().load_state_dict({key: value for key, value in state.items() if key != "gradients"})
        for number, parameter in enumerate(_parameters(self.optimizer)):
            if number in gradients:
                parameter.grad = torch.zeros_like(parameter)
                if (saved := gradients[number]) is not None:
                    parameter.grad.copy_(saved)


class Kept:
    """Everything that a checkpoint of the loop holds.

    Attributes:
        loses_gradients: Whether it holds zeros for gradients that wait for their optimizer.
    """

    def __init__(self) -> None:
        self._prepared: list[nn.Module] = []
        self._others: list[Any] = []
        self.loses_gradients = False
        self.replicas: list[Replica] = []
        self._stepped: set[int] = set()
        self._unseen: _Unseen | None = None

    def prepare(self, module: Any, collectives: Collectives, device: torch.device) -> Any:
        """Move a module to the device, give it the first rank's weights, and wrap it where there are ranks.

        Raises:
            LoopError: If it is not a module, or was prepared before.
        """
        if not isinstance(module, nn.Module):
            fix = "make an object of it" if isinstance(module, type) else "give an object with a state to keep"
            raise LoopError(f"prepare takes modules, found {shown(module)}; {fix}.", key="prepare")
        bare = bare_module(module)
        check_made("prepare", bare, error=LoopError)
        self._refuse_again(bare, "prepare")
        if any(map(nn.parameter.is_lazy, (*bare.parameters(), *bare.buffers()))):
            message = f"prepare takes modules with known shapes, found {shown(module)} without; call it once before."
            raise LoopError(message, key="prepare")
        self._prepared.append(bare)
        bare.to(device)
        collectives.broadcast_tensors([*(each.data for each in bare.parameters()), *bare.buffers()])
        trains = any(each.requires_grad for each in bare.parameters())
        if collectives.world.world_size > 1 and trains and not isinstance(module, Replica):
            options: dict[str, Any] = {BUFFER_SYNC: has_training_buffers(bare), "init_sync": False}
            module = Replica(module, device_ids=None if device.index is None else [device.index], **options)
        if isinstance(module, Replica):
            self.replicas.append(module)
            _settle_buckets(module)
        return module

    def keep(self, target: Any) -> None:
        """Add an object with a state.

        Raises:
            LoopError: If it has none, or was kept before.
        """
        if not has_state(target):
            message = f"keep takes objects with state_dict and load_state_dict, found {shown(target)}; give such ones."
            raise LoopError(message, key="keep")
        target = bare_module(target)
        check_made("keep", target, error=LoopError)
        self._refuse_again(target, "keep")
        self._others.append(target)
        if isinstance(target, Optimizer):
            target.register_step_post_hook(self._after_step)

    def _refuse_again(self, target: Any, method: str) -> None:
        if any(target is each for each in (*self._others, *self._prepared)):
            message = f"{method} was given {shown(target)} that the loop has already; give each object once."
            raise LoopError(message, key=method)

    @property
    def optimizers(self) -> list[Optimizer]:
        """The kept optimizers, in the order in which they were given."""
        return [each for each in self._others if isinstance(each, Optimizer)]

    def named(self) -> dict[str, Any]:
        """Return all that is kept by its name: ``model`` and ``optimizer`` if there is one, otherwise its class."""
        names: dict[str, Any] = {}
        only: dict[str, Sequence[Any]] = {"model": self._prepared, "optimizer": self.optimizers}
        for target in (*self._prepared, *self._others):
            alone = next((name for name, each in only.items() if len(each) == 1 and each[0] is target), None)
            stem = alone or re.sub(r"\W|^[\d_]+", "", type(target).__name__, flags=re.ASCII) or "part"
            taken, number, name = {*names, *_RESERVED, *only} - {alone}, 1, stem
            while name in taken:
                name, number = f"{stem}_{number + 1}", number + 1
            names[name] = target
        return names

    def modules(self) -> dict[str, nn.Module]:
        """Return the kept modules by name."""
        return {name: each for name, each in self.named().items() if isinstance(each, nn.Module)}

    def components(self) -> dict[str, Component]:
        """Return all that is kept as components of a checkpoint."""
        return {
            name: _Optimizer(each, self) if isinstance(each, Optimizer) else _Object(each, name)
            for name, each in self.named().items()
        }

    def sha256(self) -> str:
        """Return the digest of the weights of all kept modules, in the order of their names."""
        states = [module.state_dict().items() for _, module in sorted(self.modules().items())]
        return weights_sha256(
            *({key: each for key, each in state if isinstance(each, torch.Tensor)} for state in states)
        )

    @property
    def is_compiled(self) -> bool:
        """Whether a module is compiled: it would be compiled again for whatever observes it."""
        dynamo, modules = sys.modules.get("torch._dynamo"), [*self.modules().values()]
        if any(each._compiled_call_impl is not None for one in modules for each in one.modules()):  # noqa: SLF001  # torch has no other mark
            return True
        known = {id(each) for one in modules for each in one.modules()}
        made = () if dynamo is None else (each for each in gc.get_objects() if type(each) is dynamo.OptimizedModule)
        return any(id(each._orig_mod) in known for each in made)  # noqa: SLF001  # as above

    def begin_turn(self) -> None:
        """Note that a turn of the body begins."""
        self._stepped.clear()

    @property
    def may_have_changed(self) -> bool:
        """Whether this turn may have changed a module: an optimizer took a step, or none is known."""
        return bool(self._stepped) or not self.optimizers

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._stepped.add(id(optimizer))
        # An optimizer leaves the gradients that it has used where they are, until they are set to zero.
        for parameter in _parameters(optimizer):
            if (gradient := parameter.grad) is not None:
                setattr(gradient, _USED, _writes(gradient))

    def cannot_save_gradients(self, collectives: Collectives) -> bool:
        """Whether some gradients wait for their optimizer that differ between ranks, or are sparse; a collective.

        If so, the next checkpoint holds zeros for all that wait.
        """
        # What comes after a step is of another loss, as in adversarial training.
        waiting = [each for each in self.optimizers if id(each) not in self._stepped]
        gradients = [each.grad for optimizer in waiting for each in _parameters(optimizer) if each.grad is not None]
        if any(each.is_sparse and _is_unused(each) for each in gradients):
            state = _SPARSE
        elif collectives.world.world_size == 1:
            state = ""
        else:
            unused = {str(place): each for place, each in enumerate(gradients) if _is_unused(each)}
            state = weights_sha256(unused)
        found = {*collectives.gather(state)}
        self.loses_gradients = found == {_SPARSE} or len(found) > 1
        return self.loses_gradients

    @property
    def has_waiting_gradients(self) -> bool:
        """Whether some gradients wait for their optimizer, on this rank."""
        return any(
            each.grad is not None and _is_unused(each.grad)
            for optimizer in self.optimizers
            for each in _parameters(optimizer)
        )

    # What was not given

    def watch(self) -> None:
        """Remember the versions of objects that are not kept; the first save compares them."""
        self._unseen = _Unseen(self)

    def take_unkept(self) -> list[str]:
        """Return the classes of what has changed since and is not kept; asked once."""
        unseen, self._unseen = self._unseen, None
        return [] if unseen is None else unseen.changed()


def _settle_buckets(replica: Replica) -> None:
    """Have a replica arrange its gradients for good: in the order of its parameters, from last to first.

    It sums gradients of several ranks in an order that depends on their places in its buckets, and arranges these anew
    after its first backward pass: a resumed run would begin with other places, and so with other bits, than it left.
    """
    sparse = any(getattr(each, "sparse", False) for each in replica.modules())
    if replica.static_graph or replica.find_unused_parameters or sparse:
        return
    trained = [each for each in replica.parameters() if each.requires_grad]
    unchecked: Any = replica  # its methods have no types
    unchecked._pre_forward()  # noqa: SLF001  # the program's forward pass would need its inputs
    total = torch.zeros((), device=trained[0].device)
    for each in trained:
        total = total + each.float().sum()
    unchecked._post_forward(total).backward()  # noqa: SLF001  # as above
    for each in trained:
        each.grad = None


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _unused_gradients(optimizer: Optimizer) -> dict[int, torch.Tensor | None]:
    """Return what was computed after the last step, by the number of the parameter.

    None stands for zeros, and for what the step has used and the program sets to zero before it computes more: to an
    optimizer, this differs from a parameter without a gradient.
    """
    gradients = {number: each.grad for number, each in enumerate(_parameters(optimizer))}
    dense = {number: each for number, each in gradients.items() if each is not None and not each.is_sparse}
    return {number: each if _is_unused(each) else None for number, each in dense.items()}


def _is_unused(gradient: torch.Tensor) -> bool:
    return getattr(gradient, _USED, None) != _writes(gradient) and bool(gradient.any())


def _marks(tensors: Any) -> _Marks:
    """Return values that change whenever one of the tensors is written to or replaced."""
    return tuple((id(each), _writes(each)) for each in tensors)


def _writes(tensor: torch.Tensor) -> int:
    return tensor._version  # noqa: SLF001  # autograd's count of writes has no public name


class _Unseen:
    """Objects of the program that are not kept, with the versions of their tensors."""

    def __init__(self, kept: Kept) -> None:
        known = [*kept.named().values(), *kept.replicas]
        for each in known:
            known += getattr(each, "_schedulers", ())  # in the state of a SequentialLR or ChainedScheduler
        modules = [each for one in known if isinstance(one, nn.Module) for each in one.modules()]
        self._tensors = {id(each) for one in modules for each in _direct(one)}
        own = {id(each) for each in (*known, *modules)}
        found = [each for each in gc.get_objects() if issubclass(type(each), _WATCHED) and id(each) not in own]
        found = [each for each in found if _is_made(each)]
        self._before = [(weakref.ref(each), self._state(each)) for each in found]

    def changed(self) -> list[str]:
        """Return the classes of those that differ; of modules within one another, the outermost."""
        alive = [(target, before) for each, before in self._before if (target := each()) is not None]
        changed = {id(target): target for target, before in alive if self._state(target) != before}
        inner = {id(child) for target, _ in alive if isinstance(target, nn.Module) for child in target.children()}
        outer = [target for target, _ in alive if id(target) not in inner]
        parts = ((each, each.modules() if isinstance(each, nn.Module) else (each,)) for each in outer)
        return [type(each).__name__ for each, inside in parts if any(id(part) in changed for part in inside)]

    def _state(self, target: Any) -> Any:
        if isinstance(target, nn.Module):
            return _marks(each for each in _direct(target) if id(each) not in self._tensors)
        if isinstance(target, Optimizer):
            return _marks(
                value
                for state in target.state.values()
                for value in (state.values() if isinstance(state, dict) else ())
                if isinstance(value, torch.Tensor)
            )
        return repr(target.state_dict())


def _is_made(target: Any) -> bool:
    """Whether an object has what its base class makes: a program may hold one that failed before."""
    needed = "_modules" if isinstance(target, nn.Module) else "state"
    return hasattr(target, needed) or not isinstance(target, nn.Module | Optimizer)


def _direct(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)
