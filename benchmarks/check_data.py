"""What does `paceline check-data` cost beside plain decoding, per image?

The same JPEGs of 500x375, cut out of the two photos that scikit-learn brings, are decoded as a run decodes them, and
looked at as check-data looks at them (which is decoding, and a digest, a hash of how they look, their head and their
brightness). Both take turns in one process, in processor time; ratios are taken round by round.

    python benchmarks/check_data.py [--images DIR] [--count 100] [--rounds 7]
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from hardware import spread, write_result
from PIL import Image

from paceline.data.image.source import FileSource
from paceline_data.inspect.look import ROW, Viewer, look


def cut_photos(folder: Path, count: int) -> list[Path]:
    """Write ``count`` different parts of two photos, 500x375 pixels each."""
    package = importlib.util.find_spec("sklearn")
    assert package is not None
    assert package.origin is not None
    photos = [Image.open(path) for path in sorted((Path(package.origin).parent / "datasets" / "images").glob("*.jpg"))]
    draws = np.random.default_rng(0)
    paths = []
    for number in range(count):
        photo = photos[number % len(photos)]
        width = int(draws.integers(300, photo.width))
        height = width * 3 // 4 if width * 3 // 4 < photo.height else photo.height - 1
        left, top = int(draws.integers(0, photo.width - width)), int(draws.integers(0, photo.height - height))
        paths.append(folder / f"{number:04}.jpg")
        photo.crop((left, top, left + width, top + height)).resize((500, 375)).save(paths[-1], quality=90)
    return paths


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the result files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        if options.images is None:
            paths = cut_photos(Path(scratch), options.count)
        else:
            paths = sorted(options.images.rglob("*.jp*g"))[: options.count]
        names = [str(path.absolute()).encode() for path in paths]
        source = FileSource(Path("/"), names, np.zeros(len(names), dtype=np.int64), channels=3)
        viewer = Viewer(image_size=224, channels=3, has_files=True)
        row = np.zeros(1, dtype=ROW)[0]
        milliseconds: dict[str, list[float]] = {"decode": [], "check": []}
        for turn in range(options.rounds + 1):
            for label, values in milliseconds.items():
                started = time.process_time()
                for sample in range(len(source)):
                    if label == "decode":
                        source.read(sample)
                    else:
                        look(source, sample, viewer, row)
                if turn:  # the first round warms up
                    values.append(1000 * (time.process_time() - started) / len(source))
    pairs = zip(milliseconds["check"], milliseconds["decode"], strict=True)
    ratio = spread([check / decode for check, decode in pairs])
    figures = {label: spread(values) for label, values in milliseconds.items()}
    line = (
        f"Checking an image costs {ratio['median']:.2f} times what decoding it does ({ratio['minimum']:.2f} to "
        f"{ratio['maximum']:.2f}, {ratio['runs']} rounds): {figures['check']['median']:.2f} ms of processor time, "
        f"beside {figures['decode']['median']:.2f} ms."
    )
    print(line)
    print(write_result("check-data-cost", {"ratio": ratio, "cpu_ms_per_image": figures, "images": len(names)}, [line]))


if __name__ == "__main__":
    main()
