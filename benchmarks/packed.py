"""What does an image cost from a packed dataset to the batch, in each mode, beside FFCV's files of the same modes?

Three modes, each written by Paceline and by FFCV from the same JPEG files: the originals byte for byte, re-encoded
JPEGs (longest side 500, quality 90), and raw pixels (longest side 400). All cut a random resized crop of 224, flip half
of them, and make uint8 batches. Each measurement is a process of its own, and all take turns (A B C … A B C …).
Measured are processor time per image with everything in one thread (the sturdier number on a machine that others use
too), and images per second with two workers. The files are those of ``input_pipeline.py``.

    python benchmarks/packed.py [--peers PYTHON] [--images FOLDER] [--rounds 5] [--only NAME …]

``--peers`` names the Python of an environment with ffcv, numba and opencv. A contender that cannot run is left out, and
named.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pipeline_harness import Contender, Setting, main

MODES: dict[str, dict[str, Any]] = {
    "original JPEGs": {"mode": "original"},
    "JPEGs of 500, quality 90": {"mode": "jpeg", "max_side": 500, "quality": 90},
    "raw 400": {"mode": "raw", "max_side": 400},
}
OURS, FFCV, FOLDER = "Paceline, ", "FFCV, ", "Paceline, folder"


def _backend(setting: Setting, mode: str | None) -> Iterator[int]:
    import numpy as np
    import torch

    from paceline.data.image.dataset import DatasetRequest
    from paceline.data.image.datasets import open_stored
    from paceline.data.image.transforms import View
    from paceline.data.loaders.pytorch import PytorchBackend
    from paceline.data.slices import SampleSlice
    from paceline.recipe.data import Augment, Data

    torch.set_num_threads(1)
    if mode is None:
        source = open_stored(
            DatasetRequest(
                data=Data(dataset="image_folder", path=str(setting.folder), channels=3, validation_fraction=0)
            )
        ).train
    else:
        source = open_stored(
            DatasetRequest(
                data=Data(dataset="packed", path=str(packed(setting, mode)), channels=3, validation_fraction=0)
            )
        ).train
    view = View(image_size=setting.size, channels=3, augment=Augment(crop="random_resized", flip=0.5))
    backend = PytorchBackend(source, view, workers=setting.workers)

    def slices() -> Iterator[SampleSlice]:
        for epoch in itertools.count():
            order = np.random.default_rng(epoch).permutation(len(source))
            for at in range(0, len(order) - setting.batch + 1, setting.batch):
                ids = order[at : at + setting.batch]
                yield SampleSlice(step=0, epoch=epoch, logical_rank=0, ids=ids, step_weight=len(ids))

    return (len(batch.ids) for batch in backend.batches(slices()))


def packed(setting: Setting, mode: str) -> Path:
    """Pack the folder in a mode, unless that was done before."""
    from paceline_data.packing.pack import Request, pack

    root = Path(setting.files) / f"packed {mode}"
    if not (root / "packed.json").exists():
        request = Request(source=setting.folder, destination=root, **MODES[mode])
        pack(request, lambda done, total: None, lambda line: None)
    return root


def _ffcv(setting: Setting, mode: str) -> Iterator[int]:
    from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import RandomHorizontalFlip, ToTensor

    shape = (setting.size, setting.size)
    loader = Loader(
        str(_beton(setting, mode)),
        batch_size=setting.batch,
        num_workers=max(setting.workers, 1),
        order=OrderOption.RANDOM,
        os_cache=True,
        drop_last=True,
        pipelines={
            "image": [RandomResizedCropRGBImageDecoder(shape), RandomHorizontalFlip(), ToTensor()],
            "label": [IntDecoder(), ToTensor()],
        },
    )
    return (len(batch[0]) for _ in itertools.count() for batch in loader)


def _beton(setting: Setting, mode: str) -> Path:
    """Write FFCV's file of a mode, unless that was done before."""
    import numpy as np
    from ffcv.fields import IntField, RGBImageField
    from ffcv.fields.rgb_image import IMAGE_MODES
    from ffcv.writer import DatasetWriter
    from PIL import Image

    paths = sorted(Path(setting.folder).glob("*/*"))
    settings = MODES[mode]

    class Files:
        def __len__(self) -> int:
            return len(paths)

        def __getitem__(self, index: int) -> tuple[Any, int]:
            # FFCV takes a path where its own encoding is replaced below, and an image elsewhere.
            return (paths[index] if settings["mode"] == "original" else Image.open(paths[index]).convert("RGB")), 0

    def keep(_: Any, destination: Any, path: Path, malloc: Any) -> None:
        with Image.open(path) as image:
            destination["width"], destination["height"] = image.size
        content = np.frombuffer(path.read_bytes(), dtype=np.uint8)
        destination["mode"] = IMAGE_MODES["jpg"]
        destination["data_ptr"], storage = malloc(content.nbytes)
        storage[:] = content

    if settings["mode"] == "original":
        RGBImageField.encode = keep
    options = {
        "original": {},
        "jpeg": {
            "write_mode": "jpg",
            "max_resolution": settings.get("max_side"),
            "jpeg_quality": settings.get("quality"),
        },
        "raw": {"write_mode": "raw", "max_resolution": settings.get("max_side")},
    }[settings["mode"]]
    file = Path(setting.files) / f"{mode}.beton"
    if not file.exists():
        writer = DatasetWriter(f"{file}.part", {"image": RGBImageField(**options), "label": IntField()}, num_workers=1)
        writer.from_indexed_dataset(Files())
        os.replace(f"{file}.part", file)
    return file


