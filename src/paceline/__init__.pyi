# Written by scripts/public.

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from paceline.functions import CommandResult as CommandResult
from paceline.fitting import FitResult as FitResult
from paceline.tasks.image_classification import ImageClassification as ImageClassification
from paceline.loop.loop import Loop as Loop
from paceline.errors import PacelineError as PacelineError
from paceline.recipe.schema import Recipe as Recipe
from paceline.tasks.task import Task as Task
from paceline.trainer.result import TrainResult as TrainResult
from paceline.fitting import fit as fit
from paceline.recipe.load import load_recipe as load_recipe
from paceline.training import train as train

__all__ = [
    "CommandResult",
    "FitResult",
    "ImageClassification",
    "Loop",
    "PacelineError",
    "Recipe",
    "Task",
    "TrainResult",
    "__version__",
    "audit",
    "check_data",
    "estimate",
    "evaluate",
    "export",
    "find_lr",
    "fit",
    "load_recipe",
    "predict",
    "report",
    "resume",
    "train",
    "verify",
]

__version__: str
PUBLIC_MODULES: tuple[str, ...]
_HOMES: dict[str, str]
COMMANDS: tuple[str, ...]

def audit(run_dir: str | Path) -> CommandResult: ...
def check_data(
    source: str | Path,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    *,
    workers: int | None = None,
    limit: int | None = None,
    quarantine: str | Path | None = None,
    folds: int | None = None,
    duration: str | None = None,
    output: str | Path | None = None,
    verbose: bool = False,
    trust_code: bool = False,
) -> CommandResult: ...
def estimate(
    recipe: str | Path,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    *,
    device: str | None = None,
    processes: int | None = None,
    expandable_segments: bool = False,
    trust_code: bool = False,
) -> CommandResult: ...
def evaluate(
    target: str | Path,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    *,
    processes: int | None = None,
    predictions: str | Path | None = None,
    per_class: bool = False,
    weights: Literal["auto", "model", "ema"] = "auto",
    best: bool = False,
    trust_code: bool = False,
    sizes: int | Sequence[int] = (),
    on: Literal["validation", "holdout"] | None = None,
) -> CommandResult: ...
def export(
    target: str | Path,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    *,
    format: str = "safetensors",
    output: str | Path | None = None,
    push: str | None = None,
    yes: bool = False,
    quantize: Literal["int8", "bf16"] | None = None,
    weights: Literal["auto", "model", "ema"] = "auto",
    best: bool = False,
    trust_code: bool = False,
) -> CommandResult: ...

find_lr: Callable[..., Any]

def predict(
    target: str | Path,
    sources: Any = (),
    *,
    prompt: str | None = None,
    tokens: int | None = None,
    temperature: float | None = None,
    seed: int | None = None,
    top_k: int | None = None,
    thresholds: float | dict[str, float] | str | None = None,
    draw: str | Path | None = None,
    output: str | Path | None = None,
    batch_size: int | None = None,
    stdin_image: bool = False,
    weights: Literal["auto", "model", "ema"] = "auto",
    best: bool = False,
    trust_code: bool = False,
) -> list[dict[str, Any]] | CommandResult: ...
def report(
    runs: str | Path | Sequence[str | Path],
    *,
    output: str | Path | None = None,
    bundle: bool = False,
    timing: bool = False,
) -> Path | CommandResult: ...
def resume(
    run: str | Path,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    *,
    processes: int | str | None = None,
    max_restarts: int = 0,
    until: str | None = None,
    trust_code: bool = False,
) -> TrainResult: ...
def verify(
    run: str | Path,
    *,
    segments: int | None = None,
    all: bool = False,
    step: str | None = None,
    seed: int | None = None,
    tolerance: float | None = None,
    trust_code: bool = False,
) -> CommandResult: ...
