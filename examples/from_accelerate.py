"""A training loop of Hugging Face Accelerate, and the same with `paceline.fit`: the same losses, the same weights.

`original` is the loop as its users write it: gradients accumulated over two batches, clipped, a schedule. `ported`
gives the same network, data, loss, optimizer and scheduler to `paceline.fit`. Both see the samples in the same order.
The port is stopped in the middle, is resumed, and still ends with the original's weights; its ledger then proves which
samples it used, and it runs on several processes without another word. Where Accelerate is not installed, the port
runs alone.

    python examples/from_accelerate.py
"""

import math
import tempfile
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

import paceline
from paceline.tasks import epoch_order, read_digits

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


def right(logits: Tensor, labels: Tensor) -> Tensor:
    """Right or wrong, for each held-out digit."""
    return logits.argmax(dim=1) == labels


def ported(folder: Path) -> tuple[list[float], dict[str, Tensor], float]:
    """The same with Paceline, stopped after half of its epochs and gone on: losses, weights, and the accuracy."""
    images, labels = digits()
    for until in ({"train.until": f"{EPOCHS // 2} epochs"}, {}):
        result = paceline.fit(
            network,
            (images[:SAMPLES], labels[:SAMPLES]),
            (images[SAMPLES:], labels[SAMPLES:]),
            loss=F.cross_entropy,
            metrics={"accuracy": right},
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
            schedule=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, rate),
            epochs=EPOCHS,
            batch_size=BATCH * ACCUMULATED,
            seed=SEED,
            overrides={
                "batch.micro_size": BATCH,
                "optimizer.clip_norm": 1.0,
                "model.channels_last": False,  # as the loop has it; the faster layout rounds differently
                "parallel.device": "cpu",
                "telemetry.log_every": "1 steps",
                **until,
            },
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
