"""A 3D U-Net finds organs and tumours in volumes, as in MLPerf's benchmark on the kidney scans of KiTS19.

MONAI has the network, the loss and the sliding window; volumes are generated: a bright ball
with a darker one in it, and noise. Training shows random patches, evaluation whole volumes. On the command line the
class is `task=unet3d:OrganAndTumour`.

    pip install monai
    python examples/unet3d.py
"""

import shlex
import sys
import tempfile
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

try:
    from monai.inferers import sliding_window_inference
    from monai.losses import DiceCELoss
    from monai.networks.nets import UNet
except ImportError:
    print("This example needs MONAI: pip install monai")
    sys.exit()

import paceline
from paceline.data.batch import Batch
from paceline.data.pipeline import Pipeline, Placement, SimplePipeline
from paceline.data.random_draws import uniforms
from paceline.data.slices import SampleSlice
from paceline.metrics.accumulator import Metric
from paceline.plan import DataFacts
from paceline.recipe.unused import all_but

TRAIN, HELD_OUT = 96, 24
SIDE, PATCH = 40, 32  # voxels along each axis of a volume, and of what the network sees
BACKGROUND, ORGAN, TUMOUR = range(3)


def volume(number: int) -> tuple[Tensor, Tensor]:
    """Return intensities, float [1, SIDE, SIDE, SIDE], and classes, float [3, SIDE, SIDE, SIDE], 1 where it is one."""
    draws = np.random.default_rng(number)
    voxels = np.stack(np.meshgrid(*[np.arange(SIDE)] * 3, indexing="ij"))
    radius = draws.uniform(7, 11)
    centre = draws.uniform(radius, SIDE - radius, 3)
    direction = draws.normal(size=3)
    inner = centre + direction / np.linalg.norm(direction) * radius / 2
    classes = np.zeros([SIDE] * 3, dtype=np.int64)
    for label, middle, size in ((ORGAN, centre, radius), (TUMOUR, inner, draws.uniform(0.35, 0.5) * radius)):
        classes[((voxels - middle[:, None, None, None]) ** 2).sum(axis=0) <= size**2] = label
    brightness = np.array([0.0, 1.5, 0.7])[classes] + draws.normal(scale=0.5, size=classes.shape)
    return torch.from_numpy(brightness).float()[None], F.one_hot(torch.from_numpy(classes)).movedim(-1, 0).float()


class OrganAndTumour(paceline.Task):
    """Volumes in, the class of each voxel out."""

    unit, headline = "volumes", "dice"
    metrics = (
        Metric(name="loss"),
        Metric(name="dice", higher_is_better=True, scale=100.0),
        Metric(name="organ_dice", higher_is_better=True, scale=100.0),
        Metric(name="tumour_dice", higher_is_better=True, scale=100.0),
    )

    def __init__(self, recipe: Any) -> None:
        super().__init__(recipe)
        self.criterion = DiceCELoss(softmax=True, include_background=False)

    def data_facts(self, world: Any) -> DataFacts:
        """All volumes; the last ones are held out."""
        volumes = [volume(number) for number in range(TRAIN + HELD_OUT)]
        self.images, self.classes = (torch.stack(each) for each in zip(*volumes, strict=True))
        unused = all_but([], "the volumes are generated")
        return DataFacts(train_samples=TRAIN, evaluation_samples=HELD_OUT, unused=unused)

    def open_pipeline(self, placement: Placement) -> Pipeline:
        """Batches that `read` makes when they are asked for."""
        return SimplePipeline(self.read, evaluation_samples=HELD_OUT, placement=placement, name="volume")

    def read(self, part: SampleSlice, training: bool) -> tuple[Tensor, Tensor]:
        """Whole volumes in evaluation; in training a patch of each, mirrored or not along each axis."""
        if not training:
            chosen = TRAIN + torch.tensor(part.ids)
            return self.images[chosen], self.classes[chosen]
        shown = []
        for sample, draws in zip(part.ids, uniforms(self.recipe.seed, part.epoch, part.ids, 6), strict=True):
            z, y, x = (int(draw * (SIDE - PATCH + 1)) for draw in draws[:3])
            mirrored = [1 + axis for axis in range(3) if draws[3 + axis] < 0.5]
            both = torch.cat((self.images[sample], self.classes[sample]))
            shown.append(both[:, z : z + PATCH, y : y + PATCH, x : x + PATCH].flip(mirrored))
        images, classes = torch.stack(shown).split((1, 3), dim=1)
        return images, classes

    def build_model(self) -> nn.Module:
        """A U-Net of three stages, with residual units and instance norm; one output for each class."""
        return UNet(3, in_channels=1, out_channels=3, channels=(8, 16, 32), strides=(2, 2), num_res_units=1)

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """Cross-entropy and Dice loss of a micro-batch; both are means over its patches."""
        found: Tensor = self.criterion(model(batch.inputs).float(), batch.targets)
        return found

    def score(self, model: Any, batch: Batch) -> dict[str, Tensor]:
        """One value for each volume, which is scored by itself: windows of the size of a patch slide over it."""
        rows = []
        for image, classes in zip(batch.inputs.split(1), batch.targets.split(1), strict=True):
            logits = sliding_window_inference(image, PATCH, sw_batch_size=1, predictor=model, overlap=0.5).float()
            found = F.one_hot(logits.argmax(dim=1), 3).movedim(-1, 1)
            sums = [each.sum(dim=(0, 2, 3, 4)) for each in (found * classes, found, classes)]
            _, organ, tumour = 2 * sums[0] / (sums[1] + sums[2])
            rows.append(torch.stack((self.criterion(logits, classes), (organ + tumour) / 2, organ, tumour)))
        return dict(zip(("loss", "dice", "organ_dice", "tumour_dice"), torch.stack(rows).unbind(1), strict=True))


OVERRIDES = """train.duration="15 epochs" batch.global_size=4 optimizer.name=adamw optimizer.lr=0.005
    schedule.name=cosine schedule.warmup="5%" evaluate.every="5 epochs" evaluate.batch_size=4
    parallel.device=cpu parallel.threads=1"""

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        asked = shlex.split(OVERRIDES)
        result = paceline.train("digits", overrides=asked, run_dir=f"{folder}/run", task=OrganAndTumour, quiet=True)
    dice, tumours = result.metrics["dice"], result.metrics["tumour_dice"]
    print(f"mean Dice {dice:.1f} %, of tumours {tumours:.1f} %, after {result.summary.step} steps")
    assert dice > 85, f"expected more than 85 %, found {dice:.1f} %"
