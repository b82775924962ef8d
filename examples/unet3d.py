"""A 3D U-Net segments organs and tumours in volumes, like MLPerf's benchmark on the kidney scans of KiTS19.

MONAI provides the network and the sliding window. The volumes are generated: an organ is a bright ball, a tumour a
darker ball inside it, and everything is noisy. Training uses random patches; evaluation uses whole volumes. In a recipe
or on the command line, the task is `task=unet3d:OrganAndTumour`.

    pip install monai
    python examples/unet3d.py
"""

import sys
import tempfile
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

try:
    from monai.inferers import sliding_window_inference
    from monai.networks.nets import UNet
except ImportError:
    print("This example needs MONAI: pip install monai")
    sys.exit()

import paceline
from paceline.tasks import Batch, DataFacts, Metric, Pipeline, Placement, SampleSlice, SimplePipeline, all_but, uniforms

TRAIN, HELD_OUT = 96, 24  # volumes
SIDE, PATCH = 40, 32  # voxels along each axis of a volume, and of a patch
BACKGROUND, ORGAN, TUMOUR = range(3)


def volume(number: int) -> tuple[Tensor, Tensor]:
    """Return a volume's intensities, float [1, SIDE, SIDE, SIDE], and classes, int64 of the same shape."""
    rng = np.random.default_rng(number)
    voxels = np.indices((SIDE, SIDE, SIDE))

    def ball(centre: np.ndarray, radius: float) -> np.ndarray:
        return np.linalg.norm(voxels - centre[:, None, None, None], axis=0) <= radius

    radius = rng.uniform(7, 11)
    centre = rng.uniform(radius, SIDE - radius, size=3)
    direction = rng.normal(size=3)
    tumour_centre = centre + direction / np.linalg.norm(direction) * radius / 2
    classes = np.full((SIDE, SIDE, SIDE), BACKGROUND)
    classes[ball(centre, radius)] = ORGAN
    classes[ball(tumour_centre, radius * rng.uniform(0.35, 0.5))] = TUMOUR
    # The brightness of each class, and noise.
    intensities = np.array([0.0, 1.5, 0.7])[classes] + rng.normal(scale=0.5, size=classes.shape)
    return torch.from_numpy(intensities).float()[None], torch.from_numpy(classes)[None]


def one_hot(classes: Tensor) -> Tensor:
    """Convert classes [N, 1, D, H, W] to a mask for each class, float [N, 3, D, H, W]."""
    return F.one_hot(classes.squeeze(1), num_classes=3).movedim(-1, 1).float()


def dice(masks: Tensor, targets: Tensor) -> Tensor:
    """Return the overlap of organs and of tumours, [N, 2]: from 0 to 1 if all masks [N, 3, D, H, W] agree."""
    voxels = (2, 3, 4)
    overlap = (masks * targets).sum(voxels)
    total = masks.sum(voxels) + targets.sum(voxels)
    # A small constant avoids 0 / 0 where a patch contains no organ.
    return ((2 * overlap + 1e-5) / (total + 1e-5))[:, 1:]  # without the background


def losses(logits: Tensor, classes: Tensor) -> Tensor:
    """Return the cross-entropy plus the Dice loss of each sample, [N]."""
    cross_entropy = F.cross_entropy(logits, classes.squeeze(1), reduction="none").mean(dim=(1, 2, 3))
    dice_loss = 1 - dice(logits.softmax(dim=1), one_hot(classes)).mean(dim=1)
    return cross_entropy + dice_loss


class OrganAndTumour(paceline.Task):
    """Predict the class of each voxel of a volume."""

    unit, headline = "volumes", "dice"
    metrics = (
        Metric(name="loss"),
        *(Metric(name=each, higher_is_better=True, scale=100.0) for each in ("dice", "organ_dice", "tumour_dice")),
    )

    def data_facts(self, world: Any) -> DataFacts:
        """Generate all volumes; the last ones are held out."""
        volumes = [volume(number) for number in range(TRAIN + HELD_OUT)]
        self.images, self.classes = (torch.stack(each) for each in zip(*volumes, strict=True))
        unused = all_but([], "the volumes are generated")
        return DataFacts(train_samples=TRAIN, evaluation_samples=HELD_OUT, unused=unused)

    def open_pipeline(self, placement: Placement) -> Pipeline:
        """Return batches created by `read`."""
        return SimplePipeline(self.read, evaluation_samples=HELD_OUT, placement=placement, name="volume")

    def read(self, part: SampleSlice, training: bool) -> tuple[Tensor, Tensor]:
        """Return images and classes: whole volumes for evaluation, a randomly flipped patch of each for training."""
        if not training:
            ids = TRAIN + torch.tensor(part.ids)
            return self.images[ids], self.classes[ids]
        images, classes = [], []
        for sample, draws in zip(part.ids, uniforms(self.recipe.seed, part.epoch, part.ids, 6), strict=True):
            z, y, x = (int(draw * (SIDE - PATCH + 1)) for draw in draws[:3])
            flipped = [1 + axis for axis in range(3) if draws[3 + axis] < 0.5]
            patch = (slice(None), slice(z, z + PATCH), slice(y, y + PATCH), slice(x, x + PATCH))
            images.append(self.images[sample][patch].flip(flipped))
            classes.append(self.classes[sample][patch].flip(flipped))
        return torch.stack(images), torch.stack(classes)

    def build_model(self) -> nn.Module:
        """Return a U-Net of three stages with residual units; torch is already seeded."""
        return UNet(3, in_channels=1, out_channels=3, channels=(8, 16, 32), strides=(2, 2), num_res_units=1)

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """Return the mean loss of a micro-batch of patches."""
        return losses(model(batch.inputs).float(), batch.targets).mean()

    def score(self, model: Any, batch: Batch) -> dict[str, Tensor]:
        """Return the metrics of each volume, predicted by a window that slides over it in steps of half its side."""
        logits = sliding_window_inference(batch.inputs, PATCH, sw_batch_size=1, predictor=model, overlap=0.5).float()
        predicted = one_hot(logits.argmax(dim=1, keepdim=True))
        organ, tumour = dice(predicted, one_hot(batch.targets)).unbind(dim=1)
        loss = losses(logits, batch.targets)
        return {"loss": loss, "dice": (organ + tumour) / 2, "organ_dice": organ, "tumour_dice": tumour}


# Changes to the smallest shipped recipe, `digits`, whose network and data this task replaces.
OVERRIDES = {
    "train.duration": "15 epochs",
    "batch.global_size": 4,
    "optimizer.name": "adamw",
    "optimizer.lr": 0.005,
    "schedule.warmup": "5%",
    "evaluate.every": "5 epochs",
    "evaluate.batch_size": 4,
    "parallel.device": "cpu",
}

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        result = paceline.train("digits", overrides=OVERRIDES, run_dir=f"{folder}/run", task=OrganAndTumour, quiet=True)
    dice_percent, tumour_percent = result.metrics["dice"], result.metrics["tumour_dice"]
    print(f"mean Dice {dice_percent:.1f} %, of tumours {tumour_percent:.1f} %, after {result.summary.step} steps")
    assert dice_percent > 85, f"expected more than 85 %, found {dice_percent:.1f} %"
