"""Formats of `paceline export` for networks of Transformers."""

from __future__ import annotations

from paceline.inference.formats import Format

TRANSFORMERS = Format(
    writer="paceline_text.export:write_transformers",
    reader="Transformers",
    phrase="one that from_pretrained opens",
)
PEFT = Format(writer="paceline_text.export:write_peft", reader="peft", phrase="low-rank adapters alone")
