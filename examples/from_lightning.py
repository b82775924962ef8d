"""A Lightning module and its Trainer, and the same with `paceline.fit`: the same losses, the same weights.

`lightning_module` is a module as its users write it: AdamW, OneCycle by steps, gradients clipped. `ported` gives the
same network, loss, optimizer and scheduler to `paceline.fit`. Both see the samples in the same order. The port is
stopped in the middle of an epoch, is resumed, and still ends with the original's weights; its ledger proves which
samples it used, and it runs on several processes without another word. Where Lightning is not installed, the port runs
alone.

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
from paceline.tasks import epoch_order, read_digits

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


def right(logits: Tensor, labels: Tensor) -> Tensor:
    """What a `validation_step` would log, for each held-out digit."""
    return logits.argmax(dim=1) == labels


def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The first half of `configure_optimizers`."""
    return torch.optim.AdamW(parameters, lr=PEAK, weight_decay=DECAY)


def schedule(made: torch.optim.Optimizer) -> torch.optim.lr_scheduler.OneCycleLR:
    """Its second half."""
    return torch.optim.lr_scheduler.OneCycleLR(
        made, PEAK, total_steps=STEPS, pct_start=0.25, final_div_factor=100, cycle_momentum=False
    )


def ported(folder: Path) -> tuple[list[float], dict[str, Tensor], float]:
    """The same with Paceline, stopped in the middle of an epoch and gone on: losses, weights, and the accuracy."""
    images, labels = digits()
    for until in ({"train.until": f"{STEPS // 2 + 5} steps"}, {}):
        result = paceline.fit(
            network,
            (images[:SAMPLES], labels[:SAMPLES]),
            (images[SAMPLES:], labels[SAMPLES:]),
            loss=F.cross_entropy,
            metrics={"accuracy": right},
            optimizer=optimizer,
            schedule=schedule,
            epochs=EPOCHS,
            batch_size=BATCH,
            seed=SEED,
            overrides={"optimizer.clip_norm": 1.0, "parallel.device": "cpu", "telemetry.log_every": "1 steps", **until},
            run_dir=folder / "run",
            quiet=True,
        )
    losses = [step["loss"] for step in result.history("step")]
    weights = load_file(folder / "run" / "checkpoints" / f"step-{STEPS:08d}" / "model.safetensors")
    return losses, weights, result.metrics["accuracy"]


def main() -> None:
    """Train both, and hold the one to the other."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        losses, weights, accuracy = ported(Path(folder))
    print(f"the port: {accuracy:.2%} of the held-out digits after {len(losses)} steps, stopped once and gone on")
    assert accuracy > 0.85, f"expected more than 85 %, found {accuracy:.2%}"
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
