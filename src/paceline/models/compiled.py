"""A compiled network: which forward passes are compiled, and unplanned compilations."""

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
from torch.utils._pytree import tree_leaves

from paceline.errors import ModelError, did_you_mean
from paceline.recipe.model import Model

# One graph for each size, in training and for each set of weights that is evaluated; torch's own limit is 8.
_MOST_GRAPHS = 256


@dataclass(frozen=True, kw_only=True)
class Graph:
    """What was compiled because a size came up for the first time.

    Attributes:
        shape: Of the input.
        training: Whether gradients are computed.
        seconds: The first call, tracing and code generation included; the backward pass is compiled later.
    """

    shape: tuple[int, ...]
    training: bool
    seconds: float


class CompileLog:
    """What was compiled in this process: as planned, and beyond that.

    Attributes:
        graphs: As planned.
    """

    def __init__(self) -> None:
        from torch._dynamo.callback import callback_handler

        self.graphs: list[Graph] = []
        self._is_planned = False
        self._unplanned: list[str] = []
        own = weakref.ref(self)

        def begun(args: Any) -> None:
            # Backward passes are compiled when they are first run, which is nobody's surprise.
            traced = args.callback_trigger.name == "DYNAMO"
            if traced and (log := own()) is not None:
                log.note(args.compile_id)

        def leave() -> None:
            with contextlib.suppress(ValueError):  # torch.compiler.reset() was there before
                callback_handler.remove_start_callback(begun)

        callback_handler.register_start_callback(begun)
        weakref.finalize(self, leave)

    def note(self, compiled: Any) -> None:
        """A graph, of which this is torch's number, is begun."""
        if not self._is_planned:
            self._unplanned.append(compiled)

    @contextmanager
    def first_call(self, shape: tuple[int, ...], *, training: bool) -> Iterator[None]:
        """Around the first call with a planned size."""
        from torch._dynamo import config

        limits = {"recompile_limit": _MOST_GRAPHS, "accumulated_recompile_limit": _MOST_GRAPHS * 8}
        self._is_planned, begun = True, time.perf_counter()
        try:
            with config.patch(limits):
                yield
        finally:
            self._is_planned = False
        self.graphs.append(Graph(shape=shape, training=training, seconds=time.perf_counter() - begun))

    def surprises(self) -> list[str]:
        """Since this was last asked: why something had to be compiled once more that was not planned."""
        unplanned, self._unplanned = self._unplanned, []
        if not unplanned:
            return []
        from torch._dynamo.utils import get_compilation_metrics

        reasons = {each.compile_id: each.recompile_reason for each in get_compilation_metrics()}
        # What is compiled for the first time is somebody else's, and no news.
        found = (reason for compiled in unplanned if (reason := reasons.get(compiled)))
        return [" ".join(reason.splitlines()[0].split("  #")[0].split())[:300] for reason in found]


class CompiledNetwork(nn.Module):
    """A network that is compiled for a few sizes of batch, each for itself, and runs as it is for all others.

    Which of the two a batch meets is a function of its size, not of what came before: so a run that was resumed has the
    same bits as one that was not. Random numbers are torch's own, as uncompiled.

    Args:
        network: The bare network, whose parameters and keys stay as they are.
        model: The recipe's `model` section.
        train_sizes: Samples of a batch that is compiled where gradients are computed.
        evaluation_sizes: The same where they are not.
        log: Takes down what is compiled.
        deterministic: Whether no kernel may be chosen by the clock.
    """

    def __init__(
        self,
        network: nn.Module,
        model: Model,
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
            options=_options(model.compile_mode, deterministic) if model.compile_backend == "inductor" else None,
        )
        self.training = network.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the network."""
        shape = shape_of(args, kwargs)
        if not self.compiles(shape):
            return self.network(*args, **kwargs)
        key = (torch.is_grad_enabled(), self.network.training, shape)
        if key in self._seen:
            return self._call(*args, **kwargs)
        with self.log.first_call(shape, training=key[0]), self._explained():
            answer = self._call(*args, **kwargs)
        self._seen.add(key)
        return answer

    @contextmanager
    def _explained(self) -> Iterator[None]:
        from torch._dynamo.exc import TorchDynamoException

        try:
            yield
        except TorchDynamoException as error:  # inductor's too, which dynamo wraps
            raise ModelError(
                f"model.compile=true: {self._model.compile_backend} cannot compile {self._model.name} "
                f"({' '.join(str(error).split())[:300]}); set model.compile=false."
            ) from error

    def compiles(self, shape: tuple[int, ...]) -> bool:
        """Whether a batch of this shape is compiled, now that gradients are computed or not."""
        return bool(shape) and shape[0] in self._sizes[torch.is_grad_enabled()]


def shape_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """The shape of the first tensor among the arguments; empty if there is none, or if they begin with a list.

    A list has a tensor for each sample, of shapes that hardly ever come again: such a batch is not compiled for.
    """
    if args and isinstance(args[0], list):
        return ()
    return next((tuple(each.shape) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)), ())


def _options(mode: str, deterministic: bool) -> dict[str, Any]:
    from torch._inductor import list_mode_options

    # Draws of dropout are then those of the uncompiled network: both can be compared, and a run may go on as either.
    return {**list_mode_options(mode), "fallback_random": True, "deterministic": deterministic}


def check_backend(model: Model) -> None:
    """Check, before anything is built, that torch has the back-end.

    Raises:
        ModelError: If it does not.
    """
    if not model.compile or model.compile_backend == "inductor":
        return
    from torch._dynamo import list_backends

    known = list_backends(exclude_tags=())
    if model.compile_backend not in known:
        raise ModelError(
            f"model.compile_backend={model.compile_backend} is unknown to torch here."
            f"{did_you_mean(model.compile_backend, known)} It has {', '.join(sorted(known))}."
        )
