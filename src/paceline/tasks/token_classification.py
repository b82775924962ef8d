"""Token classification: a tag for each word of a text, such as its part of speech, or named entities in IOB2 tags."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from paceline.data.batch import Batch, Nested
from paceline.data.pipeline import Placement
from paceline.data.slices import SampleWeights
from paceline.data.text.corpus import StoredCorpus
from paceline.data.text.labelled import LabelledTexts
from paceline.data.text.pipeline import NOTHING
from paceline.data.text.tagged import open_tagged
from paceline.data.text.tokenizer import TokenIds
from paceline.metrics.accumulator import Metric
from paceline.metrics.entities import ENTITY_METRICS, Iob2
from paceline.plan import DataFacts
from paceline.tasks.task import Model, Task
from paceline.tasks.text_classification import TextClassification
from paceline.world import World

_METRICS: tuple[Metric, ...] = (
    Metric(name="loss", per="words"),
    Metric(name="token_accuracy", scale=100.0, higher_is_better=True, of="right", per="words"),
)


class TokenClassification(TextClassification):
    """Assigns one of several tags to each word of a text; a word's first token predicts its tag."""

    unit = "words"
    headline = "token_accuracy"
    gives_scores = False
    is_per_token = True
    metrics = _METRICS
    sample_classes = Task.sample_classes
    answers = Task.answers

    @cached_property
    def dataset(self) -> LabelledTexts:
        """The texts, their tags and the tokenizer, opened on first use."""
        return open_tagged(self.recipe.data)

    @cached_property
    def _iob2(self) -> Iob2 | None:
        return Iob2(self.dataset.classes) if Iob2.matches(self.dataset.classes) else None

    def data_facts(self, world: World) -> DataFacts:
        """Open the texts."""
        found = super().data_facts(world)
        if self._iob2 is not None:
            self.metrics, self.headline = (*_METRICS, *ENTITY_METRICS), "entity_f1"
        why = "the loss is the cross-entropy of each word's tag"
        unused = dict.fromkeys(("train.loss", "train.loss_options", "train.target_threshold"), why)
        return replace(found, unused={**found.unused, **unused})

    def sample_weights(self) -> SampleWeights:
        """Return the tagged words of each training text."""
        return np.add.reduceat(self.dataset.labels[0] != NOTHING, self.dataset.train.begins[:-1], dtype=np.int64)

    def description(self) -> dict[str, Any]:
        """Return facts that prediction needs, marking classes as tags of words."""
        return {**super().description(), "labels_words": True}

    def targets(self, corpus: StoredCorpus, labels: TokenIds, ids: TokenIds, width: int) -> torch.Tensor:
        """Return the tags of some texts, int64 [N, width]; -100 where no word begins."""
        found = np.full((len(ids), width), NOTHING, dtype=np.int64)
        for row, text in enumerate(ids.tolist()):
            tags = labels[corpus.begins[text] : corpus.begins[text + 1]]
            found[row, : len(tags)] = tags
        return torch.from_numpy(found)

    def prepare_training(self, placement: Placement) -> None:
        """Do nothing: there is one loss."""

    def loss(self, model: Model, batch: Batch) -> torch.Tensor:
        """Return the mean cross-entropy in nats over the micro-batch's words."""
        total = _losses(model, batch, self.recipe.train.label_smoothing)[1].sum()
        mean: torch.Tensor = total / (batch.targets != NOTHING).sum().clamp(min=1)
        return mean

    def score(self, model: Model, batch: Batch) -> dict[str, Any]:
        """Return each text's cross-entropy without smoothing, its words, right tags and entities."""
        logits, losses = _losses(model, batch)
        tagged, found = batch.targets != NOTHING, logits.argmax(dim=2)
        # Sums must not depend on the width, which is of the batch.
        losses = losses.double() if losses.device.type != "mps" else losses
        values = {"loss": losses.sum(dim=1), "words": tagged.sum(dim=1)}
        values["right"] = ((found == batch.targets) & tagged).sum(dim=1)
        return values if self._iob2 is None else values | self._iob2.counts(found, batch.targets)

    def predict(self, model: Model, batch: Batch) -> dict[str, Nested]:
        """Return the most probable tag of each tagged word, and the true one."""
        found, true = _losses(model, batch)[0].argmax(dim=2), batch.targets
        rows = zip(found, true, true != NOTHING, strict=True)
        pairs = [(one[tagged], other[tagged]) for one, other, tagged in rows]
        return {"prediction": [one for one, _ in pairs], "target": [other for _, other in pairs]}


def _losses(model: Model, batch: Batch, smoothing: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits of at least 32 bits, [N, T, tags], and the cross-entropy of each token, [N, T]; 0 without a tag."""
    logits: torch.Tensor = model(batch.inputs["tokens"], batch.inputs["mask"])
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = F.cross_entropy(
        logits.flatten(0, 1), batch.targets.flatten(), ignore_index=NOTHING, reduction="none", label_smoothing=smoothing
    )
    return logits, losses.view_as(batch.targets)
