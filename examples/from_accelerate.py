"""A training loop of Hugging Face Accelerate, and the same as a Paceline task: the same losses, the same weights.

`original` is the loop as its users write it: gradients accumulated over two batches, clipped, a schedule. `Digits` is
what is left of it in Paceline: data, network, loss, score. Both are given the samples in the same order. The port is
stopped in the middle, goes on, and still ends with the original's weights; its ledger then proves which samples it
used, and it runs on several processes without another word. Where Accelerate is not installed, the port runs alone.

    python examples/from_accelerate.py
"""

import math
import tempfile
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

import paceline
from paceline.tasks import (
    Batch,
    DataFacts,
    Metric,
    Pipeline,
    Placement,
    SampleSlice,
    SimplePipeline,
    all_but,
    epoch_order,
    read_digits,
)

SEED, SAMPLES, EPOCHS, BATCH, ACCUMULATED = 7, 1536, 6, 32, 2
STEPS = EPOCHS * SAMPLES // (BATCH * ACCUMULATED)


def digits() -> tuple[Tensor, Tensor]:
    """Images, float [1797, 1, 8, 8], and labels."""
    read = read_digits()
    return torch.from_numpy(read.images[..., 0])[:, None] / 255, torch.from_numpy(read.labels)


def network() -> nn.Module:
    """Two convolutions and a classifier."""
    body = [nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU()]
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(288, 10))


def rate(step: int) -> float:
    """The schedule's factor on the rate: a cosine."""
    return (1 + math.cos(math.pi * step / STEPS)) / 2


class InOrder(Sampler[int]):
    """Paceline's order of an epoch, so that both see the same samples; a loop of one's own would shuffle."""

    epoch = 0

    def __iter__(self) -> Iterator[int]:
        return iter(epoch_order(SEED, self.epoch, SAMPLES).tolist())

    def __len__(self) -> int:
        return SAMPLES


def original() -> tuple[list[float], dict[str, Tensor]]:
    """The loop of Accelerate; the loss of every step, and the weights."""
    from accelerate import Accelerator

    images, labels = (each[:SAMPLES] for each in digits())
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
    torch.manual_seed(SEED)
    order, model = InOrder(), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    loader = DataLoader(TensorDataset(images, labels), batch_size=BATCH, sampler=order)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    losses: list[float] = []
    for order.epoch in range(EPOCHS):
        model.train()
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    means = [sum(losses[at : at + ACCUMULATED]) / ACCUMULATED for at in range(0, len(losses), ACCUMULATED)]
    return means, accelerator.unwrap_model(model).state_dict()


class Digits(paceline.Task):
    """The same, ported: what the loop above says of data, network and loss. The rest is the recipe."""

    unit, headline = "images", "top1_accuracy"
    metrics = (Metric(name="loss"), Metric(name="top1_accuracy", of="correct", scale=100.0, higher_is_better=True))

    def data_facts(self, world: Any) -> DataFacts:
        """The first 1,536 digits are trained on, the others held out."""
        self.images, self.labels = digits()
        unused = all_but([], "the digits are shown unchanged")
        return DataFacts(train_samples=SAMPLES, evaluation_samples=len(self.labels) - SAMPLES, unused=unused)

    def open_pipeline(self, placement: Placement) -> Pipeline:
        """Batches from memory."""
        return SimplePipeline(self.read, evaluation_samples=len(self.labels) - SAMPLES, placement=placement)

    def read(self, part: SampleSlice, training: bool) -> tuple[Tensor, Tensor]:
        """Images and labels of some samples."""
        ids = torch.tensor(part.ids) + (0 if training else SAMPLES)
        return self.images[ids], self.labels[ids]

    def build_model(self) -> nn.Module:
        """The network; torch is seeded already."""
        return network()

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """Mean loss of a micro-batch."""
        return F.cross_entropy(model(batch.inputs), batch.targets)

    def score(self, model: Any, batch: Batch) -> dict[str, Tensor]:
        """One loss, and one right or wrong, for each held-out digit."""
        logits = model(batch.inputs).float()
        losses = F.cross_entropy(logits, batch.targets, reduction="none")
        return {"loss": losses, "correct": (logits.argmax(dim=1) == batch.targets).float()}


RECIPE = f"""
seed: {SEED}
model: {{channels_last: false}}   # as the loop has it; the faster layout rounds differently
batch: {{global_size: {BATCH * ACCUMULATED}, micro_size: {BATCH}}}
optimizer: {{name: sgd, lr: 0.1, momentum: 0.9, clip_norm: 1.0}}
schedule: {{name: cosine}}
train: {{duration: {EPOCHS} epochs, precision: fp32}}
parallel: {{device: cpu, threads: 1}}
telemetry: {{log_every: 1 steps, trackers: [], report: false}}
"""


def ported(folder: Path) -> tuple[list[float], dict[str, Tensor], float]:
    """The port, stopped after half of its epochs and gone on: losses, weights, and the accuracy in %."""
    recipe, run_dir = folder / "digits.yaml", folder / "run"
    recipe.write_text(RECIPE, encoding="utf-8")
    for until in ({"train.until": f"{EPOCHS // 2} epochs"}, {}):
        result = paceline.train(recipe, overrides=until, run_dir=run_dir, task=Digits, quiet=True)
    losses = [step["loss"] for step in result.history("step")]
    weights = load_file(run_dir / "checkpoints" / f"step-{STEPS:08d}" / "model.safetensors")
    return losses, weights, result.metrics["top1_accuracy"]


def main() -> None:
    """Train both, and hold the one to the other."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        losses, weights, accuracy = ported(Path(folder))
    print(f"the port: {accuracy:.2f} % of the held-out digits after {len(losses)} steps, stopped once and gone on")
    assert accuracy > 85, f"expected more than 85 %, found {accuracy:.2f} %"
    if find_spec("accelerate") is None:
        print("Accelerate is not installed (pip install accelerate): there is nothing to compare with")
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Accelerate's own
        their_losses, their_weights = original()
    furthest = max((weights[name] - other).abs().max().item() for name, other in their_weights.items())
    apart = max(abs(mine - other) for mine, other in zip(losses, their_losses, strict=True))
    print(f"Accelerate's loop: losses of {len(losses)} steps differ by at most {apart:.1e}, weights by {furthest:.1e}")
    assert apart <= 1e-6, f"expected the same losses, found {apart:.1e} between them"
    assert furthest <= 1e-6, f"expected the same weights, found {furthest:.1e} between them"


if __name__ == "__main__":
    main()
