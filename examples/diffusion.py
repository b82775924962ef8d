"""A diffusion model draws handwritten digits, like MLPerf's benchmark of Stable Diffusion draws pictures.

diffusers provides the network and the noise schedule; the images are scikit-learn's digits. The noise added to an image
depends only on (seed, epoch, image), so it is the same in every run and with any number of processes. Each evaluation
adds generated digits to the report. In a recipe or on the command line, the task is `task=diffusion:Denoising`.

    pip install diffusers
    python examples/diffusion.py
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

try:
    from diffusers import DDIMScheduler, UNet2DModel
except ImportError:
    print("This example needs diffusers: pip install diffusers")
    sys.exit()

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
    read_weights,
    uniforms,
)

HELD_OUT, SIDE = 297, 8  # images, and pixels along each side
TIMES = 1000  # noise levels: at time 0 hardly any noise, at the last one little else
SCHEDULE = DDIMScheduler(num_train_timesteps=TIMES, beta_schedule="squaredcos_cap_v2")


def digits() -> Tensor:
    """Return all digits, float [1797, 1, SIDE, SIDE], from -1 to 1."""
    return torch.from_numpy(read_digits().images).permute(0, 3, 1, 2) / 127.5 - 1


def build_network() -> nn.Module:
    """Return a U-Net that predicts the noise in an image, with attention at its lower resolution."""
    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    sizes = {"block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8}
    return UNet2DModel(in_channels=1, out_channels=1, **blocks, **sizes)


@torch.no_grad()
def generate(model: Any, count: int, steps: int = 40) -> Tensor:
    """Return generated digits, float [count, 1, SIDE, SIDE], from -1 to 1; random numbers are torch's."""
    SCHEDULE.set_timesteps(steps)
    images = torch.randn(count, 1, SIDE, SIDE).to(model.device)
    for time in SCHEDULE.timesteps:
        noise = model(images, time).sample.float()
        images = SCHEDULE.step(noise, time, images).prev_sample
    return images.clamp(-1, 1)


class Denoising(paceline.Task):
    """Predict the noise that was added to a digit."""

    unit, headline = "images", "loss"
    metrics = (Metric(name="loss"),)

    def data_facts(self, world: Any) -> DataFacts:
        """Load all digits; the last ones are held out."""
        self.images = digits()
        unused = all_but([], "the digits are not augmented")
        return DataFacts(train_samples=len(self.images) - HELD_OUT, evaluation_samples=HELD_OUT, unused=unused)

    def open_pipeline(self, placement: Placement) -> Pipeline:
        """Return batches created by `read`."""
        return SimplePipeline(self.read, evaluation_samples=HELD_OUT, placement=placement, name="digit")

    def read(self, part: SampleSlice, training: bool) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Return noisy images and their times, the inputs of the network, and the noise."""
        ids = np.asarray(part.ids) + (0 if training else len(self.images) - HELD_OUT)
        epoch = part.epoch if training else 0  # the noise of held-out images never changes
        draws = torch.from_numpy(uniforms(self.recipe.seed, epoch, ids, 1 + SIDE * SIDE))
        times = (draws[:, 0] * TIMES).long()
        # The inverse of the normal distribution turns uniform numbers into normal ones.
        noise = torch.special.ndtri(draws[:, 1:].clamp(1e-9, 1 - 1e-9)).float().reshape(-1, 1, SIDE, SIDE)
        return (SCHEDULE.add_noise(self.images[torch.from_numpy(ids)], noise, times), times), noise

    def build_model(self) -> nn.Module:
        """Return the network; torch is already seeded."""
        return build_network()

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """Return the mean squared error of the predicted noise (Ho et al. 2020)."""
        return F.mse_loss(model(*batch.inputs).sample.float(), batch.targets)

    def score(self, model: Any, batch: Batch) -> dict[str, Tensor]:
        """Return the squared error of each image."""
        return {"loss": (model(*batch.inputs).sample.float() - batch.targets).square().mean(dim=(1, 2, 3))}

    def figures(self, model: Any) -> list[tuple[Tensor, str]]:
        """Return generated digits for the report, enlarged."""
        pictures = ((generate(model, 24) + 1) * 127.5).round().to(torch.uint8)
        large = F.interpolate(pictures, scale_factor=8)
        return [(picture, f"sample {number}") for number, picture in enumerate(large, start=1)]


def share_like_digits(samples: Tensor, known: Tensor) -> float:
    """Return the share of samples [N, pixels] as close to a digit as 90 % of the digits are to another one."""
    between_digits = torch.cdist(known, known).fill_diagonal_(torch.inf).min(dim=1).values
    nearest = torch.cdist(samples, known).min(dim=1).values
    return (nearest <= between_digits.quantile(0.9)).float().mean().item()


def frechet_distance(a: Tensor, b: Tensor) -> float:
    """Return how far means and covariances of images [N, pixels] are apart: MLPerf's FID, but of the pixels."""
    gap, cov_a, cov_b = (a.mean(dim=0) - b.mean(dim=0)).square().sum(), a.T.cov(), b.T.cov()
    # The trace of a matrix square root is the sum of the square roots of the eigenvalues.
    root = torch.linalg.eigvals(cov_a @ cov_b).real.clamp(min=0).sqrt().sum()
    return (gap + cov_a.trace() + cov_b.trace() - 2 * root).item()


# Changes to the smallest shipped recipe, `digits`, whose network this task replaces.
OVERRIDES = {
    "train.duration": "20 epochs",
    "train.ema": 0.99,
    "batch.global_size": 50,
    "optimizer.name": "adamw",
    "optimizer.lr": 0.002,
    "evaluate.every": "10 epochs",
    "parallel.device": "cpu",
}

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        result = paceline.train("digits", overrides=OVERRIDES, run_dir=f"{folder}/run", task=Denoising, quiet=True)
        model = build_network().eval()
        model.load_state_dict(read_weights(Path(folder) / "run", "ema").state)
    torch.manual_seed(0)
    samples, known = generate(model, 500).flatten(1), digits().flatten(1)
    shuffled = known.gather(0, torch.rand_like(known).argsort(dim=0))  # each pixel from another digit
    share = share_like_digits(samples, known)
    distance, baseline = frechet_distance(samples, known), frechet_distance(shuffled, known)
    print(f"{share:.0%} of the samples are like digits; Fréchet distance {distance:.2f}, if shuffled {baseline:.2f}")
    assert share > 0.25, f"expected more than a quarter, found {share:.0%}; of noise it would be none"
    assert distance < baseline / 4, f"expected less than a quarter of {baseline:.2f}, found {distance:.2f}"
