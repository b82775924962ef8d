"""Text generation and masked-token prediction with a trained language model; classes of texts and tags of words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from reprlib import repr as shortened
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.checkpoint.weights import SavedWeights
from paceline.data.image.decode import BrokenImageError
from paceline.errors import DataError, NotFiniteError, RecipeError
from paceline.parsing.files import SkippedItems, has_extension, refuse_special_inputs
from paceline.parsing.plain_text import load_json
from paceline.prediction.predictor import NOT_FINITE, Answer, Predictor, Prompt, Reply
from paceline.prediction.sources import PictureFile
from paceline.recipe.data import TextSection
from paceline.tasks.exportable import Exportable, Input
from paceline_text.entities import entities_in, entity_types
from paceline_text.pipeline import padded
from paceline_text.tokenizer import MASK_WORDS, HuggingFaceTokenizer, TokenIds, Tokenizer

_GENERATION = ("tokens", "temperature", "seed")  # options of how text is generated


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How each next token is chosen.

    Attributes:
        tokens: Maximum tokens to generate.
        temperature: Divides the scores, at least 0; 0 always takes the most probable token.
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


class TextPredictor(Predictor):
    """A trained language model with its tokenizer; takes prompts and no files.

    Args:
        saved: The weights; their file describes the objective.
        network: The network with these weights, in evaluation mode on the device.
        tokenizer: Its tokenizer.
        device: Device.

    Attributes:
        network: The network.
        answers_chats: Whether a prompt is a message of the user, and what follows the answer.
    """

    classes = ()
    unit = "texts"
    holds = "a network of text"

    def __init__(self, saved: SavedWeights, network: nn.Module, tokenizer: Tokenizer, device: torch.device) -> None:
        data = saved.description("data")
        self._saved, self.network, self.tokenizer, self._device = saved, network, tokenizer, device
        self.is_masked: bool = data["objective"] == "masked"
        self.writes = not self.is_masked
        self.unused_options = {"stdin_image": "these weights are a language model and take no files"}
        if self.is_masked:
            why = "it is for text generation, and this model fills in masked tokens"
            self.unused_options |= dict.fromkeys(_GENERATION, why)
        self._context: int = data["context"]
        self.answers_chats: bool = data.get("messages", False)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise RecipeError(
            f"the weights in {self._saved.path} are a language model and take no files: give --prompt TEXT."
        )

    files = prepare = answer = _refuse

    def reply(self, prompt: Prompt) -> Reply:
        """Continue a prompt, or fill in its masked tokens."""
        if self.is_masked:
            filled = self.fill(prompt.text, top_k=prompt.top_k or self.usual_top_k)
            lines = [filled.text]
            for guess in filled.guesses:
                pairs = zip(guess.texts, guess.probabilities, strict=True)
                lines.append("  ".join(f"{text!r} {100 * value:.1f} %" for text, value in pairs))
            return Reply({"prompt": prompt.text, **asdict(filled)}, lines)
        sampling = _sampling(prompt)
        ids = list(self.write(prompt.text, sampling))
        prompt_ids = [] if self.answers_chats else self.tokenizer.encode(prompt.text).tolist()
        text = self.tokenizer.decode([*prompt_ids, *ids])
        return Reply({"prompt": prompt.text, "text": text, "written": len(ids), **asdict(sampling)}, [text])

    def pieces(self, prompt: Prompt) -> Iterator[str]:
        """Yield the text of each token that follows a prompt; empty until a character's last byte is there."""
        ids, shown = list[int](), 0
        for each in self.write(prompt.text, _sampling(prompt)):
            ids.append(each)
            text = self.tokenizer.decode(ids)
            ready = shown if text.endswith("\ufffd") else len(text)
            yield text[shown:ready]
            shown = max(shown, ready)
        yield self.tokenizer.decode(ids)[shown:]

    def write(self, prompt: str, sampling: Sampling) -> Iterator[int]:
        """Yield token ids that continue a prompt, until the document or, in a chat, the answer ends.

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
        ids = self._prompt(prompt).tolist() or [self.tokenizer.end]
        ends = {self.tokenizer.end}
        if self.answers_chats and isinstance(self.tokenizer, HuggingFaceTokenizer):
            ends |= self.tokenizer.answer_ends
        for _ in range(sampling.tokens):
            following = _choose(self._scores(ids[-self._context :], [-1])[0], sampling, draws)
            if following in ends:
                return
            ids.append(following)
            yield following

    def _prompt(self, prompt: str) -> TokenIds:
        """Return a prompt's tokens; one to a network trained on chats is a message of the user."""
        if self.answers_chats and isinstance(self.tokenizer, HuggingFaceTokenizer):
            return self.tokenizer.encode_chat(self.tokenizer.chat([{"role": "user", "content": prompt}], asks=True))[0]
        return self.tokenizer.encode(prompt)

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
        ids, positions = self._find_masks(prompt)
        if len(ids) > self._context:
            raise DataError(f"the prompt has {len(ids)} tokens, but the model takes at most {self._context}.")
        guesses = []
        probabilities = self._scores(ids, positions).double().softmax(dim=1)
        values, best = probabilities.topk(min(top_k, probabilities.shape[1]), dim=1)
        for position, row, chosen in zip(positions, values.tolist(), best.tolist(), strict=True):
            guesses.append(Guess(tuple(self.tokenizer.decode([each]) for each in chosen), tuple(row)))
            ids[position] = chosen[0]
        return Filled(self.tokenizer.decode(ids), tuple(guesses))

    def _find_masks(self, prompt: str) -> tuple[list[int], list[int]]:
        """Return the prompt's tokens and the positions of the masked ones."""
        first, other = MASK_WORDS
        parts = prompt.replace(other, first).split(first)
        if len(parts) == 1:
            raise DataError(f"the prompt has no mask: write {first} or {other} where a token is to be predicted.")
        assert self.tokenizer.mask is not None
        ids, positions = self.tokenizer.encode(parts[0]).tolist(), []
        for part in parts[1:]:
            positions.append(len(ids))
            ids += [self.tokenizer.mask, *self.tokenizer.encode(part).tolist()]
        return ids, positions

    @torch.inference_mode()
    def _scores(self, ids: list[int], positions: list[int]) -> Tensor:
        """Return logits at some positions, float32 [positions, vocabulary] on the CPU; NotFiniteError on overflow."""
        logits: Tensor = self.network(torch.tensor([ids], device=self._device))[0][positions].float().cpu()
        if not bool(logits.softmax(dim=1).isfinite().all()):
            raise NotFiniteError(f"{NOT_FINITE}.")
        return logits


