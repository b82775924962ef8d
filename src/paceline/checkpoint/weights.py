"""Read, check and load the weights of a run, a checkpoint or a single safetensors file."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.checkpoint.durable import reporting_disk_errors
from paceline.checkpoint.format import read_tensor_file
from paceline.checkpoint.hub_folder import WEIGHTS, hub_metadata, hub_weights_file, is_hub_folder
from paceline.checkpoint.manifest import check_sizes, read_weights_file
from paceline.checkpoint.state import adapt_weights, check_inventory
from paceline.checkpoint.store import CheckpointStore, retry_if_replaced, step_of
from paceline.errors import CheckpointError, NotFiniteError
from paceline.parsing.plain_text import load_json, one_line
from paceline.plugins.references import is_ours
from paceline.recipe.load import Overrides, stored_recipe
from paceline.recipe.schema import Recipe
from paceline.records.reader import read_identity, recorded_runs, recorded_step
from paceline.records.run_directory import RunDirectory, no_run_message

_LOG = logging.getLogger("paceline.weights")

ROUNDED = "rounded"
"""Entry of the description of exported weights: ``bf16`` if matrices and filters are stored in it, and were fp32."""

_ACCEPTED_TARGETS = (
    "a run directory, a checkpoint directory, a safetensors file or a hub folder; predict and serve take ONNX files too"
)
_BASE, _DOWN, _UP = ".base_layer.", ".lora_A.default.weight", ".lora_B.default.weight"
_TRANSPOSED = ".lora_transposed"  # next to a layer whose weight is [in, out]
ADAPTER_PARTS = (_DOWN, _UP, _TRANSPOSED)
"""Ends of the names of an adapter's two matrices, and of the mark of a layer whose weight is transposed."""


@dataclass(frozen=True, kw_only=True)
class SavedWeights:
    """One set of weights with its file's metadata.

    Attributes:
        state: Tensors by state_dict key, on the CPU.
        weights: ``model`` or ``ema``.
        path: The file they were read from.
        metadata: The file's own description: ``recipe`` and ``data`` as JSON, ``step``, and others.
    """

    state: dict[str, Tensor]
    weights: str
    path: Path
    metadata: Mapping[str, str]

    @cached_property
    def plain(self) -> dict[str, Tensor]:
        """The network's tensors with low-rank adapters merged into its weights."""
        model = self.description("recipe").get("model") if "recipe" in self.metadata else None
        adapters = model.get("adapters") if isinstance(model, Mapping) else None
        rank, alpha = (adapters.get("rank"), adapters.get("alpha")) if isinstance(adapters, Mapping) else (None, None)
        # Values that are not numbers are refused where the recipe is validated.
        if type(rank) is not int or rank <= 0 or not isinstance(alpha, int | float):
            return self.state
        return merge_adapters(self.state, rank, alpha, where=str(self.path))

    def recipe(self, overrides: Overrides = ()) -> Recipe:
        """Return the recipe they were trained with, plus the overrides.

        Raises:
            CheckpointError: If the file was not written by Paceline.
        """
        return stored_recipe(self.description("recipe"), str(self.path), overrides)

    def description(self, key: str) -> dict[str, Any]:
        """Return a JSON entry of the description.

        Raises:
            CheckpointError: If the file was not written by Paceline.
        """
        text = self.metadata.get(key)
        if text is None and "refusal" in self.metadata:
            raise CheckpointError(f"{self.path.parent}: {self.metadata['refusal']}.", path=self.path.parent)
        if text is None:
            raise CheckpointError(
                f"{self.path} does not say which {key} its weights belong to; give a run directory, a checkpoint, a "
                "safetensors file from a checkpoint, or a hub folder with its config.json."
            )
        try:
            entry = checked_description(key, text)
            if key == "recipe" and "network_config" in self.metadata:  # needs no folder or repository
                entry["model"] = {**entry.get("model", {}), "options": load_json(self.metadata["network_config"])}
            return _DataDescription(entry, self.path) if key == "data" else entry
        except ValueError as error:
            reason = str(error) if type(error) is ValueError else "it is not readable as JSON"
            raise CheckpointError(
                f"{self.path}: its metadata entry {key!r} is not in Paceline's format: {reason}.", path=self.path
            ) from None


