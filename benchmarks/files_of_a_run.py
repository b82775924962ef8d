"""Code of how many files runs for a step on JPEG files, for a save, for a resume, and for a whole run?

A small run on generated JPEG files is traced call by call: trained for three steps, stopped, and resumed. The files of
what is called from the training step, from the save and in the thread that writes it, and from opening a run and
restoring it are counted.

    python benchmarks/files_of_a_run.py [--dry-run]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import numpy as np
from hardware import write_result
from PIL import Image

import paceline
from paceline.trainer import loop, run_dir_checks, train

PACKAGE = str(Path(paceline.__file__).parent)
PARTS = {
    "a step": ((loop, "train_step"),),
    "a save": ((loop, "save_checkpoint"),),
    "a resume": ((run_dir_checks, "open_directory"), (train, "restore")),
}


def write_photos(root: Path) -> None:
    """Two classes of twenty noisy JPEG files."""
    generator = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (root / name).mkdir(parents=True)
        for number in range(20):
            pixels = generator.integers(0, 255, (60, 60, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{number}.jpg")


def traced(root: Path) -> dict[str, set[str]]:
    """Files by part, relative to the package; all of them under ``a run``."""
    seen: dict[str, set[str]] = defaultdict(set)
    under_way = ["a run"]

    def note(frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(PACKAGE):
            thread = threading.current_thread()
            if thread.name.startswith("checkpoint"):
                seen["a save"].add(file.removeprefix(PACKAGE + "/"))
            elif thread is threading.main_thread():
                seen[under_way[0]].add(file.removeprefix(PACKAGE + "/"))
            seen["a run"].add(file.removeprefix(PACKAGE + "/"))

    def watched(part: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            before, under_way[0] = under_way[0], part
            try:
                return real(*arguments, **named)
            finally:
                under_way[0] = before

        return call

    module: ModuleType
    for part, functions in PARTS.items():
        for module, name in functions:
            setattr(module, name, watched(part, getattr(module, name)))
    write_photos(root / "photos")
    overrides = {
        "data.path": str(root / "photos"),
        "data.image_size": 32,
        "data.workers": 0,
        "model.name": "small_resnet",
        "batch.global_size": 8,
        "train.duration": "6 steps",
        "evaluate.every": "off",
        "checkpoint.every": "3 steps",
        "parallel.device": "cpu",
        "telemetry.trackers": [],
        "telemetry.report": False,
    }
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        until = {"train.until": "3 steps"}
        paceline.train("image_folder", overrides={**overrides, **until}, run_dir=root / "run", quiet=True)
        seen.pop("a resume", None)  # a new run opens its directory too
        paceline.train("image_folder", overrides=overrides, run_dir=root / "run", quiet=True)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]  # which ends it; the types do not say so
    return seen


def main(arguments: Sequence[str] | None = None) -> None:
    """Trace, and write the result files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="print, write no result files")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        seen = traced(Path(scratch))
    lines = [f"- {part}: code of {len(seen[part])} files" for part in (*PARTS, "a run")]
    for part, room in (("a step", "data/"), ("a save", "checkpoint/")):
        lines.append(f"- {part}: {sum(each.startswith(room) for each in seen[part])} of them in {room}")
    print("\n".join(lines))
    if not options.dry_run:
        print(write_result("files-of-a-run", {part: sorted(files) for part, files in seen.items()}, lines))


if __name__ == "__main__":
    main()
