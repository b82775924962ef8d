"""Folders that timm wrote are scored as timm scores them, and begun from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file

import paceline
from paceline.checkpoint.weights import read_weights
from paceline.errors import PacelineError
from paceline.inference.export import ExportRequest, export
from paceline.inference.predict import load_predictor
from paceline.trainer.evaluate_target import EvaluationRequest, evaluate_target

Save = Callable[..., tuple[Path, Any]]
CLASSES = ("cat", "dog", "owl")
SIZE = 32


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory, make_photos: Callable[..., Path]) -> Path:
    """Pictures of the size that the network sees, so that nothing is resized."""
    return make_photos(tmp_path_factory.mktemp("photos"), names=CLASSES, side=SIZE, train=7, val=7)


@pytest.fixture
def save(tmp_path: Path) -> Save:
    def save(crop: float = 1.0, names: tuple[str, ...] | None = CLASSES, **options: Any) -> tuple[Path, Any]:
        torch.manual_seed(1)
        network = timm.create_model("test_resnet", num_classes=3).eval()
        for module in network.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                torch.nn.init.uniform_(module.running_var, 0.5, 1.5)
        # As timm's own validation would be told.
        shown = {"input_size": (3, SIZE, SIZE), "crop_pct": crop, "interpolation": "bilinear"}
        network.pretrained_cfg.update(shown, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.25), test_input_size=None)
        config = {} if names is None else {"label_names": list(names)}
        timm.models.save_for_hf(
            network, tmp_path / "hub", model_config=config, **{"safe_serialization": True, **options}
        )
        return tmp_path / "hub", network

    return save


def score(target: Path, photos: Path, *more: str, predictions: Path | None = None) -> Any:
    overrides = [f"data.path={photos}", "data.workers=0", "parallel.device=cpu", "parallel.threads=1", *more]
    return evaluate_target(EvaluationRequest(target=target, overrides=overrides, predictions=predictions))


def test_scored_as_timm_does(save: Save, photos: Path, tmp_path: Path) -> None:
    hub, _ = save()
    network = timm.create_model(f"local-dir:{hub}", pretrained=True).eval()
    config = timm.data.resolve_model_data_config(network)
    transform = timm.data.create_transform(**config, is_training=False)
    files = sorted((photos / "val").glob("*/*.png"))
    labels = [CLASSES.index(file.parent.name) for file in files]
    images = []
    for file in files:
        with Image.open(file) as image:
            images.append(transform(image))
    with torch.inference_mode():
        logits = network(torch.stack(images))
    expected = {
        "loss": float(torch.nn.functional.cross_entropy(logits, torch.tensor(labels))),
        "top1_accuracy": 100 * float((logits.argmax(1) == torch.tensor(labels)).double().mean()),
    }
    report = score(hub, photos, predictions=tmp_path / "answers.jsonl")
    assert report.samples == 21
    assert report.metrics["loss"] == pytest.approx(expected["loss"], abs=1e-5)
    assert report.metrics["top1_accuracy"] == pytest.approx(expected["top1_accuracy"])
    said = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    probabilities = logits.softmax(dim=1).max(dim=1)
    assert [each["prediction"] for each in said] == probabilities.indices.tolist()
    assert [each["probability"] for each in said] == pytest.approx(probabilities.values.tolist(), abs=1e-5)
    assert len(set(probabilities.indices.tolist())) > 1 or probabilities.values.std() > 1e-4


def test_labelled_as_timm_does_whatever_the_size(save: Save, tmp_path: Path) -> None:
    """Of images that have the network's size already, too, which timm resizes and crops."""
    hub, _ = save(crop=0.8)
    network = timm.create_model(f"local-dir:{hub}", pretrained=True).eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(network), is_training=False)
    predictor = load_predictor(hub)
    for side in (SIZE, SIZE + 8):
        pixels = np.random.default_rng(side).integers(0, 256, (side, side, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "photo.png")
        with Image.open(tmp_path / "photo.png") as image, torch.inference_mode():
            expected = network(transform(image)[None]).softmax(1)
        (found,) = predictor.predict([tmp_path / "photo.png"], top_k=3)
        assert found.probabilities == pytest.approx(expected.sort(descending=True).values[0].tolist(), abs=1e-4)


def test_arguments_that_are_none_for_a_network_are_refused(save: Save) -> None:
    hub, _ = save()
    config = json.loads((hub / "config.json").read_text())
    for options in ({"drop_rate": "x"}, {"act_layer": "os.system"}, {"unknown": 1}):
        (hub / "config.json").write_text(json.dumps({**config, "model_args": options}))
        with pytest.raises(PacelineError, match=r"model\.options \{.*do not fit|does not take images of 32 pixels"):
            load_predictor(hub)


def test_what_would_be_shown_otherwise_is_refused(save: Save, photos: Path) -> None:
    hub, _ = save(crop=0.875)
    with pytest.raises(PacelineError, match=r"32x32 already.*resized to 36 and cropped"):
        score(hub, photos)
    assert score(hub, photos, "data.evaluation_crop=1").samples == 21


def test_classes_without_names(save: Save, photos: Path, tmp_path: Path) -> None:
    hub, _ = save(names=None)
    assert score(hub, photos).samples == 21
    export(ExportRequest(target=hub, output=tmp_path / "again", form="timm"))
    card, config = ((tmp_path / "again" / name).read_text() for name in ("README.md", "config.json"))
    assert "label_names" not in config
    assert "print(int(logits.argmax()))" in card
    for split in ("train", "val"):
        (tmp_path / "four" / split).mkdir(parents=True)
        for label in (*CLASSES, "yak"):
            (tmp_path / "four" / split / label).symlink_to(photos / split / CLASSES[0])
    with pytest.raises(PacelineError, match="have 3 classes, but the data has the 4 classes"):
        score(hub, tmp_path / "four")
    for label in ("0", "2"):  # numbers are no names of theirs
        (tmp_path / "two").mkdir(exist_ok=True)
        (tmp_path / "two" / label).symlink_to(photos / "val" / CLASSES[0])
    with pytest.raises(PacelineError, match="have 3 classes, but the data has the 2 classes"):
        score(hub, tmp_path / "two")


def test_other_classes_are_refused(save: Save, photos: Path) -> None:
    hub, _ = save(names=("cow", "dog", "owl"))
    with pytest.raises(PacelineError, match="have the 3 classes cow, dog, owl, but the data has the 3 classes cat"):
        score(hub, photos)


def test_a_run_begins_from_it(save: Save, photos: Path, tiny_recipe: Path, runs: Path) -> None:
    hub, network = save()
    overrides = {
        "model": {"name": "test_resnet", "initialize_from": str(hub), "frozen": ["*", "!fc.*"]},
        "data": {"dataset": "image_folder", "path": str(photos), "image_size": SIZE, "workers": 0},
        "train.duration": "1 steps",
    }
    result = paceline.train(tiny_recipe, overrides=overrides, run_dir=runs / "from", quiet=True)
    state = read_weights(result.run_dir).state
    assert all(torch.equal(state[key], each) for key, each in network.state_dict().items() if "fc." not in key)
    assert not torch.equal(state["fc.weight"], network.fc.weight)
    assert load_file(hub / "model.safetensors").keys() == state.keys()


def test_a_pickle_alone_is_refused(save: Save, photos: Path) -> None:
    hub, _ = save(safe_serialization=False)
    with pytest.raises(PacelineError, match=r"pytorch_model\.bin only, a pickle.*never opened"):
        score(hub, photos)


@pytest.mark.parametrize("split", ["val", "test", ""])
def test_scored_on_a_folder_without_training_images(split: str, save: Save, photos: Path, tmp_path: Path) -> None:
    """Those of val/ or test/, or all of a folder of class folders."""
    hub, _ = save()
    root = photos / "val"
    if split:
        root = tmp_path / "scored"
        root.mkdir()
        (root / split).symlink_to(photos / "val")
    expected, found = score(hub, photos), score(hub, root)
    assert (found.samples, found.metrics) == (expected.samples, expected.metrics)
    part = f"the folder {split}/" if split else "all, also any that the run was trained on"
    assert f"21 samples are scored: {part}" in found.left_out
    part = score(hub, photos / "val", "data.validation_fraction=0.5")
    assert part.samples < expected.samples


@pytest.mark.parametrize("label", ["cat", "dog,owl"])
def test_a_table_of_test_images_is_scored_as_a_folder_of_them(
    label: str, save: Save, photos: Path, tmp_path: Path
) -> None:
    hub, _ = save()
    files = [file for each in label.split(",") for file in sorted((photos / "val" / each).glob("*.png"))]
    rows = [f"{file},{file.parent.name}" for file in files]
    for each in label.split(","):
        (tmp_path / "folder").mkdir(exist_ok=True)
        (tmp_path / "folder" / each).symlink_to(photos / "val" / each)
    expected = score(hub, tmp_path / "folder")
    (tmp_path / "table.csv").write_text("\n".join(["path,label", *rows]))
    (tmp_path / "split.csv").write_text("\n".join(["path,label,split", *(f"{row},test" for row in rows)]))
    for name, part in (("table.csv", "all, also any"), ("split.csv", "the rows of test")):
        found = score(hub, tmp_path / name, "data.dataset=csv")
        assert (found.samples, found.metrics) == (len(files), expected.metrics)
        assert any(f"{len(files)} samples are scored: {part}" in note for note in found.left_out)


def test_other_images_may_be_fewer_than_the_run_s_subset(photos: Path, tmp_path: Path) -> None:
    data = {"data.path": str(photos), "data.subset": 12, "data.image_size": SIZE, "batch.global_size": 6}
    asked = {**data, "model.name": "small_resnet", "train.duration": "2 steps"}
    run_dir = paceline.train("image_folder", overrides=asked, run_dir=tmp_path / "run", quiet=True).run_dir
    files = sorted((photos / "val").glob("*/*.png"))[::3]
    (tmp_path / "table.csv").write_text("\n".join(["path,label", *(f"{file},{file.parent.name}" for file in files)]))
    assert score(run_dir, tmp_path / "table.csv", "data.dataset=csv").samples == len(files)


def test_some_of_the_classes_are_scored_as_among_all(save: Save, photos: Path, tmp_path: Path) -> None:
    hub, _ = save()
    first, *others = sorted(each.name for each in (photos / "val").iterdir())
    (tmp_path / "some").mkdir()
    for name in others:
        (tmp_path / "some" / name).symlink_to(photos / "val" / name)
    answers = {name: tmp_path / f"{name}.jsonl" for name in ("all", "some")}
    score(hub, photos, predictions=answers["all"])
    found = score(hub, tmp_path / "some", predictions=answers["some"])
    assert any(first in note for note in found.left_out)
    told = {}
    for name, path in answers.items():
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        told[name] = {Path(line["sample"]).parts[-2:]: (line["target"], line["prediction"]) for line in lines}
    assert len(told["some"]) == found.samples < len(told["all"])
    assert told["some"].items() <= told["all"].items()
