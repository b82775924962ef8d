"""Names that a recipe or a command line may use, and the objects that they refer to.

Each name maps to a reference ``module:attribute``, which is imported when the object is used. Built-in names are listed
here. An installed package adds names through Python entry points, in the group named ``paceline.`` and the kind::

    [project.entry-points."paceline.optimizers"]
    prodigy = "prodigyopt:Prodigy"

Objects are called in the same way for both kinds of names, and for custom code given as ``package.module:name``:

* optimizers: ``factory(parameter_groups, lr=…, **optimizer.options)``, like torch's classes; returns a
  ``torch.optim.Optimizer``
* losses: ``factory(**train.loss_options)``; returns ``loss(logits, targets)``, called with scores and probabilities of
  shape [N, classes], which returns the loss of each sample, [N]
* augmentations: ``factory(**data.augment.policy_options)``; returns ``vary(image)``, called with a uint8 image of
  shape [C, H, W], which returns one of the same shape; it may draw from torch, NumPy's or Python's global generator
* schedules: ``shape(rate, step)`` with a :class:`paceline.plan.rates.LearningRate`; returns the learning rate of a
  step after the warm-up
* tasks: ``task(recipe)``; returns a :class:`paceline.tasks.task.Task`
* datasets: see :mod:`paceline.dataset_registry`
* backends: ``backend()``; returns a :class:`paceline.data.image.pipeline.ImageBackend`, which `data.backend` names
* run_logs: ``log()``; returns a :class:`paceline.plan.run_logs.RunLog`, which writes a log of each run
* commands: a click command
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal, TypeVar

from paceline.errors import PacelineError, did_you_mean
from paceline.optimizers import LIBRARY_OPTIMIZERS, RULES, UNSUPPORTED_OPTIMIZERS
from paceline.references import is_reference, load_reference

_T = TypeVar("_T")
Kind = Literal[
    "optimizers", "schedules", "losses", "augmentations", "tasks", "datasets", "backends", "run_logs", "commands"
]

_SCHEDULES = ("constant", "step", "linear", "cosine", "cyclic", "polynomial", "exponential", "one_cycle", "trapezoid")
_BUILT_IN: dict[Kind, dict[str, str]] = {
    "optimizers": {name: rule.reference for name, rule in RULES.items()},
    "schedules": {name: f"paceline.optim.schedules:{name}" for name in _SCHEDULES},
    "losses": {
        "cross_entropy": "torch.nn:CrossEntropyLoss",
        "bce": "torch.nn:BCEWithLogitsLoss",
        "focal": "paceline.tasks.image_classification:FocalLoss",
        "asl": "paceline.tasks.image_multilabel:AsymmetricLoss",
        "mse": "torch.nn:MSELoss",
        "l1": "torch.nn:L1Loss",
        "huber": "torch.nn:HuberLoss",
        "cross_entropy_dice": "paceline.tasks.segmentation:pixel_losses",
    },
    "augmentations": {
        "none": "torch.nn:Identity",
        "randaugment": "torchvision.transforms.v2:RandAugment",
        "trivialaugment": "torchvision.transforms.v2:TrivialAugmentWide",
        "autoaugment": "torchvision.transforms.v2:AutoAugment",
        "augmix": "torchvision.transforms.v2:AugMix",
        "timm": "paceline.data.image.transforms:timm_policy",
    },
    "tasks": {
        "image_classification": "paceline.tasks.image_classification:ImageClassification",
        "image_multilabel": "paceline.tasks.image_multilabel:ImageMultilabel",
        "image_regression": "paceline.tasks.image_regression:ImageRegression",
        "distillation": "paceline.tasks.distillation:Distillation",
        "language_modeling": "paceline.tasks.language_modeling:LanguageModeling",
        "text_classification": "paceline.tasks.text_classification:TextClassification",
        "token_classification": "paceline.tasks.token_classification:TokenClassification",
        "recommendation": "paceline.tasks.recommendation:Recommendation",
        "detection": "paceline.tasks.detection:Detection",
        "segmentation": "paceline.tasks.segmentation:Segmentation",
    },
    "datasets": {},  # built-in data sets register themselves: paceline.dataset_registry
    "backends": {},  # built-in ones are chosen in paceline.data.image.pipeline
    "run_logs": {},
    "commands": {},
}


def built_in(kind: Kind) -> dict[str, str]:
    """Return the built-in names of a kind and their references."""
    return _BUILT_IN[kind]


@cache
def installed(kind: Kind) -> dict[str, str]:
    """Return the names of a kind that installed packages add, with references, sorted; built-in names have priority.

    Raises:
        PacelineError: If two packages register different objects under one name.
    """
    from importlib.metadata import entry_points  # slow to import, and `--help` needs none

    references: dict[str, str] = {}
    for each in sorted(entry_points(group=f"paceline.{kind}"), key=lambda entry: (entry.name, entry.value)):
        if references.setdefault(each.name, each.value) != each.value:
            raise PacelineError(
                f"two installed packages register '{each.name}' in paceline.{kind}: {references[each.name]} and "
                f"{each.value}; uninstall one of them."
            )
    return {name: value for name, value in references.items() if name not in _BUILT_IN[kind]}


def known_names(kind: Kind) -> dict[str, str]:
    """Return all names of a kind and their references: built in, from installed packages, and from libraries."""
    library_names = LIBRARY_OPTIMIZERS if kind == "optimizers" else {}
    return library_names | installed(kind) | _BUILT_IN[kind]


def name_problem(kind: Kind, name: str) -> str:
    """Return what is wrong with a name, with the nearest names; empty if it is registered, or a reference."""
    if name in _BUILT_IN[kind] or is_reference(name) or name in known_names(kind):
        return ""
    if kind == "optimizers" and (why := UNSUPPORTED_OPTIMIZERS.get(name.lower())):
        return f"optimizer '{name}' is not supported: {why}"
    noun = "loss" if kind == "losses" else kind.removesuffix("s")
    listed = ", ".join((*_BUILT_IN[kind], *installed(kind)))
    suffix = ", another optimizer of torch.optim or timm" if kind == "optimizers" else ""
    return (
        f"unknown {noun} '{name}'.{did_you_mean(name, known_names(kind))} Known: {listed}{suffix}, or your own "
        "package.module:name"
    )


def load(kind: Kind, name: str, error: type[PacelineError]) -> Any:
    """Import and return the object of a name, or of a reference to custom code.

    Raises:
        PacelineError: As ``error``, if there is no such name, module or attribute.
    """
    if problem := name_problem(kind, name):
        raise error(f"{problem}.")
    is_custom = name not in _BUILT_IN[kind] and is_reference(name)
    reference = name if is_custom else _BUILT_IN[kind].get(name) or known_names(kind)[name]
    target = load_reference(reference, error, installed=not is_custom)
    if not callable(target):
        raise error(f"'{reference}' is a {type(target).__name__}, which cannot be called: name a function or a class.")
    return target