CONTENDERS: dict[str, Contender] = {
    FOLDER: partial(_backend, mode=None),
    **{OURS + mode: partial(_backend, mode=mode) for mode in MODES},
    **{FFCV + mode: partial(_ffcv, mode=mode) for mode in MODES},
}


def compete(arguments: argparse.Namespace, setting: Setting) -> dict[str, Any]:
    """Let all contenders take turns; medians, ratios mode by mode, and why some are missing."""
    from hardware import spread
    from input_pipeline import _run

    results: dict[str, dict[str, list[float]]] = {}
    missing: dict[str, str] = {}
    names = [name for name in CONTENDERS if not arguments.only or name in arguments.only]
    for turn, name in itertools.product(range(arguments.rounds), names):
        python = arguments.peers if name.startswith(FFCV) else sys.executable
        for kind, workers in (("cpu_ms_per_image", 0), ("images_per_second", 2)):
            if name in missing or (workers and turn >= arguments.wall_rounds):
                continue
            found = _run(python, Path(__file__).resolve(), name, replace(setting, workers=workers))
            if isinstance(found, str):
                missing[name] = found
                continue
            results.setdefault(name, {}).setdefault(kind, []).append(found[kind])
            print(f"{turn}  {name:<40} {kind:<18} {found[kind]:9.3f}", file=sys.stderr, flush=True)
    return {
        "contenders": {name: {kind: spread(values) for kind, values in each.items()} for name, each in results.items()},
        "cpu_ratio_ffcv_to_ours": {
            mode: _median(results[FFCV + mode]) / _median(results[OURS + mode])
            for mode in MODES
            if OURS + mode in results and FFCV + mode in results
        },
        "left_out": missing,
    }


def _median(measured: dict[str, list[float]]) -> float:
    return statistics.median(measured["cpu_ms_per_image"])


def report(result: dict[str, Any], described: str) -> list[str]:
    """The table for people."""
    lines = [described, "", "| loader | CPU-ms per image | range | images/s, two workers |", "|---|---|---|---|"]
    for name, each in result["contenders"].items():
        cost, speed = each["cpu_ms_per_image"], each.get("images_per_second")
        lines.append(
            f"| {name} | {cost['median']:.3f} | {cost['minimum']:.3f} – {cost['maximum']:.3f} | "
            f"{'' if speed is None else format(speed['median'], ',.0f')} |"
        )
    lines += ["", "| mode | FFCV's processor time, times ours |", "|---|---|"]
    lines += [f"| {mode} | {ratio:.2f} |" for mode, ratio in result["cpu_ratio_ffcv_to_ours"].items()]
    return [*lines, "", *(f"- left out: {name} ({why})" for name, why in result["left_out"].items())]


def run() -> None:
    """Parse, make the files, let them compete, write the result."""
    from input_pipeline import make_folder

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default=sys.executable, help="Python of the environment that has FFCV")
    parser.add_argument("--images", type=Path, help="folder of real images, FOLDER/CLASS/*.jpg")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--wall-rounds", type=int, default=3, help="of these, rounds with two workers too")
    parser.add_argument("--count", type=int, default=1200, help="files to make")
    parser.add_argument("--timed", type=int, default=1500, help="images that are timed")
    parser.add_argument("--only", nargs="*", help="names of contenders")
    parser.add_argument("--dry", action="store_true", help="write no result file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.images or make_folder(Path(scratch) / "images", arguments.count, small=False)
        files = sorted(folder.glob("*/*"))
        kilobytes = sum(file.stat().st_size for file in files) / len(files) / 1000
        setting = Setting(folder=str(folder), files=scratch, size=224, images=arguments.timed)
        result = compete(arguments, setting)
        kind = "real images" if arguments.images else "made from scikit-learn's photographs"
        described = f"{len(files):,} JPEG files ({kind}), {kilobytes:.1f} kB each on average, to 224x224."
        lines = report(result, described)
        print("\n".join(lines))
        if not arguments.dry:
            from hardware import write_result

            print(write_result("packed", {**result, "files": described}, lines))


if __name__ == "__main__":
    # As a contender's process: NAME SETTING. Else: the orchestrator.
    if len(sys.argv) == 3 and sys.argv[1] in CONTENDERS:
        main(CONTENDERS)
    else:
        run()
