"""Train on the rehearsed GPU, and print what the host waited for as JSON; run by test_rehearsal.py.

python tests/rehearsal/rehearse.py RECIPE RUN_DIR FAULT|- OVERRIDE…
"""

from __future__ import annotations

import json
import sys
from typing import Any

import rehearsed_gpu
import torch

rehearsed_gpu.install()

import paceline  # noqa: E402  # its modules are imported under the device's name
from paceline.data import pipeline  # noqa: E402
from paceline.tasks.image_classification import ImageClassification  # noqa: E402

# Here the host may wait: records, evaluations, saves, and all that comes before the first step.
_MAY_WAIT = {"write_step", "evaluate", "save_checkpoint", "finish_saving", "forecast", "warm_up", "keep_first_batch"}


def wait_for_a_number(inputs: Any, loss: Any) -> Any:
    """Plant an `.item()`."""
    return loss if loss.item() > 0 else -loss


def use_a_mask_of_the_host(inputs: Any, loss: Any) -> Any:
    """Plant a mask on the CPU."""
    return loss + 0 * inputs[torch.ones(len(inputs), dtype=torch.bool)].float().sum()


def use_a_tensor_of_the_host(inputs: Any, loss: Any) -> Any:
    """Plant a tensor on the default device."""
    return (loss * torch.ones(1)).sum()


def wait_for_the_device(inputs: Any, loss: Any) -> Any:
    """Plant a device-wide wait."""
    torch.get_device_module(loss.device).synchronize()
    return loss


FAULTS = {each.__name__: each for each in (wait_for_a_number, use_a_mask_of_the_host, use_a_tensor_of_the_host)}
FAULTS[wait_for_the_device.__name__] = wait_for_the_device


class Faulty(ImageClassification):
    """A task with one of the faults."""

    fault: Any

    def loss(self, model: Any, batch: Any) -> Any:
        """Plant the fault."""
        return self.fault(batch.inputs, super().loss(model, batch))


def main() -> None:
    """Train, and print the outcome."""
    recipe, run_dir, fault, *overrides = sys.argv[1:]
    task: Any = None
    if fault == "copy_from_pageable_memory":
        monkey: Any = pipeline
        monkey.pinned = lambda batch, device: batch
    elif fault != "-":
        task = type("Planted", (Faulty,), {"fault": staticmethod(FAULTS[fault])})
    quiet = ("telemetry.trackers=[]", "telemetry.report=false")
    result = paceline.train(recipe, overrides=[*quiet, *overrides], run_dir=run_dir, task=task, quiet=True)
    in_steps = [
        each
        for each in rehearsed_gpu.WAITS
        if "_fit" in each.functions and not _MAY_WAIT & set(each.functions) and each.functions[-1] != "agreed"
    ]
    outcome = {
        "step": result.summary.step,
        "weights_sha256": result.summary.weights_sha256,
        "waits": [[each.what, list(each.functions[-3:])] for each in in_steps],
        "copies": rehearsed_gpu.COPIES,
    }
    print(json.dumps(outcome))


if __name__ == "__main__":
    main()
