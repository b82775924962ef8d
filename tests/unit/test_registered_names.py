"""Names that another package registers are used as ours are, and unknown ones are refused with the nearest."""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import paceline
from paceline.cli.main import run
from paceline.data.image.datasets import open_dataset
from paceline.data.image.pipeline import available_backends
from paceline.data.image.transforms import Variation
from paceline.errors import DataError, PacelineError, RecipeError
from paceline.optim.build import build_optimizer, build_schedules
from paceline.plan.rates import LearningRate
from paceline.plan.run_logs import check_logs
from paceline.plugins import dataset_registry, registry
from paceline.plugins.dataset_registry import dataset_names
from paceline.plugins.installed_packages import entry_points
from paceline.recipe.load import load_recipe, stored_recipe, to_tree
from paceline.tasks.class_losses import ClassificationLoss
from paceline.tasks.task import build_task

CODE = '''
import random

import click
import numpy as np
import torch
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from paceline.command import Shape, command
from paceline.data.loaders.pytorch import PytorchBackend
from paceline.errors import RecipeError
from paceline.inference.formats import Format
from paceline.pages.shown import Document, Shown
from paceline.metrics.accumulator import Metric
from paceline.tasks.image_classification import ImageClassification

class Nudge(torch.optim.SGD):
    def __init__(self, params, lr, push=0.5, weight_decay=0.0):
        super().__init__(params, lr=lr, momentum=push, weight_decay=weight_decay)

def sawtooth(rate, step):
    return rate.peak / (1 + step % 2)

class Pictures(ImageClassification):
    metrics = (*ImageClassification.metrics, Metric(name="certainty"))

    def score(self, model, batch):
        scores = super().score(model, batch)
        return {**scores, "certainty": torch.full((len(batch.ids),), 0.25)}

def flicker(share=0.5):
    """Draws from three generators."""
    def vary(image):
        image = 255 - image if random.random() < share else image
        return image.roll((int(np.random.randint(5)), int(torch.randint(5, ()))), (1, 2))
    return vary

def floats():
    return lambda image: image.float()

def torn():
    return lambda image: image[9]

class Power:
    def __init__(self, power=2.0):
        self.power = power

    def __call__(self, logits, targets):
        return (logits.softmax(dim=1) - targets).abs().pow(self.power).sum(dim=1)

class Plain(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

def mean():
    return lambda logits, targets: (logits - targets).mean()

def frozen():
    return lambda logits, targets: (logits - targets).detach().sum(dim=1)

def by_class():
    return lambda logits, targets: (logits - targets).sum(dim=0)

def broken():
    return lambda logits, targets: logits @ targets

class Trained(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, logits, targets):
        return self.scale * (logits - targets).sum(dim=1)

class Readers:
    def why_unavailable(self):
        return ""

    def check(self, data, dataset):
        if data.image_size == 9:
            raise RecipeError("readers take no images of 9 pixels; use another data.image_size.")

    def workers(self, data, world):
        return data.workers, "each is a reader"

    def open(self, source, view, data, *, workers, device):
        return PytorchBackend(source, view, workers=0)

class Diary:
    title = "the diary"
    files = ("diary/today.txt",)
    def wanted(self, recipe):
        return recipe.task == "image_classification"
    def check(self, recipe, *, evaluation_samples, peak_lr):
        return {"optimizer.lr": f"{peak_lr:g} is noted in the diary"}
    def write(self, directory):
        (directory.root / "diary").mkdir(exist_ok=True)
        (directory.root / "diary" / "today.txt").write_text(directory.summary.read_text())

@command("greet", group="Politeness")
@dataclass
class Greet:
    """Greet somebody.

    By name.
    """

    name: str
    def run(self, log):
        return self
    def __paceline__(self):
        return Shown(blocks=(f"Hello, {self.name}.",))
    def to_json(self):
        return {"name": self.name}

@dataclass(frozen=True, kw_only=True)
class Sounds:
    """SOURCE is sounds: keep their names.

    With --sounds, SOURCE is a list.

    Examples:
      paceline pack --sounds a,b names
    """

    joint: Annotated[str, Shape(only="sounds"), "With --sounds: what comes between."] = ", "

    def pack(self, source, destination):
        destination.write_text(self.joint.join(source.split(",")))
        return Document(document={"written": str(destination)}, shown=Shown(blocks=["done"]))

NAMES = Format(writer="stranger:write_names", ending=".names", reader="Whoever reads names", phrase="names alone")

def write_names(request, saved, path):
    path.write_text("\\n".join(saved.plain))
    return 0.0

@click.command(short_help="Wave to everybody.")
def wave():
    """Wave, with either hand."""
'''
SATELLITE = """
import numpy as np
from paceline.data.image.dataset import Probe, in_splits
from paceline.data.image.source import ArraySource
from paceline.plugins.dataset_registry import Size, dataset


@dataset("satellite", keys=("path", "options", "validation_fraction"), size=Size("Satellite", 1000, 2, 16))
def satellite(request):
    tiles = np.full((6, 16, 16, 3), request.data.options.get("grey", 0), dtype=np.uint8)
    whole = ArraySource(tiles, np.arange(6) % 2, "tile")
    return in_splits(
        [whole], "", request.data.validation_fraction, classes=("land", "sea"), digest=str(request.path), channels=3,
        probe=Probe(6, (16, 16), greyscale=False),
    )


def plain(request):
    return 3
"""
ENTRY_POINTS = """
[paceline.optimizers]
nudge = stranger:Nudge
sgd = stranger:Nudge
[paceline.schedules]
sawtooth = stranger:sawtooth
[paceline.losses]
power = stranger:Power
[paceline.augmentations]
flicker = stranger:flicker
[paceline.backends]
readers = stranger:Readers
[paceline.run_logs]
diary = stranger:Diary
[paceline.commands]
broken = no_such_module:Broken
doctor = stranger:Greet
greet = stranger:Greet
train = stranger:Greet
wave = stranger:wave
[paceline.formats]
damaged = no_such_module:FORMAT
names = stranger:NAMES
timm = stranger:NAMES
[paceline.packers]
damaged = no_such_module:Pack
sounds = stranger:Sounds
[paceline.functions]
find_lr = stranger:sawtooth
sawtooth = stranger:sawtooth
train = stranger:sawtooth
[paceline.tasks]
pictures = stranger:Pictures

[paceline.datasets]
satellite = satellites:satellite
nothing = satellites:plain
"""

