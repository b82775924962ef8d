"""Click probabilities, predicted with trained weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.checkpoint.weights import SavedWeights, load_trained
from paceline.data.clicks.dataset import ClickDataset, ClickRows
from paceline.data.clicks.sets.criteo import CATEGORIES, DENSE, UNREADABLE, as_click_rows, opened, parse
from paceline.errors import DataError, RecipeError
from paceline.inference.answers import NOT_FINITE
from paceline.inference.trained import trained_recipe, trained_task
from paceline.plain_json import load_json
from paceline.tasks.recommendation import Recommendation

_LINES = 1024


@dataclass(frozen=True)
class ClickAnswer:
    """The prediction for one line.

    Attributes:
        path: File of the line.
        line: Line number, from 1.
        probability: Click probability; None if the line is invalid.
        error: Why the line is invalid.
    """

    path: str
    line: int
    probability: float | None = None
    error: str | None = None


class ClickPredictor:
    """Trained weights of a recommendation task; needs only the weights file.

    Args:
        saved: The weights; their file holds the table sizes.
        device: Where to compute.
        trust_code: Whether to import code named in the weights' recipe.

    Attributes:
        network: The network, in evaluation mode on the device.
    """

    def __init__(self, saved: SavedWeights, device: torch.device, *, trust_code: bool = False) -> None:
        data, source = saved.description("data"), str(saved.path)
        self._device = device
        self._dense_features: int = data["dense_features"]
        self._tables: tuple[int, ...] = tuple(data["table_rows"])
        self._is_criteo = data["dataset"] == "criteo"
        recipe = trained_recipe(saved)
        task = trained_task(saved, trust_code=trust_code)(recipe)
        if not isinstance(task, Recommendation):
            raise RecipeError(
                f"the weights in {source} were trained with the task {recipe.task}, not a recommendation task."
            )
        nothing: Any = ()  # no sample is requested
        task.dataset = ClickDataset(
            name=data["dataset"],
            train=nothing,
            validation=nothing,
            dense_features=self._dense_features,
            tables=self._tables,
            digest=data["digest"],
        )
        network = task.build_model()
        load_trained(network, saved)
        self.network: nn.Module = network.to(device).eval()

    def predict(self, path: Path) -> Iterator[ClickAnswer]:
        """Yield one prediction per line, in order; an invalid line gets an error entry.

        Args:
            path: Lines in Criteo's format, with or without labels; or JSON lines of the form ``{"dense": [numbers],
                "categories": [rows of the tables]}``, whose numbers are used unchanged.

        Raises:
            DataError: If the file cannot be read, or its format does not match the weights' training data.
        """
        is_json = path.name.lower().removesuffix(".gz").endswith(".jsonl")
        if not is_json and not self._is_criteo:
            raise DataError(
                f"'{path}': these weights were not trained on Criteo's format, so the table rows of its categories "
                'are unknown; give JSON lines (.jsonl): {"dense": [numbers], "categories": [rows of the tables]}.'
            )
        try:
            with opened(path) as file:
                numbered = enumerate(file, start=1)
                while lines := list(islice(numbered, _LINES)):
                    yield from self._answers(str(path), lines, is_json=is_json)
        except UNREADABLE as error:
            raise DataError(f"'{path}' cannot be read: {error}.") from error

    @torch.inference_mode()
    def _answers(self, path: str, lines: list[tuple[int, bytes]], *, is_json: bool) -> Iterator[ClickAnswer]:
        rows: list[ClickRows] = []
        answers: dict[int, ClickAnswer] = {}
        good = []
        for number, line in lines:
            try:
                rows.append(self._from_json(line) if is_json else self._from_criteo(line))
                good.append(number)
            except ValueError as error:
                answers[number] = ClickAnswer(path, number, error=str(error))
        if rows:
            dense = torch.from_numpy(np.concatenate([each.dense for each in rows])).to(self._device)
            categories = torch.from_numpy(np.concatenate([each.categories for each in rows])).to(self._device)
            logits = self.network(dense, categories).float()
            scored = zip(good, logits.isfinite().tolist(), logits.sigmoid().tolist(), strict=True)
            answers |= {
                number: ClickAnswer(path, number, each if is_finite else None, None if is_finite else NOT_FINITE)
                for number, is_finite, each in scored
            }
        return iter([answers[number] for number, _ in lines])

    def _from_criteo(self, line: bytes) -> ClickRows:
        has_label = line.count(b"\t") != DENSE + CATEGORIES - 1
        rows, faults = parse([line], "", has_label=has_label)
        if faults:
            raise ValueError(faults[0].reason)
        return as_click_rows(rows, self._tables)

    def _from_json(self, line: bytes) -> ClickRows:
        try:
            values: Any = load_json(line)
            dense = np.array([values["dense"]], dtype=np.float32)
            categories = np.array([values["categories"]])
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise ValueError(f'it must be {{"dense": [numbers], "categories": [rows]}} ({error})') from None
        expected = (self._dense_features, len(self._tables))
        if dense.shape != (1, expected[0]) or categories.shape != (1, expected[1]):
            raise ValueError(f"it must have {expected[0]} numbers and {expected[1]} categories")
        if not np.isfinite(dense).all():
            raise ValueError("its numbers must be finite")
        if categories.dtype.kind != "i" or (categories < 0).any() or (categories >= np.array(self._tables)).any():
            raise ValueError(f"categories must be rows of tables that have {', '.join(map(str, self._tables))} of them")
        return ClickRows(dense, categories.astype(np.int64), np.zeros(1, dtype=np.uint8))
