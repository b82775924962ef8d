"""DeepLabv3+ marks cyclones and atmospheric rivers on weather maps, as in MLPerf HPC's benchmark DeepCAM.

The task is Paceline's own, `task=segmentation`; this file brings a data set of images with eight channels and the
network. Maps are generated: on smooth random weather, cyclones are lows with wind around them, rivers are curved bands
of moist air. Lows without wind and moist blobs look alike in one channel and belong to the background.

    python examples/deepcam.py
"""

import shlex
import tempfile

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

import paceline
from paceline.data.masks.pipeline import MaskDataset
from paceline.recipe.data import Data

TRAIN, HELD_OUT, SIDE = 400, 80, 64
CHANNELS = ("wind_east", "wind_north", "pressure", "moisture", "temperature", "rain", "height", "cloud")
CLASSES = ("background", "cyclone", "river")


class WeatherMaps:
    """Maps numbered from ``first``; each is drawn from its number alone."""

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count

    def __len__(self) -> int:
        """The number of maps."""
        return self.count

    def path(self, sample: int) -> str:
        """The name of a map in messages."""
        return f"map {self.first + sample}"

    def read(self, sample: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the map in eight bits, uint8 [SIDE, SIDE, 8], and the class of each point, uint8 [SIDE, SIDE]."""
        draws = np.random.default_rng(self.first + sample)
        y, x = np.mgrid[:SIDE, :SIDE] / SIDE
        weather = dict(zip(CHANNELS, (0.5 * _smooth(draws, y, x) for _ in CHANNELS), strict=True))
        labels = np.zeros((SIDE, SIDE), dtype=np.uint8)

        for _ in range(draws.integers(1, 3)):  # rivers, and as many blobs that are none
            near = np.abs(y - draws.uniform(0.2, 0.8) - 0.25 * np.sin(draws.uniform(3, 6) * x + draws.uniform(0, 6)))
            start = draws.uniform(0, 0.5)
            band = np.exp(-((near / 0.04) ** 2)) * ((x > start) & (x < start + 0.5))
            weather["moisture"] += 2 * band + 2 * _bump(draws, y, x)[0]
            weather["wind_east"] += band
            labels[band > 0.5] = CLASSES.index("river")
        for is_cyclone in draws.permutation([True, True, False, False])[: draws.integers(1, 5)]:
            bump, down, right = _bump(draws, y, x)
            weather["pressure"] -= 2 * bump
            if is_cyclone:
                weather["wind_east"] -= 40 * down * bump
                weather["wind_north"] += 40 * right * bump
                weather["rain"] += bump
                labels[bump > 0.4] = CLASSES.index("cyclone")
        fields = np.stack([weather[name] for name in CHANNELS], axis=-1)
        fields += draws.normal(scale=0.2, size=fields.shape)
        return np.clip(128 + 32 * fields, 0, 255).astype(np.uint8), labels


def _smooth(draws: np.random.Generator, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Waves of a few directions and lengths."""
    waves = draws.uniform(-12, 12, (6, 2)), draws.uniform(0, 6, 6)
    return sum(np.sin(down * y + right * x + phase) for (down, right), phase in zip(*waves, strict=True)) / 3


def _bump(draws: np.random.Generator, y: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A round hill of height 1 somewhere on the map, and the distances from its centre along each axis."""
    (down, right), width = draws.uniform(0.15, 0.85, 2), draws.uniform(0.06, 0.1)
    return np.exp(-((y - down) ** 2 + (x - right) ** 2) / width**2), y - down, x - right


def weather(data: Data) -> MaskDataset:
    """The data set, `data.dataset=deepcam:weather`."""
    train, validation = WeatherMaps(0, TRAIN), WeatherMaps(TRAIN, HELD_OUT)
    scale = {"mean": (0.5,) * len(CHANNELS), "std": (0.15,) * len(CHANNELS)}
    return MaskDataset(
        name="weather", train=train, validation=validation, classes=CLASSES, digest=f"weather 1 {TRAIN} {SIDE}", **scale
    )


class DeepLabV3Plus(nn.Module):
    """Convolutions of several dilations on coarse features, joined with fine features (Chen et al. 2018)."""

    def __init__(self, num_classes: int, in_channels: int, *, width: int = 16) -> None:
        super().__init__()
        self.fine = nn.Sequential(_convolution(in_channels, width), _convolution(width, width, stride=2))
        self.coarse = nn.Sequential(
            _convolution(width, 2 * width, stride=2), _convolution(2 * width, 4 * width, stride=2)
        )
        self.context = nn.ModuleList(_convolution(4 * width, width, dilation=each) for each in (1, 2, 4))
        self.joined = nn.Sequential(_convolution(4 * width, 2 * width), nn.Conv2d(2 * width, num_classes, 1))

    def forward(self, maps: Tensor) -> Tensor:
        """Map float [N, channels, H, W] to logits [N, classes, H, W]."""
        fine = self.fine(maps)
        coarse = self.coarse(fine)
        context = torch.cat([each(coarse) for each in self.context], dim=1)
        context = interpolate(context, fine.shape[-2:], mode="bilinear")
        logits: Tensor = interpolate(self.joined(torch.cat((fine, context), dim=1)), maps.shape[-2:], mode="bilinear")
        return logits


def _convolution(narrow: int, wide: int, *, stride: int = 1, dilation: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(narrow, wide, 3, stride, padding=dilation, dilation=dilation, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(wide), nn.ReLU(inplace=True))


OVERRIDES = f"""data.dataset=deepcam:weather model.name=deepcam:DeepLabV3Plus "model.options={{width: 16}}"
    data.detection=null data.image_size={SIDE} data.workers=0 train.duration="10 epochs" batch.global_size=12
    optimizer.name=lamb optimizer.lr=0.01 evaluate.every="5 epochs" evaluate.batch_size=20 parallel.device=cpu"""

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        overrides = shlex.split(OVERRIDES)
        result = paceline.train("shapes-segmentation", overrides=overrides, run_dir=f"{folder}/run", quiet=True)
    miou, cyclones, rivers = (result.metrics[name] for name in ("miou", "iou_cyclone", "iou_river"))
    print(f"mIoU {miou:.1f} %, cyclones {cyclones:.1f} %, rivers {rivers:.1f} %, after {result.summary.step} steps")
    assert miou > 70, f"expected more than 70 %, found {miou:.1f} %"
