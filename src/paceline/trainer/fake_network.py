"""How does a network come to be without its weights taking any memory?

It is built on torch's ``meta`` device, where a tensor is a shape without numbers, and its parameters and buffers then
become fake tensors on the CPU: they compute shapes, strides and dtypes, and nothing else. Not the other way round: many
constructors read a number out of a tensor, which a fake tensor refuses and the real one beside it allows.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.errors import ModelError, PacelineError
from paceline.models.ema import ExponentialMovingAverage
from paceline.models.layout import lay_out
from paceline.models.transfer import adapt
from paceline.recipe.schema import Recipe
from paceline.tasks.task import Task


@contextlib.contextmanager
def random_states_kept() -> Iterator[None]:
    """Put Python's, NumPy's and torch's random states back at the end."""
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002  # the global one, which others may use
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002  # the state that old code shares


def build_shapes(recipe: Recipe, task: Task, *, channels_last: bool) -> nn.Module:
    """The network that a run would train, with its frozen parts, adapters and recomputed blocks; no numbers in it.

    Raises:
        PacelineError: If the recipe names none, or one that cannot be built.
    """
    try:
        with torch.device("meta"):
            network = _built(recipe, task)
    except PacelineError:
        raise
    except (RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError):
        # A constructor that looks at the numbers it has drawn. Real ones then: as much memory as the weights, for a
        # moment.
        network = _built(recipe, task)
    return lay_out(network.to("meta"), channels_last=channels_last)


def _built(recipe: Recipe, task: Task) -> nn.Module:
    network = task.build_model()
    adapt(network, recipe.model)
    return network


class _OwnStatistics(_BatchNorm):
    """SyncBatchNorm of one process: it exchanges a few numbers for each channel, and otherwise does the same."""

    def _check_input_dim(self, _: Tensor) -> None:
        """Any shape: whoever built the network knew."""


def unsynced(network: nn.Module) -> None:
    """Let SyncBatchNorm run where there is no GPU, which it asks for."""
    synced: list[nn.Module] = [each for each in network.modules() if isinstance(each, nn.SyncBatchNorm)]
    for module in synced:
        module.__class__ = _OwnStatistics


class Faker:
    """Makes fake tensors of others, one for each: what is shared stays shared.

    Args:
        mode: Whose they are.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._made: dict[int, tuple[Tensor, Tensor]] = {}

    def network(self, network: nn.Module) -> None:
        """Put a fake tensor in the place of each parameter, buffer, and tensor that is an attribute."""
        for module in network.modules():
            for held in (module._parameters, module._buffers, vars(module)):  # noqa: SLF001  # `setattr` asks for real ones
                held |= {name: self.tensor(each) for name, each in held.items() if isinstance(each, Tensor)}
            for name, held in vars(module).items():
                if isinstance(held, list) and held and all(isinstance(each, Tensor) for each in held):
                    vars(module)[name] = [self.tensor(each) for each in held]

    def average(self, average: ExponentialMovingAverage) -> None:
        """The same for a network's average."""
        self.network(average.module)

    def tensor(self, tensor: Tensor) -> Tensor:
        """The fake one: same shape, strides, dtype; a parameter for a parameter."""
        if isinstance(tensor, FakeTensor):
            return tensor
        # The original is kept too, or another could get its id.
        if id(tensor) not in self._made:
            self._made[id(tensor)] = (tensor, self._make(tensor))
        return self._made[id(tensor)][1]

    def _make(self, tensor: Tensor) -> Tensor:
        with self._mode:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        if not isinstance(tensor, nn.Parameter):
            return fake.requires_grad_(tensor.requires_grad)
        parameter = nn.Parameter(fake, requires_grad=tensor.requires_grad)
        for name, value in vars(tensor).items():
            setattr(parameter, name, value)
        return parameter


def why_not_fake(error: Exception, where: str, name: str) -> ModelError:
    """What to say of a network that does not run on fake tensors."""
    said = " ".join(str(error).split())[:200]
    at = f" in {where}" if where else ""
    return ModelError(
        f"model.name={name} cannot be run without its numbers: {type(error).__name__}{at} ({said}). What it computes "
        "depends on values, or uses an operator that has no shapes-only form; measure it instead, with "
        "`paceline find-batch`."
    )
