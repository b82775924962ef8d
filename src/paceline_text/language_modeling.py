"""Language modelling: next-token or masked-token prediction, with cross-entropy over the predicted tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn

from paceline.checkpoint.weights import SavedWeights
from paceline.data.balance import SampleLengths
from paceline.data.batch import Batch
from paceline.data.pipeline import Pipeline, Placement
from paceline.data.slices import SampleWeights
from paceline.errors import DataError, ModelError
from paceline.host.world import World
from paceline.metrics.accumulator import Collector, Metric, exact_sum
from paceline.parsing.files import SkippedItems
from paceline.plan import DataFacts
from paceline.plugins.dataset_registry import DatasetNames
from paceline.recipe.model import ModelSection
from paceline.recipe.schema import Recipe
from paceline.recipe.unused import all_but
from paceline.tasks.task import Model, Task
from paceline_text.corpus import IGNORED_TARGET, StoredCorpus, TextDataset, without_text
from paceline_text.models import build_language_model, is_causal
from paceline_text.pipeline import (
    EVALUATION_SEED,
    Masking,
    RowTable,
    TextPipeline,
    TextSplit,
    chunked_rows,
    masked_count,
    packed_rows,
    single_rows,
    target_count,
)
from paceline_text.sets.documents import open_text
from paceline_text.tokenizer import HuggingFaceTokenizer, refuse_other_tokenizer
from paceline_text.transformers_models import PREFIX, takes_documents

if TYPE_CHECKING:
    from paceline.prediction.predictor import Predictor
    from paceline.tasks.exportable import Exportable

_LOSS = Metric(name="loss", per="tokens")
_PERPLEXITY = Metric(name="perplexity", is_collected=True)
_BITS = Metric(name="bits_per_byte", scale=1 / math.log(2), of="loss", per="bytes")
_RIGHT = Metric(name="token_accuracy", scale=100.0, higher_is_better=True, of="right", per="tokens")
_CAUSAL = (_LOSS, _BITS, _RIGHT, _PERPLEXITY)
_MASKED = (_LOSS, replace(_RIGHT, name="masked_accuracy"))
_PROMPTS, _PROMPTS_LOOKED_AT, _ANSWER_TOKENS = 2, 100, 32
_USED = ("data.dataset", "data.path", "data.validation_fraction", "data.text")
_OF_CLASSES = ("train.loss", "train.loss_options", "train.target_threshold", "train.label_smoothing", "evaluate.top_k")


class LanguageModeling(Task):
    """Predicts the next token (`data.text.objective=causal`) or masked tokens (`masked`)."""

    unit = "tokens"

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self._is_masked = recipe.data.text.objective == "masked"
        self.metrics = _MASKED if self._is_masked else _CAUSAL
        self.headline = "masked_accuracy" if self._is_masked else "bits_per_byte"

    @cached_property
    def dataset(self) -> TextDataset:
        """The text and its tokenizer, opened on first use."""
        return open_text(self.recipe.data)

    @cached_property
    def train_rows(self) -> RowTable:
        """Rows that make up the training samples."""
        return self._rows(self.dataset.train, self.recipe.seed)

    @cached_property
    def evaluation_rows(self) -> RowTable:
        """Rows that make up the held-out samples."""
        return self._rows(self.dataset.validation, EVALUATION_SEED)

    def data_facts(self, world: World) -> DataFacts:
        """Open the text and cut it into samples."""
        dataset, text = self.dataset, self.recipe.data.text
        if self._is_masked and dataset.tokenizer.mask is None:
            raise DataError(
                "data.text.objective=masked needs a mask token, which this tokenizer "
                f"(data.text.tokenizer={text.tokenizer}) does not have; give it one, or choose objective=causal.",
                key="data.text.objective",
                value="masked",
            )
        if self._is_masked and dataset.train.is_target is not None:
            raise DataError(
                f"data.dataset={dataset.name} says which tokens to predict: set data.text.objective=causal.",
                key="data.dataset",
                value=dataset.name,
            )
        if len(self.train_rows) == 0:
            raise DataError(
                f"data.dataset={dataset.name} has fewer than two tokens to learn from; check data.path.",
                key="data.dataset",
                value=dataset.name,
            )
        reason = "the task language_modeling reads text"
        used = (*_USED, "data.split_column") if self.recipe.data.dataset in DatasetNames("split_column") else _USED
        unused = all_but(used, reason) | dict.fromkeys(_OF_CLASSES, "a language model's classes are its tokens")
        unused |= dict.fromkeys(("model.channels_last", "evaluate.keep_examples"), reason)
        if self.recipe.data.dataset != "huggingface_text":
            unused["data.text.column"] = "only data.dataset=huggingface_text has columns"
        empty = SkippedItems()
        for corpus in dict.fromkeys((dataset.train, dataset.validation)) if self.train_rows.separate else ():
            for document in np.flatnonzero(corpus.lengths < 2).tolist():
                empty.add("documents without text", corpus.name(document))
        return DataFacts(
            train_samples=len(self.train_rows),
            evaluation_samples=len(self.evaluation_rows),
            description={
                "dataset": dataset.name,
                "digest": dataset.digest,
                "objective": text.objective,
                "vocabulary": dataset.tokenizer.vocabulary,
                "context": text.context,
                "documents": len(dataset.train.lengths),
                "tokens": int(self.train_rows.tokens.sum()),
                "evaluation_documents": len(dataset.validation.lengths),
                "evaluation_tokens": int(self.evaluation_rows.tokens.sum()),
            },
            reasons={} if dataset.reason is None else {"data.validation_fraction": dataset.reason},
            unused=unused,
            left_out=(*dataset.left_out, *empty.summaries()),
        )

    def sample_weights(self) -> SampleWeights:
        """Return the number of tokens to predict in each training sample."""
        table, corpus = self.train_rows, self.dataset.train
        if corpus.is_target is not None:
            return target_count(corpus, table)
        return masked_count(table.tokens, self.recipe.data.text.mask_fraction) if self._is_masked else table.targets

    def sample_lengths(self) -> SampleLengths:
        """Return the tokens of each training sample."""
        return self._lengths(self.train_rows)

    def evaluation_lengths(self) -> SampleLengths:
        """Return the tokens of each held-out sample."""
        return self._lengths(self.evaluation_rows)

    def description(self) -> dict[str, Any]:
        """Return the tokenizer and other facts that prediction needs."""
        text = self.recipe.data.text
        return {
            "tokenizer": self.dataset.tokenizer.to_tree(),
            "vocabulary": self.dataset.tokenizer.vocabulary,
            "context": text.context,
            "objective": text.objective,
            **({"messages": True} if self.dataset.is_chat else {}),
        }

    def open_pipeline(self, placement: Placement) -> Pipeline:
        """Open the pipeline of token rows, read in this process."""
        dataset = self.dataset
        return TextPipeline(
            train=self._split(dataset.train, self.train_rows, self.recipe.seed),
            evaluation=self._split(dataset.validation, self.evaluation_rows, EVALUATION_SEED),
            tokenizer=dataset.tokenizer,
            placement=placement,
        )

    def build_model(self) -> nn.Module:
        """Build the recipe's network for the tokenizer's vocabulary and the row length."""
        config, text = self.recipe.model, self.recipe.data.text
        causal = is_causal(config)
        if causal is not None and causal == self._is_masked:
            raise ModelError(
                f"model.name={config.name} {'sees only earlier tokens' if causal else 'sees later tokens'}, and "
                f"data.text.objective={text.objective} asks for {'masked tokens' if causal else 'the next token'}; "
                f"choose model.name={'bert' if causal else 'gpt'}, or the other objective.",
                key="model.name",
                value=config.name,
            )
        vocabulary = self.dataset.tokenizer.vocabulary
        return build_language_model(config, vocabulary=vocabulary, context=text.context, is_masked=self._is_masked)

    def check_network(self, network: nn.Module) -> None:
        """Check that the network isolates documents if rows hold several independent ones."""
        text = self.recipe.data.text
        if (self.train_rows.separate or self._is_masked) and not takes_documents(network, text.context):
            raise ModelError(
                f"model.name={self.recipe.model.name} cannot separate the documents of a sample, which "
                f"data.text.rows={text.rows} with data.text.objective={text.objective} requires; choose another "
                f"model{'' if self._is_masked else ', or data.text.rows=chunked'}.",
                key="model.name",
                value=self.recipe.model.name,
            )

    def check_published(self, model: ModelSection) -> bool:
        """Return whether this is a network of Transformers, whose weights only training loads."""
        return model.name.startswith(PREFIX)

    def loss(self, model: Model, batch: Batch) -> torch.Tensor:
        """Return the mean cross-entropy in nats over the predicted tokens."""
        logits, targets = _logits(model, batch), batch.targets
        total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED_TARGET, reduction="sum")
        mean: torch.Tensor = total / (targets != IGNORED_TARGET).sum().clamp(min=1)
        return mean

    def score(self, model: Model, batch: Batch) -> dict[str, Any]:
        """Return each sample's cross-entropy in nats and its divisors: predicted tokens and their bytes."""
        logits, targets = _logits(model, batch), batch.targets
        losses = F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=IGNORED_TARGET, reduction="none")
        is_target = targets != IGNORED_TARGET
        values = {"loss": losses.double().sum(dim=1) if losses.device.type != "mps" else losses.sum(dim=1)}
        values |= {"tokens": is_target.sum(dim=1), "bytes": batch.inputs["bytes"]}
        values["right"] = ((logits.argmax(dim=2) == targets) & is_target).sum(dim=1)
        return values

    def predict(self, model: Model, batch: Batch) -> dict[str, Any]:
        """Return how well each row is predicted: total nats, predicted tokens, and their bytes or hits."""
        return self.score(model, batch)

    def figures(self, model: Any) -> Sequence[tuple[str, str]]:
        """Return what the model answers to two held-out prompts, where the data says what is an answer."""
        corpus, context, tokenizer = self.dataset.validation, self.recipe.data.text.context, self.dataset.tokenizer
        shown: list[tuple[str, str]] = []
        if corpus.is_target is None:
            return shown
        ends = {tokenizer.end}
        if self.dataset.is_chat and isinstance(tokenizer, HuggingFaceTokenizer):
            ends |= tokenizer.answer_ends
        for document in range(min(len(corpus.lengths), _PROMPTS_LOOKED_AT)):
            prompt = int(corpus.target_mask(document, 0, int(corpus.lengths[document])).argmax())
            if prompt == 0 or prompt >= context:
                continue
            ids = corpus.read(document, 0, prompt).tolist()
            for _ in range(min(_ANSWER_TOKENS, context - prompt)):
                tokens = torch.tensor([ids], device=next(model.parameters()).device)
                if (following := int(model(tokens, None, None)[0, -1].argmax())) in ends:
                    break
                ids.append(following)
            shown.append((tokenizer.decode(ids[prompt:]) or "(empty answer)", tokenizer.decode(ids[:prompt])))
            if len(shown) == _PROMPTS:
                break
        return shown

    def collectors(self) -> tuple[Collector, ...]:
        """Return the collector of perplexity: the exponential of the mean loss."""
        return () if self._is_masked else (Perplexity(),)

    def recall(self, saved: SavedWeights) -> None:
        """Take the tokenizer from the description; no text is read."""
        self.dataset = TextDataset(**without_text(saved.description("data"), str(saved.path)))

    def check_trained(self, saved: SavedWeights) -> None:
        """Refuse text that was encoded, or chats that were written, otherwise than in training."""
        refuse_other_tokenizer(
            self.dataset.tokenizer, saved.description("data"), str(saved.path), name=self.recipe.data.text.tokenizer
        )

    def predictor(self, saved: SavedWeights, device: torch.device) -> Predictor:
        """Return what continues prompts, or fills in their masked tokens."""
        # Imported only where used: training needs none of it.
        from paceline_text.answers import TextPredictor

        return TextPredictor(saved, self.trained(saved, device), self.dataset.tokenizer, device)

    def exportable(self, saved: SavedWeights, target: str) -> Exportable:
        """Return the network with its inputs: tokens."""
        from paceline_text.answers import exportable_text

        return exportable_text(saved, self.trained(saved))

    def _rows(self, corpus: StoredCorpus, seed: int) -> RowTable:
        text = self.recipe.data.text
        if text.rows == "packed":
            return packed_rows(corpus.lengths, text.context, seed)
        cut = chunked_rows if text.rows == "chunked" else single_rows
        return cut(corpus.lengths, text.context)

    def _lengths(self, table: RowTable) -> SampleLengths:
        text = self.recipe.data.text
        width = None if text.rows == "single" else text.context
        return SampleLengths(tokens=table.tokens, multiple=text.pad_multiple, width=width, max_width=text.context)

    def _split(self, corpus: StoredCorpus, table: RowTable, seed: int) -> TextSplit:
        masking, text, tokenizer = None, self.recipe.data.text, self.dataset.tokenizer
        if self._is_masked:
            assert tokenizer.mask is not None
            masking = Masking(
                seed=seed,
                fraction=text.mask_fraction,
                mask=tokenizer.mask,
                vocabulary=tokenizer.vocabulary,
                context=text.context,
            )
        return TextSplit(corpus=corpus, table=table, lengths=self._lengths(table), masking=masking)