class _DataDescription(dict[str, Any]):
    """Return a file's description of its data; an absent entry is an error that names it."""

    def __init__(self, entry: Mapping[str, Any], path: Path) -> None:
        super().__init__(entry)
        self._path = path

    def __missing__(self, key: str) -> Any:
        raise CheckpointError(f"{self._path}: its metadata entry 'data' does not say {key!r}, which is needed here.")


def checked_description(key: str, text: str) -> dict[str, Any]:
    """Read an entry of a weights file's description, and check the values used in computations.

    Raises:
        ValueError: Naming the broken rule.
    """
    entry = load_json(text)
    if not isinstance(entry, dict):
        raise ValueError(f"found a {type(entry).__name__}, but it must be a mapping")
    if key == "recipe":
        entry = {name: value for name, value in entry.items() if value is not None}
        wrong = [name for name in ("model", "data", "evaluate") if not isinstance(entry.get(name, {}), dict)]
        if wrong:
            raise ValueError(f"found {wrong[0]}={str(entry[wrong[0]])[:80]}, but it must be a section")
    # A custom task, which has a colon in its name, may describe its data in its own format.
    recorded = entry.get("task")
    is_paceline_task = not isinstance(recorded, str) or ":" not in recorded or is_ours(recorded)
    is_scaled = isinstance(entry.get("mean"), list) and len(entry["mean"]) == entry.get("channels")
    rules = _RULES | ({"channels": _SIZE_RULE} if is_scaled else {})
    for name, value in entry.items() if key == "data" and is_paceline_task else ():
        if name in rules and not rules[name][0](value):
            raise ValueError(f"found {name}={str(value)[:80]}, but it must be {rules[name][1]}")
        if name in ("mean", "std") and len(value) not in (1, entry.get("channels", len(value))):
            raise ValueError(f"found {len(value)} numbers as {name}, but there are {entry['channels']} channels")
        scales = [entry.get(each) or [] for each in ("target_mean", "target_std")]
        if name == "targets" and any(not _are_numbers(each) or len(each) != len(value) for each in scales):
            raise ValueError(f"found {len(value)} targets, but not as many numbers in target_mean and target_std")
        if name == "label_thresholds" and len(value) != len(entry.get("class_names") or ()):
            raise ValueError(f"found {len(value)} thresholds, but not as many class_names")
    return entry


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) in (int, float) for each in value)


def _is_size(value: Any) -> bool:
    return type(value) is int and 1 <= value <= _MAX_SIZE


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**40


_MAX_SIZE = 16_384
_COUNT = "a whole number from 0 to 2^40"
_SIZE_RULE = (_is_size, f"a whole number from 1 to {_MAX_SIZE}")
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        ("class_names", "targets"),
        (lambda value: isinstance(value, list) and {*map(type, value)} <= {str}, "a list of names"),
    ),
    **dict.fromkeys(
        ("mean", "std", "target_mean", "target_std", "label_thresholds"), (_are_numbers, "a list of numbers")
    ),
    "image_size": _SIZE_RULE,
    "evaluation_size": _SIZE_RULE,
    "channels": (lambda value: type(value) is int and value in (1, 3), "1 or 3"),
    "native_size": (lambda value: isinstance(value, list) and [*map(_is_size, value)] == [True] * 2, "two sizes"),
    "task": (lambda value: isinstance(value, str), "a name"),
    "dataset": (lambda value: isinstance(value, str), "a name"),
    "classes": (_is_count, _COUNT),
    "vocabulary": (_is_count, _COUNT),
    "context": (_is_count, _COUNT),
    "dense_features": (_is_count, _COUNT),
    "table_rows": (lambda value: isinstance(value, list) and all(map(_is_count, value)), "a list of whole numbers"),
    "evaluation_crop": (lambda value: type(value) in (int, float) and 0 < value <= 1, "a number above 0 and at most 1"),
    "evaluation_multiple": _SIZE_RULE,
    "interpolation": (lambda value: value in ("bilinear", "bicubic"), "bilinear or bicubic"),
    "digest": (lambda value: isinstance(value, str), "a text"),
}


