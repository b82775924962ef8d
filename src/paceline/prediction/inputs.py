"""What a predictor is given in Python: paths, texts, pictures and arrays, in any order."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from paceline.errors import DataError
from paceline.parsing.files import SkippedItems
from paceline.prediction.predictor import Answer, Predictor, Reply
from paceline.prediction.sources import PictureFile
from paceline.records.run_directory import encode_json

_TEXT_FILES = (".jsonl", ".tsv", ".txt")
# Pillow's modes that PNG stores unchanged.
_STORED = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")


def prompts_in(predictor: Predictor, inputs: Sequence[Any]) -> list[str]:
    """Return inputs that are prompts; none if these weights take none, or one of the inputs is not a text."""
    if type(predictor).reply is Predictor.reply:
        return []
    prompts = [each for each in inputs if isinstance(each, str) and not each.endswith(_TEXT_FILES)]
    return prompts if len(prompts) == len(inputs) and not any(map(os.path.exists, prompts)) else []


def pictures_in(predictor: Predictor, inputs: Sequence[Any], left_out: SkippedItems) -> Iterator[PictureFile]:
    """Return the files of paths and folders, and pictures and arrays as files, in order.

    Args:
        predictor: The predictor.
        inputs: Paths, pictures of Pillow, and arrays of uint8 [height, width] or [height, width, channels].
        left_out: Called for files that are not used.

    Raises:
        DataError: If an input is not one of these, or these weights do not take pictures.
    """
    found: list[Iterable[PictureFile]] = []
    for is_path, group in groupby(enumerate(inputs), key=lambda each: isinstance(each[1], str | os.PathLike)):
        if is_path:
            found.append(predictor.files([Path(each).expanduser() for _, each in group], left_out))
        else:
            found.append([_in_memory(predictor, value, place) for place, value in group])
    return chain.from_iterable(found)


def _in_memory(predictor: Predictor, value: Any, place: int) -> PictureFile:
    if type(predictor).files is not Predictor.files:
        raise DataError(
            f"inputs[{place}] is a {type(value).__name__}, and the weights are {predictor.holds}, which takes no "
            "pictures."
        )
    return PictureFile(Path(f"inputs[{place}]"), partial(bytes, _encoded(value, place)))


def _encoded(value: Any, place: int) -> bytes:
    """Return a picture as a file, which predictors decode as any other."""
    if not isinstance(value, Image.Image):
        pixels = np.asarray(value)
        shape = pixels.shape[:2] if pixels.shape[2:] == (1,) else pixels.shape
        if pixels.dtype != np.uint8 or not (len(shape) == 2 or (len(shape) == 3 and shape[2] in (3, 4))):
            raise DataError(
                f"inputs[{place}] is {pixels.dtype} {list(pixels.shape)}; give a path, a picture of Pillow, or an "
                "array of uint8 [height, width] or [height, width, channels]."
            )
        value = Image.fromarray(pixels.reshape(shape))
    file = io.BytesIO()
    (value if value.mode in _STORED else value.convert("RGB")).save(file, "PNG", exif=value.getexif())
    return file.getvalue()


def rows_of(answers: Iterable[Answer | Reply]) -> list[dict[str, Any]]:
    """Return answers as `paceline predict --json` prints them."""
    rows = [each.document if isinstance(each, Reply) else each.row() for each in answers]
    return json.loads(encode_json(rows))  # type: ignore[no-any-return]  # a list becomes a list
