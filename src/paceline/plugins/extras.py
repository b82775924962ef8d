"""Optional libraries: what each is for, whether it is installed, and how to install it.

``pyproject.toml`` declares them, one extra for each purpose; this table describes in words what each adds. Tests
compare the two.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from importlib.util import find_spec


@dataclass(frozen=True)
class Library:
    """One optional library.

    Attributes:
        distribution: Its package name.
        module: Its import name.
        min_version: Minimum version; empty for any.
        instead: Another distribution of the same module; empty if there is none.
    """

    distribution: str
    module: str
    min_version: str = ""
    instead: str = ""

    @property
    def version(self) -> str | None:
        """Return the installed version; None if it is missing or cannot be imported. This does not import it."""
        try:
            if find_spec(self.module) is None:
                return None
        except (ImportError, ValueError):  # its parent package is missing, or it is blocked, as in tests
            return None
        return _version(self.distribution) or _version(self.instead)

    @property
    def unavailable_reason(self) -> str:
        """Return why it cannot be used; empty if it can."""
        version = self.version
        if version is None:
            return f"{self.distribution} is not installed"
        if _numbers(version) < _numbers(self.min_version):
            return f"{self.distribution} {version} is older than {self.min_version}"
        return ""


@dataclass(frozen=True)
class Extra:
    """An extra: the libraries that ``pip install 'paceline[NAME]'`` adds.

    Attributes:
        name: As in ``pyproject.toml``.
        features: The features that require it.
        libraries: The libraries it installs.
        only_on: The only supported system, as in ``sys.platform``; empty for any.
    """

    name: str
    features: str
    libraries: tuple[Library, ...]
    only_on: str = ""

    @property
    def install(self) -> str:
        """The command that installs it."""
        return f"pip install 'paceline[{self.name}]'"

    @property
    def unavailable_reason(self) -> str:
        """Return why it cannot be used here; empty if it can."""
        if self.only_on and not sys.platform.startswith(self.only_on):
            return f"it is for {self.only_on} only, and this is {sys.platform}"
        return ", ".join(reason for library in self.libraries if (reason := library.unavailable_reason))


def _libraries(*distributions: str) -> tuple[Library, ...]:
    """Return libraries whose import name is their distribution name, some with a minimum version."""
    parts = [each.partition(">=") for each in distributions]
    return tuple(Library(name, name.replace("-", "_"), minimum) for name, _, minimum in parts)


_DALI = Library("nvidia-dali-cuda130", "nvidia.dali", "2", instead="nvidia-dali-cuda120")
# The other two store its runs in a database.
_MLFLOW = (*_libraries("alembic"), Library("mlflow-skinny", "mlflow"), *_libraries("sqlalchemy"))
_WANDB = _libraries("wandb>=0.31")

_SHOWN = _libraries("plotly", "scipy", "tensorboard")
_VISION = (*_SHOWN, Library("scikit-learn", "sklearn"), *_libraries("timm>=1.0.26", "torchvision"))
_TRANSFORMERS = _libraries("tokenizers", "transformers>=5")
_TEXT = (*_SHOWN, *_libraries("timm>=1.0.26"), *_TRANSFORMERS)

# In the order in which a user needs them, without those for developers only (dev, ci) and `all`, which unites others.
EXTRAS = (
    Extra("vision", "images, the digits, charts, TensorBoard's files", _VISION),
    Extra("tune", "hyper-parameter search", _libraries("optuna")),
    Extra("pack", "packed datasets written, Hugging Face datasets read from disk", _libraries("pyarrow")),
    Extra("simplejpeg", "fast JPEG decoding without our compiled decoder", _libraries("simplejpeg>=1.7")),
    Extra("heic", "HEIC images, as phones store them", _libraries("pillow-heif")),
    Extra("dali", "data.backend=dali", (_DALI,), only_on="linux"),
    Extra("adapters", "model.adapters", _libraries("peft")),
    Extra("transformers", "model.name=transformers:NAME, tokenizer.json files", _TRANSFORMERS),
    Extra("text", "Transformers and their tokenizers, charts, TensorBoard's files", _TEXT),
    Extra("detection", "masks of data.dataset=coco", _libraries("pycocotools")),
    Extra("fp8", "train.precision=fp8", _libraries("torchao")),
    Extra("mlflow", "telemetry.trackers=[mlflow]", _MLFLOW),
    Extra("wandb", "telemetry.trackers=[wandb]", _WANDB),
    Extra("tracking", "both of these trackers", (*_MLFLOW, *_WANDB)),
    Extra(
        "onnx",
        "ONNX files written, checked and used for predictions",
        _libraries("onnx", "onnxruntime", "onnxscript"),
    ),
    Extra("serve", "paceline serve", _libraries("fastapi", "prometheus-client", "python-multipart", "uvicorn")),
    Extra("http", "addresses that begin with http:// or https://", _libraries("aiohttp")),
    Extra("s3", "addresses that begin with s3://", _libraries("s3fs")),
    Extra("gcs", "addresses that begin with gs://", _libraries("gcsfs")),
    Extra("azure", "addresses that begin with az://", _libraries("adlfs")),
    Extra(
        "labs",
        "the course behind `paceline labs`",
        (*_VISION, *_libraries("jupyterlab", "jupytext", "matplotlib", "nbclient", "nbformat", "psutil")),
    ),
    Extra(
        "examples",
        "some files of examples/",
        (*_libraries("diffusers", "monai"), Library("open_spiel", "pyspiel"), *_libraries("torchaudio")),
    ),
    Extra("docs", "these pages built as a site", (Library("mkdocs-material", "material"), *_libraries("mkdocstrings"))),
)


def extra_of(module: str) -> Extra | None:
    """Return the first extra that provides a module, given its import name; None if no extra does."""
    parents = {".".join(module.split(".")[: count + 1]) for count in range(module.count(".") + 1)}
    return next((extra for extra in EXTRAS for library in extra.libraries if library.module in parents), None)


def missing_library(error: BaseException) -> str:
    """Return a sentence for an import that failed because an optional library is missing; empty for any other error."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return ""
    if (extra := extra_of(error.name)) is None:
        return ""
    return f"this needs {error.name}, which cannot be imported ({error}); install it with: {extra.install}"


def _version(distribution: str) -> str | None:
    from importlib import metadata  # slow to import, and `--help` needs none

    try:
        return metadata.version(distribution) if distribution else None
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: 2.0.1rc1 is (2, 0, 1)."""
    release = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, release[0].split("."))) if release else ()
