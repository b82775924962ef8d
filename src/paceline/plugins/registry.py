"""Names that a recipe or a command line may use, and the objects that they refer to.

Each name maps to a reference ``module:attribute``, which is imported when the object is used. Names of this package are
listed here. An installed package adds names through Python entry points, in the group named ``paceline.`` and the kind;
those of Paceline's own packages are built-in names too::

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
* datasets: see :mod:`paceline.plugins.dataset_registry`
* commands: see :mod:`paceline.cli.commands`
* functions: a function that is called as an attribute of the package ``paceline``, or a command
  (:mod:`paceline.command`) that one is derived from
* models: ``names()``; returns names of networks that a task builds, for `paceline models`
* formats: a :class:`paceline.inference.formats.Format`, of `paceline export`
* packers: a dataclass, whose fields are options of `paceline pack` and which has the method ``pack``
* dataset_packages: a package whose modules register data sets (:mod:`paceline.plugins.dataset_registry`), imported when
  data sets are listed
* backends: ``backend()``; returns a :class:`paceline.data.image.pipeline.ImageBackend`, which `data.backend` names
* run_logs: ``log()``; returns a :class:`paceline.plan.run_logs.RunLog`, which writes a log of each run
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

from paceline.errors import PacelineError, did_you_mean
from paceline.optimizers import LIBRARY_OPTIMIZERS, RULES, UNSUPPORTED_OPTIMIZERS
from paceline.plugins.installed_packages import entry_points
from paceline.plugins.references import is_ours, is_reference, is_same_class, load_reference

_T = TypeVar("_T")
INCOMPLETE = "Paceline's installation is incomplete or stale: install it again (in a checkout, `pip install -e .`)"
Kind = Literal[
    "optimizers",
    "schedules",
    "losses",
    "augmentations",
    "tasks",
    "datasets",
    "commands",
    "functions",
    "models",
    "formats",
    "packers",
    "dataset_packages",
    "backends",
    "run_logs",
]

_SCHEDULES = ("constant", "step", "linear", "cosine", "cyclic", "polynomial", "exponential", "one_cycle", "trapezoid")
_BUILT_IN: dict[Kind, dict[str, str]] = {
    "optimizers": {name: rule.reference for name, rule in RULES.items()},
    "schedules": {name: f"paceline.plan.rates:{name}" for name in _SCHEDULES},
    "losses": {
        "cross_entropy": "torch.nn:CrossEntropyLoss",
        "bce": "torch.nn:BCEWithLogitsLoss",
        "focal": "paceline.tasks.class_losses:FocalLoss",
        "asl": "paceline.tasks.image_multilabel:AsymmetricLoss",
        "mse": "torch.nn:MSELoss",
        "l1": "torch.nn:L1Loss",
        "huber": "torch.nn:HuberLoss",
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
        "fit": "paceline.tasks.objects:Fit",
        "own_loop": "paceline.tasks.own_code:own_loop",
    },
    "datasets": {},  # built-in data sets register themselves: paceline.plugins.dataset_registry
    "commands": {},  # listed in paceline.cli.commands
    "functions": {},  # listed in paceline/__init__.py
    "models": {},  # listed in paceline.models.build
    "formats": {
        "safetensors": "paceline.inference.formats:SAFETENSORS",
        "onnx": "paceline.inference.formats:ONNX",
        "torch-export": "paceline.inference.formats:PROGRAM",
    },
    "packers": {},  # that of images is the command itself
    "dataset_packages": {"images": "paceline.data.image.sets"},
    "backends": {},  # built-in ones are chosen in paceline.data.image.pipeline
    "run_logs": {},
}


def built_in(kind: Kind) -> dict[str, str]:
    """Return the names of a kind that Paceline's own packages define, and their references."""
    core = _BUILT_IN[kind]
    found = dict(core)
    for name, value in _entry_points(kind):
        if is_ours(value) and name not in core and found.setdefault(name, value) != value:
            raise _conflict(kind, name, found[name], value)
    return found


def installed(kind: Kind) -> dict[str, str]:
    """Return the names of a kind that other packages than ``paceline`` register, sorted, with references.

    Raises:
        PacelineError: If two packages register different objects under one name that is not built in.
    """
    ours, references = built_in(kind), dict[str, str]()
    for name, value in _entry_points(kind):
        if references.setdefault(name, ours.get(name, value)) != value and name not in ours:
            raise _conflict(kind, name, references[name], value)
    return {name: value for name, value in references.items() if name not in _BUILT_IN[kind]}


def _conflict(kind: Kind, name: str, first: str, second: str) -> PacelineError:
    return PacelineError(
        f"two installed packages register '{name}' in paceline.{kind}: {first} and {second}; uninstall one of them."
    )


def _entry_points(kind: Kind) -> list[list[str]]:
    return entry_points().get(f"paceline.{kind}", [])


def known_names(kind: Kind) -> dict[str, str]:
    """Return all names of a kind and their references: built in, from installed packages, and from libraries."""
    library_names = LIBRARY_OPTIMIZERS if kind == "optimizers" else {}
    return library_names | installed(kind) | _BUILT_IN[kind]


def name_of(kind: Kind, reference: str) -> str:
    """Return the name of a class of Paceline's own, wherever it was before; the reference itself for others."""
    return next((name for name, each in built_in(kind).items() if is_same_class(each, reference)), reference)


def name_problem(kind: Kind, name: str) -> str:
    """Return what is wrong with a name, with the nearest names; empty if it is registered, or a reference."""
    if name in built_in(kind) or is_reference(name) or name in known_names(kind):
        return ""
    if kind == "optimizers" and (why := UNSUPPORTED_OPTIMIZERS.get(name.lower())):
        return f"optimizer '{name}' is not supported: {why}"
    noun = "loss" if kind == "losses" else kind.removesuffix("s")
    listed = ", ".join((*_BUILT_IN[kind], *installed(kind)))
    suffix = ", another optimizer of torch.optim or timm" if kind == "optimizers" else ""
    return (
        f"unknown {noun} '{name}'.{did_you_mean(name, known_names(kind))} Known: {listed}{suffix}, or your own "
        f"package.module:name{'' if built_in('commands') else f'. {INCOMPLETE}'}"
    )


def load(kind: Kind, name: str, error: type[PacelineError]) -> Any:
    """Import and return the object of a name, or of a reference to custom code.

    Raises:
        PacelineError: As ``error``, if there is no such name, module or attribute.
    """
    if problem := name_problem(kind, name):
        raise error(f"{problem}.")
    names = built_in(kind)
    is_custom = name not in names and is_reference(name)
    reference = names.get(name_of(kind, name), name) if is_custom else names.get(name) or known_names(kind)[name]
    target = load_reference(reference, error, installed=not is_custom)
    if not callable(target):
        raise error(f"'{reference}' is a {type(target).__name__}, which cannot be called: name a function or a class.")
    return target


def load_all(kind: Kind) -> dict[str, Any]:
    """Import and return all objects of a kind by name, without those of other packages that cannot be imported."""
    found = {}
    for name in known_names(kind):
        try:
            found[name] = load(kind, name, PacelineError)
        except Exception:  # another package may fail in any way, which must not stop the others
            if name in built_in(kind):
                raise
    return found
