"""A task of one's own: a convolutional autoencoder learns to draw handwritten digits again.

`docs/guide/own-code.md` walks through it. On the command line the class is `task=autoencoder:Autoencoding`.

    python examples/autoencoder.py
"""

import shlex
import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
    read_digits,
)

HELD_OUT = 297


class Autoencoding(paceline.Task):
    """Pictures in, the same pictures out."""

    unit, headline = "images", "unexplained"
    metrics = (Metric(name="loss"), Metric(name="unexplained", of="squared_error", per="squares", scale=100.0))

    def data_facts(self, world: Any) -> DataFacts:
        """All digits as floats in [0, 1], [1797, 1, 28, 28]; the last ones are held out."""
        pixels = torch.from_numpy(read_digits().images).permute(0, 3, 1, 2) / 255
        self.digits = F.interpolate(pixels, size=28, mode="bilinear")
        unused = all_but([], "the digits are shown unchanged")
        return DataFacts(train_samples=len(pixels) - HELD_OUT, evaluation_samples=HELD_OUT, unused=unused)

    def open_pipeline(self, placement: Placement) -> Pipeline:
        """Batches that `read` makes when they are asked for."""
        return SimplePipeline(self.read, evaluation_samples=HELD_OUT, placement=placement, name="digit")

    def read(self, part: SampleSlice, training: bool) -> tuple[Tensor, Tensor]:
        """What is shown and what is wanted: the same."""
        shown = self.digits[torch.tensor(part.ids) + (0 if training else len(self.digits) - HELD_OUT)]
        return shown, shown

    def build_model(self) -> nn.Module:
        """28 x 28 pixels to 64 numbers, and back."""
        half, twice = {"stride": 2, "padding": 1}, {"stride": 2, "padding": 1, "output_padding": 1}
        down = [nn.Conv2d(1, 16, 3, **half), nn.ReLU(), nn.Conv2d(16, 32, 3, **half), nn.ReLU()]
        up = [nn.ConvTranspose2d(32, 16, 3, **twice), nn.ReLU(), nn.ConvTranspose2d(16, 1, 3, **twice), nn.Sigmoid()]
        return nn.Sequential(*down, nn.Conv2d(32, 64, 7), nn.ConvTranspose2d(64, 32, 7), nn.ReLU(), *up)

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """Mean squared error of a micro-batch."""
        return F.mse_loss(model(batch.inputs).float(), batch.targets)

    def score(self, model: Any, batch: Batch) -> dict[str, Tensor]:
        """One value for each picture: its loss, and what `unexplained` divides."""
        error = (model(batch.inputs).float() - batch.targets).square().flatten(1)
        squares = batch.targets.square().flatten(1).sum(dim=1)
        return {"loss": error.mean(dim=1), "squared_error": error.sum(dim=1), "squares": squares}


OVERRIDES = """train.duration="12 epochs" batch.global_size=50 optimizer.name=adamw optimizer.lr=0.003
    parallel.device=cpu parallel.threads=1"""

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        asked = shlex.split(OVERRIDES)
        result = paceline.train("digits", overrides=asked, run_dir=f"{folder}/run", task=Autoencoding, quiet=True)
    unexplained = result.metrics["unexplained"]
    print(f"{unexplained:.2f} % of the held-out pixels' squares are not drawn, after {result.summary.step} steps")
    assert unexplained < 4, f"expected less than 4 %, found {unexplained:.2f} %"
