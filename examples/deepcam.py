"""DeepLabv3+ segments cyclones and atmospheric rivers in weather maps, like MLPerf HPC's DeepCAM.

This file defines a data set of images with eight channels and a network; the task is Paceline's `task=segmentation`.
The maps are generated. In smooth random weather, cyclones are lows with wind around them, and rivers are curved bands
of moist air. Lows without wind and moist blobs look similar in one channel, but belong to the background.

    python examples/deepcam.py
"""

import tempfile

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

import paceline
from paceline.tasks import Data
from paceline_vision import MaskDataset

TRAIN, HELD_OUT, SIDE = 400, 80, 64  # maps, and points along each side of a map
CHANNELS = ("wind_east", "wind_north", "pressure", "moisture", "temperature", "rain", "height", "cloud")
CLASSES = ("background", "cyclone", "river")


class WeatherMaps:
    """Maps numbered from ``first``; each depends only on its number."""

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count

    def __len__(self) -> int:
        """Return the number of maps."""
        return self.count

    def path(self, sample: int) -> str:
        """Return the name of a map for messages."""
        return f"map {self.first + sample}"

    def read(self, sample: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the map, uint8 [SIDE, SIDE, 8], and the class of each point, uint8 [SIDE, SIDE]."""
        rng = np.random.default_rng(self.first + sample)
        y, x = np.mgrid[:SIDE, :SIDE] / SIDE
        weather = {name: 0.5 * _waves(rng, y, x) for name in CHANNELS}
        labels = np.zeros((SIDE, SIDE), dtype=np.uint8)

        for _ in range(rng.integers(1, 3)):
            distance = np.abs(y - rng.uniform(0.2, 0.8) - 0.25 * np.sin(rng.uniform(3, 6) * x + rng.uniform(0, 6)))
            start = rng.uniform(0, 0.5)
            river = np.exp(-((distance / 0.04) ** 2)) * ((x > start) & (x < start + 0.5))
            blob, _, _ = _bump(rng, y, x)  # moist, but not a river
            weather["moisture"] += 2 * river + 2 * blob
            weather["wind_east"] += river
            labels[river > 0.5] = CLASSES.index("river")
        for is_cyclone in rng.permutation([True, True, False, False])[: rng.integers(1, 5)]:
            low, down, right = _bump(rng, y, x)
            weather["pressure"] -= 2 * low
            if is_cyclone:
                weather["wind_east"] -= 40 * down * low
                weather["wind_north"] += 40 * right * low
                weather["rain"] += low
                labels[low > 0.4] = CLASSES.index("cyclone")
        channels = np.stack([weather[name] for name in CHANNELS], axis=-1)
        channels += rng.normal(scale=0.2, size=channels.shape)
        return np.clip(128 + 32 * channels, 0, 255).astype(np.uint8), labels


def _waves(rng: np.random.Generator, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return a sum of six waves with random directions and lengths."""
    waves = zip(rng.uniform(-12, 12, (6, 2)), rng.uniform(0, 6, 6), strict=True)
    return sum(np.sin(down * y + right * x + phase) for (down, right), phase in waves) / 3


def _bump(rng: np.random.Generator, y: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a round hill of height 1 at a random place, and the distances from its centre along y and x."""
    (centre_y, centre_x), width = rng.uniform(0.15, 0.85, 2), rng.uniform(0.06, 0.1)
    down, right = y - centre_y, x - centre_x
    return np.exp(-(down**2 + right**2) / width**2), down, right


def weather(data: Data) -> MaskDataset:
    """Return the data set, for `data.dataset=deepcam:weather`."""
    return MaskDataset(
        name="weather",
        train=WeatherMaps(0, TRAIN),
        validation=WeatherMaps(TRAIN, HELD_OUT),
        classes=CLASSES,
        mean=(0.5,) * len(CHANNELS),
        std=(0.15,) * len(CHANNELS),
        digest=f"weather 1 {TRAIN} {SIDE}",  # a run resumes only with the same one
    )


class DeepLabV3Plus(nn.Module):
    """Convolutions of several dilations on coarse features, combined with fine features (Chen et al. 2018)."""

    def __init__(self, num_classes: int, in_channels: int, *, width: int = 16) -> None:
        super().__init__()
        self.fine = nn.Sequential(_conv(in_channels, width), _conv(width, width, stride=2))
        self.coarse = nn.Sequential(_conv(width, 2 * width, stride=2), _conv(2 * width, 4 * width, stride=2))
        self.context = nn.ModuleList(_conv(4 * width, width, dilation=dilation) for dilation in (1, 2, 4))
        self.head = nn.Sequential(_conv(4 * width, 2 * width), nn.Conv2d(2 * width, num_classes, 1))

    def forward(self, maps: Tensor) -> Tensor:
        """Map float [N, channels, H, W] to logits [N, classes, H, W]."""
        fine = self.fine(maps)
        coarse = self.coarse(fine)
        context = torch.cat([conv(coarse) for conv in self.context], dim=1)
        context = interpolate(context, fine.shape[-2:], mode="bilinear")
        logits = self.head(torch.cat((fine, context), dim=1))
        return interpolate(logits, maps.shape[-2:], mode="bilinear")


def _conv(inputs: int, outputs: int, *, stride: int = 1, dilation: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, 3, stride, padding=dilation, dilation=dilation, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


# Changes to the recipe `shapes-segmentation`.
OVERRIDES = {
    "data.dataset": "deepcam:weather",
    "data.detection": None,  # settings of the pictures that the recipe generates
    "data.image_size": SIDE,
    "data.workers": 0,
    "model.name": "deepcam:DeepLabV3Plus",
    "model.options": {"width": 16},
    "train.duration": "10 epochs",
    "batch.global_size": 12,
    "optimizer.name": "lamb",
    "optimizer.lr": 0.01,
    "evaluate.every": "5 epochs",
    "evaluate.batch_size": 20,
    "parallel.device": "cpu",
}

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        result = paceline.train("shapes-segmentation", overrides=OVERRIDES, run_dir=f"{folder}/run", quiet=True)
    miou, cyclones, rivers = (result.metrics[name] for name in ("miou", "iou_cyclone", "iou_river"))
    print(f"mIoU {miou:.1f} %, cyclones {cyclones:.1f} %, rivers {rivers:.1f} %, after {result.summary.step} steps")
    assert miou > 70, f"expected more than 70 %, found {miou:.1f} %"
