"""What do the checks look at?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.recipe.plan import Plan
from paceline.recipe.schema import Recipe
from paceline_advisor.doctor.anatomy import Anatomy
from paceline_advisor.doctor.behaviour import Behaviour
from paceline_advisor.doctor.findings import Finding
from paceline_advisor.doctor.layers import Layer
from paceline_advisor.doctor.loaders import Loader
from paceline_advisor.doctor.room import Lack
from paceline_advisor.doctor.target import Target


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A run that could be, as far as it is known without running it.

    Attributes:
        recipe: What was asked.
        plan: What that comes to on the target.
        target: Which device it is judged for.
        anatomy: What its network is made of; empty where that could not be seen.
        behaviour: What the user's code did in a micro-batch; empty where none could be had.
        loaders: DataLoaders that the user's code made.
        environment: Environment variables of this process.
        sockets: NUMA nodes of this machine whose cores this process may use.
        run: Events of a run directory, where one was named.
        lack: The memory that a step lacks on the target; None if it fits, or that is not known.
    """

    recipe: Recipe
    plan: Plan
    target: Target
    anatomy: Anatomy
    behaviour: Behaviour
    loaders: tuple[Loader, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    sockets: int = 1
    run: tuple[dict[str, Any], ...] = ()
    lack: Lack | None = None

    @property
    def products(self) -> str:
        """In which numbers matrices are multiplied: the plan's, and of fp32 ones ``tf32`` where it is allowed."""
        if self.plan.precision != "fp32":
            return self.plan.precision
        asked = self.plan.float32_matmul
        # Torch's own default: TF32 for convolutions.
        is_tf32 = asked in ("high", "medium") or (asked == "default" and self.convolutional)
        return "tf32" if is_tf32 and self.target.has("tf32") else "fp32"

    @property
    def convolutional(self) -> bool:
        """Whether most of the network's work is convolutions."""
        return self.share(lambda layer: layer.kind == "convolution") > 0.5

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The network's matrix products."""
        return self.anatomy.layers

    def share(self, which: Callable[[Layer], bool]) -> float:
        """What share of the FLOPs some layers have."""
        total = sum(layer.flops for layer in self.layers)
        return sum(layer.flops for layer in self.layers if which(layer)) / total if total else 0.0

    @property
    def flops_per_layer(self) -> float:
        """FLOPs of one layer's forward pass of a micro-batch, on average."""
        total = sum(layer.flops for layer in self.layers) * self.plan.micro_batch_size
        return total / max(1, sum(layer.calls for layer in self.layers))


Check = Callable[[Subject], Iterator[Finding]]


def named(names: tuple[str, ...] | list[str], most: int = 4) -> str:
    """Some names and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"
