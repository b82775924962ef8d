"""A folder to share: its program answers as `paceline predict` does, without Paceline, and its page runs nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calls import output_of
from golden_sentences import raises
from PIL import Image

import paceline
from paceline.checkpoint.weights import SavedWeights, read_weights
from paceline.cli.export import Export
from paceline.errors import CheckpointError, PacelineError, RecipeError
from paceline.inference.export import ExportRequest, export
from paceline_ops.bundle.folder import write_folder

pytestmark = pytest.mark.needs("onnxruntime", "onnxscript")

FILES = {"README.md", "index.html", "model.json", "model.onnx", "pillow_pixels.py", "predict.py"}
HOSTILE = "<img src=x onerror=alert(1)>", "[a](javascript:alert(1)) `|\x1b[31m"
SMALL = {
    "parallel.device": "cpu",
    "parallel.threads": 1,
    "telemetry.trackers": [],
    "telemetry.report": False,
    "train.duration": "6 steps",
    "train.ema": "off",
}


def waves(height: int, width: int, seed: int) -> np.ndarray[Any, Any]:
    """Smooth colours, as photos have, and an edge."""
    draws = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width] / 10
    layers = [128 + 100 * np.sin(a * x + b * y + c) for a, b, c in draws.uniform(0.2, 1.5, (3, 3))]
    pixels = np.stack(layers, axis=2)
    pixels[height // 3 : height // 2, width // 4 : width // 2] = draws.integers(0, 256, 3)
    return pixels.round().astype(np.uint8)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photos as they come: rotated by EXIF, grey, transparent, in CMYK, of 16 bits, long, tiny, and a broken one."""
    root = tmp_path_factory.mktemp("photos")
    colour = Image.fromarray(waves(70, 100, 1))
    exif = Image.Exif()
    exif[0x0112] = 6
    colour.save(root / "turned.jpg", exif=exif, quality=95)
    colour.convert("L").save(root / "grey.png")
    colour.convert("CMYK").save(root / "print.jpg", quality=95)
    clear = colour.copy()
    clear.putalpha(Image.fromarray(waves(70, 100, 2)[:, :, 0]))
    clear.save(root / "clear.webp", lossless=True)
    colour.quantize(16).save(root / "palette.gif")
    Image.fromarray(waves(60, 60, 3)[:, :, 0].astype(np.uint16) * 257).save(root / "deep.png")
    Image.fromarray(waves(20, 300, 4)).save(root / "long.png")
    Image.fromarray(waves(9, 7, 5)).save(root / "tiny.png")
    Image.fromarray(waves(32, 32, 6)).save(root / "fits.tif")
    (root / "broken.jpg").write_bytes((root / "turned.jpg").read_bytes()[:500])
    return root


