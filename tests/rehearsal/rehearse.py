"""Train on the rehearsed GPU, and print what the host waited for as JSON; run by test_rehearsal.py.

python tests/rehearsal/rehearse.py RECIPE RUN_DIR FAULT|- OVERRIDE…
"""

from __future__ import annotations

import json
import sys
import types
from typing import Any

import rehearsed_gpu
import torch

rehearsed_gpu.install()

import paceline  # noqa: E402  # its modules are imported under the device's name
from paceline.data.batch import Batch  # noqa: E402  # the device must be registered first
from paceline.distributed import strategy  # noqa: E402  # the device must be registered first
from paceline.distributed.data_parallel import DataParallel  # noqa: E402  # the device must be registered first
from paceline.tasks.image_classification import ImageClassification  # noqa: E402  # the device must be registered first

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


def wait_in_the_backward_pass(inputs: Any, loss: Any) -> Any:
    """Plant an `.item()` on a thread of autograd's."""
    loss.register_hook(lambda gradient: gradient * min(gradient.item(), 1.0))
    return loss


def keep_a_tensor(inputs: Any, loss: Any) -> Any:
    """Plant a list that keeps a tensor of every step."""
    _kept.append(inputs.repeat(16, 1, 1, 1))
    return loss


def wait_in_the_network(answer: Any) -> None:
    """Plant an `.item()` in a forward pass."""
    answer.sum().item()


def use_the_last_answer(answer: Any) -> None:
    """Plant a network that reads what it returned before."""
    _kept.append(answer.detach())
    _kept[:-2] = []
    _kept[0].sum()


_kept: list[Any] = []
_IN_THE_LOSS = (
    *(wait_for_a_number, use_a_mask_of_the_host, use_a_tensor_of_the_host, wait_for_the_device),
    *(wait_in_the_backward_pass, keep_a_tensor),
)
IN_THE_LOSS = {each.__name__: each for each in _IN_THE_LOSS}
IN_THE_NETWORK = {each.__name__: each for each in (wait_in_the_network, use_the_last_answer)}
IN_PACELINE: dict[str, tuple[Any, str, Any]] = {
    "copy_from_pageable_memory": (Batch, "pin_memory", lambda batch: batch),
    "read_flags_at_once": (strategy, "VOTE_LAG", 0),
    "reduce_nothing": (DataParallel, "micro_batch", lambda self, part: self.no_reduction()),
}


class Faulty(ImageClassification):
    """A task with one of the faults."""

    fault: str

    def build_model(self) -> Any:
        """Plant a fault in the network."""
        network = super().build_model()
        if self.fault in IN_THE_NETWORK:
            network.register_forward_hook(lambda *call: IN_THE_NETWORK[self.fault](call[-1]))
        return network

    def loss(self, model: Any, batch: Any) -> Any:
        """Plant a fault in the loss."""
        loss = super().loss(model, batch)
        return IN_THE_LOSS[self.fault](batch.inputs, loss) if self.fault in IN_THE_LOSS else loss


def main() -> None:
    """Train, and print the outcome."""
    recipe, run_dir, fault, *overrides = sys.argv[1:]
    task: Any = type("Planted", (Faulty,), {"fault": fault}) if fault in {*IN_THE_LOSS, *IN_THE_NETWORK} else None
    if fault in IN_PACELINE:
        setattr(*IN_PACELINE[fault])
    allocated = []

    def on_step_end(step: int) -> None:
        allocated.append(rehearsed_gpu.Device.allocated)
        if fault == "run_out_of_memory" and step == 13:
            rehearsed_gpu.Device.limit = allocated[-1]

    observer = types.SimpleNamespace(on_step_end=on_step_end)
    quiet = ("telemetry.trackers=[]", "telemetry.report=false")
    result = paceline.train(
        recipe, overrides=[*quiet, *overrides], run_dir=run_dir, task=task, callbacks=[observer], quiet=True
    )
    in_steps = [
        each for each in rehearsed_gpu.WAITS if "_fit" in each.functions and not _MAY_WAIT & set(each.functions)
    ]
    outcome = {
        "step": result.summary.step,
        "weights_sha256": result.summary.weights_sha256,
        "waits": [[each.what, list(each.functions[-3:])] for each in in_steps],
        "copies": rehearsed_gpu.COPIES,
        "allocated": allocated,
        "peak": rehearsed_gpu.Device.peak,
    }
    print(json.dumps(outcome))


if __name__ == "__main__":
    main()
