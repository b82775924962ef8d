"""What does an image cost from its file to the batch: Paceline's back-ends beside other people's loaders?

All read the same JPEG files, cut a random resized crop of each, flip half of them, and make batches. Each measurement
is a process of its own, and all contenders take turns (A B C … A B C …). Two things are measured: processor time per
image with everything in one thread (the sturdier number, on a machine that others use too), and images per second with
two workers. ``--small`` does the same with 32x32 files. Beside the contenders stand the ceilings: the steps of the work
by themselves, each on the same files in one thread.

The files are made from the two photographs that come with scikit-learn: crops of many scales, about 500x375 pixels
and 110 kB, as ImageNet's are; ``--images FOLDER`` (FOLDER/CLASS/*.jpg) measures real ones instead.

    python benchmarks/input_pipeline.py [--peers PYTHON] [--small] [--images FOLDER] [--rounds 5] [--only NAME …]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from pipeline_harness import Contender, Setting, as_json, main

HERE = Path(__file__).parent
PEERS = HERE / "input_pipeline_peers.py"
OURS = "Paceline, folder"


# ------------------------------------------------------------------------------------------------ our contenders


def _source(setting: Setting) -> tuple[Any, Any, Iterator[Any]]:
    """The files, how they are shown, and slices without end."""
    import torch

    from paceline.data.image.dataset import DatasetRequest
    from paceline.data.image.datasets import open_stored
    from paceline.data.image.transforms import View
    from paceline.data.slices import SampleSlice
    from paceline.recipe.data import Augment, Data

    torch.set_num_threads(1)
    source = open_stored(
        DatasetRequest(data=Data(dataset="image_folder", path=str(setting.folder), channels=3, validation_fraction=0))
    ).train
    view = View(image_size=setting.size, channels=3, augment=Augment(crop="random_resized", flip=0.5))

    def slices() -> Iterator[SampleSlice]:
        for epoch in itertools.count():
            order = np.random.default_rng(epoch).permutation(len(source))
            for at in range(0, len(order) - setting.batch + 1, setting.batch):
                ids = order[at : at + setting.batch]
                yield SampleSlice(step=0, epoch=epoch, logical_rank=0, ids=ids, step_weight=len(ids))

    return source, view, slices()


def _folder_backend(setting: Setting) -> Iterator[int]:
    from paceline.data.loaders.pytorch import PytorchBackend

    source, view, slices = _source(setting)
    backend = PytorchBackend(source, view, workers=setting.workers)
    return (len(batch.ids) for batch in backend.batches(slices))


def _threads(setting: Setting) -> Iterator[int]:
    """The same reader in threads of one process, each with a batch of its own, handed over in order."""
    from concurrent.futures import ThreadPoolExecutor

    from paceline.data.loaders.pytorch import SliceReader

    source, view, slices = _source(setting)
    reader = SliceReader(source, view)
    pool = ThreadPoolExecutor(max(setting.workers, 1))
    ahead = [pool.submit(reader.__getitem__, next(slices)) for _ in range(3 * max(setting.workers, 1))]
    while True:
        ahead.append(pool.submit(reader.__getitem__, next(slices)))
        yield len(ahead.pop(0).result().ids)


def _without_compiled(setting: Setting) -> Iterator[int]:
    from paceline.data.image import decode as jpeg

    jpeg._REGION = None  # noqa: SLF001 (what an installation without a compiler does)
    return _folder_backend(setting)


CONTENDERS: dict[str, Contender] = {
    OURS: _folder_backend,
    "Paceline, folder, threads in place of processes": _threads,
    "Paceline, folder, without the compiled decoder": _without_compiled,
}


# ------------------------------------------------------------------------------------------------------ ceilings


def ceilings(setting: Setting) -> dict[str, float]:
    """Processor time of single steps, in milliseconds per image, on the contenders' files."""
    import torch

    from paceline.data.image.decode import LazyImage, read_file
    from paceline.data.image.transforms import Box, draw, random_resized_box, resized_part
    from paceline.recipe.data import Augment

    torch.set_num_threads(1)
    paths = sorted(Path(setting.folder).glob("*/*"))[:500]
    contents = [read_file(path) for path in paths]
    pictures = [LazyImage(content, 3, "") for content in contents]
    attempts = draw(Augment(crop="random_resized"), 0, 0, np.arange(len(paths))).attempts
    assert attempts is not None
    boxes = [
        random_resized_box(each, picture.size, (0.08, 1.0), (3 / 4, 4 / 3))
        for each, picture in zip(attempts, pictures, strict=True)
    ]
    last_rows = [Box(box.top + box.height - 1, 0, 1, 1) for box in boxes]
    parts = [picture.part(box) for picture, box in zip(pictures, boxes, strict=True)]
    steps: dict[str, Callable[[int], object]] = {
        "read the file": lambda k: read_file(paths[k]),
        "decode all of it": lambda k: pictures[k].part(),
        "decode the crop": lambda k: pictures[k].part(boxes[k]),
        "entropy decoding down to the crop's last row": lambda k: pictures[k].part(last_rows[k]),
        "resize the crop": lambda k: resized_part(parts[k], setting.size),
    }
    return {name: min(_milliseconds(step, len(paths)) for _ in range(3)) for name, step in steps.items()}


