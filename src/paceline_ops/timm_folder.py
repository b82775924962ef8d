"""Export to a folder that ``timm.create_model`` can load."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from paceline.checkpoint.durable import hash_file
from paceline.checkpoint.hub_folder import CONFIG, UNNAMED, WEIGHTS
from paceline.checkpoint.state import strip_wrapper_prefix
from paceline.checkpoint.weights import ROUNDED, SavedWeights, weights_sha256
from paceline.errors import ModelError, PacelineError, RecipeError, RunDirectoryError
from paceline.inference.export import ExportRequest, file_metadata, rounded, without_paths, write_tensors
from paceline.models.build import HUB, hub_network
from paceline.parsing.plain_text import one_line
from paceline.parsing.units import metric_unit
from paceline.recipe.model import ModelSection
from paceline.records.events import for_display
from paceline.records.reader import NO_METRICS, read_environment, read_events
from paceline.records.run_directory import RunDirectory
from paceline.tasks.exportable import Exportable
from paceline.tasks.trained import open_exportable, trained_recipe, trained_task
from paceline.training_record import card_facts

_BEYOND_ONE_LABEL = {
    "labels": "gives an image any number of labels",
    "numbers": "predicts numbers",
    "pixels": "labels pixels",
}
# Keys of timm's architecture description that fine-tuning from the folder needs.
_KEPT = ("first_conv", "classifier", "fixed_input_size", "min_input_size")


def write_timm(request: ExportRequest, saved: SavedWeights, path: Path) -> float:
    """Write a folder for ``timm.create_model``, and compare."""
    saved.description("recipe")
    state: Mapping[str, Tensor] = saved.plain
    shown = saved
    if request.quantize is not None:
        state = rounded(saved)
        # timm loads fp32, so its outputs are those of the rounded weights.
        read = {key: each.float() if each.dtype == torch.bfloat16 else each for key, each in state.items()}
        shown = replace(saved, state=read, metadata={**saved.metadata, ROUNDED: "bf16"})
    task = trained_task(saved, trust_code=request.trust_code)(trained_recipe(saved))
    if task.learns in _BEYOND_ONE_LABEL:
        raise RecipeError(
            f"{saved.path} {_BEYOND_ONE_LABEL[task.learns]}, and timm's folders are for one label; use --format "
            "safetensors, onnx or torch-export."
        )
    exportable = open_exportable(shown, trust_code=request.trust_code, target="timm")
    # Under the names that timm expects.
    renamed = strip_wrapper_prefix(exportable.network.state_dict(), state)[0]
    write_weights = partial(write_tensors, state=renamed, metadata=file_metadata(saved, request))
    return write_hub_folder(exportable, path, run=request.target, write_weights=write_weights)


def write_hub_folder(
    exportable: Exportable, folder: Path, *, run: Path, write_weights: Callable[[Path], None]
) -> float:
    """Write a hub folder, load it with timm, and compare.

    Args:
        exportable: The network.
        folder: New folder.
        run: Where the weights come from, for the model card.
        write_weights: Writes the safetensors file.

    Returns:
        The largest difference between timm's output and the network's, in logits.

    Raises:
        ModelError: If timm does not have the network, or its results differ.
    """
    import timm

    model = exportable.saved.description("recipe").get("model", {})
    requested, options = str(model.get("name", "small_resnet")), dict(model.get("options", {}))
    name = requested.partition(".")[0]
    if requested.startswith(HUB):
        _, name, from_hub = hub_network(ModelSection(name=requested))
        options = from_hub | options
    is_timms = type(exportable.network).__module__.startswith("timm.") and timm.is_model(name)
    if exportable.outputs is None or not is_timms:
        raise ModelError(
            f"model.name={requested} is not a timm network, so timm.create_model could not open its hub folder; use "
            f"--format safetensors, onnx or torch-export."
        )
    folder.mkdir()
    (folder / CONFIG).write_text(json.dumps(hub_config(exportable, name, options), indent=2) + "\n", encoding="utf-8")
    write_weights(folder / WEIGHTS)
    try:
        network: Any = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    except Exception as error:  # an arbitrary factory may raise anything
        raise ModelError(f"timm.create_model cannot open the written folder: {error}; nothing was kept.") from error
    difference = exportable.compare(network, what="timm")
    card = model_card(exportable.saved, name, weights_file=folder / WEIGHTS, run=run)
    (folder / CARD).write_text(card, encoding="utf-8")
    return difference


def hub_config(exportable: Exportable, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Build ``config.json`` in timm's format: the network's name and options, its classes and the preprocessing."""
    network: Any = exportable.network
    data = exportable.saved.description("data")
    pretrained = dict(network.pretrained_cfg)
    side, channels = int(data["image_size"]), int(data["channels"])
    shown_side = int(data.get("evaluation_size", side))
    config = {key: pretrained[key] for key in _KEPT if pretrained.get(key) is not None}
    config |= {
        "input_size": [channels, side, side],
        "crop_pct": crop_share(data, side),
        "crop_mode": "center",
        "interpolation": data.get("interpolation", "bilinear"),
        "mean": list(data["mean"]),
        "std": list(data["std"]),
        "num_classes": len(data["class_names"]),
        "pool_size": None,
        "custom_load": False,
    }
    if shown_side != side:
        config |= {"test_input_size": [channels, shown_side, shown_side], "test_crop_pct": crop_share(data, shown_side)}
    if pretrained.get("fixed_input_size") and "img_size" not in options:
        # Otherwise timm would build the network for the image size.
        options["img_size"] = list(network.patch_embed.img_size) if hasattr(network, "patch_embed") else side
    return {
        "architecture": name,
        "num_classes": len(data["class_names"]),
        "num_features": int(network.num_features),
        **({} if data.get(UNNAMED) else {"label_names": list(data["class_names"])}),
        **({"model_args": options} if options else {}),
        "pretrained_cfg": config,
    }


