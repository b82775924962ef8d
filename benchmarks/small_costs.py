"""What do small things cost that decisions, the doctor or rules of thumb give a figure for?

In processor time on one thread: random numbers without state, looking at every gradient for numbers that are none,
biases before BatchNorm, gradients that are set to zero in place of None, the import of what reads recipes. By the
clock: loader processes that are started anew in each epoch.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from hardware import spread, write_result
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from paceline.data.order import epoch_order
from paceline.data.random_draws import derive_seed
from paceline.models.small_resnet import small_resnet

if TYPE_CHECKING:
    from torch.utils.data import Dataset

ROUNDS = 9


def processor_seconds(call: Callable[[], Any], times: int = 1) -> float:
    """Of one call, on average over ``times``."""
    started = time.process_time()
    for _ in range(times):
        call()
    return (time.process_time() - started) / times


def draws() -> dict[str, Any]:
    """Hashing and re-seeding before a forward pass, and the order of an epoch of ImageNet."""
    steps = iter(range(10**9))

    def reseed() -> None:
        torch.default_generator.manual_seed(derive_seed(0, next(steps), 0))

    epochs = iter(range(10**6))
    return {
        "reseeding_microseconds": spread([processor_seconds(reseed, 20_000) * 1e6 for _ in range(ROUNDS)]),
        "order_seconds": spread(
            [processor_seconds(lambda: epoch_order(0, next(epochs), 1_281_167)) for _ in range(ROUNDS)]
        ),
    }


def step_of(network: nn.Module, images: torch.Tensor, *, to_none: bool = True) -> Callable[[], None]:
    """A training step with momentum, before which gradients are set to None or to zero."""
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-4, momentum=0.9)
    labels = torch.zeros(len(images), dtype=torch.int64)

    def step() -> None:
        optimizer.zero_grad(set_to_none=to_none)
        F.cross_entropy(network(images), labels).backward()
        optimizer.step()

    return step


def looking_at_gradients() -> dict[str, Any]:
    """One look at all gradients of a small network, over a step of 64 images of 32 pixels."""
    network = small_resnet(10, 3)
    step = step_of(network, torch.randn(64, 3, 32, 32))
    step()
    gradients = [each.grad for each in network.parameters() if each.grad is not None]

    def measure_landscape() -> bool:
        return bool(nn.utils.get_total_norm(gradients).isfinite())

    shares = [processor_seconds(measure_landscape, 20) / processor_seconds(step) for _ in range(ROUNDS)]
    return {"share": spread(shares)}


def biases_before_batchnorm() -> dict[str, Any]:
    """A step of six layers of convolution and BatchNorm without biases, over the same with them, in turns."""
    images = torch.randn(32, 3, 32, 32)
    steps = {}
    for bias in (True, False):
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for before, after in ((3, 32), *[(32, 32)] * 5):
            layers += [nn.Conv2d(before, after, 3, padding=1, bias=bias), nn.BatchNorm2d(after), nn.ReLU()]
        steps[bias] = step_of(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()), images)
        steps[bias]()
    gains = [processor_seconds(steps[True], 3) / processor_seconds(steps[False], 3) for _ in range(ROUNDS)]
    return {"times_as_fast_without": spread(gains)}


def gradients_to_zero() -> dict[str, Any]:
    """A step with gradients that are set to zero over one with None: many weights and few samples, and a usual one."""
    cases: dict[str, tuple[nn.Module, torch.Tensor]] = {
        "linear_layers_batch_8": (nn.Sequential(*(nn.Linear(512, 512) for _ in range(50))), torch.randn(8, 512)),
        "small_resnet_batch_64": (small_resnet(10, 3), torch.randn(64, 3, 32, 32)),
    }
    found = {}
    for name, (network, images) in cases.items():
        steps = [step_of(network, images, to_none=to_none) for to_none in (False, True)]
        zero: list[float] = []
        none: list[float] = []
        for _ in range(ROUNDS):
            for step, seconds in zip(steps, (zero, none), strict=True):
                step()  # its gradients are there, or not, as after one of its own
                seconds.append(processor_seconds(step, 3))
        found[f"{name}_zero_over_none"] = spread([one / other for one, other in zip(zero, none, strict=True)])
    return found


def loaders_anew() -> dict[str, Any]:
    """What an epoch takes longer with two loader processes that begin and end with it, in seconds by the clock.

    ``fork`` is what Linux's Python takes up to 3.13 and Paceline always; ``spawn`` is macOS's and Windows'.
    """
    found = {}
    samples = cast("Dataset[torch.Tensor]", torch.zeros(8, 1))  # it has all that a loader asks for
    for how in ("fork", "spawn"):
        loaders = [
            DataLoader(samples, num_workers=2, multiprocessing_context=how, persistent_workers=is_kept)
            for is_kept in (False, True)
        ]
        relisted: list[float] = []
        kept: list[float] = []
        for _ in range(ROUNDS + 1):
            for loader, seconds in zip(loaders, (relisted, kept), strict=True):
                started = time.perf_counter()
                list(loader)
                seconds.append(time.perf_counter() - started)
        # In the first epoch both begin them.
        found[f"{how}_seconds"] = spread([one - other for one, other in zip(relisted[1:], kept[1:], strict=True)])
    return found


def import_of_recipes() -> dict[str, Any]:
    """Processor seconds of the import of what reads recipes, beside Python with the package alone."""
    seconds = []
    for _ in range(ROUNDS):
        alone, with_recipes = (_import_seconds(name) for name in ("paceline", "paceline.recipe.load"))
        seconds.append(with_recipes - alone)
    return {"seconds": spread(seconds)}


def _import_seconds(name: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", f"import {name}"], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


PARTS = (
    draws,
    looking_at_gradients,
    biases_before_batchnorm,
    gradients_to_zero,
    loaders_anew,
    import_of_recipes,
)


def main() -> int:
    """Measure all of it."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found = {part.__name__: part() for part in PARTS}
    lines = [
        f"{name}, {what}: {each['median']:.4g} ({each['minimum']:.4g} to {each['maximum']:.4g}, n = {each['runs']})."
        for name, figures in found.items()
        for what, each in figures.items()
    ]
    write_result("small-costs", found, lines)
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
