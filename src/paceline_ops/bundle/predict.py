"""Say what is in photos, with the model in this folder: `python predict.py photo.jpg …`.

It needs Python 3.10 with onnxruntime, numpy and pillow: nothing else, and no network.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from PIL import Image

from paceline.data.image.pillow_pixels import decoded, open_image

with contextlib.suppress(ImportError):  # HEIC photos
    import pillow_heif

    pillow_heif.register_heif_opener()

FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
Numbers = NDArray[Any]


class Model:
    """The model of a folder.

    Args:
        folder: Has ``model.onnx``, and ``model.json``, which says how images are prepared and what the outputs mean.
    """

    def __init__(self, folder: Path) -> None:
        self.about: dict[str, Any] = json.loads((folder / "model.json").read_text(encoding="utf-8"))
        self._session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])

    def answer(self, content: bytes) -> tuple[dict[str, float], Image.Image | None]:
        """Return labels with their probabilities, the most probable first, of an image file's content.

        Returns:
            For a model of numbers, these instead. For a model of pixels, shares of the pixels instead, and the label
            of each pixel as an image of numbers.

        Raises:
            Exception: Of Pillow, if it cannot be read; ValueError if the network computes no finite number.
        """
        about = self.about
        with open_image(io.BytesIO(content)) as opened:
            pixels = decoded(opened, content, about["channels"])
        image = Image.fromarray(pixels[:, :, 0] if about["channels"] == 1 else pixels)
        if about["learns"] == "pixels":
            return self._pixels(image)
        values = self._values(self._normalized(self._square(image)))
        order = np.argsort(-values, kind="stable").tolist()
        if about["learns"] == "numbers":
            order = sorted(order)
        elif about["learns"] == "labels":
            order = [each for each in order if values[each] > about["thresholds"][each]]
        return {about["names"][each]: float(values[each]) for each in order}, None

    def _square(self, image: Image.Image) -> Image.Image:
        """Resize until the image just covers the square and its margin, and keep the centre."""
        size, crop = self.about["size"], self.about["crop"]
        width, height = image.size
        if (width, height) == (size, size) and not (self.about["always_resized"] and crop < 1):
            return image
        side = round(size / crop)
        wide, high = max(side, side * width // height), max(side, side * height // width)
        left, top = round((wide - size) / 2), round((high - size) / 2)
        right, bottom = left + size, top + size
        box = (left * width / wide, top * height / high, right * width / wide, bottom * height / high)
        return image.resize((size, size), FILTERS[self.about["interpolation"]], box)

    def _normalized(self, image: Image.Image) -> Numbers:
        """Return float32 [1, channels, height, width]."""
        pixels = np.asarray(image, dtype=np.float64).reshape(image.height, image.width, -1)
        found = (pixels / 255 - self.about["mean"]) / self.about["std"]
        return np.ascontiguousarray(found.transpose(2, 0, 1)[None], dtype=np.float32)

    def _logits(self, images: Numbers) -> Numbers:
        (logits,) = self._session.run(["logits"], {"images": np.ascontiguousarray(images)})
        if not np.isfinite(logits).all():
            raise ValueError("the network's output is not a finite number")
        return np.asarray(logits[0], dtype=np.float64)

    def _values(self, images: Numbers) -> Numbers:
        learns = self.about["learns"]
        if learns == "numbers":
            return self._logits(images)
        if learns == "labels":
            return np.asarray(1 / (1 + np.exp(-self._logits(images))))
        parts = [(weight, np.exp(logits - logits.max())) for weight, logits in self._views(images)]
        return np.asarray(sum(weight * part / part.sum() for weight, part in parts))

    def _views(self, images: Numbers) -> Iterator[tuple[float, Numbers]]:
        """Yield the logits of each view that the run's evaluation averages, with its weight."""
        kind, (height, width) = self.about["views"], images.shape[2:]
        if kind == "none":
            yield 1, self._logits(images)
            return
        shifted = kind == "flip_shift"  # by a pixel to the lower right and the upper left
        views = [(0.25 if shifted else 0.5, images)]
        if shifted:
            padded = np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1)), mode="reflect")
            views += [(0.125, padded[:, :, at : at + height, at : at + width]) for at in (0, 2)]
        for weight, view in views:
            yield weight, self._logits(view)
            yield weight, self._logits(view[:, :, :, ::-1])

    def _pixels(self, image: Image.Image) -> tuple[dict[str, float], Image.Image]:
        size, longer = self.about["size"], max(image.size)
        width, height = (max(1, round(each * size / longer)) for each in image.size)
        shown = Image.new("RGB", (size, size), tuple(round(255 * each) for each in self.about["mean"]))
        shown.paste(image.resize((width, height), FILTERS[self.about["interpolation"]]), (0, 0))
        best, found = np.full((image.height, image.width), -math.inf), np.zeros((image.height, image.width), np.uint8)
        for label, scores in enumerate(self._logits(self._normalized(shown))):
            larger = _enlarged(scores[:height, :width], image.height, image.width)
            found[larger > best], best = label, np.maximum(best, larger)
        shares = np.bincount(found.ravel(), minlength=len(self.about["names"])) / found.size
        order = [each for each in np.argsort(-shares, kind="stable").tolist() if shares[each] > 0]
        return {self.about["names"][each]: float(shares[each]) for each in order}, Image.fromarray(found)