def crop_share(data: dict[str, Any], side: int) -> float:
    """Return the ``crop_pct`` with which timm, which rounds down, resizes images as in evaluation.

    Images that already have the target size are not resized, so data of a single size, such as the digits, are not
    cropped.
    """
    if data.get("native_size") == [side, side]:
        return 1.0
    crop = float(data["evaluation_crop"])
    resized = round(side / crop)
    return crop if math.floor(side / crop) == resized else side / (resized + 0.25)


CARD = "README.md"

_STEP = re.compile(r"step-(\d+)")
NOT_KNOWN = "not known"
_MOST_NAMES = 20
_VERSIONS = ("paceline", "torch", "timm", "python")


@dataclass(frozen=True)
class WeightsOrigin:
    """A run directory's facts about the weights; empty if there is no run directory.

    Attributes:
        run: The run's name.
        step: The checkpoint's step.
        folder: The run directory.
        evaluation: Event of the evaluation of these weights at that step.
        environment: ``environment.json``.
    """

    run: str | None = None
    step: int | None = None
    folder: Path | None = None
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the evaluation."""
        return {
            key: value
            for key, value in self.evaluation.items()
            if key not in NO_METRICS and isinstance(value, int | float) and not isinstance(value, bool)
        }


def model_card(saved: SavedWeights, architecture: str, *, weights_file: Path, run: Path) -> str:
    """Return the model card as Markdown, with the hub's front matter.

    Args:
        saved: The weights.
        architecture: timm's name.
        weights_file: The exported safetensors file.
        run: The exported target.
    """
    data = saved.description("data")
    origin = weights_origin(saved, run)
    versions = versions_of(origin)
    version = f" {versions['paceline']}" if "paceline" in versions else ""
    made = f"Trained with Paceline{version}, exported with `paceline export --format timm`"
    hashes = {f"`{weights_file.name}` (SHA-256 of the file)": f"`{hash_file(weights_file, hashlib.sha256).digest}`"}
    if ROUNDED not in saved.metadata:
        key = "ema_sha256" if saved.weights == "ema" else "weights_sha256"
        hashes[f"weights (`{key}` in `summary.json`)"] = f"`{weights_sha256(saved.plain)}`"
    recipe = yaml.safe_dump(without_paths(saved.description("recipe")), sort_keys=False, allow_unicode=True, width=120)
    parts = [
        # The hub shows these numbers without context, so include only those of this exact file.
        _front_matter(architecture, data, {} if ROUNDED in saved.metadata else origin.metrics),
        f"# {architecture} for {len(data['class_names'])} classes",
        f"{made}. Unknown facts are marked as not known.",
        "## What it is\n\n" + table(_about(saved, architecture, data, origin)),
        *(["## What it was trained on\n\n" + table(trained)] if (trained := training_facts(origin)) else []),
        _results(saved, origin),
        _how_to_load(data),
        "## Hashes\n\n" + table(hashes),
        f"## Recipe\n\nThe whole recipe, as resolved for the run:\n\n```yaml\n{recipe}```",
    ]
    return "\n\n".join(parts) + "\n"


def weights_origin(saved: SavedWeights, target: Path) -> WeightsOrigin:
    """Find the run directory around the weights; a standalone file has none."""
    steps = [match for part in saved.path.parts if (match := _STEP.fullmatch(part))]
    step = int(steps[-1][1]) if steps else None
    folder = (
        target
        if RunDirectory(target).exists()
        else next((each for each in saved.path.parents if RunDirectory(each).exists()), None)
    )
    if folder is None or step is None:
        return WeightsOrigin(step=step)
    try:
        facts = [
            for_display(event, RunDirectory(folder).events)
            for event in read_events(RunDirectory(folder).events, kinds=("evaluation",))
            if event.get("step") == step and event.get("weights") == saved.weights
        ]
        environment = read_environment(RunDirectory(folder))
    except RunDirectoryError:
        return WeightsOrigin(folder.resolve().name, step, folder)
    return WeightsOrigin(folder.resolve().name, step, folder, facts[-1] if facts else {}, environment)


def training_facts(origin: WeightsOrigin) -> dict[str, str]:
    """Return what the run was trained on; empty without a run directory, or if its records are damaged."""
    if origin.folder is None:
        return {}
    try:
        return {key: one_line(value) for key, value in card_facts(RunDirectory(origin.folder)).items()}
    except PacelineError:
        return {}


def _front_matter(architecture: str, data: Mapping[str, Any], metrics: Mapping[str, float]) -> str:
    matter: dict[str, Any] = {
        "library_name": "timm",
        "pipeline_tag": "image-classification",
        "tags": ["image-classification", "timm", "paceline"],
        "license": "unknown",
    }
    if metrics:
        dataset = str(data.get("dataset", "unknown"))
        results = [
            {"type": "accuracy" if key == "top1_accuracy" else key, "name": key, "value": value}
            for key, value in metrics.items()
        ]
        task = {"type": "image-classification"}
        result = {"task": task, "dataset": {"name": dataset, "type": dataset}, "metrics": results}
        matter["model-index"] = [{"name": architecture, "results": [result]}]
    return f"---\n{yaml.safe_dump(matter, sort_keys=False, allow_unicode=True)}---"


def versions_of(origin: WeightsOrigin) -> dict[str, str]:
    """Return the versions of the run's environment that matter."""
    versions = origin.environment.get("versions", origin.environment)
    return {key: str(versions[key]) for key in _VERSIONS if isinstance(versions, Mapping) and key in versions}


