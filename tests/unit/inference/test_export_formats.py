"""Run to file to another library and back: each answers as the network does, on images that were really prepared."""

from __future__ import annotations

import copy
import errno
import hashlib
import json
import os
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import yaml
from golden_sentences import raises
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

import paceline
from paceline.checkpoint.durable import hash_file
from paceline.checkpoint.weights import SavedWeights, read_weights, weights_sha256
from paceline.data.batch import Normalize, Placement
from paceline.data.image.decode import decode
from paceline.data.image.sets.digits import read_digits
from paceline.data.image.transforms import evaluation_image
from paceline.errors import PacelineError
from paceline.inference.atomic_output import put_in_place
from paceline.inference.export import Exported, ExportRequest, export, without_paths
from paceline.inference.formats import formats
from paceline.records.run_directory import RunDirectory
from paceline.tasks.trained import open_exportable, trained_recipe, trained_task
from paceline.training_record import training_record

CPU = torch.device("cpu")
NET = {"model.name": "test_resnet.r160_in1k", "model.options": None, "train.ema": 0.9}
CLASSES = ("cat", "dog", "owl")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of three classes and many sizes."""
    root = tmp_path_factory.mktemp("photos")
    draws = np.random.default_rng(0)
    for split in ("train", "val"):
        for number, label in enumerate(CLASSES):
            (root / split / label).mkdir(parents=True)
            for index in range(6):
                height, width = draws.integers(30, 60, 2)
                colours = np.roll((200, 80, 60), number) + draws.integers(0, 50, (height, width, 3))
                Image.fromarray(colours.astype(np.uint8)).save(root / split / label / f"{index}.png")
    return root


@pytest.fixture(scope="module")
def train(tiny_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    root = tmp_path_factory.mktemp("trained")

    def trained(name: str, overrides: Mapping[str, Any]) -> Path:
        paceline.train(tiny_recipe, overrides=overrides, run_dir=root / name, quiet=True)
        return root / name

    return trained


@pytest.fixture(scope="module")
def digits(train: Callable[..., Path]) -> Path:
    """A run of one of timm's networks on grey images."""
    return train("digits", NET)


@pytest.fixture(scope="module")
def photos(train: Callable[..., Path], folder: Path) -> Path:
    """A run of one of timm's networks on colour images that are resized."""
    data = {"data.dataset": "image_folder", "data.path": str(folder), "data.image_size": 32, "data.workers": 0}
    return train("photos", NET | data | {"train.duration": "3 steps", "data.evaluation_crop": 0.9})


def written(target: Path, output: Path, form: str, **options: Any) -> Exported:
    return export(ExportRequest(target=target, output=output, form=form, **options))


def network_of(saved: SavedWeights) -> nn.Module:
    return trained_task(saved, trust_code=False)(trained_recipe(saved)).trained(saved)


@torch.inference_mode()
def answers(network: Any, images: Tensor) -> Tensor:
    found: Tensor = network(images)
    return found


def grey_digits(count: int) -> Tensor:
    """Digits as evaluation shows them, uint8 [N, 1, 8, 8]."""
    return torch.from_numpy(read_digits().images[:count]).permute(0, 3, 1, 2)


def normalised(images: Tensor, saved: SavedWeights) -> Tensor:
    data = saved.description("data")
    return Normalize(tuple(data["mean"]), tuple(data["std"]), Placement(device=CPU))(images)


def near(found: Any, expected: Tensor) -> None:
    torch.testing.assert_close(torch.as_tensor(found), expected, rtol=0, atol=1e-5)


def timms(folder: Path) -> tuple[nn.Module, Callable[[Image.Image], Tensor]]:
    network = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    config = timm.data.resolve_model_data_config(network)
    return network, timm.data.create_transform(**config, is_training=False)


def is_exact(done: Exported) -> bool:
    return done.largest_difference is not None and done.largest_difference < 1e-5


