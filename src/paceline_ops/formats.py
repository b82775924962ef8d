"""Formats of `paceline export` for other trainers."""

from __future__ import annotations

from paceline.inference.formats import Format

TIMM = Format(
    writer="paceline_ops.timm_folder:write_timm",
    reader="timm",
    rounds_to=("bf16",),
    phrase="a folder that timm.create_model and the Hugging Face hub open",
)
