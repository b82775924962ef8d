"""A folder or a table in place of a recipe: what is chosen is said, can be typed by name, and is kept on a resume."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import timm
from calls import Call
from golden_sentences import raises
from huggingface_hub import constants
from PIL import Image
from safetensors.torch import save_file

import paceline
from paceline.errors import PacelineError
from paceline.models import build
from paceline.recipe.load import is_data, load_recipe
from paceline.trainer import first_recipe

SHORT = ("parallel.device=cpu", "parallel.threads=1")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Sixteen photos of each of two classes, of unequal sizes."""
    generator = np.random.default_rng(0)
    for channel, name in enumerate(("cat", "dog")):
        folder = tmp_path / "photos" / name
        folder.mkdir(parents=True)
        for number in range(16):
            pixels = generator.integers(0, 200, (70 + number, 90, 3), dtype=np.uint8)
            pixels[..., channel] += 55
            Image.fromarray(pixels).save(folder / f"{number:02d}.jpg")
    return tmp_path / "photos"


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def local_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the hub had them: the plan does not load any."""
    monkeypatch.setattr(first_recipe, "why_no_weights", lambda _: "")


def test_what_is_data(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "table.CSV").write_text("path,label\n")
    (tmp_path / "recipe.yaml").write_text("task: image_classification\n")
    assert is_data(photos)
    assert is_data(tmp_path / "table.CSV")
    assert not is_data(tmp_path)  # as a run directory has it
    assert not is_data(tmp_path / "recipe.yaml")
    assert not is_data("photo")


def test_a_folder_named_like_a_recipe_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_recipe("cifar10").notices == ()
    (tmp_path / "cifar10" / "cat").mkdir(parents=True)
    (reported,) = load_recipe("cifar10").notices
    assert "write ./cifar10" in reported
    assert is_data("./cifar10")
    assert load_recipe("cifar10", ["data.path=cifar10"]).notices == ()


def test_python_takes_the_same_and_resumes(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = {
        "train.duration": "2 steps",
        "parallel.device": "cpu",
        "parallel.threads": np.int64(1),
        "telemetry.trackers": [],
    }
    paceline.train(photos, overrides=short | {"train.until": "1 steps"}, run_dir=tmp_path / "run")
    printed = capsys.readouterr().out
    assert f"{photos}: small_resnet, from scratch" in printed
    assert "'train.duration=2 steps'" in printed
    assert paceline.train(str(photos), overrides=short, run_dir=tmp_path / "run", quiet=True).status == "completed"
    assert capsys.readouterr().out == ""


@pytest.mark.everyday
def test_a_folder_may_have_any_name(photos: Path, tmp_path: Path) -> None:
    for name in ("photos #1", "[a, b]", "a: b", "caf\udce9"):
        photos = photos.rename(tmp_path / name)
        chosen = first_recipe.choose_recipe(str(photos), SHORT)
        assert load_recipe(chosen.recipe, chosen.overrides).recipe.data.path == str(photos)


def test_from_scratch_where_no_weights_are_at_hand(photos: Path, paceline_here: Call) -> None:
    photos.rename(photos.with_name("[2024]: photos #1"))  # a name with a meaning in YAML
    done = paceline_here("train", "./[2024]: photos #1/", *SHORT, "--plan-only", "--json").ended(0)
    plan = done.document
    assert plan["recipe"]["model"]["name"] == "small_resnet"
    assert plan["recipe"]["data"]["image_size"] == 64
    assert "HF_HUB_OFFLINE" in done.err
    # What is said to be the same is the same.
    (by_name,) = (line.partition(": ")[2] for line in done.err.splitlines() if line.startswith("The same by name"))
    again = paceline_here(*shlex.split(by_name)[1:], "--plan-only", "--json")
    assert again.document["recipe"] == plan["recipe"]


def test_from_published_weights_where_they_are(
    photos: Path, local_weights: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = first_recipe.choose_recipe(str(photos), [])
    assert found.recipe == "fine_tune"
    assert "model.name=resnet18" in found.overrides
    many = first_recipe.choose_recipe(str(photos), ["model.name=small_resnet", "train.duration=2 steps"])
    assert many.recipe == "image_folder"  # the user's own network, and nothing published of it is asked for
    assert [each for each in many.overrides if each.startswith("train.duration")] == ["train.duration=2 steps"]


def test_uneven_classes_are_drawn_equally_often(photos: Path) -> None:
    def sampling(*requested: str) -> list[str]:
        chosen = first_recipe.choose_recipe(str(photos), requested)
        return [each for each in (*chosen.overrides, *chosen.reasons) if "data.sampling" in each]

    assert sampling() == []
    for number in range(2, 16):
        (photos / "dog" / f"{number:02d}.jpg").unlink()
    key, reason = sampling()
    assert key == "data.sampling=balanced"
    assert reason.startswith("data.sampling=balanced: 'cat' has 13 images and 'dog' 1")
    assert sampling("train.class_weights=balanced") == []
    assert sampling("data.sampling=uniform") == ["data.sampling=uniform"]


def test_a_picture_in_two_classes_is_named(photos: Path) -> None:
    def named() -> list[str]:
        return [each for each in first_recipe.choose_recipe(str(photos), ()).reasons if "two classes" in each]

    shutil.copy(photos / "cat" / "03.jpg", photos / "cat" / "again.jpg")  # twice in one class: no label is wrong
    changed = bytearray((photos / "cat" / "04.jpg").read_bytes())
    changed[-3] ^= 1
    (photos / "dog" / "as-large.jpg").write_bytes(changed)
    assert named() == []
    shutil.copy(photos / "cat" / "05.jpg", photos / "dog" / "copy.jpg")
    (said,) = named()
    assert said.startswith("1 image is in two classes")
    assert f"{photos}/cat/05.jpg (cat)" in said
    assert f"{photos}/dog/copy.jpg (dog)" in said


@pytest.mark.everyday
def test_a_weights_file_is_enough(photos: Path, tmp_path: Path, paceline_here: Call) -> None:
    """No weights are fetched, the classifier of other classes begins anew, and small images are enlarged."""
    weights = timm.create_model("mobilenetv3_small_050", num_classes=7).state_dict()
    save_file(weights, tmp_path / "weights.safetensors")
    requested = ("model.name=mobilenetv3_small_050", f"model.initialize_from={tmp_path / 'weights.safetensors'}")
    for path in photos.rglob("*.jpg"):
        with Image.open(path) as image:
            small = image.resize((32, 32))
        small.save(path)
    found = first_recipe.choose_recipe(str(photos), requested)
    assert {"model.pretrained=null", "model.initialize_partly=true", "data.image_size=96"} <= set(found.overrides)
    done = paceline_here(
        "train", "photos", *requested, *SHORT, "train.duration=1 steps", "data.workers=0", "--run-dir", "r"
    ).ended(0)
    assert "classifier.bias are newly initialised" in " ".join(done.out.split())
    assert "image_folder on photos in r\n" in done.out or "fine_tune on photos in r\n" in done.out
    assert "is not used" not in done.out


def test_the_cache_is_looked_into(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "resnet18" in build.why_no_weights("resnet18")
    folder = tmp_path / "hub" / "models--timm--resnet18.a1_in1k"
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc" / "model.safetensors").write_bytes(b"")
    assert build.why_no_weights("resnet18") == ""


@pytest.mark.parametrize("table", ["csv", "tsv"])
def test_a_table(photos: Path, tmp_path: Path, table: str) -> None:
    between = "," if table == "csv" else "\t"
    rows = [
        f"photos/{path.parent.name}/{path.name}{between}{path.parent.name}" for path in sorted(photos.rglob("*.jpg"))
    ]
    (tmp_path / f"labels.{table}").write_text("\n".join([f"path{between}label", *rows]) + "\n")
    found = first_recipe.choose_recipe(str(tmp_path / f"labels.{table}"), [])
    assert {"data.dataset=csv", f"data.path={tmp_path / f'labels.{table}'}"} <= set(found.overrides)


def test_the_same_image_in_two_classes_or_splits_is_told(photos: Path, paceline_here: Call, tmp_path: Path) -> None:
    def reported(source: str) -> str:
        why = paceline_here("train", source, *SHORT, "--plan-only", "--json").ended(0).document["plan"]["reasons"]
        return why.get("data.copies", "").replace(f"{tmp_path}/", "")

    assert reported("photos") == ""
    for number in (3, 5):
        (photos / "dog" / f"copy{number}.jpg").write_bytes((photos / "cat" / f"{number:02}.jpg").read_bytes())
    first, *_ = reported("photos").split("; ")
    pair = "'photos/cat/03.jpg' and 'photos/dog/copy3.jpg' are the same image with different labels, and 1 more"
    assert first == pair
    (tmp_path / "both").mkdir()
    for split in ("train", "val"):
        (tmp_path / "both" / split).symlink_to(photos)
    assert "'both/train/cat/00.jpg' and 'both/val/cat/00.jpg' are the same image with different splits" in reported(
        "both"
    )
    short = (*SHORT, "train.duration=1 steps", "data.workers=0", "data.image_size=16", "--run-dir", "run")
    done = paceline_here("train", "photos", *short).ended(0)
    assert "are the same image with different labels" in " ".join(done.out.split())


@pytest.mark.parametrize("requested", ["data.path=elsewhere", "task=detection", "data.target_columns=[age]"])
def test_two_answers_to_what_is_trained_on_are_refused(photos: Path, requested: str) -> None:
    with raises(PacelineError, path=photos):
        first_recipe.choose_recipe(str(photos), [requested])


def test_a_run_that_is_there_keeps_what_was_chosen(
    photos: Path, paceline_here: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested = (*SHORT, "data.image_size=16", "train.duration=4 steps", "data.workers=0")
    paceline_here("train", "photos", *requested, "train.until=2 steps", "--run-dir", "run").ended(75)
    monkeypatch.setattr(first_recipe, "why_no_weights", lambda _: "")  # another choice would be made by now
    # A stop before it leaves `train.until` in force; once reached, it is dropped, as by `paceline resume`.
    plan = json.loads(Path("run/plan.json").read_text())
    Path("run/plan.json").write_text(json.dumps(plan | {"until_step": 3}))
    recipe = Path("run/recipe.yaml").read_text()
    Path("run/recipe.yaml").write_text(recipe.replace("until: 2 steps", "until: 3 steps"))
    assert "3 steps" in paceline_here("train", "photos", "--run-dir", "run").ended(75).out
    paceline_here("train", "photos", "--run-dir", "run").ended(0)
    assert json.loads(Path("run/summary.json").read_text())["step"] == 4


def test_ones_own_network_goes_on(photos: Path, tmp_path: Path, paceline_here: Call) -> None:
    body = "return nn.Sequential(nn.Flatten(), nn.Linear(in_channels * 256, num_classes))"
    (tmp_path / "own_net.py").write_text(f"from torch import nn\ndef make(num_classes, in_channels): {body}\n")
    requested = (*SHORT, "model.name=own_net:make", "data.image_size=16", "train.duration=2 steps", "data.workers=0")
    for _ in range(2):  # the second time it is complete, and its recipe names code
        paceline_here("train", "photos", *requested, "--run-dir", "run").ended(0)


def test_images_with_masks_are_no_classes(tmp_path: Path) -> None:
    for name in ("images", "masks"):
        (tmp_path / "set" / "train" / name).mkdir(parents=True)
    with raises(PacelineError, path="set"):
        first_recipe.choose_recipe(str(tmp_path / "set"), [])