def last_evaluation(run: Path, weights: str) -> dict[str, Any]:
    told = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [each for each in told if each["event"] == "evaluation" and each["weights"] == weights][-1]


def test_run_to_safetensors(digits: Path, tmp_path: Path) -> None:
    for asked, kept in (("auto", "ema"), ("ema", "ema"), ("model", "model")):
        output = tmp_path / "new" / f"{asked}.safetensors"  # the folders above it are made
        assert written(digits, output, "safetensors", weights=asked).saved.weights == kept
        found, wanted = load_file(output), read_weights(digits, kept).state
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)
        # What was exported can be exported: it says what it belongs to.
        again = written(output, tmp_path / f"{asked}-again.safetensors", "safetensors")
        assert again.saved.description("recipe") == read_weights(digits).description("recipe")


NEEDS_ONNX = pytest.mark.needs("onnx", "onnxruntime", "onnxscript")


@pytest.mark.parametrize(
    "form",
    ["safetensors", "torch-export", "timm", *(pytest.param(each, marks=NEEDS_ONNX) for each in ("onnx", "folder"))],
)
def test_no_path_is_exported(photos: Path, folder: Path, form: str, tmp_path: Path) -> None:
    output = tmp_path / ("photos" + formats()[form].ending)
    written(photos, output, form)
    files = [each for each in output.rglob("*") if each.is_file()] if output.is_dir() else [output]
    assert files
    whole = [folder, photos, Path(torch.__file__).parents[1]]
    assert [(each.name, path) for each in files for path in whole if str(path).encode() in unpacked(each)] == []


def unpacked(path: Path) -> bytes:
    """A file's content; of an archive, that of its members."""
    if not zipfile.is_zipfile(path):
        return path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        return b"".join(map(archive.read, archive.namelist()))


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        ("/home/me/photos", "photos"),
        ("../clinic/photos", "photos"),
        ("transformers:~/clinic/bert", "transformers:bert"),
        ("s3://bucket/mine/photos", "s3://photos"),
        ("transformers:/home/me/bert", "transformers:bert"),
        ("transformers:owner/bert", "transformers:owner/bert"),
        ("hf://datasets/owner/photos", "hf://datasets/owner/photos"),
        ("3 epochs", "3 epochs"),
    ],
)
def test_of_a_path_the_name_is_kept(value: str, kept: str) -> None:
    assert without_paths({"data": [value, 3], "off": None}) == {"data": [kept, 3], "off": None}