def follows_rule(key: str, value: Any) -> bool:
    """Whether an entry of a description of data has Paceline's format, which a custom task's need not have."""
    return _RULES[key][0](value)


def read_weights(target: Path, weights: str = "auto", *, best: bool = False) -> SavedWeights:
    """Read weights; ``auto`` takes the moving average if there is one.

    From a checkpoint, only the manifest and the requested weights are read and verified; of several checkpoints, the
    newest with intact weights is used. If the run has ended at a later step, that is an error; if its records name
    another step, a note is logged.

    Args:
        target: A run directory, a checkpoint directory, a safetensors file or a hub folder, Paceline's or timm's.
        weights: ``auto``, ``model`` or ``ema``.
        best: In a run directory, take the best checkpoint instead of the newest.

    Raises:
        CheckpointError: If the target holds no such weights, or they are damaged.
    """
    check_target(target)
    if target.suffix == ".safetensors":
        return _check_requested(_from_file(target), weights)
    if target.name.endswith(".safetensors.index.json"):
        raise CheckpointError(f"'{target}' is an index of shards, not weights; give the folder with one {WEIGHTS}.")
    with reporting_disk_errors("read", target):
        is_hub, is_empty = is_hub_folder(target), target.is_dir() and not (target / "manifest.json").exists()
    if is_hub:
        return _check_requested(_from_hub_folder(target), weights)
    checkpoints = target / "checkpoints"
    if is_empty and not CheckpointStore(checkpoints if checkpoints.is_dir() else target).steps():
        if not (RunDirectory(target).exists() or target.name == "checkpoints"):
            suggestion = f" Did you mean {target / 'model.onnx'}?" if (target / "model.onnx").is_file() else ""
            raise CheckpointError(no_run_message(target, expected=_ACCEPTED_TARGETS) + suggestion, path=target)
        raise CheckpointError(
            f"'{target}' holds no checkpoint; give a run that has saved one, or a checkpoint.", path=target
        )
    if not best:
        return _newest(target, weights)

    def read_best(path: Path) -> SavedWeights:
        if not path.exists():
            raise CheckpointError(f"{target}/checkpoints/best.json names {path.name}, which is gone; leave out --best.")
        return _from_checkpoint(path, weights)

    # Meanwhile another one may become the best, and this one may be pruned.
    return retry_if_replaced(lambda: _best_of(target), read_best)


def check_target(target: Path) -> None:
    """Check, before any work, that the target for reading weights exists.

    Raises:
        CheckpointError: If it does not.
    """
    with reporting_disk_errors("look for", target):
        if target.exists():
            return
    problem = no_run_message(target, expected=_ACCEPTED_TARGETS)
    if target.suffix in (".safetensors", ".onnx"):
        problem = f"there is no file '{target}'; give {_ACCEPTED_TARGETS}."
    elif target.parent.name == "checkpoints":
        problem = f"there is no checkpoint '{target}'; give {_ACCEPTED_TARGETS}."
    raise CheckpointError(problem, path=target)


def _newest(target: Path, weights: str) -> SavedWeights:
    with reporting_disk_errors("look for checkpoints in", target):
        store = CheckpointStore(target / "checkpoints" if (target / "checkpoints").is_dir() else target)

    run = RunDirectory(store.directory.parent)
    identity, (recorded, is_final) = read_identity(run), recorded_step(run)  # before the weights: a run may be training
    runs = [*recorded_runs(run)] if identity is None else [identity.id]

    def read(path: Path) -> SavedWeights | _MissingWeightsError:
        found = check_sizes(path).facts.get("run")
        if runs and found and found not in runs:
            raise CheckpointError(f"{path} is a checkpoint of another run.", path=path)
        try:
            return _from_checkpoint(path, weights)
        except _MissingWeightsError as error:
            return error

    saved, damaged = store.read_newest(read)
    if isinstance(saved, _MissingWeightsError):
        raise saved
    if saved is None and not damaged:
        return retry_if_replaced(lambda: target, partial(_from_checkpoint, weights=weights))
    if saved is None:
        reason = damaged[0].reason
        raise CheckpointError(f"No checkpoint in {store.directory} is whole: {reason} Give another run or checkpoint.")
    path, step = next((each, step) for each in saved.path.parents if (step := step_of(each)) is not None)
    if recorded is None or recorded == step:
        return saved
    problem = f"the records of '{run.root}' end at step {recorded}, but these weights are of step {step}"
    if is_final and recorded > step:
        raise CheckpointError(
            f"{problem}: no newer checkpoint is intact. Restore it (the train command fetches it from "
            f"checkpoint.mirror), or give {path} to use these.{''.join(f' {each.reason}' for each in damaged[:1])}"
        )
    _LOG.warning("%s", one_line(f"note: {problem}"))
    return saved


