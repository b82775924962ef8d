"""Note digests of what each step of a run computes, so that two runs can be compared step by step.

Ordinary runs do not import this: it is for runs in a temporary directory, started by a study that sets
``TRACE_VARIABLE``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.data.batch import Batch, select_rows, tensors_in
from paceline.trainer.listeners import Listener
from paceline.trainer.saved_run import SavedRun


class StepTracer(Listener):
    """Writes a line of JSON for each step: samples, settings of the optimizer, and digests in the order of computation.

    A digest has a phase (``forward``, ``backward`` or ``update``), a module and the name of a tensor. In most steps
    these are the random generator, the loss, and all weights after the update; in detail, also every module's output,
    every gradient, and each weight.

    Args:
        run: The run.
        network: Its modules.
        optimizers: What trains them.
        sample_name: Names a sample by its number.
        setting: The folder of the notes, and the first and last step to note in detail, as JSON.
    """

    def __init__(
        self,
        run: SavedRun,
        network: nn.Module,
        optimizers: Sequence[Optimizer],
        sample_name: Callable[[int], str],
        setting: str,
    ) -> None:
        folder, first, last = json.loads(setting)
        self._network, self._optimizers, self._name = network, optimizers, sample_name
        self._run, self._detailed = run, range(first, last + 1)
        self._path = Path(folder) / f"rank-{run.world.rank}.jsonl"
        self._samples: list[tuple[Any, ...]] = []
        self._notes: list[tuple[str, str, str, str]] = []

    @property
    def _is_detailed(self) -> bool:
        return self._run.progress.position + 1 in self._detailed

    def begin_step(self) -> None:
        """Forget what was noted outside of steps; note the weights that a step in detail begins with."""
        self._samples, self._notes = [], []
        if self._is_detailed:
            self._note_state("forward")

    def around_forward(self, model: Callable[..., Any], batch: Batch) -> AbstractContextManager[None]:
        """Note samples and generator; in detail, also what each module returns."""
        run, count = self._run, len(batch.ids)
        for row, sample in enumerate([] if batch.slice.phantom else batch.ids.tolist()):
            parts = (digest(tensors_in(select_rows(each, [row], size=count))) for each in (batch.inputs, batch.targets))
            self._samples.append((sample, self._name(sample), *parts))
        self._note("forward", "", "random generator", [torch.get_rng_state()])
        # A compiled network would be compiled again.
        return self._hooked() if self._is_detailed and run.plan.compile == "off" else nullcontext()

    def after_loss(self, loss: Tensor) -> None:
        """Note the loss."""
        self._note("forward", "", "loss", [loss])

    def around_backward(self, batch: Batch) -> AbstractContextManager[None]:
        """In detail, note the gradients that have come together so far."""
        return self._noting_gradients() if self._is_detailed else nullcontext()

    def on_step_end(self, step: int) -> None:
        """Note weights and moving average, and write the line."""
        position = self._run.progress.position
        if position in self._detailed:
            self._note_state("update")
        for name, network in self._run.models().items():
            self._note("update", "", f"all weights ({name})", network.state_dict().values())
        groups = [group for each in self._optimizers for group in each.param_groups]
        line = {
            "step": step,
            "position": position,
            "samples": self._samples,
            "settings": [{key: str(each) for key, each in group.items() if key != "params"} for group in groups],
            "notes": self._notes,
        }
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        modules = self._network.named_modules()
        handles = [each.register_forward_hook(partial(self._returned, name)) for name, each in modules]
        try:
            yield
        finally:
            for each in handles:
                each.remove()

    def _returned(self, name: str, _module: nn.Module, _arguments: Any, output: Any) -> None:
        tensors = list(tensors_in(output))
        self._note("forward", name, "output", tensors)
        for each in tensors:
            if each.requires_grad:
                each.register_hook(partial(self._got_gradient, name))  # type: ignore[no-untyped-call]  # torch has no types here

    def _got_gradient(self, name: str, gradient: Tensor) -> None:
        self._note("backward", name, "gradient of the output", [gradient])

    @contextmanager
    def _noting_gradients(self) -> Iterator[None]:
        yield
        for name, each in reversed(list(self._network.named_parameters())):
            if each.grad is not None:
                self._note_named("backward", f"{name}.grad", each.grad)

    def _note_state(self, phase: str) -> None:
        for weights, network in self._run.models().items():
            for name, each in network.state_dict().items():
                of = {"model": "", "ema": " (moving average)"}.get(weights, f" ({weights})")
                self._note_named(phase, f"{name}{of}", each)

    def _note_named(self, phase: str, name: str, value: Any) -> None:
        module = name.removesuffix(".grad").rpartition(".")[0]
        if isinstance(value, Tensor):
            self._note(phase, module, name.removeprefix(f"{module}."), [value])

    def _note(self, phase: str, module: str, tensor: str, values: Iterable[Any]) -> None:
        self._notes.append((phase, module, tensor, digest(tensors_in(*values))))


def digest(tensors: Iterable[Tensor]) -> str:
    """Return a hash of the bytes of tensors; of this process's part if they are sharded."""
    total = hashlib.sha256()
    for each in tensors:
        own = each.to_local() if hasattr(each, "to_local") else each
        dense = own.detach().to_dense() if own.layout is not torch.strided else own.detach()
        total.update(dense.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()[:16]