def _about(saved: SavedWeights, architecture: str, data: Mapping[str, Any], origin: WeightsOrigin) -> dict[str, str]:
    names = ["not known"] if data.get(UNNAMED) else [str(each) for each in data["class_names"]]
    more = f", … ({len(names)} in all)" if len(names) > _MOST_NAMES else ""
    shown = ", ".join(json.dumps(each, ensure_ascii=False)[1:-1] for each in names[:_MOST_NAMES])
    return {
        "Architecture": f"`{architecture}` of timm",
        "Weights": f"{saved.weights}{' (a moving average over training)' if saved.weights == 'ema' else ''}",
        **({"Stored": f"matrices and filters rounded to {kept}"} if (kept := saved.metadata.get(ROUNDED)) else {}),
        "Run and step": f"{origin.run or NOT_KNOWN}, step {NOT_KNOWN if origin.step is None else origin.step}",
        "Data": f"{data.get('dataset') or NOT_KNOWN}",
        "Digest of the data": f"`{data['digest']}`" if data.get("digest") else NOT_KNOWN,
        "Classes": shown + more,
        "Trained at, shown at": f"{data['image_size']}, {data.get('evaluation_size', data['image_size'])} pixels",
        "Versions": ", ".join(f"{key} {value}" for key, value in versions_of(origin).items()) or NOT_KNOWN,
        "Licence of the data and of the weights": f"{NOT_KNOWN} to Paceline; whoever publishes them must say",
        "Intended use, limits, biases": f"{NOT_KNOWN} to Paceline",
    }


def _results(saved: SavedWeights, origin: WeightsOrigin) -> str:
    if not origin.metrics:
        return (
            "## How good it is\n\nNot known: no evaluation of these weights at this step was found. "
            "`paceline evaluate FOLDER data.path=...` scores them."
        )
    rows = {key: f"{value:.2f} %" if metric_unit(key) else f"{value:.4f}" for key, value in origin.metrics.items()}
    samples = origin.evaluation.get("samples", NOT_KNOWN)
    split = origin.evaluation.get("split", "validation")
    kept = saved.metadata.get(ROUNDED)
    before = "" if kept is None else f", before they were rounded to {kept}, which may change it"
    return (
        f"## How good it is\n\nThe {saved.weights} weights on {samples} held-out samples ({split}), each scored once, "
        f"at step {origin.step}{before}:\n\n{table(rows)}"
    )


def _how_to_load(data: Mapping[str, Any]) -> str:
    mode = "L" if data["channels"] == 1 else "RGB"
    size = data.get("evaluation_size", data["image_size"])
    test = "" if size == data["image_size"] else ", use_test_size=True"
    answer = "int(logits.argmax())" if data.get(UNNAMED) else 'model.pretrained_cfg["label_names"][logits.argmax()]'
    notes = []
    if data.get("native_size") == [size, size]:
        notes.append(f"The images that it was trained on are {size}x{size} and are not cropped.")
    if "evaluation_multiple" in data:
        notes.append("In the run, images kept their aspect ratio in evaluation; timm shows squares.")
    return f"""## How to load it

```python
import timm
import torch
from PIL import Image

model = timm.create_model("local-dir:FOLDER", pretrained=True).eval()
config = timm.data.resolve_model_data_config(model{test})
transform = timm.data.create_transform(**config, is_training=False)
with torch.inference_mode():
    logits = model(transform(Image.open("photo.jpg").convert("{mode}"))[None])
print({answer})
```

With Paceline: `paceline predict FOLDER photo.jpg`, `paceline evaluate FOLDER`, `model.initialize_from=FOLDER`.
{" ".join(notes)}""".rstrip()


def table(rows: Mapping[str, str]) -> str:
    """Return a Markdown table of two columns."""
    cells = ((key, value.replace("|", "\\|").replace("\n", " ")) for key, value in rows.items())
    return "\n".join(["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in cells)])