class _MissingWeightsError(CheckpointError):
    """A complete checkpoint without the requested weights; older ones do not have them either."""


def _from_checkpoint(path: Path, weights: str) -> SavedWeights:
    components = check_sizes(path).components
    name = ("ema" if "ema" in components else "model") if weights == "auto" else weights
    if name not in components:
        raise _MissingWeightsError(f"{path} holds no '{name}' weights; it holds {', '.join(components)}.", path=path)
    content = read_weights_file(path, name)
    file = path / (name if (path / name).is_dir() else f"{name}.safetensors")
    return SavedWeights(state=content.tensors, weights=name, path=file, metadata=content.metadata)


def _check_requested(saved: SavedWeights, weights: str) -> SavedWeights:
    """Return a file's only set of weights, unless another set was requested."""
    if weights not in ("auto", saved.weights):
        raise CheckpointError(
            f"{saved.path} holds the '{saved.weights}' weights alone, not '{weights}': leave out --weights, or give "
            "the run.",
            path=saved.path,
        )
    return saved


def _from_file(path: Path) -> SavedWeights:
    content = read_tensor_file(path)
    state, metadata = content.tensors, dict(content.metadata)
    # Files written by `paceline export` name their set of weights; a checkpoint's files are named after it.
    candidates = (metadata.get("weights"), metadata.get("component"), path.stem)
    name = next((each for each in candidates if each in ("model", "ema")), "model")
    if metadata.pop(ROUNDED, None) == "bf16":
        state = {key: each.float() if each.dtype == torch.bfloat16 else each for key, each in state.items()}
    return SavedWeights(state=state, weights=name, path=path, metadata=metadata)


def _from_hub_folder(path: Path) -> SavedWeights:
    saved = _from_file(hub_weights_file(path))
    if "recipe" in saved.metadata:  # Paceline's own file, which says more than its config.json
        return saved
    return replace(saved, metadata={**saved.metadata, **hub_metadata(path)})


def _best_of(run: Path) -> Path:
    directory = run / "checkpoints"
    best = CheckpointStore(directory).read_best()
    if best is None:
        raise CheckpointError(f"{run} names no best checkpoint (checkpoints/best.json); leave out --best.")
    return CheckpointStore(directory).path(best.step)


def merge_adapters(state: Mapping[str, Tensor], rank: int, alpha: float, *, where: str) -> dict[str, Tensor]:
    """Merge low-rank adapters into the weights of linear and convolution layers: W + alpha / rank · B A.

    The result has the plain network's names and cost, and needs no other library.

    Args:
        state: Tensors of a network with adapters.
        rank: Rows of each A, and columns of each B.
        alpha: The adapters' scaling factor, multiplied by the rank.
        where: The file, for the message.

    Raises:
        CheckpointError: If adapters do not fit their layers.
    """
    if not abs(alpha) < 2**1000:
        raise CheckpointError(f"{where}: model.adapters.alpha={str(alpha)[:40]} of its recipe must be finite.")
    layers = {name.removesuffix(end) for name in state for end in ADAPTER_PARTS if name.endswith(end)}
    merged: dict[str, Tensor] = {}
    for name, tensor in state.items():
        layer, _, suffix = name.rpartition(_BASE)
        if layer in layers:
            merged[f"{layer}.{suffix}"] = tensor
        elif not name.endswith(ADAPTER_PARTS):
            merged[name] = tensor
    for layer in layers:
        names = [f"{layer}{end}" for end in (f"{_BASE}weight", _DOWN, _UP)]
        base, down, up = matrices = [state.get(name, torch.tensor(0)) for name in names]
        is_transposed = f"{layer}{_TRANSPOSED}" in state
        sides = base.shape[::-1] if is_transposed else base.shape
        # A: [rank, in, ...], B: [out, rank] or [out, rank, 1, 1]; the product has the weight's shape.
        has_shapes = [down.shape, up.shape] == [(rank, *sides[1:]), (*sides[:1], rank, *(1 for _ in sides[2:]))]
        is_valid = base.ndim > 1 and all(each.is_floating_point() for each in matrices)
        if not (has_shapes and is_valid) or f"{layer}.weight" in state:
            raise CheckpointError(
                f"{where}: the adapters of {layer!r} do not fit it: {', '.join(names)} must be of rank {rank}, and "
                f"{layer}.weight absent; save the weights again."
            )
        change = torch.tensordot(up.flatten(1).float(), down.float(), dims=1) * (alpha / rank)
        merged[f"{layer}.weight"] = (base.float() + (change.T if is_transposed else change)).to(base.dtype)
    return merged


