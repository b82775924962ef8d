"""Text generation and masked-token prediction with a trained language model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.checkpoint.weights import SavedWeights, load_trained
from paceline.data.text.corpus import TextDataset, encoded
from paceline.data.text.tokenizer import MASK_WORDS, Tokenizer, tokenizer_from
from paceline.errors import DataError, NotFiniteError, RecipeError
from paceline.inference.answers import NOT_FINITE
from paceline.inference.trained import trained_recipe, trained_task
from paceline.tasks.language_modeling import LanguageModeling


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How each next token is chosen.

    Attributes:
        tokens: Maximum tokens to generate. temperature: Divides the scores, at least 0; 0 always takes the most
        probable token.
        top_k: Choose among this many of the most probable; None for all.
        seed: Random seed: the same seed gives the same text.
    """

    tokens: int = 200
    temperature: float = 0.8
    top_k: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class Guess:
    """Candidates for one masked token: texts, most probable first, with their probabilities."""

    texts: tuple[str, ...]
    probabilities: tuple[float, ...]


@dataclass(frozen=True)
class Filled:
    """A prompt with each masked token replaced by the most probable one, and the alternatives."""

    text: str
    guesses: tuple[Guess, ...]


class TextPredictor:
    """A trained language model with its tokenizer; needs only the weights file.

    Args:
        saved: The weights; their file holds the tokenizer and describes the network.
        device: Device.
        trust_code: Whether to import code named in the weights' recipe.

    Raises:
        RecipeError: If they are not a language model's.

    Attributes:
        network: The network, in evaluation mode on the device.
    """

    def __init__(self, saved: SavedWeights, device: torch.device, *, trust_code: bool = False) -> None:
        data, where = saved.described("data"), str(saved.path)
        if "tokenizer" not in data:
            raise RecipeError(f"the weights in {where} are not a language model and take no prompt; give files.")
        self.tokenizer: Tokenizer = tokenizer_from(data["tokenizer"], where)
        self.is_masked: bool = data["objective"] == "masked"
        self._context: int = data["context"]
        self._device = device
        recipe = trained_recipe(saved)
        task = trained_task(saved, trust_code=trust_code)(recipe)
        if not isinstance(task, LanguageModeling):
            raise RecipeError(
                f"the weights in {where} were trained with the task {recipe.task}, which does not generate text."
            )
        nothing = encoded((), self.tokenizer)
        task.dataset = TextDataset(
            name=data["dataset"], train=nothing, validation=nothing, tokenizer=self.tokenizer, digest=data["digest"]
        )
        network = task.build_model()
        load_trained(network, saved)
        self.network: nn.Module = network.to(device).eval()

    def write(self, prompt: str, sampling: Sampling) -> Iterator[int]:
        """Yield token ids that continue a prompt, until the document ends.

        Raises:
            RecipeError: If the model was trained on masked tokens.
        """
        if self.is_masked:
            raise RecipeError(
                f"this model fills in masked tokens and does not generate text: give a prompt with "
                f"{' or '.join(MASK_WORDS)}."
            )
        draws = torch.Generator().manual_seed(sampling.seed)
        # Without a prompt, start a document: after the end token of a previous one.
        ids = self.tokenizer.encode(prompt).tolist() or [self.tokenizer.end]
        for _ in range(sampling.tokens):
            following = _choose(self._scores(ids[-self._context :], [-1])[0], sampling, draws)
            if following == self.tokenizer.end:
                return
            ids.append(following)
            yield following

    def fill(self, prompt: str, *, top_k: int = 3) -> Filled:
        """Predict each ``[MASK]`` or ``<mask>``.

        Raises:
            DataError: If there is no mask, or the prompt is longer than the model's context.
            RecipeError: If the model was trained to continue text.
        """
        if not self.is_masked:
            raise RecipeError(
                f"this model continues text and does not fill in masked tokens: leave out {' and '.join(MASK_WORDS)}."
            )
        ids, places = self._hidden_in(prompt)
        if len(ids) > self._context:
            raise DataError(f"the prompt has {len(ids)} tokens, but the model takes at most {self._context}.")
        guesses = []
        probabilities = self._scores(ids, places).double().softmax(dim=1)
        values, best = probabilities.topk(min(top_k, probabilities.shape[1]), dim=1)
        for place, row, chosen in zip(places, values.tolist(), best.tolist(), strict=True):
            guesses.append(Guess(tuple(self.tokenizer.decode([each]) for each in chosen), tuple(row)))
            ids[place] = chosen[0]
        return Filled(self.tokenizer.decode(ids), tuple(guesses))

    def _hidden_in(self, prompt: str) -> tuple[list[int], list[int]]:
        """Return the prompt's tokens and the positions of the masked ones."""
        first, other = MASK_WORDS
        parts = prompt.replace(other, first).split(first)
        if len(parts) == 1:
            raise DataError(f"the prompt has no mask: write {first} or {other} where a token is to be predicted.")
        assert self.tokenizer.mask is not None
        ids, places = self.tokenizer.encode(parts[0]).tolist(), []
        for part in parts[1:]:
            places.append(len(ids))
            ids += [self.tokenizer.mask, *self.tokenizer.encode(part).tolist()]
        return ids, places

    @torch.inference_mode()
    def _scores(self, ids: list[int], places: list[int]) -> Tensor:
        """Return logits at some positions, float32 [positions, vocabulary] on the CPU; NotFiniteError on overflow."""
        logits: Tensor = self.network(torch.tensor([ids], device=self._device))[0][places].float().cpu()
        if not bool(logits.softmax(dim=1).isfinite().all()):
            raise NotFiniteError(f"{NOT_FINITE}.")
        return logits


def _choose(scores: Tensor, sampling: Sampling, draws: torch.Generator) -> int:
    """Sample one token from its scores, float32 [vocabulary]."""
    if sampling.temperature == 0:
        return int(scores.argmax())
    scores = scores.double() / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < len(scores):
        scores = scores.masked_fill(scores < scores.topk(sampling.top_k).values[-1], -torch.inf)
    return int(torch.multinomial(scores.softmax(dim=0), 1, generator=draws))
