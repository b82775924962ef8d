"""Token classification: a tag for each word of a text, such as its part of speech, or named entities in IOB2 tags.

In IOB2, ``B-PER`` begins an entity of the type PER, ``I-PER`` continues it, and ``O`` is outside. As in conlleval, and
by default in seqeval, an ``I-`` tag that continues nothing begins an entity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from paceline.checkpoint.weights import SavedWeights
from paceline.data.batch import Batch, Nested
from paceline.data.slices import SampleWeights
from paceline.host.world import World
from paceline.metrics.accumulator import Collector, Metric
from paceline.plan import DataFacts
from paceline.tasks.task import Model, Task
from paceline_text.corpus import IGNORED_TARGET, StoredCorpus
from paceline_text.entities import ENTITY_METRICS, IOB2, EntityScores, entity_counts, entity_names, entity_types
from paceline_text.text_classification import TextClassification
from paceline_text.tokenizer import TokenIds

if TYPE_CHECKING:
    from paceline.prediction.predictor import Predictor

_ACCURACY = Metric(name="token_accuracy", scale=100.0, higher_is_better=True, of="right", per="words")
_METRICS: tuple[Metric, ...] = (Metric(name="loss", per="words"), _ACCURACY)


class TokenClassification(TextClassification):
    """Assigns one of several tags to each word of a text; a word's first token predicts its tag."""

    unit = "words"
    headline = "token_accuracy"
    gives_scores = False
    per_word = True
    metrics = _METRICS
    sample_classes = Task.sample_classes
    answers = Task.answers

    def data_facts(self, world: World) -> DataFacts:
        """Open the texts."""
        found, why = super().data_facts(world), "the loss is the cross-entropy of each word's tag"
        rows, held_out = self.dataset.first_rows, self.dataset.labels[1]
        self._types = entity_types(self.dataset.classes)
        odd = (f"tag {tag!r} in {row} is not O, B-X or I-X" for tag, row in rows.items() if not IOB2.fullmatch(tag))
        reason = next(odd, "")
        if self._types is not None and held_out.size and not np.isin(held_out, np.flatnonzero(self._types)).any():
            self._types, reason = None, "the held-out texts have no entity"  # F1 would be 0 / 0
        if self._types is not None:
            self.metrics, self.headline = (*_METRICS, *ENTITY_METRICS), ENTITY_METRICS[0].name
        elif reason:
            found = replace(found, left_out=(*found.left_out, f"entity_f1 is not reported: {reason}"))
        unused = dict.fromkeys(("train.loss", "train.loss_options", "train.target_threshold"), why)
        return replace(found, unused={**found.unused, **unused})

    def sample_weights(self) -> SampleWeights:
        """Return the tagged words of each training text."""
        return np.add.reduceat(self.dataset.labels[0] != IGNORED_TARGET, self.dataset.train.begins[:-1], dtype=np.int64)

    def targets(self, corpus: StoredCorpus, labels: TokenIds, ids: TokenIds, width: int) -> torch.Tensor:
        """Return the tags of some texts, int64 [N, width]; -100 where no word begins."""
        found = np.full((len(ids), width), IGNORED_TARGET, dtype=np.int64)
        for row, text in enumerate(ids.tolist()):
            found[row, : corpus.lengths[text]] = labels[corpus.begins[text] : corpus.begins[text + 1]]
        return torch.from_numpy(found)

    def loss(self, model: Model, batch: Batch) -> torch.Tensor:
        """Return the mean cross-entropy in nats over the micro-batch's words."""
        total = _losses(model, batch, self.recipe.train.label_smoothing)[1].sum()
        mean: torch.Tensor = total / (batch.targets != IGNORED_TARGET).sum().clamp(min=1)
        return mean

    def score(self, model: Model, batch: Batch) -> dict[str, Any]:
        """Return each text's cross-entropy without smoothing, its words, right tags and entities."""
        logits, losses = _losses(model, batch)
        found = logits.argmax(dim=2)
        # Sums must not depend on the width, which is of the batch.
        losses = losses.double() if losses.device.type != "mps" else losses
        values = {"loss": losses.sum(dim=1), "words": (batch.targets != IGNORED_TARGET).sum(dim=1)}
        values["right"] = (found == batch.targets).sum(dim=1)
        return values if self._types is None else values | entity_counts(found, batch.targets, self._types)

    def collectors(self) -> tuple[Collector, ...]:
        """Return the collector of entities, if tags are IOB2's."""
        return () if self._types is None else (EntityScores(entity_names(self.dataset.classes)),)

    def named_answers(self, line: Mapping[str, Any], classes: Sequence[str]) -> dict[str, Any]:
        """Return the words of a text, and the names of their tags."""
        tags = {f"{key}_class": [classes[each] for each in line[key]] for key in ("prediction", "target")}
        return {"words": self.dataset.words[line["id"]], **tags}

    def predictor(self, saved: SavedWeights, device: torch.device) -> Predictor:
        """Return what tags the words of texts."""
        # Imported only where used: training needs none of it.
        from paceline_text.answers import WordTagger

        return WordTagger(saved, self.trained(saved, device), self.dataset.tokenizer, device, self.recipe.data.text)

    def predict(self, model: Model, batch: Batch) -> dict[str, Nested]:
        """Return the most probable tag of each word, and the true one."""
        rows = zip(_losses(model, batch)[0].argmax(dim=2), batch.targets, batch.targets != IGNORED_TARGET, strict=True)
        pairs = [(found[is_word], true[is_word]) for found, true, is_word in rows]
        return {"prediction": [found for found, _ in pairs], "target": [true for _, true in pairs]}


def _losses(model: Model, batch: Batch, smoothing: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits of at least 32 bits, [N, T, tags], and the cross-entropy of each token, [N, T]; 0 without a tag."""
    logits: torch.Tensor = model(batch.inputs["tokens"], batch.inputs["mask"])
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    asked: dict[str, Any] = {"ignore_index": IGNORED_TARGET, "reduction": "none", "label_smoothing": smoothing}
    return logits, F.cross_entropy(logits.mT, batch.targets, **asked)
