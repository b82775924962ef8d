"""Export to a folder to hand to somebody: ONNX model, labels, card, page, and a program that needs no Paceline."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

from paceline.checkpoint.weights import SavedWeights
from paceline.errors import RecipeError
from paceline.inference.export import ExportRequest, write_onnx_file
from paceline.metrics.intervals import share_interval
from paceline.pages.page import Block, Page, Section, Table, Text, write_page
from paceline.parsing.plain_text import one_line
from paceline.parsing.units import first_of, format_count, format_metric, metric_title
from paceline.reports.html.predictions import predictions
from paceline.reports.html.runs import RunRecord, read_runs
from paceline.tasks.labelling import Outputs, Preprocessing
from paceline.tasks.trained import trained_recipe, trained_task
from paceline.tasks.views import CROPS
from paceline_ops.timm_folder import NOT_KNOWN, WeightsOrigin, table, training_facts, versions_of, weights_origin

_DOES = {
    "class": "gives a photo one of {} classes",
    "labels": "gives a photo any of {} labels",
    "numbers": "estimates {} numbers of a photo",
    "pixels": "gives each pixel of a photo one of {} classes",
}
_MOST_NAMES = 50
# A reader of Markdown may interpret these, also in the name of a class.
_MARKUP = re.compile(r"([\\`*_{}\[\]()#!|~])")
# The reading of photos, by its name in the folder.
_READING = "pillow_pixels"
_HOW = (
    "It needs Python 3.10 or newer and no network. `--json` is for programs, and `--help` lists all options. "
    "`model.json` says how photos are prepared: other programs can read it and `model.onnx`, too."
)
_PROMPTS = "pip install onnxruntime numpy pillow", "python predict.py photo.jpg"


def write_folder(request: ExportRequest, saved: SavedWeights, path: Path) -> float:
    """Write the folder, and compare ONNX Runtime's outputs with the network's."""
    about = _description(request, saved)
    path.mkdir()
    difference = write_onnx_file(request, saved, path / "model.onnx")
    assert isinstance(difference, float)  # not quantised
    (path / "model.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    reading = files("paceline.data.image").joinpath(f"{_READING}.py").read_text(encoding="utf-8")
    program = files("paceline_ops.bundle").joinpath("predict.py").read_text(encoding="utf-8")
    (path / f"{_READING}.py").write_text(reading, encoding="utf-8")
    own = program.replace(f"from paceline.data.image.{_READING} import", f"from {_READING} import")
    (path / "predict.py").write_text(own, encoding="utf-8")
    card = _Card.of(request, saved, about)
    (path / "README.md").write_text(card.markdown(), encoding="utf-8")
    write_page(path / "index.html", card.page())
    return difference


def _description(request: ExportRequest, saved: SavedWeights) -> dict[str, Any]:
    """Return how photos are prepared, and the meaning of the outputs.

    Raises:
        RecipeError: If the program could not answer as the run does.
    """
    data, recipe = saved.description("data"), trained_recipe(saved)
    task = (request.task or trained_task(saved, trust_code=request.trust_code))(recipe)
    learns, size, crop = task.learns, data.get("evaluation_size"), data.get("evaluation_crop")
    reason = ""
    if learns not in _DOES or (crop is None and learns != "pixels"):
        reason = "predicts something other than labels of photos or of their pixels"
    elif learns == "pixels" and data["channels"] != 3:
        reason = f"takes images of {data['channels']} channels"
    elif data.get("evaluation_multiple") is not None:
        reason = "shows photos in their own shapes (data.evaluation_shape)"
    elif recipe.evaluate.augment in CROPS:
        reason = f"averages several crops (evaluate.augment={recipe.evaluate.augment})"
    if reason:
        raise RecipeError(f"{saved.path} {reason}, which --format folder does not support; use --format safetensors.")
    common = {"learns": learns, "views": recipe.evaluate.augment}
    if learns == "pixels":
        kept = ("channels", "interpolation", "mean", "std")
        return common | {"names": data["class_names"], "size": size} | {key: data[key] for key in kept}
    shown, outputs = Preprocessing.description(data, str(saved.path)), Outputs.description(data)
    assert outputs is not None  # it labels photos
    return common | {"names": outputs.names, "thresholds": outputs.thresholds} | vars(shown)


@dataclass(frozen=True, kw_only=True)
class _SharedRun(RunRecord):
    """A run that shows nothing but predictions of the exported weights, without the names of files.

    Attributes:
        origin: The weights.
    """

    origin: WeightsOrigin

    def extra(self, name: str) -> Mapping[str, Any] | None:
        """Read a file of the last evaluation; None if it is of other weights."""
        found, evaluation = super().extra(name), self.origin.evaluation
        if found is None or any(found.get(key) != evaluation.get(key, "") for key in ("step", "weights")):
            return None
        nameless = [each | {"name": "held-out image"} for each in found.get("examples", ())]
        return {**found, **({"examples": nameless} if nameless else {})}


@dataclass(frozen=True, kw_only=True)
class _Card:
    """What there is to say about a model, for the card and for the page.

    Attributes:
        name: The run's name.
        about: The description in ``model.json``.
        does: What the model does, in a sentence.
        score: How good it is, a sentence each.
        facts: Where it comes from.
        predictions: Pictures and tables of its predictions.
    """

    name: str
    about: Mapping[str, Any]
    does: str
    score: list[str]
    facts: dict[str, str]
    predictions: tuple[Block, ...]

    @classmethod
    def of(cls, request: ExportRequest, saved: SavedWeights, about: Mapping[str, Any]) -> _Card:
        """Gather the facts from the weights and the run directory around them."""
        origin, data = weights_origin(saved, request.target), saved.description("data")
        run = None if origin.folder is None else read_runs([origin.folder])[0]
        counts = {} if run is None else run.plan
        trained = [str(data.get("dataset") or NOT_KNOWN)]
        if "train_samples" in counts:
            trained.append(
                f"{format_count(counts['train_samples'])} images, another "
                f"{format_count(counts.get('evaluation_samples', 0))} held out to score it"
            )
        shared: tuple[Block, ...] = ()
        if run is not None:
            own = _SharedRun(**{each.name: getattr(run, each.name) for each in fields(run)}, origin=origin)
            shared = tuple(predictions([own]))
        names = tuple(map(str, about["names"]))
        versions = ", ".join(f"{key} {value}" for key, value in versions_of(origin).items())
        return cls(
            name=origin.run or request.target.resolve().stem,
            about=about,
            does=f"This model {_DOES[about['learns']].format(len(names))}: {first_of(names, _MOST_NAMES)}.",
            score=list(_score(origin)),
            facts={
                "Trained on": ", ".join(trained),
                "Network": str(saved.description("recipe").get("model", {}).get("name", NOT_KNOWN)),
                "Step, weights": f"{NOT_KNOWN if origin.step is None else origin.step}, {saved.weights}",
                "Made with": versions or NOT_KNOWN,
                **training_facts(origin),
                "Licence, intended use, limits": f"{NOT_KNOWN}: whoever shares the model must say",
            },
            predictions=shared,
        )

    def markdown(self) -> str:
        """Return the card as Markdown."""
        facts = {key: _plain(value) for key, value in self.facts.items()}
        parts = [
            f"# {_plain(self.name)}",
            _plain(self.does),
            "## How good it is\n\n" + "\n".join(f"- {_plain(each)}" for each in self.score),
            "## Use it\n\n```\n" + "\n".join(_PROMPTS) + "\n```\n\n" + _HOW,
            "## About\n\n" + table(facts),
        ]
        return "\n\n".join(parts) + "\n"

    def page(self) -> Page:
        """Return the card as a page, with pictures of its predictions."""
        about = Table(columns=("", ""), rows=[*self.facts.items()], caption="About this model")
        use = Text(*(f"`{each}`" for each in _PROMPTS), _HOW)
        sections = {"How good it is": (Text(*self.score), *self.predictions), "Use it": (use,), "About": (about,)}
        return Page(
            title=self.name,
            subtitle=self.does,
            sections=[Section(title=title, blocks=blocks) for title, blocks in sections.items()],
        )


def _score(origin: WeightsOrigin) -> Iterator[str]:
    """Describe the evaluation of the exported weights."""
    metrics = {key: value for key, value in origin.metrics.items() if key != "loss"}
    samples = int(origin.evaluation.get("samples", 0))
    if not metrics or not samples:
        yield "Not known: no evaluation of these weights was found."
        return
    if (accuracy := metrics.pop("top1_accuracy", None)) is not None:
        hits = round(samples * accuracy / 100)
        rate = share_interval(hits, samples)
        yield (
            f"It is right on {hits:,} of {samples:,} held-out images: {accuracy:.1f} % (95 % interval: "
            f"{100 * rate.low:.1f} to {100 * rate.high:.1f} %)."
        )
    for key, value in metrics.items():
        yield f"{metric_title(key)} on {samples:,} held-out images: {format_metric(key, value)}"


def _plain(text: str) -> str:
    """Return text in which no character has a meaning in Markdown."""
    return _MARKUP.sub(r"\\\1", html.escape(one_line(text), quote=False))
