"""Your own data on a disk that are not images: tell which of four notes a WAV file plays.

Threads read the next batches while one is trained on; each file is cut at another place in each epoch, by numbers that
belong to (seed, epoch, sample), so that a run that is killed and goes on hears the same. On the command line:
`paceline train image_folder task=sounds_on_disk:Notes data.path=FOLDER`.

    python examples/sounds_on_disk.py
"""

import tempfile
import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paceline
from paceline.tasks import (
    Batch,
    DataFacts,
    Metric,
    Pipeline,
    Placement,
    SampleSlice,
    SimplePipeline,
    all_but,
    reading_threads,
    uniforms,
)

NOTES = {"a": 440, "b": 494, "c": 523, "d": 587}  # Hz
RATE, HEARD, HELD_OUT = 4000, 800, 100  # samples a second; samples of a file that the network hears; files


class Notes(paceline.Task):
    """Files named `a-0001.wav`: their first letter is what is learned."""

    unit, headline = "sounds", "top1_accuracy"
    metrics = (Metric(name="loss"), Metric(name="top1_accuracy", of="right", scale=100.0, higher_is_better=True))

    def data_facts(self, world: Any) -> DataFacts:
        """The files by name, in an order of their own; the last are held out."""
        files = sorted(Path(self.recipe.data.path or "").glob("*.wav"))
        order = np.random.default_rng(0).permutation(len(files))
        self.files = [files[each] for each in order]
        used = ["data.path", "data.workers"]
        self.threads, why = reading_threads(self.recipe.data.workers, world)
        return DataFacts(
            train_samples=len(files) - HELD_OUT,
            evaluation_samples=HELD_OUT,
            description={"workers": self.threads},
            reasons={"data.workers": why},
            unused=all_but(used, "sounds are read from a folder of WAV files, and cut at a random place"),
        )

    def open_pipeline(self, placement: Placement) -> Pipeline:
        """Batches that threads read ahead."""
        return SimplePipeline(
            self.read, evaluation_samples=HELD_OUT, placement=placement, name="sound", threads=self.threads
        )

    def read(self, part: SampleSlice, training: bool) -> tuple[Tensor, Tensor]:
        """Sounds, float32 [N, 1, HEARD] in [-1, 1], and the numbers of their notes, int64 [N]."""
        files = [self.files[each if training else each - HELD_OUT] for each in part.ids]
        begins = uniforms(self.recipe.seed, part.epoch, part.ids, 1)[:, 0] if training else np.zeros(len(files))
        sounds = torch.from_numpy(np.stack([cut(*each) for each in zip(files, begins, strict=True)]))
        return sounds.unsqueeze(1), torch.tensor([list(NOTES).index(each.name[0]) for each in files])

    def build_model(self) -> nn.Module:
        """Three convolutions over time."""
        layers: list[nn.Module] = []
        for inside, outside in ((1, 16), (16, 32), (32, 32)):
            layers += [nn.Conv1d(inside, outside, 9, stride=3, bias=False), nn.BatchNorm1d(outside), nn.ReLU()]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(32, len(NOTES)))

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """Mean cross-entropy of a micro-batch."""
        return F.cross_entropy(model(batch.inputs).float(), batch.targets)

    def score(self, model: Any, batch: Batch) -> dict[str, Tensor]:
        """One value for each sound."""
        answers = model(batch.inputs).float()
        right = answers.argmax(dim=1) == batch.targets
        return {"loss": F.cross_entropy(answers, batch.targets, reduction="none"), "right": right.float()}


def cut(path: Path, begin: float) -> np.ndarray:
    """A part of a file, float32 [HEARD] in [-1, 1]; `begin` in [0, 1) says where."""
    with wave.open(str(path), "rb") as file:
        file.setpos(int(begin * (file.getnframes() - HEARD + 1)))
        return np.frombuffer(file.readframes(HEARD), dtype="<i2").astype(np.float32) / 32768


def write_sounds(folder: Path, count: int) -> None:
    """Files of a quarter of a second: a note, and noise that is louder."""
    draws = np.random.default_rng(1)
    for number in range(count):
        name, pitch = list(NOTES.items())[number % len(NOTES)]
        time = np.arange(RATE // 4) / RATE + draws.uniform()
        sound = np.sin(2 * np.pi * pitch * time) + 3 * draws.normal(size=len(time))
        with wave.open(str(folder / f"{name}-{number:04d}.wav"), "wb") as file:
            file.setparams((1, 2, RATE, 0, "NONE", "not compressed"))
            file.writeframes((2500 * sound).clip(-32768, 32767).astype("<i2").tobytes())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        write_sounds(Path(folder), 900)
        overrides = {
            "data.path": folder,
            "train.duration": "8 epochs",
            "batch.global_size": 32,
            "optimizer.name": "adamw",
            "optimizer.lr": 0.005,
            "parallel.device": "cpu",
            "parallel.threads": 1,
        }
        result = paceline.train("image_folder", overrides=overrides, run_dir=f"{folder}/run", task=Notes, quiet=True)
    accuracy = result.metrics["top1_accuracy"]
    print(f"{accuracy:.1f} % of the held-out sounds are named rightly, after {result.summary.step} steps")
    assert accuracy > 90, f"expected more than 90 %, found {accuracy:.1f} %"