def _enlarged(values: Numbers, height: int, width: int) -> Numbers:
    """Interpolate linearly between the centres of pixels, [rows, columns] to [height, width]."""
    for axis, wanted in enumerate((height, width)):
        have = values.shape[axis]
        places = np.clip((np.arange(wanted) + 0.5) * have / wanted - 0.5, 0, have - 1)
        low = np.floor(places).astype(int)
        part = np.expand_dims(places - low, 1 - axis)
        high = np.minimum(low + 1, have - 1)
        values = values.take(low, axis) * (1 - part) + values.take(high, axis) * part
    return values


def _one_line(text: str) -> str:
    """Escape what a terminal would obey."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def _in_words(about: dict[str, Any], found: list[tuple[str, float]]) -> str:
    if about["learns"] == "numbers":
        return "  ".join(f"{name} {value:.7g}" for name, value in found)
    return "  ".join(f"{name} {100 * value:.1f} %" for name, value in found) or "no label"


def main() -> int:
    """Print a line for each photo; return 1 if one cannot be read."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("photos", nargs="+", metavar="PHOTO")
    parser.add_argument("--top-k", type=int, default=3, help="most labels shown for a photo (default: 3)")
    parser.add_argument("--json", action="store_true", help="print a JSON object for each photo, with all labels")
    parser.add_argument("--masks", type=Path, metavar="DIR", help="write the number of each pixel's class as PNG files")
    options = parser.parse_args()
    model, failed = Model(Path(__file__).resolve().parent), 0
    if options.masks is not None:
        if model.about["learns"] != "pixels":
            parser.error("--masks is for models of pixels, and this one labels whole photos; leave it out")
        options.masks.mkdir(parents=True, exist_ok=True)
    for path in options.photos:
        found, mask, error = dict[str, float](), None, ""
        try:
            found, mask = model.answer(Path(path).read_bytes())
            if options.masks is not None and mask is not None:
                with (options.masks / f"{Path(path).stem}.png").open("xb") as file:
                    mask.save(file, "PNG")
        except IsADirectoryError:
            failed, error = 1, f"a folder; give its files: {Path(path) / '*'}"
        except Exception as problem:  # noqa: BLE001  # Pillow's plugins raise anything
            failed, error = 1, str(problem) or type(problem).__name__
        if options.json:
            sys.stdout.write(json.dumps({"path": path, "values": found, "error": error or None}) + "\n")
            continue
        shown = list(found.items())[: options.top_k if model.about["learns"] == "class" else None]
        sys.stdout.write(f"{_one_line(path)}  {_one_line(error or _in_words(model.about, shown))}\n")
    return failed


if __name__ == "__main__":
    sys.exit(main())
