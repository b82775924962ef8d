"""The recipe's `model.adapters` section: low-rank matrices beside layers that stay as they are."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from paceline.recipe.fields import STRICT, Needs, Off, OpenFraction, PositiveFloat, PositiveInt

_ADAPTED = Needs(("model.adapters.rank",), "there are no adapters (model.adapters.rank)")
_Rank = Annotated[PositiveInt, Field(le=65_536)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Adapters:
    """Low-rank adapters (Hu et al. 2021): only they and the classifier are trained."""

    rank: Annotated[_Rank | None, Off] = None
    """Rank of the matrices beside a layer's weights, or `off`. An output layer that shares the embedding's weights
    stays frozen and gets none; transposed linear layers (GPT-2's `Conv1D`) count as linear ones."""
    alpha: Annotated[PositiveFloat, _ADAPTED] = 16.0
    """What they compute is multiplied by this over `rank`."""
    targets: Annotated[tuple[str, ...], Field(min_length=1), _ADAPTED] = ("*",)
    """Shell patterns of layers that get them: linear ones and convolutions, but for the classifier."""
    dropout: Annotated[OpenFraction, _ADAPTED] = 0.0
    """Share of an adapter's input that is dropped in training."""