def _milliseconds(step: Callable[[int], object], count: int) -> float:
    begin = time.process_time()
    for index in range(count):
        step(index)
    return 1000 * (time.process_time() - begin) / count


# --------------------------------------------------------------------------------------------------------- files


def make_folder(root: Path, count: int, *, small: bool) -> Path:
    """Write ``count`` varied JPEG files under ``root``/{a,b}, the same ones every time."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    photos = [Image.fromarray(image) for image in load_sample_images().images]
    generator = np.random.default_rng(0)
    for index in range(count):
        photo = photos[index % 2]
        share = generator.uniform(0.5, 1.0)
        width, height = int(photo.width * share), int(photo.height * share)
        left, top = (int(generator.uniform(0, space + 1)) for space in (photo.width - width, photo.height - height))
        size = (
            (32, 32)
            if small
            else [(500, 375), (500, 333), (375, 500), (480, 360)][generator.choice(4, p=[0.5, 0.2, 0.2, 0.1])]
        )
        if size[0] < size[1]:
            width = int(height * size[0] / size[1])
        part = photo.resize(size, Image.Resampling.BICUBIC, box=(left, top, left + width, top + height))
        # The originals have been compressed and their finest noise with them; cameras' pictures have it.
        noise = generator.normal(0, 6, (size[1], size[0], 3))
        pixels = (np.asarray(part) + noise).clip(0, 255).astype(np.uint8)
        folder = root / "ab"[index % 2]
        folder.mkdir(parents=True, exist_ok=True)
        quality = int(generator.integers(90, 98))
        Image.fromarray(pixels).save(
            folder / f"{index:05d}.jpg", quality=quality, subsampling=int(generator.choice([2, 2, 2, 0]))
        )
    return root


# --------------------------------------------------------------------------------------------------------- rounds


def _run(python: str, script: Path, name: str, setting: Setting) -> dict[str, float] | str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path[1:]])}
    if python != sys.executable:
        environment["PYTHONPATH"] = str(HERE)
    done = subprocess.run(
        [python, str(script), name, as_json(setting)], capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode:
        return next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no reason given")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def compete(arguments: argparse.Namespace, setting: Setting) -> dict[str, Any]:
    """Let all contenders take turns; medians, and why some are missing."""
    from hardware import spread
    from input_pipeline_peers import CONTENDERS as THEIRS

    entrants = [(name, sys.executable, Path(__file__).resolve()) for name in CONTENDERS]
    entrants += [(name, arguments.peers, PEERS) for name in THEIRS]
    entrants = [each for each in entrants if not arguments.only or each[0] in arguments.only]
    results: dict[str, dict[str, list[float]]] = {}
    missing: dict[str, str] = {}
    for turn in range(arguments.rounds):
        for name, python, script in entrants:
            for kind, workers in (("cpu_ms_per_image", 0), ("images_per_second", 2)):
                if name in missing or (kind == "images_per_second" and turn >= arguments.wall_rounds):
                    continue
                # With workers, what is read ahead when the clock starts and stops must not count: a longer run.
                longer = {"warm": 8 * setting.warm, "images": 2 * setting.images} if workers else {}
                found = _run(python, script, name, replace(setting, workers=workers, **longer))
                if isinstance(found, str):
                    missing[name] = found
                    continue
                results.setdefault(name, {}).setdefault(kind, []).append(found[kind])
                if workers:
                    # Of the same run: what two workers at once, and handing batches over, cost beside the work.
                    results[name].setdefault("cpu_ms_with_two_workers", []).append(found["cpu_ms_per_image"])
                print(f"{turn}  {name:<48} {kind:<18} {found[kind]:9.3f}", file=sys.stderr, flush=True)
    ours = results.get(OURS, {}).get("cpu_ms_per_image", [])
    return {
        "contenders": {name: {kind: spread(values) for kind, values in each.items()} for name, each in results.items()},
        # Round by round: the machine is not the same in each.
        "cpu_ratio_to_ours": {
            name: spread([theirs / own for theirs, own in zip(each["cpu_ms_per_image"], ours, strict=True)])
            for name, each in results.items()
            if len(each["cpu_ms_per_image"]) == len(ours) > 0
        },
        "left_out": missing,
    }


def report(result: dict[str, Any], steps: dict[str, float], described: str) -> list[str]:
    """The table for people."""
    lines = [
        described,
        "",
        "| loader | CPU-ms per image | range | times ours | images/s, two workers | CPU-ms then |",
        "|---|---|---|---|---|---|",
    ]
    by_cost = sorted(result["contenders"].items(), key=lambda item: item[1]["cpu_ms_per_image"]["median"])
    for name, each in by_cost:
        cost, speed = each["cpu_ms_per_image"], each.get("images_per_second")
        ratio = result["cpu_ratio_to_ours"].get(name)
        cells = [
            name,
            f"{cost['median']:.3f}",
            f"{cost['minimum']:.3f} – {cost['maximum']:.3f}",
            "" if ratio is None else f"{ratio['median']:.2f}",
            "" if speed is None else f"{speed['median']:,.0f}",
            "" if speed is None else f"{each['cpu_ms_with_two_workers']['median']:.3f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| step by itself, one thread | CPU-ms per image |", "|---|---|"]
    lines += [f"| {name} | {cost:.3f} |" for name, cost in steps.items()]
    lines += ["", *(f"- left out: {name} ({why})" for name, why in result["left_out"].items())]
    return lines


def run() -> None:
    """Parse, make the files, let them compete, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default=sys.executable, help="Python of the environment that has the peers")
    parser.add_argument("--images", type=Path, help="folder of real images, FOLDER/CLASS/*.jpg")
    parser.add_argument("--small", action="store_true", help="32x32 files in place of 500x375")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--wall-rounds", type=int, default=3, help="of these, rounds with two workers too")
    parser.add_argument("--count", type=int, default=1200, help="files to make")
    parser.add_argument("--only", nargs="*", help="names of contenders")
    parser.add_argument("--dry", action="store_true", help="write no result file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.images or make_folder(Path(scratch) / "images", arguments.count, small=arguments.small)
        files = sorted(folder.glob("*/*"))
        kilobytes = sum(file.stat().st_size for file in files) / len(files) / 1000
        timed = 20000 if arguments.small else 1500
        setting = Setting(
            folder=str(folder),
            files=scratch,
            size=32 if arguments.small else 224,
            images=timed,
            batch=256 if arguments.small else 64,
            warm=1024 if arguments.small else 128,
        )
        result = compete(arguments, setting)
        steps = ceilings(setting)
        kind = "real images" if arguments.images else "made from scikit-learn's photographs"
        described = (
            f"{len(files):,} JPEG files ({kind}), {kilobytes:.1f} kB each on average, to {setting.size}x{setting.size}."
        )
        lines = report(result, steps, described)
        print("\n".join(lines))
        if not arguments.dry:
            from hardware import write_result

            claim = "input-pipeline-small" if arguments.small else "input-pipeline-folder"
            print(write_result(claim, {**result, "ceilings_ms": steps, "files": described}, lines))


if __name__ == "__main__":
    # As a contender's process: NAME SETTING. Else: the orchestrator.
    if len(sys.argv) == 3 and sys.argv[1] in CONTENDERS:
        main(CONTENDERS)
    else:
        run()
