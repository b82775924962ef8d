"""An RNN transducer writes down what it hears, as in MLPerf's benchmark on LibriSpeech.

Sounds are generated: each letter is a tone of random length. torchaudio has the loss; the network is a recurrent
encoder of spectra, a recurrent predictor of letters, and a layer that joins them. On the command line the class is
`task=rnnt:Dictation`.

    pip install torchaudio
    python examples/rnnt.py
"""

import shlex
import sys
import tempfile
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

try:
    from torchaudio.functional import rnnt_loss
except ImportError:
    print("This example needs torchaudio: pip install torchaudio")
    sys.exit()

import paceline
from paceline.data.batch import Batch
from paceline.data.pipeline import Pipeline, Placement, SimplePipeline
from paceline.data.slices import SampleSlice
from paceline.metrics.accumulator import Metric
from paceline.plan import DataFacts
from paceline.recipe.unused import all_but

TRAIN, HELD_OUT = 800, 100
LETTERS, LONGEST, BLANK = 8, 6, 0  # of the alphabet, numbered from 1; of a word; no letter
BANDS, WINDOW, PAIR = 33, 64, 2  # of a spectrum; its samples; spectra that the encoder reads at once
FRAMES = LONGEST * 8 // PAIR


def sound(number: int) -> tuple[Tensor, int, Tensor, int]:
    """Return spectra, float [FRAMES, PAIR * BANDS], how many count, the word, int32 [LONGEST], and its length."""
    draws = np.random.default_rng(number)
    word = draws.integers(1, LETTERS + 1, draws.integers(3, LONGEST + 1))
    lengths = PAIR * draws.integers(2, 5, len(word))  # spectra of each letter
    cycles = np.repeat(0.04 + 0.05 * word, lengths * WINDOW)  # in a sample
    wave = np.sin(2 * np.pi * cycles * np.arange(len(cycles))) + draws.normal(scale=0.7, size=len(cycles))
    spectra = 3 + np.log(1e-3 + np.abs(np.fft.rfft(wave.reshape(-1, WINDOW))) / WINDOW)
    shown, letters = torch.zeros(FRAMES * PAIR, BANDS), torch.zeros(LONGEST, dtype=torch.int32)
    shown[: len(spectra)], letters[: len(word)] = torch.from_numpy(spectra), torch.from_numpy(word)
    return shown.reshape(FRAMES, -1), len(spectra) // PAIR, letters, len(word)


class Transducer(nn.Module):
    """Logits of the next letter, or of none, at each moment after each beginning of the word."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.encoder = nn.GRU(PAIR * BANDS, width, batch_first=True)
        self.embedding = nn.Embedding(1 + LETTERS, width)
        self.predictor = nn.GRU(width, width, batch_first=True)
        self.join = nn.Sequential(nn.Tanh(), nn.Linear(width, 1 + LETTERS))

    def forward(self, spectra: Tensor, letters: Tensor) -> Tensor:
        """Return logits [N, FRAMES, 1 + LONGEST, 1 + LETTERS]."""
        heard, _ = self.encoder(spectra)
        said, _ = self.predictor(self.embedding(nn.functional.pad(letters.long(), (1, 0))))
        return torch.as_tensor(self.join(heard[:, :, None] + said[:, None]))

    def write(self, spectra: Tensor, frames: int) -> list[int]:
        """Return the letters of one sound [1, FRAMES, PAIR * BANDS]: the most probable one at each moment."""
        heard, _ = self.encoder(spectra[:, :frames])
        said, state = self.predictor(self.embedding(torch.zeros(1, 1, dtype=torch.long, device=spectra.device)))
        word: list[int] = []
        for frame in heard[0]:
            letter = int(self.join(frame + said[0, 0]).argmax())
            if letter != BLANK and len(word) < LONGEST:
                word.append(letter)
                said, state = self.predictor(self.embedding(torch.tensor([[letter]], device=spectra.device)), state)
        return word


def edits(found: list[int], wanted: list[int]) -> int:
    """Return the fewest insertions, deletions and replacements of letters (Levenshtein)."""
    row = list(range(len(wanted) + 1))
    for done, letter in enumerate(found, start=1):
        before, row[0] = row[0], done
        for at, other in enumerate(wanted, start=1):
            before, row[at] = row[at], min(row[at] + 1, row[at - 1] + 1, before + (letter != other))
    return row[-1]


class Dictation(paceline.Task):
    """Sounds in, words out."""

    unit, headline = "words", "letter_error"
    metrics = (Metric(name="loss"), Metric(name="letter_error", of="edits", per="letters", scale=100.0))

    def data_facts(self, world: Any) -> DataFacts:
        """All sounds; the last ones are held out."""
        spectra, frames, words, lengths = zip(*map(sound, range(TRAIN + HELD_OUT)), strict=True)
        self.spectra, self.words = torch.stack(spectra), torch.stack(words)
        self.counts = torch.tensor([frames, lengths], dtype=torch.int32).T
        unused = all_but([], "the sounds are generated")
        return DataFacts(train_samples=TRAIN, evaluation_samples=HELD_OUT, unused=unused)

    def open_pipeline(self, placement: Placement) -> Pipeline:
        """Batches that `read` makes when they are asked for."""
        return SimplePipeline(self.read, evaluation_samples=HELD_OUT, placement=placement, name="sound")

    def read(self, part: SampleSlice, training: bool) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Spectra with the word that the predictor is shown; the targets are the numbers of frames and letters."""
        chosen = torch.tensor(part.ids) + (0 if training else TRAIN)
        return (self.spectra[chosen], self.words[chosen]), self.counts[chosen]

    def build_model(self) -> nn.Module:
        """The transducer; torch is seeded already."""
        return Transducer()

    def losses(self, model: Any, batch: Batch) -> Tensor:
        """The loss of each sound: minus the log probability of its word, over all alignments (Graves 2012)."""
        counts, words = batch.targets, batch.inputs[1]
        frames, letters = counts.max(dim=0).values.tolist()  # the library wants no more padding than needed
        logits = model(*batch.inputs).float()[:, :frames, : letters + 1].contiguous()
        given = (each.contiguous() for each in (words[:, :letters], *counts.unbind(1)))
        found: Tensor = rnnt_loss(logits, *given, blank=BLANK, reduction="none")
        return found

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """Mean loss of a micro-batch."""
        return self.losses(model, batch).mean()

    def score(self, model: Any, batch: Batch) -> dict[str, Tensor]:
        """One value for each sound; `letter_error` divides the sums of edits and letters."""
        (spectra, words), counts = batch.inputs, batch.targets.tolist()
        pairs = zip(spectra.split(1), words.tolist(), counts, strict=True)
        wrong = [edits(model.write(one, frames), word[:length]) for one, word, (frames, length) in pairs]
        found = {"edits": torch.tensor(wrong).to(batch.targets).float(), "letters": batch.targets[:, 1].float()}
        return {"loss": self.losses(model, batch), **found}


OVERRIDES = """train.duration="10 epochs" batch.global_size=10 optimizer.name=adamw optimizer.lr=0.005
    optimizer.clip_norm=5 schedule.warmup="5%" evaluate.every="5 epochs" parallel.device=cpu parallel.threads=1"""

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        asked = shlex.split(OVERRIDES)
        result = paceline.train("digits", overrides=asked, run_dir=f"{folder}/run", task=Dictation, quiet=True)
    error = result.metrics["letter_error"]
    print(f"{error:.1f} % of the letters are wrong, after {result.summary.step} steps")
    assert error < 12, f"expected less than 12 %, found {error:.1f} %"
