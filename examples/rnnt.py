"""An RNN transducer transcribes sounds, like MLPerf's benchmark on the speech of LibriSpeech.

torchaudio provides the loss and the edit distance; the network is as in Graves (2012). The sounds are generated: each
letter is a noisy tone of random length. In a recipe or on the command line, the task is `task=rnnt:Transcription`.

    pip install torchaudio
    python examples/rnnt.py
"""

import sys
import tempfile
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

try:
    from torchaudio.functional import edit_distance, rnnt_loss
except ImportError:
    print("This example needs torchaudio: pip install torchaudio")
    sys.exit()

import paceline
from paceline.tasks import Batch, DataFacts, Metric, Pipeline, Placement, SampleSlice, SimplePipeline, all_but

TRAIN, HELD_OUT = 800, 100  # words
LETTERS, MAX_LETTERS = 8, 6  # of the alphabet, and of the longest word
BLANK = 0  # the output "no letter"; letters are numbered from 1
WINDOW, BINS = 64, 33  # samples of a spectrum, and its frequencies
STACKED = 2  # consecutive spectra that form one frame, the encoder's input
MAX_FRAMES = 4 * MAX_LETTERS  # a letter lasts at most four frames


def utterance(number: int) -> tuple[Tensor, int, Tensor, int]:
    """Return a sound, float [MAX_FRAMES, STACKED * BINS], and its word, int32 [MAX_LETTERS], each with its length."""
    rng = np.random.default_rng(number)
    word = rng.integers(1, LETTERS + 1, size=rng.integers(3, MAX_LETTERS + 1))
    frames = rng.integers(2, 5, size=len(word))  # of each letter
    frequency = np.repeat(0.04 + 0.05 * word, frames * STACKED * WINDOW)  # in cycles per sample
    wave = np.sin(2 * np.pi * frequency * np.arange(len(frequency))) + rng.normal(scale=0.7, size=len(frequency))
    spectra = np.log(np.abs(np.fft.rfft(wave.reshape(-1, WINDOW))) / WINDOW + 1e-3) + 3  # roughly from -3 to 3
    sound = torch.from_numpy(spectra).float().reshape(-1, STACKED * BINS)
    padded_sound = F.pad(sound, (0, 0, 0, MAX_FRAMES - len(sound)))
    padded_word = F.pad(torch.from_numpy(word).int(), (0, MAX_LETTERS - len(word)))
    return padded_sound, len(sound), padded_word, len(word)


class Transducer(nn.Module):
    """Predict the next letter, or a blank, from the current frame and the letters so far."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.encoder = nn.GRU(STACKED * BINS, width, batch_first=True)
        self.embedding = nn.Embedding(1 + LETTERS, width)
        self.predictor = nn.GRU(width, width, batch_first=True)
        self.joiner = nn.Sequential(nn.Tanh(), nn.Linear(width, 1 + LETTERS))

    def forward(self, sounds: Tensor, words: Tensor) -> Tensor:
        """Return logits after each frame and each prefix of the word, [N, MAX_FRAMES, 1 + MAX_LETTERS, 1 + LETTERS]."""
        encoded, _ = self.encoder(sounds)
        predicted, _ = self.predictor(self.embedding(F.pad(words.long(), (1, 0), value=BLANK)))
        return self.joiner(encoded[:, :, None] + predicted[:, None])

    def transcribe(self, sound: Tensor) -> list[int]:
        """Return the letters of one sound [1, frames, STACKED * BINS], at most one per frame, by greedy search."""
        encoded, _ = self.encoder(sound)
        predicted, state = self.predictor(self.embedding(torch.full((1, 1), BLANK, device=sound.device)))
        word: list[int] = []
        for frame in encoded[0]:
            letter = self.joiner(frame + predicted[0, 0]).argmax()
            if letter != BLANK:
                word.append(int(letter))
                predicted, state = self.predictor(self.embedding(letter.reshape(1, 1)), state)
        return word


class Transcription(paceline.Task):
    """Transcribe sounds to letters."""

    unit, headline = "words", "letter_error"
    metrics = (Metric(name="loss"), Metric(name="letter_error", of="edits", per="letters", scale=100.0))

    def data_facts(self, world: Any) -> DataFacts:
        """Generate all sounds; the last ones are held out."""
        sounds, frames, words, letters = zip(*map(utterance, range(TRAIN + HELD_OUT)), strict=True)
        self.sounds, self.words = torch.stack(sounds), torch.stack(words)
        self.lengths = torch.tensor([frames, letters], dtype=torch.int32).T
        unused = all_but([], "the sounds are generated")
        return DataFacts(train_samples=TRAIN, evaluation_samples=HELD_OUT, unused=unused)

    def open_pipeline(self, placement: Placement) -> Pipeline:
        """Return batches created by `read`."""
        return SimplePipeline(self.read, evaluation_samples=HELD_OUT, placement=placement, name="sound")

    def read(self, part: SampleSlice, training: bool) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Return sounds and words, the inputs of the network, and the frames and letters of each, [N, 2]."""
        ids = torch.tensor(part.ids) + (0 if training else TRAIN)
        return (self.sounds[ids], self.words[ids]), self.lengths[ids]

    def build_model(self) -> nn.Module:
        """Return the network; torch is already seeded."""
        return Transducer()

    def losses(self, model: Any, batch: Batch) -> Tensor:
        """Return minus the log probability of each word, summed over all its alignments with the sound, [N]."""
        (_, words), lengths = batch.inputs, batch.targets
        frames, letters = lengths.max(dim=0).values.tolist()
        # rnnt_loss requires contiguous tensors, as long as the longest sound and word of the batch.
        logits = model(*batch.inputs).float()[:, :frames, : letters + 1]
        arguments = (each.contiguous() for each in (logits, words[:, :letters], *lengths.unbind(dim=1)))
        return rnnt_loss(*arguments, blank=BLANK, reduction="none")

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """Return the mean loss of a micro-batch."""
        return self.losses(model, batch).mean()

    def score(self, model: Any, batch: Batch) -> dict[str, Tensor]:
        """Return values of each sound; the metric `letter_error` is the sum of `edits` over the sum of `letters`."""
        (sounds, words), lengths = batch.inputs, batch.targets
        edits = torch.zeros(len(sounds), device=sounds.device)
        for row, (frames, letters) in enumerate(lengths.tolist()):
            edits[row] = edit_distance(model.transcribe(sounds[row : row + 1, :frames]), words[row, :letters].tolist())
        return {"loss": self.losses(model, batch), "edits": edits, "letters": lengths[:, 1].float()}


# Changes to the smallest shipped recipe, `digits`, whose network and data this task replaces.
OVERRIDES = {
    "train.duration": "10 epochs",
    "batch.global_size": 10,
    "optimizer.name": "adamw",
    "optimizer.lr": 0.005,
    "optimizer.clip_norm": 5,
    "schedule.warmup": "5%",
    "evaluate.every": "5 epochs",
    "parallel.device": "cpu",
}

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        result = paceline.train("digits", overrides=OVERRIDES, run_dir=f"{folder}/run", task=Transcription, quiet=True)
    error = result.metrics["letter_error"]
    print(f"{error:.1f} % of the letters are wrong, after {result.summary.step} steps")
    assert error < 12, f"expected less than 12 %, found {error:.1f} %"
