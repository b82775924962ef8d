"""Are the answers the same, in the same order, however they are read, and does memory stay as it is?"""

from __future__ import annotations

import io
import itertools
import json
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from golden_sentences import raises
from PIL import Image

import paceline
from paceline.checkpoint.weights import read_weights
from paceline.cli.main import run as command
from paceline.errors import CheckpointError, DataError
from paceline.host.machine import available_cores
from paceline.inference.predict import load_predictor, open_predictor
from paceline.prediction.answer_files import answer_file
from paceline.prediction.predictor import Answer, predict_ahead
from paceline.prediction.sources import PictureFile
from paceline.tasks.labelling import ImageLabeller
from paceline_vision.detection.predictor import Detections

CPU = torch.device("cpu")
NOISE = {"dataset": "synthetic", "image_size": 16, "channels": 3, "classes": 7}


@pytest.fixture(scope="module")
def trained(tiny_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a tiny network on noise; to be read only."""
    asked = {"data": NOISE, "train.duration": "2 steps", "evaluate.every": "off"}
    return paceline.train(tiny_recipe, overrides=asked, run_dir=tmp_path_factory.mktemp("run"), quiet=True).run_dir


def by_class(answer: Any) -> dict[str, float]:
    return dict(zip(answer.labels, answer.probabilities, strict=True))


def png() -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (16, 16)).save(content, "PNG")
    return content.getvalue()


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """150 JPEG files of several sizes, two of them broken."""
    folder = tmp_path_factory.mktemp("pictures")
    draws = np.random.default_rng(0)
    for number in range(150):
        pixels = draws.integers(0, 256, (*draws.integers(8, 40, 2), 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:03}.jpg")
    (folder / "010.jpg").write_bytes(b"no image")
    (folder / "099.jpg").write_bytes((folder / "098.jpg").read_bytes()[:60])
    return folder


def one_after_the_other(predictor: ImageLabeller, paths: list[Path]) -> Iterator[tuple[Any, ...]]:
    """As it was before anything was read ahead: of 64 files in a row those that can be read, in one batch."""
    from paceline.data.image.decode import BrokenImageError

    for part in (paths[start : start + 64] for start in range(0, len(paths), 64)):
        images: dict[Path, torch.Tensor] = {}
        for path in part:
            try:
                images[path] = predictor.prepare(path.read_bytes())
            except BrokenImageError:
                continue
        values, labels = predictor.probabilities(torch.stack(list(images.values()))).topk(3, dim=1)
        told = dict(zip(images, zip(values.tolist(), labels.tolist(), strict=True), strict=True))
        for path in part:
            sure, best = told.get(path, ((), ()))
            yield path, tuple(predictor.classes[label] for label in best), tuple(sure)


@torch.inference_mode()
def test_the_same_bits_in_the_same_order(trained: Path, pictures: Path) -> None:
    predictor = load_predictor(trained)
    paths = sorted(pictures.iterdir())
    found = [(each.path, each.labels, each.probabilities) for each in predictor.predict(paths, top_k=3)]
    assert found == list(one_after_the_other(predictor, paths))
    assert [path.name for path, labels, _ in found if not labels] == ["010.jpg", "099.jpg"]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_other_batches_say_the_same(trained: Path, pictures: Path, size: int) -> None:
    predictor = load_predictor(trained)
    paths = sorted(pictures.iterdir())
    usual, other = (list(predictor.predict(paths, top_k=7, batch_size=each)) for each in (64, size))
    assert [each.path for each in usual] == [each.path for each in other] == paths
    for one, two in zip(usual, other, strict=True):
        assert by_class(one) == pytest.approx(by_class(two), abs=1e-5)


class Counting:
    """Endless pictures, of which it is known how many were asked for, and how many were in memory at most."""

    def __init__(self, content: bytes) -> None:
        self.asked = self.most_held = 0
        self._content = content
        self._held = weakref.WeakSet[Callable[[], bytes]]()

    def __iter__(self) -> Iterator[PictureFile]:
        while True:
            self.asked += 1
            self._held.add(read := lambda: self._content)
            self.most_held = max(self.most_held, len(self._held))
            yield PictureFile(Path(str(self.asked)), read)


def test_no_more_is_read_ahead_than_two_batches(trained: Path) -> None:
    counting = Counting(png())
    answers = predict_ahead(load_predictor(trained), counting, top_k=1, batch_size=8)
    for number in range(1, 201):
        assert next(answers).path == Path(str(number))
        assert counting.asked - number <= 16 + 64  # two batches, and a picture for each thread
    assert counting.most_held <= 5 * available_cores() + 2
    before = threading.active_count()
    answers.close()
    assert threading.active_count() < before


def test_detectors_look_at_pictures_one_by_one(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    predictor, batches = load_predictor(trained), []
    real = predictor.answer

    def answer(prepared: Any, top_k: int) -> Any:
        batches.append(len(prepared))
        return real(prepared, top_k)

    monkeypatch.setattr(predictor, "largest_batch", 1, raising=False)
    monkeypatch.setattr(predictor, "answer", answer, raising=False)
    list(itertools.islice(predict_ahead(predictor, Counting(png()), top_k=1), 5))
    assert set(batches) == {1}


# --------------------------------------------------------------------------------------------------------- files


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def predicted(trained: Path, *more: object) -> int:
    return command(["predict", str(trained), *map(str, more)])


def test_sources_are_looked_for_before_weights(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert predicted(here / "no-run", "*.png", "-", "gone.png") == 2
    assert "'gone.png' does not exist; give image files" in capsys.readouterr().err


def test_json_lines(trained: Path, pictures: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert predicted(trained, pictures, "--json") == 1
    rows = json.loads(capsys.readouterr().out)
    assert predicted(trained, pictures, "--output", "answers.jsonl") == 1
    told = capsys.readouterr().out.splitlines()
    assert [json.loads(line) for line in Path("answers.jsonl").read_text().splitlines()] == rows
    assert [line.partition("  ")[0] for line in told[:-1]] == [f"{pictures}/010.jpg", f"{pictures}/099.jpg"]
    assert told[-1] == "150 images, 2 of them unreadable: answers.jsonl"
    assert [each.name for each in here.iterdir()] == ["answers.jsonl"]


def test_csv(trained: Path, pictures: Path, here: Path) -> None:
    import csv

    assert predicted(trained, pictures, "--output", "a.csv", "--top-k", 2) == 1
    with open("a.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 148 * 2 + 2
    assert list(rows[0]) == ["path", "rank", "label", "probability", "error"]
    assert [(row["path"], row["rank"]) for row in rows[:2]] == [(f"{pictures}/000.jpg", rank) for rank in "12"]
    assert float(rows[0]["probability"]) >= float(rows[1]["probability"])
    assert [Path(row["path"]).name for row in rows if row["error"]] == ["010.jpg", "099.jpg"]


def test_parquet(trained: Path, pictures: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    assert predicted(trained, pictures, "--json") == 1
    expected = json.loads(capsys.readouterr().out)
    assert predicted(trained, pictures, "--output", "a.parquet") == 1
    assert parquet.read_table("a.parquet").to_pylist() == expected


LABELS: Any = SimpleNamespace(classes=("x", "y"), number_names=(), kind=Answer)
BOXES: Any = SimpleNamespace(classes=("x", "y"), number_names=(), kind=Detections)


def test_a_file_is_whole_or_not_there(here: Path) -> None:
    rows = [{"path": Path("a.png"), "labels": ("x",), "probabilities": (1.0,), "error": None}]

    def interrupted() -> None:
        with answer_file(Path("a.jsonl"), LABELS) as file:
            file.write(rows)
            assert not Path("a.jsonl").exists()
            # What a kill would leave.
            assert len(Path("a.jsonl.partial").read_text().splitlines()) == 1
            with raises(DataError, path="a.jsonl"), answer_file(Path("a.jsonl"), LABELS):
                pass
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [each.name for each in here.iterdir()] == ["a.jsonl.partial"]
    with answer_file(Path("a.jsonl"), LABELS) as file:
        file.write(rows)
    assert [each.name for each in here.iterdir()] == ["a.jsonl"]
    with raises(DataError, path="a.jsonl"), answer_file(Path("a.jsonl"), LABELS):
        pass


def test_boxes_in_csv(here: Path) -> None:
    found = {"labels": ("x", "y"), "probabilities": (1.0, 0.5), "boxes": ((1, 2, 3, 4),) * 2}
    rows = [{"path": Path("a"), "error": None, **found}]
    rows += [{"path": Path("b"), "error": None, **dict.fromkeys(found, ())}]
    with answer_file(Path("a.csv"), BOXES) as file:
        file.write(rows)
    assert Path("a.csv").read_text().splitlines() == [
        "path,rank,label,probability,left,top,right,bottom,error",
        "a,1,x,1.0,1,2,3,4,",
        "a,2,y,0.5,1,2,3,4,",
        "b,,,,,,,,",
    ]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--output", "a.txt"), "must end in .jsonl, .csv or .parquet"),
        (("--output", "nowhere/a.csv"), "there is no directory 'nowhere'; create it"),
        (("--stdin-image",), "--stdin-image is for the source - alone"),
        (("--draw", "found"), "these weights predict neither"),
    ],
)
def test_what_has_no_effect_is_refused(
    trained: Path, pictures: Path, here: Path, capsys: Any, more: Any, words: str
) -> None:
    assert predicted(trained, pictures, *more) == 2
    assert words in capsys.readouterr().err
    assert not list(here.iterdir())


# ---------------------------------------------------------------------------------------------------------- ONNX


@pytest.fixture(scope="module")
def onnx_file(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``onnx_file(**metadata)`` writes the network of the run with these metadata besides its own."""
    for library in ("onnx", "onnxruntime", "onnxscript"):
        pytest.importorskip(library, reason=f"needs {library}")
    import onnx

    folder = tmp_path_factory.mktemp("onnx")
    predictor, batch = load_predictor(trained), torch.export.Dim("batch")
    names: dict[str, Any] = {"input_names": ["images"], "output_names": ["logits"], "dynamic_shapes": ({0: batch},)}
    shown = (torch.zeros(2, 3, 16, 16),)
    torch.onnx.export(predictor.network, shown, folder / "plain.onnx", **names, dynamo=True, verbose=False)
    numbers = itertools.count()

    def write(**metadata: str) -> Path:
        model = onnx.load(folder / "plain.onnx")
        onnx.helper.set_model_props(model, {**read_weights(trained).metadata, **metadata})
        path = folder / f"{next(numbers)}.onnx"
        onnx.save(model, path)
        return path

    return write


def test_onnx_runtime_says_the_same(trained: Path, pictures: Path, onnx_file: Callable[..., Path]) -> None:
    paths = sorted(pictures.iterdir())
    ours, other = (
        list(predict_ahead(open_predictor(each, device=CPU), map(PictureFile.at, paths), top_k=7))
        for each in (trained, onnx_file())
    )
    for one, two in zip(ours, other, strict=True):
        assert (one.path, one.error) == (two.path, two.error)
        assert by_class(one) == pytest.approx(by_class(two), abs=1e-5)


def test_several_views_of_an_image(trained: Path, pictures: Path, onnx_file: Callable[..., Path]) -> None:
    recipe = json.loads(read_weights(trained).metadata["recipe"])
    flipped, crops = (json.dumps({**recipe, "evaluate": {"augment": kind}}) for kind in ("flip", "five_crop"))
    picture = pictures / "000.jpg"
    one, two = (
        next(predict_ahead(open_predictor(each, device=CPU), [PictureFile.at(picture)], top_k=7))
        for each in (onnx_file(), onnx_file(recipe=flipped))
    )
    predictor = load_predictor(trained)
    image = predictor.prepare(picture.read_bytes())
    with torch.inference_mode():
        views = predictor.probabilities(torch.stack([image, image.flip(2)])).mean(dim=0).tolist()
    assert by_class(two) == pytest.approx(dict(zip(predictor.classes, views, strict=True)), abs=1e-5)
    assert one.probabilities != pytest.approx(two.probabilities, abs=1e-5)
    with pytest.raises(CheckpointError, match="five_crop"):
        open_predictor(onnx_file(recipe=crops), device=CPU)


def test_onnx_files_that_are_none_or_not_ours(onnx_file: Callable[..., Path], here: Path) -> None:
    Path("x.onnx").write_bytes(b"nonsense")
    for path, words in (
        (Path("x.onnx"), "cannot be opened by ONNX Runtime"),
        (Path("y.onnx"), "does not exist"),
        (onnx_file(data=""), "'data'"),
        (onnx_file(data='{"tokenizer": {}}'), "is not an image classifier"),
        (onnx_file(data="[]"), "'data'"),
    ):
        with pytest.raises((CheckpointError, DataError), match=words):
            open_predictor(path, device=CPU)
    with pytest.raises(CheckpointError, match="--best have no effect"):
        open_predictor(Path("x.onnx"), best=True, device=CPU)


# --------------------------------------------------------------------------------------------------- hub folders


def test_a_folder_of_timms_own(here: Path, pictures: Path) -> None:
    """Answered as timm's own transform and network answer."""
    import timm

    made = timm.create_model("test_resnet", num_classes=3)
    timm.models.save_for_hf(made, "hub", safe_serialization=True, model_config={"label_names": ["x", "y", "z"]})
    made.eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(made), is_training=False)
    path = pictures / "000.jpg"
    with torch.inference_mode():
        expected = made(transform(Image.open(path))[None]).softmax(dim=1)[0].tolist()
    (found,) = open_predictor(Path("hub"), device=CPU).predict([path], top_k=3)
    assert by_class(found) == pytest.approx(dict(zip("xyz", expected, strict=True)), abs=0.01)
