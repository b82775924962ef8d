"""Properties that determine how a network scales: gradients in the order in which they become ready, blocks, FLOPs.

The network is built on torch's ``meta`` device and runs forward and backward once there: this allocates no memory and
computes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.distributed.sharding import modules_to_shard
from paceline.errors import DataError
from paceline.host.world import World
from paceline.models.flops import StepWork, WorkCounter, tensors_in
from paceline.models.transfer import adapt
from paceline.plan import ParameterNumbers
from paceline.recipe.schema import Recipe
from paceline.tasks.task import build_task
from paceline.trainer.fake_batch import with_placeholder_data
from paceline.trainer.fake_step import fake_step
from paceline.trainer.network import count_parameters
from paceline.trainer.subject import Subject
from paceline_advisor import frozen
from paceline_advisor.apply import with_values
from paceline_advisor.formulas.parallel_step import Gradient, Launches, Network, Unit
from paceline_advisor.scaling.room import Share, of_one_process

_FP32_BYTES = 4
_SENT_BYTES = {"none": 4, "bf16": 2, "fp16": 2}
_TRIED = 2  # samples: BatchNorm needs more than one


@frozen
class ScaledRun:
    """The network and data to be trained.

    Attributes:
        network: Its properties that determine how it scales.
        numbers: Number of its parameters.
        samples: Samples in an epoch.
        work: FLOPs of a forward and backward pass of ``work_samples`` samples; None if the network could not be called.
        work_samples: Samples of that pass.
        launches: Kernel launches of a forward and backward pass.
        decodes: Whether its samples are image files decoded on CPU cores.
        unsharded: Why FSDP cannot shard it, as the rest of a sentence that begins with FSDP; empty if it can.
        notices: Assumptions.
    """

    network: Network
    numbers: ParameterNumbers
    samples: int
    work: StepWork | None
    decodes: bool
    work_samples: int = 1
    launches: Launches = field(default_factory=Launches)
    unsharded: str = ""
    notices: tuple[str, ...] = ()

    @property
    def flops_per_sample(self) -> float | None:
        """FLOPs of a forward and backward pass of one sample; None if the network could not be called."""
        return None if self.work is None else self.work.model_flops / self.work_samples


def describe(recipe: Recipe, samples: int | None = None) -> ScaledRun:
    """Build a recipe's network and collect its properties.

    Args:
        recipe: The recipe to train; its data may be elsewhere.
        samples: Samples in an epoch; None for those of the recipe's data.

    Raises:
        PacelineError: If it cannot be built.
    """
    # Loading weights does not change any shape.
    opened, assumed = _opened(recipe.without_initial_weights())
    plain, task, data = opened.recipe, opened.task, opened.data
    notices = [assumed] if assumed else []
    with torch.device("meta"):
        network = task.build_model()
        adapt(network, plain.model)
    network.train()
    found = _counted(network, data.description) or _counted_as_the_task_does(plain)
    costs = _costs(network, found)
    if found is None:
        notices.append("the network could not be called without its data: layers are weighted by their parameters")
    moving = [] if found is None else [each for each in found.works if each.bytes_moved or each.flops]
    return ScaledRun(
        network=Network(
            gradients=_gradients(network, costs, _SENT_BYTES[recipe.parallel.gradient_compression]),
            units=_units(network, costs, plain),
        ),
        numbers=count_parameters(network),
        samples=data.train_samples if samples is None else samples,
        work=found,
        work_samples=_TRIED,
        launches=Launches(
            eager=sum(each.calls for each in moving), products=sum(each.calls for each in moving if each.flops)
        ),
        decodes="data.decoder" in data.reasons or (bool(assumed) and task.has_known_shapes),
        unsharded=task.why_not_sharded,
        notices=tuple(notices),
    )


_TENSORS, _BLOCKS = 200, 20


def of_parameters(count: int, samples: int) -> ScaledRun:
    """Return a network of equal tensors and blocks, of which only the number of parameters is known."""
    tensor, block = _FP32_BYTES * count / _TENSORS, _FP32_BYTES * count / _BLOCKS
    return ScaledRun(
        network=Network(
            gradients=tuple(Gradient(tensor, (index + 1) / _TENSORS) for index in range(_TENSORS)),
            units=tuple(Unit(block, block, 1 / _BLOCKS) for _ in range(_BLOCKS)),
        ),
        numbers=ParameterNumbers(count, count),
        samples=samples,
        work=None,
        decodes=False,
        notices=(f"assumed: {_TENSORS} equal tensors in {_BLOCKS} blocks, gradients of 4 bytes, data that is ready",),
    )


def _opened(recipe: Recipe) -> tuple[Subject, str]:
    """Open the task and its data; where that is missing, typical data, and a sentence that says so.

    Raises:
        DataError: If data that is there cannot be opened.
    """
    assumed, path = None, recipe.data.path
    has_known_shapes = build_task(recipe).has_known_shapes
    if not has_known_shapes:  # an image task's shapes are in its plan
        recipe, assumed = with_placeholder_data(recipe)
    try:
        return Subject.open(recipe, World(), "task"), assumed or ""
    except DataError:
        if not has_known_shapes or (path is not None and Path(path).exists()):
            raise
    recipe, assumed = with_placeholder_data(with_values(recipe, {"data.path": None}))
    opened = Subject.open(recipe, World(), "task")
    where = "data.path is not set" if path is None else f"data.path={path} is not here"
    kind = (assumed or "").partition(": ")[2]
    return opened, f"{where}: {kind}; {opened.data.train_samples:,} samples are an epoch"


def _counted(network: nn.Module, facts: Mapping[str, Any]) -> StepWork | None:
    """Return the FLOPs of both passes over :data:`_TRIED` samples; None if the network cannot be called."""
    size, channels = facts.get("image_size"), facts.get("channels")
    if not isinstance(size, int) or not isinstance(channels, int):
        return None
    try:
        with WorkCounter(network) as counter:
            answer = network(torch.zeros(_TRIED, channels, size, size, device="meta"))
            sums = [each.sum() for each in tensors_in(answer) if each.requires_grad]
            torch.autograd.backward(torch.stack(sums).sum())
    except Exception:  # noqa: BLE001  # a user's network may raise anything on tensors without values
        return None
    return counter.work


def _counted_as_the_task_does(recipe: Recipe) -> StepWork | None:
    """Return the same with the task's own batches and loss, for networks without image inputs."""
    try:
        with (
            fake_step(of_one_process(recipe, Share(devices=1, micro_batch=_TRIED, passes=1))) as step,
            WorkCounter(step.network) as counter,
        ):
            step.backward(step.forward())
    except Exception:  # noqa: BLE001  # the data may be missing, or the network may need real values
        return None
    return counter.work


