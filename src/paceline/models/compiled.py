"""A compiled network: which forward passes are compiled, and detection of unplanned compilations."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from paceline.errors import ModelError, did_you_mean
from paceline.models.build import overrunning
from paceline.recipe.model import ModelSection

# One graph per size, for training and for each evaluated set of weights; torch's default limit is 8.
_MOST_GRAPHS = 256


@dataclass(frozen=True, kw_only=True)
class CompiledGraph:
    """A graph compiled for a new size.

    Attributes:
        shape: Shape of the input.
        training: Whether gradients are computed.
        seconds: Duration of the first call, including tracing and code generation; the backward pass is compiled later.
    """

    shape: tuple[int, ...]
    training: bool
    seconds: float


class CompileLog:
    """Compilations in this process: planned and unplanned.

    Attributes:
        graphs: The planned graphs.
    """

    def __init__(self) -> None:
        from torch._dynamo.callback import callback_handler

        self.graphs: list[CompiledGraph] = []
        self._is_planned = False
        self._unplanned: list[str] = []
        own = weakref.ref(self)

        def begun(args: Any) -> None:
            # Backward passes compile at their first run, as expected.
            traced = args.callback_trigger.name == "DYNAMO"
            if traced and (log := own()) is not None:
                log.note(args.compile_id)

        def leave() -> None:
            with contextlib.suppress(ValueError):  # torch.compiler.reset() was called before
                callback_handler.remove_start_callback(begun)

        callback_handler.register_start_callback(begun)
        weakref.finalize(self, leave)

    def note(self, compiled: Any) -> None:
        """Record that compilation of a graph with this torch number has started."""
        if not self._is_planned:
            self._unplanned.append(compiled)

    @contextmanager
    def first_call(self, shape: tuple[int, ...], *, training: bool) -> Iterator[None]:
        """Wrap the first call with a planned size."""
        from torch._dynamo import config

        limits = {"recompile_limit": _MOST_GRAPHS, "accumulated_recompile_limit": _MOST_GRAPHS * 8}
        self._is_planned, start = True, time.perf_counter()
        try:
            with config.patch(limits):
                yield
        finally:
            self._is_planned = False
        self.graphs.append(CompiledGraph(shape=shape, training=training, seconds=time.perf_counter() - start))

    def surprises(self) -> list[str]:
        """Return, since the last call, why anything was recompiled that was not planned."""
        unplanned, self._unplanned = self._unplanned, []
        if not unplanned:
            return []
        from torch._dynamo.utils import get_compilation_metrics

        reasons = {each.compile_id: each.recompile_reason for each in get_compilation_metrics()}
        # A first compilation outside this network is not a recompilation.
        unplanned_reasons = (reason for compiled in unplanned if (reason := reasons.get(compiled)))
        return [" ".join(reason.splitlines()[0].split("  #")[0].split())[:300] for reason in unplanned_reasons]


class CompiledNetwork(nn.Module):
    """A network compiled separately for a few batch sizes; it runs uncompiled for all others.

    The choice depends only on the batch size, not on earlier batches, so a resumed run is bit-identical to an
    uninterrupted one. Random numbers are torch's, as in uncompiled mode.

    Args:
        network: The unwrapped network; its parameters and keys stay unchanged.
        model: The recipe's `model` section.
        train_sizes: Batch sizes compiled with gradients.
        evaluation_sizes: Batch sizes compiled without gradients.
        log: Records compilations.
        deterministic: Whether to disable timing-based kernel selection.
    """

    def __init__(
        self,
        network: nn.Module,
        model: ModelSection,
        *,
        train_sizes: Collection[int],
        evaluation_sizes: Collection[int],
        log: CompileLog,
        deterministic: bool = False,
    ) -> None:
        super().__init__()
        self.network = network
        self.log = log
        self._model = model
        self._sizes = {True: frozenset(train_sizes), False: frozenset(evaluation_sizes)}
        self._seen: set[tuple[bool, bool, tuple[int, ...]]] = set()
        self._call = torch.compile(
            network,
            dynamic=False,
            backend=model.compile_backend,
            options=self._options(deterministic) if model.compile_backend == "inductor" else None,
        )
        self.training = network.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the network."""
        shape = shape_of(args, kwargs)
        if not self.compiles(shape):
            return self.network(*args, **kwargs)
        key = (torch.is_grad_enabled(), self.network.training, shape)
        if key in self._seen:
            output = self._call(*args, **kwargs)
        else:
            with self.log.first_call(shape, training=key[0]), self._explained():
                output = self._call(*args, **kwargs)
            self._seen.add(key)
        # A loss is read some steps later, when the next replays of a CUDA graph have overwritten it.
        return tree_map(lambda each: each.clone() if isinstance(each, Tensor) and not each.ndim else each, output)

    def _options(self, deterministic: bool) -> dict[str, Any]:
        from torch._inductor import list_mode_options

        # Dropout then draws as in the uncompiled network, so that both can be compared and a run can switch between
        # them. Inductor would make all convolutions channels last.
        layout = {"layout_optimization": False} if overrunning(self.network) else {}
        fixed = {"fallback_random": True, "deterministic": deterministic}
        return list_mode_options(self._model.compile_mode) | layout | fixed

    @contextmanager
    def _explained(self) -> Iterator[None]:
        from torch._dynamo.exc import TorchDynamoException

        try:
            yield
        except TorchDynamoException as error:  # inductor's counters too, which dynamo wraps
            raise ModelError(
                f"model.compile=true: {self._model.compile_backend} cannot compile {self._model.name} "
                f"({' '.join(str(error).split())[:300]}); set model.compile=false."
            ) from error

    def compiles(self, shape: tuple[int, ...]) -> bool:
        """Whether a batch of this shape is compiled in the current gradient mode."""
        return bool(shape) and shape[0] in self._sizes[torch.is_grad_enabled()]


def shape_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Return the shape of the first tensor argument; empty if there is none, or if the first argument is a list.

    A list holds one tensor per sample, in shapes that rarely recur, so such a batch is not compiled.
    """
    if args and isinstance(args[0], list):
        return ()
    return next((tuple(each.shape) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)), ())


def check_backend(model: ModelSection) -> None:
    """Check, before anything is built, that torch has the back-end.

    Raises:
        ModelError: If it does not.
    """
    if model.compile_backend == "inductor":
        return
    from torch._dynamo import list_backends

    known = list_backends(exclude_tags=())
    if model.compile_backend not in known:
        raise ModelError(
            f"model.compile_backend={model.compile_backend} is unknown to torch here."
            f"{did_you_mean(model.compile_backend, known)} It has {', '.join(sorted(known))}."
        )
