"""Click probabilities, predicted with trained weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.checkpoint.weights import SavedWeights
from paceline.data.image.decode import BrokenImageError
from paceline.errors import DataError
from paceline.parsing.files import SkippedItems
from paceline.parsing.plain_text import load_json
from paceline.prediction.predictor import NOT_FINITE, Answer, Predictor
from paceline.prediction.sources import PictureFile
from paceline_recsys.dataset import ClickRows
from paceline_recsys.sets.criteo import CATEGORIES, DENSE, UNREADABLE, as_click_rows, opened, parse


@dataclass(frozen=True)
class ClickAnswer(Answer):
    """The prediction for one line; its path ends in the line's number, from 1.

    Attributes:
        probability: Click probability; None if the line is invalid.
    """

    probability: float | None = None

    def description(self) -> str:
        """Describe the prediction in one line, without the path."""
        return f"wrong: {self.error}" if self.probability is None else f"{100 * self.probability:.1f} %"

    def row(self) -> dict[str, Any]:
        """Return the prediction as ``path``, ``line``, ``probability`` and ``error``."""
        path, _, line = str(self.path).rpartition(":")
        return {"path": path, "line": int(line), "probability": self.probability, "error": self.error}


class ClickPredictor(Predictor):
    """Trained weights of a recommendation task.

    Args:
        saved: The weights; their file holds the table sizes.
        network: The network with these weights, in evaluation mode on the device.
        device: Where to compute.

    Attributes:
        network: The network.
    """

    classes = ()
    unit = "lines"
    holds = "a network of clicks"
    kind = ClickAnswer
    usual_batch = 1024
    unused_options = MappingProxyType(
        dict.fromkeys(
            ("thresholds", "draw", "output", "batch_size", "stdin_image", "top_k"),
            "these weights take lines of samples",
        )
    )

    def __init__(self, saved: SavedWeights, network: nn.Module, device: torch.device) -> None:
        data = saved.description("data")
        self._saved, self.network, self._device = saved, network, device
        self._dense_features: int = data["dense_features"]
        self._tables: tuple[int, ...] = tuple(data["table_rows"])
        self._is_criteo = data["dataset"] == "criteo"

    def files(self, sources: Sequence[Path], left_out: SkippedItems) -> Iterator[PictureFile]:
        """Yield each line of the files.

        Args:
            sources: Lines in Criteo's format, with or without labels; or JSON lines of the form ``{"dense": [numbers],
                "categories": [rows of the tables]}``, whose numbers are used unchanged.
            left_out: Not called.

        Raises:
            DataError: If a file cannot be read, or its format does not match the weights' training data.
        """
        if missing := [each for each in sources if not each.is_file()]:
            raise DataError(f"'{missing[0]}' is not a file; give files of lines (.tsv, .txt, .jsonl).", path=missing[0])
        return (line for source in sources for line in self._lines(source))

    def _lines(self, source: Path) -> Iterator[PictureFile]:
        is_json = source.name.lower().removesuffix(".gz").endswith(".jsonl")
        if not is_json and not self._is_criteo:
            raise DataError(
                f"'{source}': these weights were not trained on Criteo's format, so the table rows of its categories "
                'are unknown; give JSON lines (.jsonl): {"dense": [numbers], "categories": [rows of the tables]}.'
            )
        try:
            with opened(source) as file:
                for number, line in enumerate(file, start=1):
                    yield PictureFile(Path(f"{source}:{number}"), partial(self._read, line, is_json=is_json))
        except UNREADABLE as error:
            raise DataError(f"'{source}' cannot be read: {error}.", path=source) from error

    def _read(self, line: bytes, *, is_json: bool) -> ClickRows:
        try:
            return self._from_json(line) if is_json else self._from_criteo(line)
        except ValueError as error:
            raise BrokenImageError("line", str(error)) from error

    def prepare(self, content: Any) -> Any:
        """Return what a line holds."""
        return content

    @torch.inference_mode()
    def answer(self, prepared: Sequence[ClickRows], top_k: int) -> list[Answer]:
        """Return the click probability of each line, in order, without paths."""
        dense = torch.from_numpy(np.concatenate([each.dense for each in prepared])).to(self._device)
        categories = torch.from_numpy(np.concatenate([each.categories for each in prepared])).to(self._device)
        logits = self.network(dense, categories).float()
        return [
            ClickAnswer(Path(), probability=each) if is_finite else ClickAnswer(Path(), error=NOT_FINITE)
            for is_finite, each in zip(logits.isfinite().tolist(), logits.sigmoid().tolist(), strict=True)
        ]

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