SHORT = {"train.duration": "2 steps", "parallel.device": "cpu", "parallel.threads": 1, "telemetry.trackers": []}


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed packages, with one that registers names."""
    (tmp_path / "stranger.py").write_text(CODE)
    (tmp_path / "satellites.py").write_text(SATELLITE)
    dataset_names()
    monkeypatch.setattr(dataset_registry, "_entries", dict(dataset_registry._entries))
    install(tmp_path, "stranger", ENTRY_POINTS)
    monkeypatch.syspath_prepend(tmp_path)
    entry_points.cache_clear()
    yield tmp_path
    entry_points.cache_clear()


def install(site: Path, name: str, registered: str) -> None:
    folder = site / f"{name}-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(registered)


def recipe(**overrides: Any) -> Any:
    return stored_recipe({}, "plain", {key.replace("__", "."): value for key, value in overrides.items()})


@pytest.mark.usefixtures("stranger")
@pytest.mark.parametrize("name", ["nudge", "stranger:Nudge"])
def test_an_optimizer_of_another_package(name: str) -> None:
    requested = recipe(optimizer__name=name, optimizer__lr=0.5, optimizer__options={"push": 0.25}).optimizer
    built = build_optimizer(torch.nn.Linear(2, 2), requested, torch.device("cpu"))
    group = built.param_groups[0]
    assert (type(built).__name__, group["momentum"], group["lr"]) == ("Nudge", 0.25, 0.5)
    assert load_recipe("digits", [f"optimizer.name={name}"]).recipe.optimizer.nesterov is False  # the file's is dropped
    with pytest.raises(RecipeError, match="momentum"):
        recipe(optimizer__name=name, optimizer__momentum=0.5)
    wrong = recipe(optimizer__name=name, optimizer__options={"pull": 1}).optimizer
    with pytest.raises(RecipeError, match="do not fit"):
        build_optimizer(torch.nn.Linear(2, 2), wrong, torch.device("cpu"))
    moved = recipe(optimizer__name=name, schedule__momentum={"name": "linear", "end": 0.5})
    with pytest.raises(RecipeError, match=r"schedule\.momentum"):
        build_schedules(moved, None)  # type: ignore[arg-type]  # refused before the plan is looked at


@pytest.mark.usefixtures("stranger")
def test_a_schedule_and_a_task_of_another_package() -> None:
    requested = recipe(schedule__name="sawtooth", task="pictures", data__dataset="digits")
    rate = LearningRate(name=requested.schedule.name, peak=0.5, total_steps=9, warmup_steps=2)
    assert [rate(step) for step in range(4)] == [0.25, 0.5, 0.5, 0.25]
    assert type(build_task(requested)).__name__ == "Pictures"


@pytest.mark.usefixtures("stranger")
def test_a_metric_of_another_package(tmp_path: Path) -> None:
    run = paceline.train("digits", overrides={"task": "pictures", **SHORT}, run_dir=tmp_path / "run", quiet=True)
    assert run.history("evaluation")[-1]["certainty"] == 0.25


@pytest.mark.usefixtures("stranger")
def test_a_data_back_end_of_another_package(tmp_path: Path) -> None:
    weights = {}
    for name, workers in {"readers": 3, "pytorch": 0}.items():
        overrides = {"data.backend": name, "data.workers": workers, **SHORT}
        run = paceline.train("digits", overrides=overrides, run_dir=tmp_path / name, quiet=True)
        weights[name] = run.summary.weights_sha256
        data = json.loads((run.run_dir / "plan.json").read_text())["data"]
        assert (data["backend"], data["workers"]) == (name, workers)
    assert weights["readers"] == weights["pytorch"]
    assert available_backends()["readers"] == "available"
    with pytest.raises(RecipeError, match="readers take no images of 9 pixels"):
        paceline.train("digits", overrides={"data.backend": "readers", "data.image_size": 9}, quiet=True)
    with pytest.raises(RecipeError, match=r"data\.backend: found 'reader', but it must be 'auto', 'memory', 'pytorch'"):
        load_recipe("digits", ["data.backend=reader"])


@pytest.mark.usefixtures("stranger")
def test_a_log_of_another_package(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is written whenever a run ends; where it cannot be, the run ends as it would have."""
    run = paceline.train("digits", overrides={"train.until": "1 step", **SHORT}, run_dir=tmp_path / "run", quiet=True)
    assert json.loads((run.run_dir / "diary" / "today.txt").read_text())["status"] == "stopped"
    assert "is noted in the diary" in json.loads((run.run_dir / "plan.json").read_text())["reasons"]["optimizer.lr"]
    assert check_logs(recipe(task="image_regression"), 10, 0.1) == {}, "its recipe asks for no diary"
    shutil.rmtree(run.run_dir / "diary")
    (run.run_dir / "diary").write_text("in the way")
    assert paceline.train("digits", overrides=SHORT, run_dir=run.run_dir).status == "completed"
    assert "note: the diary could not be written: " in capsys.readouterr().out


