"""How much faster are training steps on a CPU with torch's fused AdamW and SGD?

Two copies of a network take turns, a block of steps each (A B A B …), with torch's default optimizer and the fused one.

    python benchmarks/fused.py [--rounds 12] [--dry-run]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from hardware import facts, spread, write_result

from paceline.host.machine import available_cores
from paceline.models.lecture_net import lecture_net
from paceline.trainer.process_settings import keep_freed_memory

NETWORKS: dict[str, Any] = {
    "lecture_net": lecture_net,
    "mobilenet_v3_large": lambda classes: torchvision.models.mobilenet_v3_large(num_classes=classes),
    "resnet50": lambda classes: torchvision.models.resnet50(num_classes=classes),
    "vit_b_16": lambda classes: torchvision.models.vit_b_16(num_classes=classes),
}
# Network, batch, image size, bf16 and steps in a block.
CASES = [
    ("lecture_net", 4, 32, False, 40),
    ("mobilenet_v3_large", 32, 96, False, 4),
    ("resnet50", 32, 96, True, 2),
    ("vit_b_16", 4, 224, True, 1),
]


def measure(rule: str, name: str, batch: int, size: int, bf16: bool, steps: int, rounds: int) -> list[float]:
    """Times of blocks with the fused optimizer, each over that of the block before with the default one."""
    images = torch.randn(batch, 3, size, size).to(memory_format=torch.channels_last)
    labels = torch.randint(0, 10, (batch,))
    arms = []
    for fused in (False, True):
        torch.manual_seed(0)
        model = NETWORKS[name](10).to(memory_format=torch.channels_last)
        given: dict[str, Any] = {"momentum": 0.9} if rule == "SGD" else {}
        arms.append((model, getattr(torch.optim, rule)(model.parameters(), lr=1e-4, fused=fused, **given)))
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds + 1):
        for (model, optimizer), times in zip(arms, seconds, strict=True):
            started = time.perf_counter()
            for _ in range(steps):
                with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                    loss = F.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                torch.autograd.backward(loss)
                optimizer.step()
            times.append(time.perf_counter() - started)
    return [fused / default for default, fused in zip(*seconds, strict=True)][1:]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the result files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--dry-run", action="store_true", help="print, write no result files")
    options = parser.parse_args(arguments)
    known = facts()
    torch.set_num_threads(available_cores())
    result, lines = {}, []
    with keep_freed_memory(torch.device("cpu")):
        for rule in ("AdamW", "SGD"):
            for name, batch, size, bf16, steps in CASES:
                ratio = spread(measure(rule, name, batch, size, bf16, steps, options.rounds))
                result[f"{rule} {name}"] = ratio
                lines.append(
                    f"- {rule}, {name}, batch {batch}, {size} pixels, {'bf16' if bf16 else 'fp32'}: a step takes "
                    f"{ratio['median']:.3f} of its time ({ratio['minimum']:.2f} to {ratio['maximum']:.2f})"
                )
                print(lines[-1], flush=True)
    if not options.dry_run:
        print(write_result("fused-optimizer", {"ratios": result}, lines, known))


if __name__ == "__main__":
    main()
