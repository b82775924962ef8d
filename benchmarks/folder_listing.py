"""How long until an image folder's files are known: listed anew, and remembered from the time before?

Small files, in as many class folders as ImageNet has, those of a folder hard links to one; both ways take turns. What
is timed is the whole of opening: the listing, the digest of all names and sizes, the heads of 256 files, and the arrays
that loader processes share.

    python benchmarks/folder_listing.py [--files 300000] [--classes 1000] [--rounds 5]
"""

from __future__ import annotations

import argparse
import io
import os
import tempfile
import time
from pathlib import Path

from hardware import spread, write_result
from PIL import Image

from paceline.data.image.dataset import DatasetRequest
from paceline.data.image.datasets import open_stored
from paceline.data.image.sets.image_folder import cache_file
from paceline.recipe.data import Data


def make_tree(root: Path, files: int, classes: int) -> None:
    """Write small images in class folders."""
    content = io.BytesIO()
    Image.new("RGB", (8, 8)).save(content, "JPEG")
    for label in range(classes):
        folder = root / f"n{label:08d}"
        folder.mkdir(parents=True)
        first = folder / f"n{label:08d}_0.JPEG"
        first.write_bytes(content.getvalue())
        for number in range(1, files // classes):
            os.link(first, folder / f"n{label:08d}_{number}.JPEG")


def seconds(root: Path) -> tuple[float, str]:
    """Open the folder; how long it took, and what was said of it."""
    begin = time.perf_counter()
    how = open_stored(
        DatasetRequest(data=Data(dataset="image_folder", path=str(root), channels=3, validation_fraction=0))
    ).listing
    return time.perf_counter() - begin, how


def main() -> None:
    """Make the files, open them in both ways, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=300_000)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["XDG_CACHE_HOME"] = str(Path(scratch, "cache"))
        root = Path(scratch, "images")
        make_tree(root, arguments.files, arguments.classes)
        time.sleep(4)  # folders that changed just now are not remembered
        relisted, remembered = [], []
        for _ in range(arguments.rounds):
            cache_file(root).unlink(missing_ok=True)
            relisted.append(seconds(root)[0])
            took, how = seconds(root)
            if "from a cached listing" not in how:
                raise SystemExit(f"listed again: {how}")
            remembered.append(took)
        size = cache_file(root).stat().st_size
    result = {"files": arguments.files, "anew_seconds": spread(relisted), "remembered_seconds": spread(remembered)}
    lines = [
        f"{arguments.files:,} small files in {arguments.classes:,} class folders; median of {arguments.rounds}.",
        "",
        "| opened | seconds |",
        "|---|---|",
        f"| listed anew | {result['anew_seconds']['median']:.2f} |",
        f"| remembered | {result['remembered_seconds']['median']:.2f} |",
        "",
        f"- remembered in a file of {size / 1e6:.1f} MB",
    ]
    print("\n".join(lines))
    print(write_result("folder-listing", {**result, "memory_file_bytes": size}, lines))


if __name__ == "__main__":
    main()