@pytest.mark.usefixtures("stranger")
@pytest.mark.parametrize("name", ["flicker", "stranger:flicker"])
def test_an_augmentation_of_another_package(name: str) -> None:
    """What it does depends on seed, epoch and sample alone, whichever generator it draws from."""
    requested = recipe(data__augment__policy=name, data__augment__policy_options={"share": 0.4}).data.augment
    vary = Variation(requested, (0.5,), seed=3)
    images = torch.randint(0, 255, (40, 1, 8, 8), dtype=torch.uint8)
    before = random.getstate(), torch.get_rng_state()
    complete = vary(images.clone(), np.arange(40), 1)
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert torch.equal(complete[20:], Variation(requested, (0.5,), seed=3)(images[20:].clone(), np.arange(20, 40), 1))
    assert not torch.equal(complete, vary(images.clone(), np.arange(40), 2))


@pytest.mark.usefixtures("stranger")
@pytest.mark.parametrize(
    ("name", "options", "wrong"),
    [
        ("stranger:floats", {}, r"gave torch\.float32 \[3, 32, 32\]"),
        ("stranger:torn", {}, "failed on a black image"),
        ("flicker", {"shar": 1}, "do not fit"),
    ],
)
def test_what_is_not_an_augmentation_is_refused(name: str, options: dict[str, Any], wrong: str) -> None:
    requested = recipe(data__augment__policy=name, data__augment__policy_options=options).data.augment
    with pytest.raises(RecipeError, match=wrong):
        Variation(requested, (0.5, 0.5, 0.5), seed=0)


