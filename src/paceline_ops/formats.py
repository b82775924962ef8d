"""Formats of `paceline export` for other trainers, and for people."""

from __future__ import annotations

from paceline.inference.formats import Format

TIMM = Format(
    writer="paceline_ops.timm_folder:write_timm",
    reader="timm",
    rounds_to=("bf16",),
    phrase="a folder that timm.create_model and the Hugging Face hub open",
)
FOLDER = Format(
    writer="paceline_ops.bundle.folder:write_folder",
    reader="ONNX Runtime",
    phrase="a folder to share: ONNX model, labels, card, page, and a program that runs it without Paceline",
    advice="index.html shows held-out images of the run: look at it before you share the folder",
)
