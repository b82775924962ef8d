"""What of a recipe's network decides how it scales: gradients in the order of their arrival, blocks, arithmetic?

The network is built without memory (torch's ``meta`` device) and called once, so that nothing is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.distributed.sharding import modules_to_shard
from paceline.errors import DataError
from paceline.formulas.overlap import Gradient, Unit
from paceline.formulas.parallel_step import Network
from paceline.models.build import build_model
from paceline.models.transfer import adapt
from paceline.recipe.schema import Recipe
from paceline.recipe.strategy import ParameterNumbers
from paceline.tasks.build import build_task
from paceline.world import World

# The task that a folder of images stands for until it is there: ImageNet-1k (Russakovsky et al. 2015).
_IMAGENET = {"classes": 1000, "samples": 1_281_167, "channels": 3, "image_size": 224}
_FP32_BYTES = 4
_SENT_BYTES = {"none": 4, "bf16": 2, "fp16": 2, "powersgd": 4}
_TRIED = 2  # samples: BatchNorm needs more than one


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is to be trained.

    Attributes:
        network: What of it decides how it scales.
        numbers: Its parameters.
        samples: In an epoch.
        flops_per_sample: Of a forward pass, in convolutions and linear layers; None if it could not be called.
        decodes: Whether its samples are image files that processor cores decode.
        notices: What had to be assumed.
    """

    network: Network
    numbers: ParameterNumbers
    samples: int
    flops_per_sample: float | None
    decodes: bool
    notices: tuple[str, ...] = ()


def describe(recipe: Recipe, samples: int | None = None) -> Subject:
    """Build a recipe's network and take stock of it.

    Args:
        recipe: What is to be trained; its data may be elsewhere.
        samples: In an epoch; None for those of the recipe's data.

    Raises:
        PacelineError: If it cannot be built.
    """
    # Weights that are loaded change no shape.
    plain = replace(recipe, model=replace(recipe.model, pretrained=False, initialize_from=None))
    facts, build, notices = _opened(plain)
    with torch.device("meta"):
        network = build()
        adapt(network, plain.model)
    network.train()
    costs = _costs(network, facts)
    if costs is None:
        notices.append("the network could not be called without its data: layers are weighed by their parameters")
    parameters = list(network.parameters())
    return Subject(
        network=Network(
            gradients=_gradients(network, costs, _SENT_BYTES[recipe.parallel.gradient_compression]),
            units=_units(network, costs, plain),
        ),
        numbers=ParameterNumbers(
            sum(each.numel() for each in parameters), sum(each.numel() for each in parameters if each.requires_grad)
        ),
        samples=facts["samples"] if samples is None else samples,
        flops_per_sample=None if costs is None else sum(costs.values()) / _TRIED,
        decodes=bool(facts["decodes"]),
        notices=tuple(notices),
    )


def _opened(recipe: Recipe) -> tuple[dict[str, Any], Callable[[], nn.Module], list[str]]:
    task = build_task(recipe)
    path = recipe.data.path
    try:
        found = task.data_facts(World())
    except DataError:
        if path is not None and Path(path).exists():
            raise
        facts = dict(_IMAGENET, image_size=recipe.data.image_size if recipe.data.image_size != "auto" else 224)
        where = "data.path is not given" if path is None else f"data.path={path} is not here"
        told = [f"{where}: ImageNet-1k is assumed, {facts['samples']:,} images of {facts['classes']:,} classes"]

        def build() -> nn.Module:
            return build_model(recipe.model, num_classes=facts["classes"], in_channels=facts["channels"])

        return {**facts, "decodes": True}, build, told
    kept = {key: found.description.get(key) for key in ("classes", "channels", "image_size", "backend")}
    decodes = "data.decoder" in found.reasons
    return {**kept, "samples": found.train_samples, "decodes": decodes}, task.build_model, []


def _costs(network: nn.Module, facts: Mapping[str, Any]) -> dict[str, float] | None:
    """FLOPs of each module with parameters of its own in a forward pass of :data:`_TRIED` samples, in their order."""
    costs: dict[str, float] = {}
    size, channels = facts.get("image_size"), facts.get("channels")
    if not isinstance(size, int) or not isinstance(channels, int):
        return None

    def count(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, _: Any, output: Any) -> None:
            costs[name] = costs.get(name, 0.0) + _flops(module, output)

        return hook

    hooks = [
        module.register_forward_hook(count(name))
        for name, module in network.named_modules()
        if any(True for _ in module.parameters(recurse=False))
    ]
    try:
        network(torch.zeros(_TRIED, channels, size, size, device="meta"))
    except Exception:  # noqa: BLE001  # whatever a network of the user's own raises where there are no numbers
        return None
    finally:
        for hook in hooks:
            hook.remove()
    return costs


def _flops(module: nn.Module, output: Any) -> float:
    weight = getattr(module, "weight", None)
    if not isinstance(output, torch.Tensor) or not isinstance(weight, torch.Tensor):
        return 0.0
    # Each output number of a layer with filters is a product with one of them; a norm scales and shifts.
    terms = weight[0].numel() if weight.ndim > 1 else 1
    return 2.0 * output.numel() * terms


def _gradients(network: nn.Module, costs: Mapping[str, float] | None, size: int) -> tuple[Gradient, ...]:
    """In the order in which a backward pass produces them: the last layer called is the first."""
    names = _order(network, costs)
    weighed = {name: _weight(network, name, costs) for name in names}
    total = sum(weighed.values()) or 1.0
    done, found = 0.0, []
    for name in reversed(names):
        done += weighed[name]
        own = [each for each in network.get_submodule(name).parameters(recurse=False) if each.requires_grad]
        found += [Gradient(each.numel() * size, min(1.0, done / total)) for each in own]
    return tuple(found)


def _order(network: nn.Module, costs: Mapping[str, float] | None) -> list[str]:
    owners = [name for name, module in network.named_modules() if any(True for _ in module.parameters(recurse=False))]
    if costs is None:
        return owners
    # What is used without being called (tokens, positions) stands at the front: its gradient comes last.
    return [*(name for name in owners if name not in costs), *costs]


def _weight(network: nn.Module, name: str, costs: Mapping[str, float] | None) -> float:
    if costs is not None:
        return costs.get(name, 0.0)
    return float(sum(each.numel() for each in network.get_submodule(name).parameters(recurse=False)))


def _units(network: nn.Module, costs: Mapping[str, float] | None, recipe: Recipe) -> tuple[Unit, ...]:
    """What FSDP would gather at once, in the order of the forward pass; what no block holds comes first."""
    sharded = modules_to_shard(network, recipe.parallel)
    numbers: dict[str, tuple[int, int]] = {"": (0, 0)}
    shares: dict[str, float] = {"": 0.0}
    for name in _order(network, costs):
        unit = max((each for each in sharded if name == each or name.startswith(f"{each}.")), key=len, default="")
        own = list(network.get_submodule(name).parameters(recurse=False))
        every, trained = numbers.get(unit, (0, 0))
        added = sum(each.numel() for each in own)
        numbers[unit] = (every + added, trained + sum(each.numel() for each in own if each.requires_grad))
        shares[unit] = shares.get(unit, 0.0) + _weight(network, name, costs)
    total = sum(shares.values()) or 1.0
    gathered = 2 if recipe.parallel.gather_dtype == "bf16" else _FP32_BYTES
    sent = min(gathered, _SENT_BYTES[recipe.parallel.gradient_compression])
    return tuple(
        Unit(every * gathered, trained * sent, shares[unit] / total)
        for unit, (every, trained) in numbers.items()
        if every
    )