@pytest.mark.usefixtures("stranger")
def test_weight_decay_that_an_optimizer_lacks_is_refused() -> None:
    requested = recipe(optimizer__name="stranger:Plain", optimizer__weight_decay=0.1).optimizer
    with pytest.raises(RecipeError, match=r"optimizer\.weight_decay=0\.1 has no effect"):
        build_optimizer(torch.nn.Linear(2, 2), requested, torch.device("cpu"))


@pytest.mark.usefixtures("stranger")
@pytest.mark.parametrize("name", ["power", "stranger:Power"])
@pytest.mark.parametrize("weights", [(), (1.0, 4.0, 0.5)])
def test_a_loss_of_another_package(name: str, weights: tuple[float, ...]) -> None:
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = torch.tensor([0, 1, 2, 1])
    requested = recipe(train__loss=name, train__loss_options={"power": 1}, train__label_smoothing=0.1)
    assert to_tree(requested)["train"]["loss_options"] == {"power": 1}
    made = ClassificationLoss(requested.train, weights)
    made.check(3, torch.device("cpu"))
    expected = torch.eye(3, dtype=torch.float64)[labels] * 0.9 + 0.1 / 3
    each = (logits.softmax(dim=1) - expected).abs().sum(dim=1)
    own = torch.tensor(weights or (1.0, 1.0, 1.0), dtype=torch.float64)[labels]
    found = made(logits, labels, own.mean().item() if weights else None)
    torch.testing.assert_close(found, (own * each).sum() / own.sum(), rtol=1e-12, atol=0)


@pytest.mark.usefixtures("stranger")
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("stranger:mean", r"shape \[\] for 2 samples"),
        ("stranger:by_class", r"shape \[3\] for 2 samples"),
        ("stranger:frozen", "without a gradient"),
        ("stranger:Trained", "has parameters"),
        ("stranger:broken", "RuntimeError"),
        ("stranger:sawtooth", "do not fit"),
        ("stranger:power", r"no 'power'\. Did you mean 'Power'"),
        ("strangr:Power", "no module 'strangr'"),
        ("os:getcwd", "cannot be called with"),
    ],
)
def test_what_is_not_a_loss_is_refused(name: str, wrong: str) -> None:
    with pytest.raises(RecipeError, match=wrong):
        ClassificationLoss(recipe(train__loss=name).train).check(3, torch.device("cpu"))


@pytest.mark.usefixtures("stranger")
def test_a_registered_part_may_use_every_key_and_a_stored_recipe_has_them() -> None:
    requested = recipe(
        schedule__name="sawtooth", schedule__end_lr=0.25, train__loss="power", train__target_threshold=0.5
    )
    assert stored_recipe(to_tree(requested), "stored") == requested


def test_our_names_cannot_be_replaced_and_one_name_is_one_object(stranger: Path) -> None:
    assert registry.installed("optimizers") == {"nudge": "stranger:Nudge"}
    assert registry.load("optimizers", "sgd", RecipeError) is torch.optim.SGD
    install(stranger, "other", "[paceline.optimizers]\nnudge = other:Nudge\n")
    entry_points.cache_clear()
    with pytest.raises(PacelineError, match=r"two installed packages register 'nudge'.*other:Nudge"):
        registry.installed("optimizers")