def test_run_to_hub_folder_to_timm_grey(digits: Path, tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    for weights in ("model", "ema"):
        done = written(digits, tmp_path / weights, "timm", weights=weights)
        assert done.saved.weights == weights
        assert done.largest_difference == 0
    written(digits, hub, "timm")
    saved, images = read_weights(digits), grey_digits(40)
    network, transform = timms(hub)
    shown = torch.stack([transform(Image.fromarray(each[0].numpy(), "L")) for each in images])
    near(shown, normalised(images, saved))
    expected = answers(network_of(saved), normalised(images, saved))
    assert expected.std() > 0.01
    near(answers(network, shown), expected)
    assert not torch.equal(load_file(tmp_path / "model/model.safetensors")["fc.weight"], network.fc.weight)
    # And back: the folder is read as the run was.
    near(answers(network_of(read_weights(hub)), normalised(images, saved)), expected)
    assert list(network.pretrained_cfg["label_names"]) == saved.description("data")["class_names"]


def test_run_to_hub_folder_to_timm_resized(photos: Path, folder: Path, tmp_path: Path) -> None:
    written(photos, tmp_path / "hub", "timm")
    saved, (network, transform) = read_weights(photos), timms(tmp_path / "hub")
    files = sorted(folder.glob("val/*/*.png"))
    ours = torch.stack([evaluation_image(decode(file, 3), 32, 0.9) for file in files])
    shown = torch.stack([transform(Image.open(file)) for file in files])
    # Pillow rounds in the middle of a resize, torch at its end: never by more than a grey level.
    deviation = torch.tensor(saved.description("data")["std"]).view(1, 3, 1, 1)
    assert ((shown - normalised(ours, saved)) * deviation * 255).abs().max() < 1.01
    near(answers(network, shown), answers(network_of(saved), shown))


def test_what_the_card_says(digits: Path, tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    written(digits, hub, "timm", weights="model")
    front, _, body = (hub / "README.md").read_text().removeprefix("---\n").partition("\n---\n")
    matter = yaml.safe_load(front)
    assert matter["library_name"] == "timm"
    saved = read_weights(digits, "model")
    event = last_evaluation(digits, "model")
    metrics = {each["name"]: each["value"] for each in matter["model-index"][0]["results"][0]["metrics"]}
    assert metrics["top1_accuracy"] == event["top1_accuracy"]
    assert f"The model weights on {event['samples']} held-out samples" in body
    summary = json.loads((digits / "summary.json").read_text())
    digests = (saved.description("data")["digest"], weights_sha256(saved.plain), summary["weights_sha256"])
    assert [
        each for each in (*digests, hash_file(hub / "model.safetensors", hashlib.sha256).digest) if each not in body
    ] == []
    recipe = body.partition("```yaml\n")[2].partition("```")[0]
    assert yaml.safe_load(recipe) == saved.description("recipe")
    record = training_record(RunDirectory(digits))
    counts = ", ".join(f"{name} {count}" for name, count in record["data"]["classes"].items())
    assert f"| Training samples by class | {counts} |" in body
    assert f"| Digest of the ledger | {record['ledger']['sha256']} |" in body
    assert str(digits.parent) not in front + body
    # A lone file knows nothing of its run, and its card says so.
    again = tmp_path / "again"
    alone = tmp_path / "alone.safetensors"
    written(digits, alone, "safetensors")
    written(alone, again, "timm")
    assert "Not known: no evaluation" in (again / "README.md").read_text()
    assert (again / "config.json").read_text() == (hub / "config.json").read_text()


def test_run_to_onnx(digits: Path, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="needs onnx")
    ort = pytest.importorskip("onnxruntime", reason="needs onnxruntime")
    path = tmp_path / "digits.onnx"
    done = written(digits, path, "onnx")
    assert is_exact(done)
    assert done.size_bytes == path.stat().st_size
    saved, session = read_weights(digits), ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert [(each.name, each.shape, each.type) for each in session.get_inputs()] == [
        ("images", ["batch", 1, 8, 8], "tensor(float)")
    ]
    network = network_of(saved)
    for batch in (1, 3, 40):
        images = normalised(grey_digits(batch), saved)
        near(session.run(["logits"], {"images": images.numpy()})[0], answers(network, images))
    said = session.get_modelmeta().custom_metadata_map
    assert saved.metadata.items() <= said.items()
    assert said["weights"] == "ema"
    assert "(value / 255 - mean) / std with mean 0.3" in said["preprocessing"]
    onnx.checker.check_model(str(path), full_check=True)


def test_run_to_program(digits: Path, tmp_path: Path) -> None:
    saved, network = read_weights(digits, "model"), network_of(read_weights(digits, "model"))
    for rounded, tolerance in ((None, 1e-5), ("bf16", 0.05)):
        path = tmp_path / f"{rounded}.pt2"
        done = written(digits, path, "torch-export", weights="model", quantize=rounded)
        assert done.largest_difference == 0
        kept = {"paceline.json": ""}
        program = torch.export.load(path, extra_files=kept).module()
        for batch in (1, 3, 40):
            images = normalised(grey_digits(batch), saved)
            found = answers(program, images)
            assert found.dtype == torch.float32
            torch.testing.assert_close(found, answers(network, images), rtol=0, atol=tolerance)
        said = json.loads(kept["paceline.json"])
        assert saved.metadata.items() <= said.items()
        assert said.get("rounded") == rounded


def test_rounded_to_bf16(digits: Path, tmp_path: Path) -> None:
    saved, images = read_weights(digits), grey_digits(40)
    whole, small, hub = tmp_path / "whole.safetensors", tmp_path / "small.safetensors", tmp_path / "hub"
    written(digits, whole, "safetensors")
    written(digits, small, "safetensors", quantize="bf16")
    written(digits, hub, "timm", quantize="bf16")
    assert small.stat().st_size < 0.6 * whole.stat().st_size
    card = (hub / "README.md").read_text()
    assert "before they were rounded to bf16" in card
    assert [each for each in ("model-index", "summary.json") if each in card] == []
    stored = load_file(small)
    assert stored["fc.weight"].dtype == torch.bfloat16
    assert stored["bn1.running_var"].dtype == torch.float32
    # Read back it is fp32 again, within bf16's 8 bits; nothing else would fit the network.
    state = read_weights(small).state
    assert all(each.dtype == saved.state[key].dtype for key, each in state.items())
    torch.testing.assert_close(state["fc.weight"], saved.state["fc.weight"], rtol=2**-8, atol=0)
    assert "rounded" not in read_weights(small).metadata
    expected = answers(network_of(read_weights(small)), normalised(images, saved))
    near(answers(timms(hub)[0], normalised(images, saved)), expected)


def test_in_whole_numbers(digits: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="needs onnxruntime")
    path, whole = tmp_path / "small.onnx", tmp_path / "whole.onnx"
    done = written(digits, path, "onnx", quantize="int8")
    written(digits, whole, "onnx")
    assert path.stat().st_size < 0.4 * whole.stat().st_size
    assert done.trial is not None
    assert done.trial.images == 359
    assert done.trial.after is not None
    assert done.trial.before == pytest.approx(last_evaluation(digits, "ema")["top1_accuracy"])
    assert abs(done.trial.after - done.trial.before) < 5
    import onnxruntime as ort

    said = ort.InferenceSession(path, providers=["CPUExecutionProvider"]).get_modelmeta().custom_metadata_map
    assert said["rounded"] == "int8"
    assert "recipe" in said
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith(".")] == []


def test_text(tiny_recipe: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="needs onnxruntime")
    (tmp_path / "books").mkdir()
    for number in range(4):
        (tmp_path / "books" / f"{number}.txt").write_text("a book of many words. " * 20)
    overrides = {
        "task": "language_modeling",
        "model": {"name": "gpt", "options": {"depth": 1, "width": 16, "heads": 2}},
        "data": {"dataset": "text_folder", "path": str(tmp_path / "books"), "text": {"context": 16}},
        "train.duration": "2 steps",
    }
    paceline.train(tiny_recipe, overrides=overrides, run_dir=tmp_path / "run", quiet=True)
    assert is_exact(written(tmp_path / "run", tmp_path / "text.onnx", "onnx"))
    with pytest.raises(PacelineError, match="not a timm network"):
        written(tmp_path / "run", tmp_path / "hub", "timm")


CLICKS = {"dense_features": 3, "categories": 4, "max_rows": 30, "evaluation_samples": 70}


def test_clicks(tiny_recipe: Path, tmp_path: Path) -> None:
    overrides = {
        "task": "recommendation",
        "model": {"name": "dlrm", "options": {"embedding": 4, "bottom": [8], "top": [8]}},
        "data": {"dataset": "synthetic_clicks", "samples": 150, "recommendation": CLICKS},
        "train.duration": "2 steps",
    }
    paceline.train(tiny_recipe, overrides=overrides, run_dir=tmp_path / "run", quiet=True)
    pytest.importorskip("onnxruntime", reason="needs onnxruntime")
    assert is_exact(written(tmp_path / "run", tmp_path / "clicks.onnx", "onnx"))


def test_adapters_are_merged(train: Callable[..., Path], digits: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="needs the extra for adapters")
    run = train("adapted", NET | {"model.adapters": {"rank": 2}, "model.initialize_from": str(digits)})
    written(run, tmp_path / "hub", "timm")
    network, images = timms(tmp_path / "hub")[0], grey_digits(20)
    saved = read_weights(run)
    assert any("lora" in key for key in saved.state)
    near(answers(network, normalised(images, saved)), answers(network_of(saved), normalised(images, saved)))
    written(run, tmp_path / "merged.safetensors", "safetensors")
    assert load_file(tmp_path / "merged.safetensors").keys() == network.state_dict().keys()


def left(folder: Path) -> set[str]:
    return {each.name for each in folder.iterdir()}


@pytest.mark.parametrize(
    ("form", "output", "options", "said"),
    [
        ("onnx", "a.pt2", {}, r"must end in \.onnx"),
        ("torch-export", "a.onnx", {}, r"must end in \.pt2"),
        ("timm", "a.onnx", {}, "a folder's name does not end in"),
        ("safetensors", "a.bin", {}, r"must end in \.safetensors"),
        ("safetensors", "mine.safetensors/a.safetensors", {}, "is not a directory"),
        ("safetensors", "mine.safetensors", {}, "already exists and is not overwritten"),
        ("timm", "there", {}, "already exists and is not overwritten"),
        ("timm", "/", {}, "already exists and is not overwritten"),
        ("onnx", "new/a.onnx", {"weights": "other"}, "holds no 'other' weights"),
        ("timm", "hub", {"quantize": "int8"}, "--quantize int8 is for --format onnx"),
        ("onnx", "a.onnx", {"quantize": "bf16"}, "--quantize bf16 is for --format timm, safetensors, torch-export"),
        ("onnx", "a.onnx", {"overrides": ["data.path=x"]}, "overrides have no effect here"),
        ("onnx", "a.onnx", {"quantize": "int8", "overrides": ["train.ema=0.1"]}, "override 'train.ema' has no effect"),
    ],
)
def test_what_is_refused(digits: Path, tmp_path: Path, form: str, output: str, options: Any, said: str) -> None:
    if form == "onnx":
        pytest.importorskip("onnx", reason="needs onnx")
    (tmp_path / "there").mkdir()
    (tmp_path / "mine.safetensors").write_text("mine")
    with pytest.raises(PacelineError, match=said):
        written(digits, tmp_path / output, form, **options)
    assert left(tmp_path) == {"there", "mine.safetensors"}
    assert (tmp_path / "mine.safetensors").read_text() == "mine"


def test_networks_that_timm_lacks(tiny_recipe: Path, train: Callable[..., Path], tmp_path: Path) -> None:
    short = {"train.duration": "1 steps"}
    squeezenet = {"model.name": "torchvision:squeezenet1_1", "model.options": None, "data.image_size": 32}
    torchvisions = train("torchvisions", short | squeezenet)
    for run in (train("ours", short), torchvisions):
        with pytest.raises(PacelineError, match=r"not a timm network.*use --format safetensors, onnx or torch-"):
            written(run, tmp_path / "hub", "timm")
    assert left(tmp_path) == set()
    written(torchvisions, tmp_path / "torchvisions.pt2", "torch-export")


UNEXPORTABLE = """
import torch
from torch import nn

class Undecided(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.classifier = nn.Linear(64, classes)

    def forward(self, x):
        y = self.classifier(x.flatten(1))
        return y if float(y.detach().sum()) > 0 else -y

def undecided(num_classes):
    return Undecided(num_classes)
"""


def test_a_network_that_cannot_be_traced(train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnx", reason="needs onnx")
    (tmp_path / "undecided_network.py").write_text(UNEXPORTABLE)
    monkeypatch.syspath_prepend(tmp_path)
    own = {"model.name": "undecided_network:undecided", "model.options": None, "train.duration": "1 steps"}
    run = train("undecided", own)
    before = left(tmp_path)
    for form, ending, words in (
        ("onnx", ".onnx", "cannot be written as ONNX"),
        ("torch-export", ".pt2", "cannot be traced by torch.export"),
    ):
        with pytest.raises(PacelineError, match="names code to import"):
            written(run, tmp_path / f"a{ending}", form)
        with pytest.raises(PacelineError, match=words):
            written(run, tmp_path / f"a{ending}", form, trust_code=True)
        assert left(tmp_path) - {"__pycache__"} == before - {"__pycache__"}


def test_a_class_of_ours_is_found_where_it_is_today() -> None:
    former = "paceline.tasks.segmentation:Segmentation"
    for task in ("image_classification", former):
        described = {"data": json.dumps({"task": former}), "recipe": json.dumps({"task": task})}
        saved = SavedWeights(state={}, weights="model", path=Path("a"), metadata=described)
        made = trained_task(saved, trust_code=task == former)(trained_recipe(saved))
        assert (type(made).__module__, type(made).__name__) == ("paceline_vision.segmentation.task", "Segmentation")


def test_what_no_format_but_safetensors_holds() -> None:
    for task, said in (
        ("detection", "a detector's export is compared on held-out pictures, which cannot be read"),
        ("image_classification", "what its network's inputs are"),
    ):
        described = {"data": "{}", "recipe": json.dumps({"task": task})}
        saved = SavedWeights(state={}, weights="model", path=Path("a"), metadata=described)
        with pytest.raises(PacelineError, match=said):
            open_exportable(saved, trust_code=False, target="onnx")


def test_a_missing_extra_is_named(digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnx", reason="needs onnx")
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    with pytest.raises(PacelineError, match=r"needs onnxruntime .*pip install 'paceline\[onnx\]'"):
        written(digits, tmp_path / "a.onnx", "onnx")
    assert left(tmp_path) == set()


def test_answers_that_differ_are_not_kept(digits: Path, tmp_path: Path) -> None:
    exportable = open_exportable(read_weights(digits), trust_code=False, target="onnx")
    other = copy.deepcopy(exportable.network)
    with torch.no_grad():
        other.fc.weight[0, 0] += 0.1
    with pytest.raises(PacelineError, match="differs from the network by up to"):
        exportable.compare(other, what="it")
    with pytest.raises(PacelineError, match="or NaN"):
        exportable.compare(lambda *inputs: exportable.network(*inputs) * torch.nan, what="it")


def failing(output: Path, error: BaseException) -> None:
    with put_in_place(output) as path:
        path.mkdir()
        (path / "config.json").write_text("{}")
        raise error


def placed(output: Path, *, is_overtaken: bool = False) -> None:
    with put_in_place(output) as path:
        path.write_text("new")
        if is_overtaken:
            output.write_text("someone else's, meanwhile")


def full_disk(_path: Path, _target: Path) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_two_may_be_written_at_once_to_folders_that_are_not_there(tmp_path: Path) -> None:
    with put_in_place(tmp_path / "a" / "w.bin") as one, put_in_place(tmp_path / "b" / "w.bin") as other:
        one.write_text("one")
        other.write_text("other")
    assert [(tmp_path / name / "w.bin").read_text() for name in "ab"] == ["one", "other"]


def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with raises(PacelineError, path="hub"):
        failing(tmp_path / "hub", OSError(28, "no space left on device"))
    for folder in ("hub", "new/hub"):
        with pytest.raises(KeyboardInterrupt):
            failing(tmp_path / folder, KeyboardInterrupt())
    assert left(tmp_path) == set()
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", full_disk)
        with raises(PacelineError, path="new/deep/mine"):
            placed(tmp_path / "new" / "deep" / "mine")
    assert left(tmp_path) == set(), "nor do the folders that were made for it stay"
    with raises(PacelineError, path="mine"):
        placed(tmp_path / "mine", is_overtaken=True)
    assert (tmp_path / "mine").read_text() == "someone else's, meanwhile"
    assert left(tmp_path) == {"mine"}
