"""Which networks does bf16 make faster on this CPU?

Times training steps of timm's networks in channels_last, fp32 and bf16 in turns (A B A B …), and counts the share of
their multiplications that depthwise convolutions do.

    python benchmarks/precision_families.py [NAME …] [--batch 32] [--size 96] [--rounds 5] [--dry-run]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import timm
import torch
from hardware import facts, write_result
from networks import stepper
from torch import nn

from paceline.host.machine import available_cores
from paceline.models.build import to_memory_format
from paceline.trainer.process_settings import keep_freed_memory

FAMILIES = [
    *("tf_efficientnet_lite0", "efficientnet_b0", "mobilenetv2_100", "mobilenetv3_small_100", "mobilenetv3_large_100"),
    *("mnasnet_100", "ghostnet_100", "edgenext_xx_small", "mobilevit_xxs", "convnext_atto", "convnext_nano"),
    *("regnety_004", "resnext26ts", "resnet18", "resnet50", "vit_tiny_patch16_224", "deit_tiny_patch16_224"),
    *("mobilevit_s", "mobilenetv4_conv_small", "tf_efficientnetv2_b0", "repvit_m0_9", "xception41"),
]


def depthwise_share(model: nn.Module, images: torch.Tensor) -> float:
    """The share of the multiplications of convolutions and linear layers that depthwise convolutions do."""
    counts = {True: 0, False: 0}

    def count(module: nn.Module, _: Any, output: torch.Tensor) -> None:
        if isinstance(module, nn.Conv2d):
            is_depthwise = module.groups == module.in_channels > 1
            counts[is_depthwise] += output.numel() * module.weight[0].numel()
        elif isinstance(module, nn.Linear):
            counts[False] += output.numel() * module.in_features

    hooks = [each.register_forward_hook(count) for each in model.modules()]
    with torch.no_grad():
        model(images[:1])
    for hook in hooks:
        hook.remove()
    return counts[True] / sum(counts.values())


def build(name: str, size: int) -> nn.Module:
    """A network of timm's for ten classes."""
    torch.manual_seed(0)
    given: dict[str, Any] = {"img_size": size} if name.startswith(("vit", "deit")) else {}
    return to_memory_format(timm.create_model(name, num_classes=10, **given), channels_last=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the result files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=FAMILIES)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--size", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dry-run", action="store_true", help="print, write no result files")
    options = parser.parse_args(arguments)
    known = facts()
    torch.set_num_threads(available_cores())
    images = torch.randn(options.batch, 3, options.size, options.size).contiguous(memory_format=torch.channels_last)
    found, lines = (
        {},
        ["| network | depthwise, % of the multiplications | fp32 images/s | bf16 / fp32 |", "|---|---|---|---|"],
    )
    with keep_freed_memory(torch.device("cpu")):
        for name in options.names:
            steps = [stepper(build(name, options.size), images, bf16=bf16) for bf16 in (False, True)]
            seconds: list[list[float]] = [[], []]
            for number in range(options.rounds + 2):
                for step, taken in zip(steps, seconds, strict=True):
                    started = time.perf_counter()
                    step()
                    if number > 1:
                        taken.append(time.perf_counter() - started)
            ratios = [slow / fast for slow, fast in zip(*seconds, strict=True)]
            share = depthwise_share(build(name, options.size).eval(), images)
            rate = options.batch / statistics.median(seconds[0])
            found[name] = {"depthwise_share": share, "fp32_images_per_second": rate, "bf16_speed": ratios}
            middle = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            lines.append(f"| {name} | {100 * share:.1f} | {rate:.0f} | {middle} |")
            print(lines[-1], flush=True)
    if not options.dry_run:
        print(write_result(f"precision-families-{options.size}px", {"networks": found}, lines, known))


if __name__ == "__main__":
    main()