def _decoded(content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BrokenImageError("text", f"it is not UTF-8 ({error.reason})") from error


class TextLabeller(Predictor):
    """A trained text classifier with its tokenizer.

    Args:
        saved: The weights; their file describes the classes.
        network: The network with these weights, in evaluation mode on the device.
        tokenizer: Its tokenizer.
        device: Device.
        text: How text was read in training.

    Attributes:
        network: The network.
        keys: Keys of JSON lines that may hold the text.
    """

    unit = "texts"
    holds = "a network of text"
    unused_options = MappingProxyType(
        dict.fromkeys(_GENERATION, "it is for text generation, and this model classifies texts")
        | {"stdin_image": "these weights take lines of text"}
    )

    def __init__(
        self, saved: SavedWeights, network: nn.Module, tokenizer: Tokenizer, device: torch.device, text: TextSection
    ) -> None:
        data = saved.description("data")
        self._saved, self.network, self.tokenizer, self._device = saved, network, tokenizer, device
        self.classes = tuple(data["class_names"])
        column, usual = text.column, ("tokens", "text") if self.kind is TaggedWords else ("text",)
        self.keys = dict.fromkeys(usual if column == "text" else (column, *usual))
        self._context: int = data["context"]

    def files(self, sources: Sequence[Path], left_out: SkippedItems) -> Iterator[PictureFile]:
        """Return each line of text files as a text; of JSON lines, the value of one of the keys.

        Raises:
            DataError: If a file cannot be read, or a line has no text.
        """
        return texts_of(sources, self)

    def reply(self, prompt: Prompt) -> Reply:
        """Return the classes of a prompt, or the tags of its words."""
        try:
            prepared = self.prepare(prompt.text.encode())
        except BrokenImageError as error:
            raise DataError(f"the prompt cannot be read: {error.reason}.") from None
        (answer,) = self.answer([prepared], prompt.top_k or self.usual_top_k)
        if answer.error is not None:
            raise NotFiniteError(f"{answer.error}.")
        row = answer.row()
        document = {"prompt": prompt.text, **{key: row[key] for key in row if key not in ("path", "error")}}
        return Reply(document, [answer.description()])

    def prepare(self, content: bytes) -> TokenIds:
        """Return the tokens of a text, int64 [tokens]; BrokenImageError if it is not UTF-8, or empty."""
        text = _decoded(content)
        ids = self.tokenizer.encode_whole(text, self._context)
        if not text.strip() or not len(ids):
            raise BrokenImageError("text", "it is empty")
        return ids

    @torch.inference_mode()
    def answer(self, prepared: Sequence[TokenIds], top_k: int) -> list[Answer]:
        """Return the most probable classes of each text, in order, without paths."""
        values, best = self._scores(prepared).softmax(dim=1).topk(min(top_k, len(self.classes)), dim=1)
        return [
            Answer(Path(), tuple(self.classes[label] for label in labels), tuple(scores))
            if math.isfinite(scores[0])
            else self.unreadable(Path(), NOT_FINITE)
            for scores, labels in zip(values.tolist(), best.tolist(), strict=True)
        ]

    def _scores(self, texts: Sequence[TokenIds]) -> Tensor:
        """Return logits, float32 on the CPU: [N, classes], or of tokens [N, T, classes]."""
        batch = padded(list(texts), max(map(len, texts)), self.tokenizer)
        logits: Tensor = self.network(batch["tokens"].to(self._device), batch["mask"].to(self._device))
        return logits.float().cpu()


@dataclass(frozen=True)
class TaggedWords(Answer):
    """The tags of a text's words in ``labels``, with their probabilities.

    Attributes:
        words: The words.
        entities: ``type``, ``begin`` and ``end`` (excluded) in the words, and ``text`` of each entity in IOB2 tags.
    """

    per_label = MappingProxyType({"words": ("word",)})
    words: tuple[str, ...] = ()
    entities: tuple[dict[str, Any], ...] = ()

    def _found(self) -> str:
        return " ".join(f"{word}/{tag}" for word, tag in zip(self.words, self.labels, strict=True))

    def _columns(self) -> dict[str, Any]:
        return {"words": self.words, **super()._columns(), "entities": self.entities}


class WordTagger(TextLabeller):
    """A trained token classifier; arguments and attributes as of :class:`TextLabeller`."""

    kind = TaggedWords
    unused_options = MappingProxyType(
        {**TextLabeller.unused_options, "top_k": "a prediction of these weights has one tag for each word"}
    )

    def prepare(self, content: Any) -> Any:
        """Return the words of a text, its tokens, and the token that begins each word.

        Args:
            content: Its words, or UTF-8 text in which spaces separate them.

        Raises:
            BrokenImageError: If it is not UTF-8, empty or too long.
        """
        words = content if isinstance(content, list) else _decoded(content).split()
        if not any(map(str.strip, words)):
            raise BrokenImageError("text", "it is empty")
        ids, starts = self.tokenizer.encode_words(words, self._context)
        places = np.flatnonzero(starts >= 0)
        if missing := len(words) - len(places):
            why = f"beyond the network's {self._context} tokens, or give no token; split the text"
            raise BrokenImageError("text", f"{missing} of its {len(words)} words are {why}")
        return words, ids, places

    @torch.inference_mode()
    def answer(self, prepared: Sequence[Any], top_k: int) -> list[Answer]:
        """Return the most probable tag of each word, in order, without paths."""
        answers, types = list[Answer](), entity_types(self.classes)
        for (words, _, places), scores in zip(prepared, self._scores([ids for _, ids, _ in prepared]), strict=True):
            sure, best = scores[places].softmax(dim=1).max(dim=1)
            tags, found = tuple(self.classes[tag] for tag in best.tolist()), []
            if types is not None:
                begins, _, ends = (each[0].tolist() for each in entities_in(best[None], types))
                for begin in np.flatnonzero(begins).tolist():
                    end = ends[begin]
                    said = {"begin": begin, "end": end, "text": " ".join(words[begin:end])}
                    found.append({"type": tags[begin][2:], **said})
            answer = TaggedWords(Path(), tags, tuple(sure.tolist()), words=tuple(words), entities=tuple(found))
            answers.append(answer if bool(sure.isfinite().all()) else self.unreadable(Path(), NOT_FINITE))
        return answers


def texts_of(sources: Sequence[Path], labeller: TextLabeller) -> Iterator[PictureFile]:
    """Yield each line of text files as a text; of JSON lines, the value of one of the labeller's keys.

    Raises:
        DataError: If a file cannot be read, or a line has no text.
    """
    fix = f"give .txt files with a text on each line, or .jsonl files with the key {' or '.join(labeller.keys)}"
    for source in sources:
        if not source.exists():
            raise DataError(f"'{source}' does not exist; {fix}, or --prompt TEXT.", path=source)
        refuse_special_inputs(source)
        is_json = has_extension(source.name, ("jsonl",))
        number = 0
        try:
            with source.open("rb") as lines:
                if b"\0" in lines.peek():
                    raise ValueError("it has NUL bytes")
                for number, line in enumerate(lines, start=1):
                    text: Any = line.rstrip(b"\r\n")
                    if is_json:
                        row = load_json(line)
                        text = next((row[key] for key in labeller.keys if key in row), None)
                        is_words = isinstance(text, list) and all(isinstance(word, str) for word in text)
                        if not isinstance(text, str) and not (labeller.kind is TaggedWords and is_words):
                            raise DataError(f"line {number} of '{source}' has no text, found {shortened(row)}; {fix}.")
                        encoded = "".join(text).encode()  # refuses lone surrogates
                        text = encoded if isinstance(text, str) else text

                    def read(text: Any = text) -> Any:
                        return text

                    yield PictureFile(Path(f"{source}:{number}"), read)
        except (OSError, ValueError, TypeError) as error:
            where = f"line {number} of " if number else ""
            raise DataError(f"{where}'{source}' cannot be read as text ({error}); {fix}.") from error


MASK = Input("mask", ("batch", "length"), (2,), "1 for tokens, 0 for padding, int64")


def exportable_text(saved: SavedWeights, network: nn.Module, *more: Input) -> Exportable:
    """Return a network of tokens with its inputs."""
    data = saved.description("data")
    vocabulary, longest = int(data["vocabulary"]), int(data["context"])
    description = f"token ids in [0, {vocabulary}), int64, at most {longest} in a row"
    tokens = Input("tokens", ("batch", "length"), (vocabulary,), description)
    return Exportable(network=network, inputs=(tokens, *more), longest={"length": longest}, saved=saved)


def _sampling(prompt: Prompt) -> Sampling:
    given = {name: getattr(prompt, name) for name in (*_GENERATION, "top_k")}
    return Sampling(**{name: each for name, each in given.items() if each is not None})


def _choose(scores: Tensor, sampling: Sampling, draws: torch.Generator) -> int:
    """Sample one token from its scores, float32 [vocabulary]."""
    if sampling.temperature == 0:
        return int(scores.argmax())
    scores = scores.double() / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < len(scores):
        scores = scores.masked_fill(scores < scores.topk(sampling.top_k).values[-1], -torch.inf)
    return int(torch.multinomial(scores.softmax(dim=0), 1, generator=draws))
