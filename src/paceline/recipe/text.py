"""The recipe's `data.text` section: how text becomes the samples of a language model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from paceline.recipe.fields import STRICT, Applies, LocalPath, OpenFraction, PositiveInt


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Text:
    """How text becomes samples."""

    objective: Literal["causal", "masked"] = "causal"
    """What is asked: `causal`, the next token after each (Radford et al. 2019); or `masked`, some that were hidden
    (Devlin et al. 2018)."""
    context: Annotated[PositiveInt, Field(ge=2, le=10**7)] = 256
    """Most tokens in a sample, which is as far as the model can look."""
    tokenizer: LocalPath = "bytes"
    """`bytes`: each byte of the text's UTF-8 is a token; or a JSON file that a tokenizer was written to;
    a tokenizer.json of Hugging Face's `tokenizers`, or a folder with one (extra `transformers`)."""
    column: str = "text"
    """Which column of a `huggingface_text` dataset is the text; each row is a document."""
    rows: Literal["chunked", "packed", "single"] = "chunked"
    """`chunked`: documents follow one another in one stream, which is cut every `context` tokens. `packed`: whole
    documents are put together so that they fill `context` tokens, and know nothing of one another; longer ones are cut
    (Krell et al. 2021). `single`: each sample is one document, or a part of one that is longer."""
    pad_multiple: Annotated[PositiveInt, Field(le=10**6), Applies("rows", ("single",))] = 8
    """A micro-batch is padded to its longest sample, rounded up to a multiple of this: so there are fewer shapes."""
    mask_fraction: Annotated[OpenFraction, Field(gt=0), Applies("objective", ("masked",))] = 0.15
    """Share of a sample's tokens that are asked for, at least one."""