Train = Callable[..., Path]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    root = tmp_path_factory.mktemp("runs")

    def trained(name: str, recipe: str, **changes: Any) -> Path:
        paceline.train(recipe, overrides=SMALL | changes, run_dir=root / name, quiet=True)
        return root / name

    return trained


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Colours as classes of hostile names."""
    root = tmp_path_factory.mktemp("classes")
    for place, name in enumerate((*HOSTILE, "plain")):
        (root / name).mkdir()
        for seed in range(12):
            pixels = waves(40, 50, seed)
            pixels[:, :, place] //= 3
            Image.fromarray(pixels).save(root / name / f"{seed}.png")
    small = {"model.name": "small_resnet", "model.options": {"width": 4, "stages": 1}, "data.workers": 0}
    return small | {"data.path": str(root), "data.image_size": 32, "batch.global_size": 8}


@pytest.fixture(scope="module")
def run(train: Train, folder: dict[str, Any]) -> Path:
    return train("first", "image_folder", **folder)


def asked(program: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """Ask the program as somebody else would, who has no Paceline."""
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    check = (
        "import runpy, sys; sys.argv = sys.argv[1:]; sys.modules.update(paceline=None, torch=None); "
        "sys.path.insert(0, sys.argv[0].rpartition('/')[0]); runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [sys.executable, "-c", check, str(program), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=own, timeout=120)


def largest_difference(run: Path, shared: Path, photos: Path) -> float:
    """Compare the program's answers with those of `paceline predict`, as a share of how far these are apart."""
    paths = sorted(photos.iterdir())
    done = asked(shared / "predict.py", "--json", *paths)
    assert done.returncode == 1, done.stderr  # one is broken
    about = json.loads((shared / "model.json").read_text())
    options = {} if about["learns"] in ("labels", "numbers") else {"top_k": len(about["names"])}
    found, pairs = [json.loads(line) for line in done.stdout.splitlines()], []
    for row, own in zip(paceline.predict(run, paths, **options), found, strict=True):
        assert (row["error"] is None) == (own["error"] is None), own
        names, values = row.get("labels", ()), row.get("probabilities", row.get("shares", ()))
        expected = row["numbers"] if about["learns"] == "numbers" else dict(zip(names, values, strict=True))
        assert own["values"].keys() == expected.keys()
        pairs += [(name, own["values"][name], expected[name]) for name in expected]
    name = max({each[0] for each in pairs}, key=lambda name: np.ptp([each[2] for each in pairs if each[0] == name]))
    shown = np.array([each[1:] for each in pairs if each[0] == name])
    assert len(shown) > 4
    return float(np.abs(shown[:, 0] - shown[:, 1]).max() / np.ptp(shown[:, 1]))


SHAPES = {"samples": 10, "evaluation_samples": 5, "smallest_side": 32, "largest_side": 48, "objects": 2}
FIGURES = {"data.samples": 64, "batch.global_size": 16, "model.options": {"channels": 2}}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "bicubic": ("image_folder", {"data.interpolation": "bicubic", "data.evaluation_crop": 0.8}),
    "views": ("image_folder", {"evaluate.augment": "flip_shift"}),
    "grey": ("image_folder", {"data.channels": 1, "evaluate.augment": "flip"}),
    "labels": ("figures", FIGURES | {"evaluate.thresholds": {"circle": 0.3}}),
    "numbers": ("discs", FIGURES),
    "pixels": (
        "shapes-segmentation",
        {"model.options": {"width": 2, "stages": 1}, "data.detection.generated": SHAPES, "data.image_size": 48}
        | {"batch.global_size": 4, "evaluate.batch_size": 2, "train.duration": "60 steps"},
    ),
}


@pytest.mark.parametrize(
    "kind", ["bicubic", *(pytest.param(each, marks=pytest.mark.thorough) for each in KINDS if each != "bicubic")]
)
def test_its_program_answers_as_predict_does(
    kind: str, train: Train, folder: dict[str, Any], photos: Path, tmp_path: Path
) -> None:
    recipe, changes = KINDS[kind]
    run = train(kind, recipe, **(folder if recipe == "image_folder" else {}) | changes)
    export(ExportRequest(target=run, output=tmp_path / "shared", form="folder"))
    assert {each.name for each in (tmp_path / "shared").iterdir()} == FILES
    assert largest_difference(run, tmp_path / "shared", photos) < (0.002 if recipe == "image_folder" else 0.005)
    if kind == "pixels":
        words = "--masks", tmp_path / "masks", photos / "long.png"
        assert asked(tmp_path / "shared" / "predict.py", *words).returncode == 0
        with Image.open(tmp_path / "masks" / "long.png") as mask:
            assert (mask.mode, mask.size) == ("L", (300, 20))
        again = asked(tmp_path / "shared" / "predict.py", *words)
        assert (again.returncode, "exists" in again.stdout) == (1, True)