def load_trained(network: nn.Module, saved: SavedWeights) -> None:
    """Load saved weights into their network, and log any conversions (by default to standard error).

    Raises:
        CheckpointError: If they do not fit the network.
        NotFiniteError: As :func:`check_finite`.
    """
    current = network.state_dict()
    state, notices = adapt_weights(current, saved.plain)
    check_inventory(current, state, where=str(saved.path))
    check_tensors({name: state[name] for name in current}, str(saved.path))
    if "data" in saved.metadata:
        check_scale(saved.description("data"), str(saved.path))
    network.load_state_dict(state)
    for notice in notices:
        _LOG.warning("%s", one_line(f"note: {saved.path}: {notice}"))


def check_finite(saved: SavedWeights) -> None:
    """Refuse weights, or means and standard deviations of their data, that are not finite numbers.

    Raises:
        NotFiniteError: Naming the first in alphabetical order, as a file has no order.
    """
    check_tensors(dict(sorted(saved.plain.items())), str(saved.path))
    if "data" in saved.metadata:
        check_scale(saved.description("data"), str(saved.path))


def check_tensors(state: Mapping[str, Tensor], where: str) -> None:
    """Refuse tensors with values that are not finite numbers; raises NotFiniteError."""
    nonfinite = [name for name, tensor in state.items() if _is_nonfinite(tensor)]
    if nonfinite:
        raise NotFiniteError(
            f"{where}: {nonfinite[0]} holds non-finite values ({len(nonfinite)} of {len(state)} tensors do); "
            "use an earlier checkpoint or another file."
        )


def check_scale(data: Mapping[str, Any], where: str) -> None:
    """Refuse a description whose images or targets cannot be normalized; raises NotFiniteError."""
    for key in ("mean", "std", "target_mean", "target_std"):
        is_mean = key.endswith("mean")
        values: Any = data.get(key)
        for value in values if follows_rule(key, values) else ():
            if not abs(value) < 2**1000 or (not is_mean and value <= 0):
                rule = "must be finite" if is_mean else "must be finite and above 0"
                raise NotFiniteError(f"{where}: {key} is {values}, and every number {rule}.")


def _is_nonfinite(tensor: Tensor) -> bool:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    values = tensor.float() if tensor.element_size() == 1 else tensor  # isfinite does not support float8
    if bool(values.isfinite().all()):
        return False
    # A mask of zeros and -inf, which many networks keep as a buffer for attention, is valid.
    zeros = values == 0
    return tensor.ndim < 2 or not (bool(zeros.any()) and bool((zeros | (values == -torch.inf)).all()))


def weights_sha256(*states: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 of each state's entries in sorted key order: the key's UTF-8 bytes, then the tensor's bytes.

    Tensors are taken contiguous, on the CPU, little-endian, in their own dtype. Sharded ones are gathered one at a
    time, which makes this a collective.
    """
    digest = hashlib.sha256()
    for entries, key in ((each, key) for each in states for key in sorted(each)):
        digest.update(key.encode())
        tensor = entries[key].detach()
        tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        tensor = tensor.cpu().contiguous()
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
