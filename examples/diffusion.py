"""A diffusion model draws handwritten digits, as MLPerf's benchmark of Stable Diffusion draws pictures.

diffusers has the network and the noise schedule; the images are scikit-learn's digits. The noise of an image in an
epoch is a function of (seed, epoch, image), so every run and every number of processes sees the same. After each
evaluation the task draws samples for the report. On the command line the class is `task=diffusion:Denoising`.

    pip install diffusers
    python examples/diffusion.py
"""

import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

try:
    from diffusers import DDIMScheduler, DDPMScheduler, UNet2DModel
except ImportError:
    print("This example needs diffusers: pip install diffusers")
    sys.exit()

import paceline
from paceline.checkpoint.weights import read_weights
from paceline.data.batch import Batch
from paceline.data.image.sets.digits import read_digits
from paceline.data.pipeline import Pipeline, Placement, SimplePipeline
from paceline.data.random_draws import uniforms
from paceline.data.slices import SampleSlice
from paceline.metrics.accumulator import Metric
from paceline.plan import DataFacts
from paceline.recipe.unused import all_but

HELD_OUT, SIDE, TIMES = 297, 8, 1000
SCHEDULE = DDPMScheduler(num_train_timesteps=TIMES, beta_schedule="squaredcos_cap_v2")


class Noise(nn.Module):
    """diffusers' network, called with noisy images and times; returns the noise that it sees."""

    def __init__(self) -> None:
        super().__init__()
        blocks = {
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        }
        sizes = {"block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8}
        self.body = UNet2DModel(sample_size=SIDE, in_channels=1, out_channels=1, **blocks, **sizes)

    def forward(self, noisy: Tensor, times: Tensor) -> Tensor:
        """Return noise [N, 1, SIDE, SIDE]."""
        found: Tensor = self.body(noisy, times).sample
        return found


def draw(model: Any, count: int, steps: int = 40) -> Tensor:
    """Return samples, uint8 [count, 1, SIDE, SIDE], from torch's random state."""
    schedule = DDIMScheduler.from_config(SCHEDULE.config)
    schedule.set_timesteps(steps)
    images = torch.randn(count, 1, SIDE, SIDE).to(next(model.parameters()).device)
    with torch.no_grad():
        for time in schedule.timesteps:
            images = schedule.step(
                model(images, time.expand(count).to(images.device)).float(), time, images
            ).prev_sample
    return ((images.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)


class Denoising(paceline.Task):
    """Noisy digits in, their noise out."""

    unit, headline = "images", "loss"
    metrics = (Metric(name="loss"),)

    def data_facts(self, world: Any) -> DataFacts:
        """All digits as floats in [-1, 1]; the last ones are held out."""
        self.images = torch.from_numpy(read_digits().images).permute(0, 3, 1, 2) / 127.5 - 1
        unused = all_but([], "the digits are shown unchanged")
        return DataFacts(train_samples=len(self.images) - HELD_OUT, evaluation_samples=HELD_OUT, unused=unused)

    def open_pipeline(self, placement: Placement) -> Pipeline:
        """Batches that `read` makes when they are asked for."""
        return SimplePipeline(self.read, evaluation_samples=HELD_OUT, placement=placement, name="digit")

    def read(self, part: SampleSlice, training: bool) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Noisy images with their times, and the noise; held-out images always have the same."""
        ids = np.asarray(part.ids) + (0 if training else len(self.images) - HELD_OUT)
        drawn = torch.from_numpy(uniforms(self.recipe.seed, part.epoch if training else 0, ids, 1 + SIDE * SIDE))
        times = (drawn[:, 0] * TIMES).long()
        noise = torch.special.ndtri(drawn[:, 1:].clamp(1e-9, 1 - 1e-9)).float().reshape(-1, 1, SIDE, SIDE)
        return (SCHEDULE.add_noise(self.images[torch.from_numpy(ids)], noise, times), times), noise

    def build_model(self) -> nn.Module:
        """The network; torch is seeded already."""
        return Noise()

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """Mean squared error of the noise (Ho et al. 2020)."""
        return F.mse_loss(model(*batch.inputs).float(), batch.targets)

    def score(self, model: Any, batch: Batch) -> dict[str, Tensor]:
        """The error of each image."""
        return {"loss": (model(*batch.inputs).float() - batch.targets).square().flatten(1).mean(dim=1)}

    def figures(self, model: Any) -> list[tuple[Tensor, str]]:
        """Samples for the report, enlarged."""
        large = F.interpolate(draw(model, 24), scale_factor=8)
        return [(each, f"sample {number}") for number, each in enumerate(large, start=1)]


OVERRIDES = """train.duration="20 epochs" batch.global_size=50 optimizer.name=adamw optimizer.lr=0.002
    schedule.warmup="5%" train.ema=0.99 evaluate.every="10 epochs" parallel.device=cpu parallel.threads=1"""


def share_like_digits(samples: Tensor, digits: Tensor) -> float:
    """Return the share of samples that are as near to a digit as nine in ten digits are to another one."""
    points, known = samples.flatten(1).float(), digits.flatten(1).float()
    between = torch.cdist(known, known).fill_diagonal_(torch.inf).min(dim=1).values
    nearest = torch.cdist(points, known).min(dim=1).values
    return (nearest <= between.quantile(0.9)).float().mean().item()


def main() -> None:
    """Train, draw with the averaged weights, and compare the samples with the digits."""
    with tempfile.TemporaryDirectory() as folder:
        asked = shlex.split(OVERRIDES)
        result = paceline.train("digits", overrides=asked, run_dir=f"{folder}/run", task=Denoising, quiet=True)
        model = Noise().eval()
        model.load_state_dict(read_weights(Path(folder) / "run", "ema").state)
    torch.manual_seed(0)
    digits = torch.from_numpy(read_digits().images).permute(0, 3, 1, 2)
    share = share_like_digits(draw(model, 100), digits)
    print(f"error of the noise {result.metrics['loss']:.3f}; {share:.0%} of the samples are like digits")
    assert share > 0.25, f"expected more than a quarter, found {share:.0%}; of noise it would be none"


if __name__ == "__main__":
    main()