def test_what_is_said_in_the_terminal_and_on_the_page(
    run: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = output_of(Export, run, "--format", "folder")
    assert said.startswith("first-folder: ")
    assert "  ONNX Runtime matches the network: largest difference" in said
    assert "index.html shows held-out images" in said
    shared = tmp_path / "first-folder"

    done = asked(shared / "predict.py", "--top-k", 2, photos / "turned.jpg", photos / "none\x1b.jpg", photos)
    first, second, folder = done.stdout.splitlines()
    assert done.returncode == 1
    assert first.count(" %") == 2
    assert "No such file" in second
    assert folder.endswith(f"  a folder; give its files: {photos / '*'}")
    with pytest.raises(CheckpointError, match=r"Did you mean first-folder/model\.onnx\?$"):
        read_weights(Path("first-folder"))
    assert not {"\x1b", "\x07"} & set(done.stdout)
    assert asked(shared / "predict.py", "--masks", "masks", photos / "turned.jpg").returncode == 2

    page, card = ((shared / name).read_text() for name in ("index.html", "README.md"))
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    score = [each for each in events if each["event"] == "evaluation"][-1]
    hits = round(score["samples"] * score["top1_accuracy"] / 100)
    for text in (page, card.replace("\\", "")):
        assert (
            f"It is right on {hits} of {score['samples']} held-out images: {score['top1_accuracy']:.1f} % (95 %" in text
        )
        assert "python predict.py photo.jpg" in text
    assert "default-src 'none'" in page
    for text in (page, card):
        assert "<img src=x" not in text
        assert "\x1b" not in text
    assert "[a](" not in card
    assert "data:image/" in page  # of held-out images
    for text in (page, card):
        assert "Digest of the ledger" in text
        assert "Training samples by class" in text
    assert str(photos.parent) not in page + card  # names of files are nobody else's business
    before = {each: each.read_bytes() for each in shared.iterdir() if each.is_file()}
    with raises(CheckpointError):
        export(ExportRequest(target=run, output=Path("first-folder"), form="folder"))
    assert {each: each.read_bytes() for each in shared.iterdir() if each.is_file()} == before


def test_what_cannot_be_shared_is_refused(run: Path, tmp_path: Path) -> None:
    recipe = {"task": "image_classification", "evaluate": {"augment": "five_crop"}}
    described = {"evaluation_crop": 0.9, "channels": 3}
    for data, task, said in (
        ({}, {"task": "detection"}, "predicts something other than labels of photos"),
        (described, recipe, "averages several crops"),
        (described | {"evaluation_multiple": 32}, recipe, "in their own shapes"),
        ({"channels": 1}, {"task": "segmentation"}, "takes images of 1 channels"),
    ):
        metadata = {"data": json.dumps(data), "recipe": json.dumps(task)}
        saved = SavedWeights(state={}, weights="model", path=Path("a"), metadata=metadata)
        request = ExportRequest(target=tmp_path, output=tmp_path / "b", form="folder")
        with raises(RecipeError) as caught:
            write_folder(request, saved, tmp_path / "c")
        assert said in str(caught.value)
        assert "use --format safetensors" in str(caught.value)
    with pytest.raises(PacelineError, match="folder's name does not end in"):
        export(ExportRequest(target=run, output=tmp_path / "a.onnx", form="folder"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.thorough
def test_it_runs_where_nothing_else_is_installed(run: Path, photos: Path, tmp_path: Path) -> None:
    export(ExportRequest(target=run, output=tmp_path / "shared", form="folder"))
    venv.create(tmp_path / "fresh", with_pip=True)
    python = tmp_path / "fresh" / "bin" / "python"
    install = [
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "onnxruntime",
        "numpy",
        "pillow",
    ]
    done = subprocess.run(install, capture_output=True, text=True, check=False, timeout=500)
    if done.returncode:
        pytest.skip(f"pip cannot install here: {done.stderr.strip().splitlines()[-1]}")
    paths = sorted(each for each in photos.iterdir() if each.stem != "broken")
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [python, tmp_path / "shared" / "predict.py", "--json", *paths]
    told = subprocess.run(command, capture_output=True, text=True, check=False, env=own, cwd=tmp_path, timeout=120)
    assert told.returncode == 0, told.stderr
    for row, line in zip(paceline.predict(run, paths, top_k=3), told.stdout.splitlines(), strict=True):
        values = json.loads(line)["values"]
        assert [values[name] for name in row["labels"]] == pytest.approx(row["probabilities"], abs=0.01)