class Perplexity:
    """Perplexity: the exponential of the mean loss per token, exact for any number of processes."""

    def __init__(self) -> None:
        self._sums: list[torch.Tensor] = []

    def add(self, values: Mapping[str, Any], ids: NDArray[np.int64]) -> None:
        """Add a batch's nats and tokens."""
        self._sums.append(torch.stack([values["loss"].sum(), values["tokens"].sum().to(values["loss"].dtype)]))

    def part(self) -> list[list[float]]:
        """Return nats and tokens of each batch."""
        rows: list[list[float]] = torch.stack(self._sums).tolist() if self._sums else []
        return rows

    def results(self, parts: Sequence[list[list[float]]]) -> dict[str, float]:
        """Compute the perplexity; infinite if it overflows."""
        rows = [row for part in parts for row in part]
        tokens = sum(row[1] for row in rows)
        if not tokens:
            return {_PERPLEXITY.name: math.nan}
        mean = exact_sum(row[0] for row in rows) / tokens
        return {_PERPLEXITY.name: math.inf if mean > 700 else math.exp(mean)}


def _logits(model: Model, batch: Batch) -> torch.Tensor:
    """Return the network's logits in at least 32 bits, which sums over thousands of tokens need."""
    inputs = batch.inputs
    logits: torch.Tensor = model(inputs["tokens"], inputs.get("positions"), inputs.get("documents"))
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
