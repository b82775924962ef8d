"""The recipe's `data.detection` section: how pictures with boxes around their objects are read, shown and generated."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from paceline.recipe.fields import STRICT, Auto, Fraction, Off, Pixels, PositiveInt, Switch

# Smaller ones hold no object that could be told from another.
_SMALLEST = 32


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GeneratedBoxes:
    """The data set `shapes`: discs, rectangles and triangles on a pattern, each drawn from its number alone."""

    samples: Annotated[PositiveInt, Field(le=10**8)] = 2000
    """Training pictures."""
    evaluation_samples: Annotated[PositiveInt, Field(le=10**8)] = 200
    """Held-out pictures."""
    smallest_side: Annotated[Pixels, Field(ge=_SMALLEST)] = 64
    """Least height and width of a picture in pixels."""
    largest_side: Annotated[Pixels, Field(ge=_SMALLEST)] = 96
    """Largest height and width."""
    objects: Annotated[PositiveInt, Field(le=1000)] = 4
    """Most objects in a picture; there is at least one."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.smallest_side > self.largest_side:
            raise ValueError(
                f"found smallest_side={self.smallest_side} and largest_side={self.largest_side}, but the first must "
                "not be larger"
            )
        return self


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Boxes:
    """How pictures with boxes around their objects are read and shown."""

    short_sides: Annotated[tuple[Pixels, ...] | None, Off] = (800,)
    """Pixels of a picture's shorter side, its aspect ratio kept. Of several, training draws one for each picture, by
    (seed, epoch, sample), and evaluation takes the largest. `off`: pictures stay as large as they are."""
    long_side: Pixels = 1333
    """Most pixels of the longer side; where that is not enough, the shorter one is smaller than `short_sides` says."""
    flip: Fraction = 0.5
    """Probability of a horizontal flip in training."""
    like_shapes: Switch = True
    """Sort each step's samples by aspect ratio before they are cut into micro-batches: less of these is padding. No
    step sees other samples for it."""
    keep_empty: Switch = False
    """Train on pictures without a box, too; evaluation always has them."""
    masks: Auto | Switch = "auto"
    """Read the objects' masks; `auto`: if the model's name says that it is for masks."""
    generated: GeneratedBoxes = GeneratedBoxes()
    """What `data.dataset=shapes` generates."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.short_sides is not None and not self.short_sides:
            raise ValueError("found short_sides=[], but it is one length or several, or off")
        if self.short_sides is not None and max(self.short_sides) > self.long_side:
            raise ValueError(
                f"found short_sides={list(self.short_sides)} and long_side={self.long_side}, but the longer side must "
                "not be the smaller one"
            )
        return self
