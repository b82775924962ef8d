"""Which objects do trained weights find in these pictures, and where?"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw

from paceline.checkpoint.components import check_inventory
from paceline.checkpoint.weights import SavedWeights
from paceline.data.boxes.pipeline import as_floats, as_tensor
from paceline.data.image.decode import BrokenImageError, Pixels, decode
from paceline.models.detectors import build_detector
from paceline.recipe.load import refuse_foreign_code, stored_recipe

_SURE = 0.5
# Bright ones that follow one another apart on the colour circle, one for each class in turn.
_COLOURS = ("#ff4b4b", "#3fd0ff", "#ffd23f", "#7dff6a", "#ff7bf0", "#ffa04b", "#8ea2ff", "#ffffff")


@dataclass(frozen=True)
class Detections:
    """The answer for one picture.

    Attributes:
        path: The image file.
        labels: Class names, the surest first; empty if nothing was found, or the picture could not be read.
        probabilities: How sure each is, in [0, 1].
        boxes: Left, top, right and bottom edge of each in pixels of the file's picture.
        error: Why there is no answer, if there is none.
    """

    path: Path
    labels: tuple[str, ...] = ()
    probabilities: tuple[float, ...] = ()
    boxes: tuple[tuple[float, float, float, float], ...] = ()
    error: str | None = None

    def described(self) -> str:
        """The answer as one line for people, without the path."""
        if self.error is not None:
            return f"unreadable: {self.error}"
        rows = zip(self.labels, self.probabilities, self.boxes, strict=True)
        said = (f"{label} {100 * sure:.1f} % ({', '.join(f'{edge:.0f}' for edge in box)})" for label, sure, box in rows)
        return "  ".join(said) or f"nothing of {100 * _SURE:.0f} % or more"


def _copies(paths: Sequence[Path]) -> dict[Path, str]:
    """What each picture's copy is called: as the picture, and numbered where others are called so."""
    taken: set[str] = set()
    names: dict[Path, str] = {}
    for path in paths:
        if path in names:
            continue
        tries = itertools.chain([f"{path.stem}.png"], (f"{path.stem}-{number}.png" for number in itertools.count(2)))
        # Some file systems tell no large letters from small ones.
        names[path] = next(each for each in tries if each.lower() not in taken)
        taken.add(names[path].lower())
    return names


class DetectionPredictor:
    """A trained detector; needs no file but the weights' own.

    Args:
        saved: The weights; their file says how their network was built, and how pictures were shown.
        device: Where to compute.
        trust_code: Whether the weights' recipe may name code to import.
    """

    usual_top_k = 100

    def __init__(self, saved: SavedWeights, device: torch.device, *, trust_code: bool = False) -> None:
        where = str(saved.path)
        recipe = stored_recipe(saved.described("recipe"), where)
        self.classes: tuple[str, ...] = tuple(saved.described("data")["class_names"])
        refuse_foreign_code({"model": saved.described("recipe").get("model", {})}, recipe, where, trusted=trust_code)
        # The weights come from the file: nothing is downloaded or initialised from elsewhere.
        model = replace(recipe.model, pretrained=False, initialize_from=None)
        network = build_detector(model, recipe.data.boxes, num_classes=len(self.classes))
        check_inventory(network.state_dict(), saved.plain, where=where)
        network.load_state_dict(saved.plain)
        self._network = network.to(device).eval()
        self._device = device

    def predict(self, paths: Sequence[Path], *, top_k: int = 100, draw: Path | None = None) -> Iterator[Detections]:
        """Yield one answer per file, in order; an unreadable file is an answer too.

        Args:
            paths: The files.
            top_k: Most objects to tell of a picture.
            draw: A folder for copies of the pictures with what was found drawn into them.
        """
        copies = _copies(paths)
        for path in paths:
            try:
                pixels = decode(path, 3)
            except BrokenImageError as error:
                yield Detections(path, error=error.reason)
                continue
            found = self._found(pixels, top_k)
            answer = self._answer(path, found)
            if draw is not None:
                draw.mkdir(parents=True, exist_ok=True)
                self._drawn(pixels, answer, found).save(draw / copies[path])
            yield answer

    @torch.inference_mode()
    def _found(self, pixels: Pixels, top_k: int) -> dict[str, torch.Tensor]:
        """What is likelier there than not, the surest first, on the CPU."""
        found: dict[str, torch.Tensor] = self._network(as_floats([as_tensor(pixels).to(self._device)]))[0]
        sure = found["scores"].sort(descending=True, stable=True).indices
        kept = sure[found["scores"][sure] >= _SURE][:top_k]
        return {name: each[kept].cpu() for name, each in found.items()}

    def _answer(self, path: Path, found: dict[str, torch.Tensor]) -> Detections:
        boxes: list[Any] = [tuple(round(edge, 2) for edge in box) for box in found["boxes"].tolist()]
        return Detections(
            path,
            tuple(self.classes[label - 1] for label in found["labels"].tolist()),
            tuple(found["scores"].tolist()),
            tuple(boxes),
        )

    def _drawn(self, pixels: Pixels, answer: Detections, found: dict[str, torch.Tensor]) -> Image.Image:
        """The picture with boxes and, where there are any, masks."""
        picture = Image.fromarray(pixels)
        colours = [_COLOURS[self.classes.index(label) % len(_COLOURS)] for label in answer.labels]
        for colour, mask in zip(colours, found.get("masks", ()), strict=False):
            seen = Image.fromarray(((mask[0] >= _SURE).to(torch.uint8) * 110).numpy(), mode="L")
            picture.paste(Image.new("RGB", picture.size, colour), mask=seen)
        pen = ImageDraw.Draw(picture)
        for colour, box, label in zip(colours, answer.boxes, answer.labels, strict=True):
            pen.rectangle(box, outline=colour)
            pen.text((box[0] + 2, box[1] + 1), label, fill=colour)
        return picture
