"""The recipe's `distillation` section: learning from the answers of trained weights."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic.dataclasses import dataclass

from paceline.recipe.fields import STRICT, Applies, Fraction, LocalPath, Off, PositiveFloat


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Distillation:
    """What a network learns from another one, its teacher."""

    teacher: Annotated[LocalPath | None, Off] = None
    """The teacher's weights: a run directory, a checkpoint or a safetensors file, trained on the same classes."""
    kind: Literal["soft", "hard"] = "soft"
    """`soft`: the teacher's probabilities (Hinton et al. 2015); `hard`: its answer as a label (Touvron et al. 2020)."""
    temperature: Annotated[PositiveFloat, Applies("kind", ("soft",))] = 1.0
    """What the logits of both are divided by; the loss is multiplied by its square."""
    weight: Fraction = 0.5
    """The teacher's share of the loss; the labels have the rest."""
