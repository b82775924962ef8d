"""A Lightning module and its Trainer, and the same as a Paceline task: the same losses, the same weights.

`lightning_module` is a module as its users write it: AdamW, OneCycle by steps, gradients clipped. `Digits` is what is
left of it in Paceline. Both are given the samples in the same order. The port is stopped in the middle of an epoch,
goes on, and still ends with the original's weights; its ledger proves which samples it used, and it runs on several
processes without another word. Where Lightning is not installed, the port runs alone.

    python examples/from_lightning.py
"""

import logging
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

SEED, SAMPLES, EPOCHS, BATCH, PEAK, DECAY = 3, 1536, 5, 64, 0.01, 0.05
STEPS = EPOCHS * SAMPLES // BATCH


def digits() -> tuple[Tensor, Tensor]:
    """Images, float [1797, 64], and labels."""
    read = read_digits()
    return torch.from_numpy(read.images).flatten(1) / 255, torch.from_numpy(read.labels)


def network() -> nn.Module:
    """A perceptron."""
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.LayerNorm(96), nn.Linear(96, 10))


class InOrder(Sampler[int]):
    """Paceline's order of an epoch, so that both see the same samples; Lightning sets the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Called at the beginning of each."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(epoch_order(SEED, self.epoch, SAMPLES).tolist())

    def __len__(self) -> int:
        return SAMPLES


def lightning_module() -> Any:
    """The module; made here, since its base class is in a library that may not be installed."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.losses = network(), list[float]()

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            inputs, targets = batch
            loss = F.cross_entropy(self.model(inputs), targets)
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=PEAK, weight_decay=DECAY)
            schedule = torch.optim.lr_scheduler.OneCycleLR(
                optimizer, PEAK, total_steps=STEPS, pct_start=0.25, final_div_factor=100, cycle_momentum=False
            )
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    return Module()


def original(folder: Path) -> tuple[list[float], dict[str, Tensor]]:
    """Lightning's training; the loss of every step, and the weights."""
    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    images, labels = (each[:SAMPLES] for each in digits())
    torch.manual_seed(SEED)
    module = lightning_module()
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        devices=1,
        gradient_clip_val=1.0,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(images, labels), batch_size=BATCH, sampler=InOrder()))
    return module.losses, module.model.state_dict()


class Digits(paceline.Task):
    """The same, ported: what the module above says of data, network and loss. The rest is the recipe."""

    unit, headline = "images", "top1_accuracy"
    metrics = (Metric(name="loss"), Metric(name="top1_accuracy", of="correct", scale=100.0, higher_is_better=True))

    def data_facts(self, world: Any) -> DataFacts:
        """The first 1,536 digits are trained on, the others held out."""
        self.images, self.labels = digits()
        unused = all_but([], "the digits are shown unchanged")
        return DataFacts(train_samples=SAMPLES, evaluation_samples=len(self.labels) - SAMPLES, unused=unused)

    def open_pipeline(self, placement: Placement) -> Pipeline:
        """Batches from memory, in place of a DataLoader."""
        return SimplePipeline(self.read, evaluation_samples=len(self.labels) - SAMPLES, placement=placement)

    def read(self, part: SampleSlice, training: bool) -> tuple[Tensor, Tensor]:
        """Images and labels of some samples."""
        ids = torch.tensor(part.ids) + (0 if training else SAMPLES)
        return self.images[ids], self.labels[ids]

    def build_model(self) -> nn.Module:
        """The network; torch is seeded already."""
        return network()

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """What `training_step` returned."""
        return F.cross_entropy(model(batch.inputs), batch.targets)

    def score(self, model: Any, batch: Batch) -> dict[str, Tensor]:
        """What a `validation_step` would log, for each held-out digit."""
        logits = model(batch.inputs).float()
        losses = F.cross_entropy(logits, batch.targets, reduction="none")
        return {"loss": losses, "correct": (logits.argmax(dim=1) == batch.targets).float()}


RECIPE = f"""
seed: {SEED}
batch: {{global_size: {BATCH}}}
optimizer: {{name: adamw, lr: {PEAK}, weight_decay: {DECAY}, decay_norm_and_bias: true, clip_norm: 1.0}}
schedule: {{name: one_cycle, warmup: 25%, end_lr: {PEAK / 25 / 100}}}   # begins at a 25th of the peak, as torch's
train: {{duration: {EPOCHS} epochs, precision: fp32}}
parallel: {{device: cpu, threads: 1}}
telemetry: {{log_every: 1 steps, trackers: [], report: false}}
"""


def ported(folder: Path) -> tuple[list[float], dict[str, Tensor], float]:
    """The port, stopped in the middle of an epoch and gone on: losses, weights, and the accuracy in %."""
    recipe, run_dir = folder / "digits.yaml", folder / "run"
    recipe.write_text(RECIPE, encoding="utf-8")
    for until in ({"train.until": f"{STEPS // 2 + 5} steps"}, {}):
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
    if find_spec("lightning") is None:
        print("Lightning is not installed (pip install lightning): there is nothing to compare with")
        return
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's own
        their_losses, their_weights = original(Path(folder))
    furthest = max((weights[name] - other).abs().max().item() for name, other in their_weights.items())
    apart = max(abs(mine - other) for mine, other in zip(losses, their_losses, strict=True))
    print(f"Lightning's: losses of {len(losses)} steps differ by at most {apart:.1e}, weights by {furthest:.1e}")
    assert apart <= 1e-6, f"expected the same losses, found {apart:.1e} between them"
    assert furthest <= 1e-6, f"expected the same weights, found {furthest:.1e} between them"


if __name__ == "__main__":
    main()
