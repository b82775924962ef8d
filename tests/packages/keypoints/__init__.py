"""Keypoints: find the centre of a bright spot in a generated picture. The whole task is in this folder."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.checkpoint.weights import SavedWeights
from paceline.data.batch import Batch
from paceline.data.pipeline import Pipeline, Placement, SimplePipeline
from paceline.data.random_draws import uniforms
from paceline.data.slices import SampleSlice
from paceline.host.world import World
from paceline.metrics.accumulator import Metric
from paceline.plan import DataFacts
from paceline.recipe.unused import all_but
from paceline.tasks.task import Model, Task
from paceline_vision.drawing import draw_objects

if TYPE_CHECKING:
    from keypoints.predict import KeypointPredictor
    from paceline.tasks.exportable import Exportable

SIDE = 16
_SAMPLES = {True: 64, False: 16}


class Finder(nn.Module):
    """Finds a point: pictures, float32 [N, 1, 16, 16] in [0, 1], to x and y in [0, 1], [N, 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1))
        self.register_buffer("places", (torch.arange(SIDE) + 0.5) / SIDE)

    def forward(self, pictures: Tensor) -> Tensor:
        """Return the mean place, weighted by the softmax of the scores."""
        weights = self.scores(pictures).flatten(1).softmax(dim=1).unflatten(1, (SIDE, SIDE))
        return torch.stack([weights.sum(dim=1) @ self.places, weights.sum(dim=2) @ self.places], dim=1)


class Keypoints(Task):
    """Predicts where the spot is."""

    headline = "distance"
    unit = "pictures"
    metrics = (Metric(name="loss"), Metric(name="distance"))

    @cached_property
    def points(self) -> dict[bool, Any]:
        """Places of the spots of training (true) and held-out pictures, float64 [samples, 2]."""
        return {training: uniforms(int(training), 0, np.arange(count), 2) for training, count in _SAMPLES.items()}

    def data_facts(self, world: World) -> DataFacts:
        """Return the number of pictures."""
        return DataFacts(
            train_samples=_SAMPLES[True],
            evaluation_samples=_SAMPLES[False],
            description={"dataset": "spots", "digest": "spots 1"},
            unused=all_but(("data.dataset",), "pictures of spots are drawn"),
        )

    def description(self) -> dict[str, Any]:
        """Return what prediction needs."""
        return {"side": SIDE}

    def open_pipeline(self, placement: Placement) -> Pipeline:
        """Open batches of drawn pictures."""
        return SimplePipeline(self._read, evaluation_samples=_SAMPLES[False], placement=placement, name="spot")

    def _read(self, part: SampleSlice, training: bool) -> tuple[Tensor, Tensor]:
        points = torch.from_numpy(self.points[training][part.ids]).float()
        places = (torch.arange(SIDE) + 0.5) / SIDE
        x, y = (torch.exp(-((places - points[:, axis, None]) ** 2) / 0.005) for axis in range(2))
        return (y[:, :, None] * x[:, None, :])[:, None], points

    def build_model(self) -> nn.Module:
        """Build the network."""
        return Finder()

    def loss(self, model: Model, batch: Batch) -> Tensor:
        """Return the mean squared distance."""
        return (model(batch.inputs) - batch.targets).square().sum(dim=1).mean()

    def score(self, model: Model, batch: Batch) -> dict[str, Any]:
        """Return the squared distance, and the distance in pixels."""
        squares = (model(batch.inputs) - batch.targets).square().sum(dim=1)
        return {"loss": squares, "distance": SIDE * squares.sqrt()}

    def predict(self, model: Model, batch: Batch) -> dict[str, Any]:
        """Return the place."""
        x, y = model(batch.inputs).T
        return {"x": x, "y": y}

    def shown(self, batch: Batch) -> list[tuple[Tensor, str]]:
        """Return the pictures with a box around the spot."""
        pictures = (255 * batch.inputs.cpu()).to(torch.uint8).expand(-1, 3, -1, -1)
        boxes = SIDE * torch.cat([batch.targets - 0.1, batch.targets + 0.1], dim=1).cpu()
        return [
            (draw_objects(picture, [0], masks=None, boxes=box[None]), f"{box[0]:.0f}, {box[1]:.0f}")
            for picture, box in zip(pictures, boxes, strict=True)
        ]

    def recall(self, saved: SavedWeights) -> None:
        """Need no data."""

    def predictor(self, saved: SavedWeights, device: torch.device) -> KeypointPredictor:
        """Return what finds spots in image files."""
        from keypoints.predict import KeypointPredictor

        return KeypointPredictor(saved, self.trained(saved, device), device)

    def exportable(self, saved: SavedWeights, target: str) -> Exportable:
        """Return the network with its input."""
        from paceline.tasks.exportable import Exportable, Input

        pictures = Input("pictures", ("batch", 1, SIDE, SIDE), None, "grey, in [0, 1], float32")
        return Exportable(network=self.trained(saved), inputs=(pictures,), longest={}, saved=saved)
