"""Paceline as its command trains: records, ledger, clock and checkpoints of the run directory on, TensorBoard off."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from paceline.plugins.loading import loading

with loading():  # as the command does
    from given import CLASSES, LR, MEAN, MOMENTUM, RESUMED_STEPS, SAMPLES, STD, Clock, Spec, begin, pixels

    from paceline.data.image.datasets import ImageDataset
    from paceline.data.image.source import ArraySource
    from paceline.recipe.data import Data
    from paceline.recipe.load import load_recipe
    from paceline.records.reader import read_events
    from paceline.telemetry.display import Display
    from paceline.trainer.train import Options, train_recipe


class Ticking(Display):
    """Calls the clock."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def advance(self, step: int) -> None:
        self.clock.step()


def noise(data: Data) -> ImageDataset:
    """The images that the others are given."""
    size = data.image_size if isinstance(data.image_size, int) else 32
    counts = (5 * SAMPLES if data.augment.crop == "pad" else SAMPLES, int(os.environ["HELD_OUT"]) or 64)
    (train, labels), (held_out, targets) = (pixels(count, size, seed) for seed, count in enumerate(counts))
    return ImageDataset(
        name="noise",
        train=ArraySource(train.permute(0, 2, 3, 1).contiguous().numpy(), labels.numpy(), "noise"),
        validation=ArraySource(held_out.permute(0, 2, 3, 1).contiguous().numpy(), targets.numpy(), "noise"),
        classes=tuple("0123456789"),
        channels=3,
        image_size=size,
        native_size=(size, size),
        mean=MEAN,
        std=STD,
    )


_AUGMENT: dict[str, Any] = {
    "tensors": None,
    "resident": None,
    "memory": {"crop": "pad", "padding": 4, "flip": 0.5},
    "folder": {"crop": "random_resized", "flip": 0.5},
}


def packed(spec: Spec) -> str:
    """The folder packed as pixels, as its documentation says for processors that cannot keep up; made once."""
    place = Path(spec.folder).parent / "packed"
    arguments = ["--kind", "image_folder", "--mode", "raw", "--max-side", "400"]
    if not (place / "packed.json").exists():
        subprocess.run([sys.executable, "-m", "paceline", "pack", spec.folder, str(place), *arguments], check=True)
    return str(place)


def recipe(spec: Spec, read: str) -> dict[str, Any]:
    """What differs from a recipe's defaults; ``read`` is how files are read, if not from the folder."""
    saves = f"{spec.save_every} steps" if spec.save_every else "off"
    data: dict[str, Any] = {"data.dataset": "run_paceline:noise", "data.image_size": spec.image_size}
    if spec.data == "folder":
        data = {"data.dataset": "image_folder", "data.path": spec.folder, "data.image_size": spec.image_size}
        data |= {"data.workers": spec.workers, "data.backend": "dali" if read == "dali" else "pytorch"}
    if read == "packed":
        data |= {"data.dataset": "packed", "data.path": packed(spec)}
    if spec.data == "resident":
        data = {"data.dataset": "synthetic", "data.image_size": spec.image_size, "data.classes": CLASSES}
        data |= {"data.samples": 1_000 * spec.batch}
    data["data.augment"] = _AUGMENT[spec.data]
    halves = {"train.until": f"{spec.total} steps"} if spec.saves and not spec.resume else {}
    return {
        **data,
        **halves,
        "model.name": "lecture_net" if spec.network == "lecture_net" else f"torchvision:{spec.network}",
        "model.channels_last": spec.channels_last,
        "train.precision": spec.precision,
        "train.duration": f"{spec.total + (RESUMED_STEPS if halves else 0)} steps",
        "batch.global_size": spec.batch,
        "optimizer": {"name": "sgd", "lr": LR, "momentum": MOMENTUM, "weight_decay": 0.0, "nesterov": False},
        "schedule.name": "constant",
        "schedule.warmup": "0 steps",
        "evaluate.every": f"{spec.total} steps" if spec.evaluate else "off",
        "checkpoint.every": saves,
        "parallel.device": spec.device,
        "parallel.threads": spec.threads,
        "telemetry.report": False,
        "telemetry.trackers": [],
    }


def main() -> None:
    """Train as asked."""
    spec, clock, out = begin()
    os.environ["HELD_OUT"] = str(spec.evaluate)
    path = Path(spec.scratch) / "peers.yaml"
    path.write_text("task: image_classification\n")
    result = train_recipe(
        load_recipe(path, recipe(spec, os.environ.get("READ", ""))),
        Options(run_dir=Path(spec.scratch) / "run", display=Ticking(clock)),
    )
    for event in read_events(result.run_dir / "events.jsonl"):
        if event["event"] == "evaluation" and event["weights"] == "model":
            clock.evaluations.append((event["time"] - event["seconds"], event["time"]))
    clock.write(out)


if __name__ == "__main__":
    main()