@pytest.mark.parametrize("kind", ["optimizers", "schedules", "losses", "augmentations", "tasks"])
def test_every_one_of_ours_is_there(kind: registry.Kind) -> None:
    assert all(callable(registry.load(kind, name, RecipeError)) for name in registry.built_in(kind))


@pytest.mark.usefixtures("stranger")
def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    for message, nearest in {
        "optimizer.name=nudgd": r"unknown optimizer 'nudgd'\. Did you mean 'nudge'",
        "optimizer.name=LBFGS": r"optimizer 'LBFGS' is not supported: it computes the loss several times a step",
        "optimizer.name=SparseAdam": r"optimizer 'SparseAdam' is not supported: .* set optimizer\.tables=sparse_adam",
        "schedule.name=sawtoth": r"unknown schedule 'sawtoth'\. Did you mean 'sawtooth'",
        "train.loss=powr": r"unknown loss 'powr'\. Did you mean 'power'",
        "data.augment.policy=flickr": r"unknown augmentation 'flickr'\. Did you mean 'flicker'",
    }.items():
        with pytest.raises(RecipeError, match=nearest):
            load_recipe("digits", [message])
    assert load_recipe("digits", ["train.loss=Focal"]).recipe.train.loss == "focal"
    with pytest.raises(RecipeError, match=r"unknown task 'picture'\. Did you mean 'pictures'"):
        build_task(recipe(task="picture"))