def _costs(network: nn.Module, found: StepWork | None) -> dict[str, float]:
    """Return FLOPs of the backward pass by module with parameters, in forward order.

    FLOPs of a module without parameters (attention's products) are added to the previous one with parameters. If the
    pass is unknown, parameter counts replace FLOPs, in the order of the network's modules.
    """
    owners = {name: sum(each.numel() for each in own) for name, own in _parameters(network).items()}
    if found is None:
        return {name: float(numbers) for name, numbers in owners.items()}
    costs: dict[str, float] = {}
    answers: dict[str, str | None] = {}
    last: str | None = None
    for work in found.works:
        if work.phase == "forward":
            last = work.layer if work.layer in owners else last
            answers.setdefault(work.layer, last)
            if last is not None:
                costs.setdefault(last, 0.0)
    for work in found.works:
        owner = answers.get(work.layer)
        if owner is not None and work.phase in ("dgrad", "wgrad"):
            costs[owner] += work.flops
    behind = {name: [name] for name in costs}
    first: list[str] = []
    for name in owners:
        if name in costs:
            continue
        # Used without being called: by the enclosing module (the projection of an attention layer), or by the network
        # itself (tokens, positions). The latter happens at the start, so its gradient comes last.
        around = name.rpartition(".")[0]
        while around and around not in costs:
            around = around.rpartition(".")[0]
        (behind[around] if around else first).append(name)
    return {name: costs.get(name, 0.0) for name in (*first, *chain.from_iterable(behind.values()))}


def _parameters(network: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Return the direct parameters of each module that has some."""
    own = {name: list(module.parameters(recurse=False)) for name, module in network.named_modules()}
    return {name: parameters for name, parameters in own.items() if parameters}


def _gradients(network: nn.Module, costs: dict[str, float], size: int) -> tuple[Gradient, ...]:
    """Return the gradients in the order in which a backward pass produces them: the last called layer is first.

    ``size`` is the bytes of a number as it is sent.
    """
    total, own = sum(costs.values()) or 1.0, _parameters(network)
    done, found = 0.0, []
    for name in reversed(costs):
        done += costs[name]
        found += [Gradient(each.numel() * size, min(1.0, done / total)) for each in own[name] if each.requires_grad]
    return tuple(found)


def _units(network: nn.Module, costs: Mapping[str, float], recipe: Recipe) -> tuple[Unit, ...]:
    """Return the units that FSDP would gather at once, in forward order; parameters outside of blocks come first."""
    sharded = modules_to_shard(network, recipe.parallel)
    numbers: dict[str, tuple[int, int]] = {"": (0, 0)}
    shares: dict[str, float] = {"": 0.0}
    owned = _parameters(network)
    for name, cost in costs.items():
        unit = max((each for each in sharded if name == each or name.startswith(f"{each}.")), key=len, default="")
        own = owned[name]
        every, trained = numbers.get(unit, (0, 0))
        added = sum(each.numel() for each in own)
        numbers[unit] = (every + added, trained + sum(each.numel() for each in own if each.requires_grad))
        shares[unit] = shares.get(unit, 0.0) + cost
    total = sum(shares.values()) or 1.0
    gathered = 2 if recipe.parallel.gather_dtype == "bf16" else _FP32_BYTES
    sent = min(gathered, _SENT_BYTES[recipe.parallel.gradient_compression])
    return tuple(
        Unit(every * gathered, trained * sent, shares[unit] / total)
        for unit, (every, trained) in numbers.items()
        if every
    )