@pytest.mark.usefixtures("stranger")
def test_a_command_of_another_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["greet", "you"]) == 0
    assert capsys.readouterr().out == "Hello, you.\n"
    assert run(["greet", "you", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"name": "you"}
    assert run(["help", "all"]) == 0
    politeness, _, others = (
        capsys.readouterr().out.partition("Politeness:\n")[2].partition("From installed packages:\n")
    )
    assert politeness == "  greet  Greet somebody.\n\n"
    assert others == "  broken  no_such_module\n  wave    Wave to everybody.\n"
    for ours in ("train", "doctor"):  # cannot be replaced
        assert run([ours, "--help"]) == 0
        assert "greet" not in capsys.readouterr().out.lower()
    assert run(["--help"]) == 0
    assert "greet" not in capsys.readouterr().out
    assert run(["broken"]) == 2
    assert "there is no module 'no_such_module'" in capsys.readouterr().err
    assert run(["great"]) == 2
    assert "Did you mean 'greet'?" in capsys.readouterr().err


@pytest.mark.usefixtures("stranger")
def test_a_format_of_another_package(train_tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = train_tiny("run").run_dir
    capsys.readouterr()
    assert run(["export", "--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "[folder|names|peft|timm|transformers|safetensors|onnx|torch-export]" in said
    assert "names: names alone; peft: low-rank adapters alone;" in said
    assert run(["export", str(run_dir), "--format", "names", "--output", str(tmp_path / "a.names")]) == 0
    assert "Whoever reads names matches the network: largest difference 0.0e+00" in capsys.readouterr().out
    assert "classifier.weight" in (tmp_path / "a.names").read_text().splitlines()
    assert run(["export", str(run_dir), "--format", "names", "--output", str(tmp_path / "a.txt")]) == 2
    assert "must end in .names" in capsys.readouterr().err
    assert run(["export", str(run_dir), "--format", "names", "--output", "b.names", "--quantize", "bf16"]) == 2
    assert "is for --format timm, safetensors, torch-export, not names" in capsys.readouterr().err
    assert run(["export", str(run_dir), "--format", "timm", "--output", str(tmp_path / "a.names")]) == 2
    assert "a folder's name does not end in .names" in capsys.readouterr().err, "ours cannot be replaced"


@pytest.mark.usefixtures("stranger")
def test_a_packer_of_another_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "paceline_data.pack", raising=False)  # it asks for packers when it is imported
    assert run(["pack", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "  With --sounds, SOURCE is a list.\n" in shown
    assert "    paceline pack --text books packed/books\n" in shown
    assert "    paceline pack --sounds a,b names\n" in shown
    assert run(["pack", "--sounds", "a,b", str(tmp_path / "names"), "--joint", "+"]) == 0
    assert (tmp_path / "names").read_text() == "a+b"
    for refused, why in {
        ("--sounds", "a,b"): "Missing argument 'DEST': where to write.",
        ("a", "b", "--joint", "+"): "it is used only with --sounds",
        ("--sounds", "a", "b", "--mode", "raw"): "it does not apply with --sounds",
    }.items():
        assert run(["pack", *refused]) == 2
        assert why in capsys.readouterr().err


@pytest.mark.usefixtures("stranger")
def test_a_function_of_another_package() -> None:
    assert paceline.sawtooth(LearningRate(name="constant", peak=0.5, total_steps=9, warmup_steps=0), 1) == 0.25
    assert {"find_lr", "sawtooth", "train"} <= set(dir(paceline))
    for name, home in {"find_lr": "paceline_advisor.tuning.lr_range", "train": "paceline.training"}.items():
        vars(paceline).pop(name, None)
        assert getattr(paceline, name).__module__ == home, "ours cannot be replaced"
    del paceline.sawtooth


def test_two_of_one_name_leave_ours_alone(stranger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(stranger, "other", "[paceline.commands]\ngreet = other:Greet\n[paceline.functions]\nsawtooth = other:saw\n")
    entry_points.cache_clear()
    for words in (["--help"], ["doctor", "--help"], ["train", "--help"]):
        assert run(words) == 0
    assert run(["greet", "you"]) == 2
    assert "two installed packages register 'greet'" in capsys.readouterr().err
    vars(paceline).pop("find_lr", None)
    assert paceline.find_lr
    with pytest.raises(AttributeError, match="two installed packages register 'sawtooth'"):
        paceline.sawtooth  # noqa: B018  # the access is the test


def test_names_of_our_packages_are_built_in(stranger: Path) -> None:
    """A name from one of Paceline's other packages obeys the recipe's rules, as the core's names do."""
    install(stranger, "ours", "[paceline.schedules]\nslope = paceline_slopes:slope\n")
    entry_points.cache_clear()
    assert "slope" in registry.built_in("schedules")
    assert {"slope", "sawtooth"} <= registry.installed("schedules").keys()
    assert "sawtooth" not in registry.built_in("schedules")
    with pytest.raises(RecipeError, match=r"'schedule\.end_lr' has no effect"):
        recipe(schedule__name="slope", schedule__end_lr=0.25)
    assert recipe(schedule__name="sawtooth", schedule__end_lr=0.25).schedule.end_lr == 0.25


def test_a_command_that_an_incomplete_installation_lacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(["--help"])
    capsys.readouterr()
    monkeypatch.setattr(sys, "path", [place for place in sys.path if not [*Path(place).glob("*-info")]])
    entry_points.cache_clear()
    assert run(["doctor"]) == 2
    said = capsys.readouterr().err
    assert "there is no command 'doctor'" in said
    assert "installation is incomplete or stale" in said
    assert run(["--help"]) == 0
    assert "Advise" not in capsys.readouterr().out
    entry_points.cache_clear()


@pytest.mark.usefixtures("stranger")
def test_another_packages_data_set_is_one_of_ours() -> None:
    assert "satellite" in dataset_names()
    recipe = load_recipe("image_folder", ["data.dataset=satellite", "data.path=x", "data.options.grey=7"]).recipe
    found = open_dataset(recipe.data)
    assert (found.name, found.classes, found.native_size) == ("satellite", ("land", "sea"), (16, 16))
    assert found.train.read(0).max() == 7
    with pytest.raises(RecipeError, match=r"'data.image_column' has no effect with data.dataset=satellite"):
        load_recipe("image_folder", ["data.dataset=satellite", "data.path=x", "data.image_column=a"])
    with pytest.raises(DataError, match="its opener returned int"):
        open_dataset(load_recipe("image_folder", ["data.dataset=nothing", "data.path=x"]).recipe.data)
