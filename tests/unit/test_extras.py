"""The table of extras is what pyproject.toml says, and what is not there is one sentence that names its extra."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from paceline.plugins.extras import EXTRAS, Library, extra_of, missing_library

ROOT = Path(__file__).parents[2]
VISION = {"plotly", "scipy", "sklearn", "tensorboard", "timm", "torchvision"}
FOR_DEVELOPERS = {"all", "dev", "ci"}  # and what unites others
# Runs commands in a process in which nothing of the libraries named can be found.
WITHOUT = """
import contextlib, importlib.machinery, io, json, sys

class Without(importlib.machinery.PathFinder):
    barred = tuple(json.loads(sys.argv[1]))

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if any(fullname == name or fullname.startswith(name + ".") for name in cls.barred):
            return None
        return super().find_spec(fullname, path, target)

sys.meta_path[:] = [Without if finder is importlib.machinery.PathFinder else finder for finder in sys.meta_path]

from paceline.cli.main import run

for arguments in json.loads(sys.stdin.read()):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(arguments)
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""
TINY = ("train.duration=1 steps", "model.options={width: 4, stages: 1}", "telemetry={trackers: [], report: off}")
TINY += ("parallel={device: cpu, threads: 1}",)
# What needs each library; the others are told of by `paceline env` alone: without simplejpeg Pillow decodes,
# fp8 asks for a GPU first, and no command of ours builds the pages.
NEEDS = {
    "tune": ["tune", "digits", "--search", "search.yaml"],
    "pack": ["pack", "photos", "packed"],
    "dali": ["train", "image_folder", "data.path=photos", "data.backend=dali", "--plan-only"],
    "adapters": ["train", "digits", "--run-dir", "adapted", "model.adapters.rank=2", *TINY],
    "transformers": ["train", "gpt-small-docs", "model.name=transformers:gpt2", "model.options=null", "--plan-only"],
    "detection": ["train", "shapes-maskrcnn", "data.dataset=coco", "data.path=objects", "--plan-only"],
    "mlflow": ["train", "digits", "--run-dir", "told", *TINY, "telemetry.trackers=[mlflow]"],
    "onnx": ["export", "run", "--format", "onnx", "--output", "digits.onnx"],
    "serve": ["serve", "run", "--port", "0"],
    "s3": ["train", "image_folder", "data.path=s3://bucket/photos", "--plan-only"],
    "http": ["train", "image_folder", "data.path=https://127.0.0.1/photos", "--plan-only"],
    "gcs": ["train", "image_folder", "data.path=gs://bucket/photos", "--plan-only"],
    "azure": ["train", "image_folder", "data.path=az://container/photos", "--plan-only"],
    "wandb": ["train", "digits", "--run-dir", "told", *TINY, "telemetry.trackers=[wandb]"],
}


def declared() -> dict[str, list[str]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    return extras


def flat(name: str) -> set[tuple[str, str]]:
    """What an extra installs, as (distribution, its least version), extras of our own followed."""
    found = set()
    for requirement in declared()[name]:
        match = re.match(r"([\w-]+)(?:\[([\w,]+)\])?(?:>=([\d.]+))?", requirement)
        assert match is not None
        if match[1] == "paceline":
            found |= {each for inner in match[2].split(",") for each in flat(inner)}
        else:
            found.add((match[1], match[3] or ""))
    return found


def test_the_table_is_what_the_project_says() -> None:
    assert {extra.name for extra in EXTRAS} == set(declared()) - FOR_DEVELOPERS
    for extra in EXTRAS:
        assert {(each.distribution, each.min_version) for each in extra.libraries} == flat(extra.name), extra.name


def test_what_version_a_library_has_and_why_it_cannot_be_used() -> None:
    assert Library("numpy", "numpy", "1").version == np.__version__
    assert Library("no-such-thing", "numpy", instead="numpy").version == np.__version__
    assert Library("numpy", "numpy", "1").unavailable_reason == ""
    assert Library("no-such-thing", "no_such_thing").unavailable_reason == "no-such-thing is not installed"
    assert Library("numpy", "no_such.thing").unavailable_reason == "numpy is not installed"
    assert Library("numpy", "numpy", "1000.1").unavailable_reason == f"numpy {np.__version__} is older than 1000.1"


def test_imports_that_fail_lead_to_their_extra() -> None:
    mistake = ModuleNotFoundError("No module named 'pyarrow.parquet'", name="pyarrow.parquet")
    assert missing_library(mistake).endswith("install it with: pip install 'paceline[pack]'")
    assert missing_library(ModuleNotFoundError("No module named 'my_code'", name="my_code")) == ""
    assert missing_library(ValueError("wrong")) == ""
    assert extra_of("nvidia") is None
    assert extra_of("nvidia.dali.fn") is not None


def without(modules: Iterable[str], commands: dict[str, list[str]], folder: Path) -> dict[str, tuple[int, str, str]]:
    """The exit code, output and errors of each command where these modules cannot be found."""
    words, requested = [sys.executable, "-c", WITHOUT, json.dumps([*modules])], json.dumps([*commands.values()])
    own = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        words, input=requested, cwd=folder, env=own, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(commands, [json.loads(line) for line in done.stdout.splitlines()], strict=True))


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, str]]:
    """What each command says where no extra but vision is installed, and `environment` with it."""
    folder = tmp_path_factory.mktemp("bare")
    write_photos(folder / "photos")
    write_objects(folder / "objects")
    modules = sorted({library.module for extra in EXTRAS for library in extra.libraries} - VISION)
    commands = {
        "a run": ["train", "digits", "--run-dir", "run", *TINY],
        **NEEDS,
        "environment": ["environment", "--json"],
        "for people": ["environment"],
    }
    return without(modules, commands, folder)


def write_photos(folder: Path) -> None:
    for label in ("cat", "dog"):
        (folder / label).mkdir(parents=True)
        for number in range(4):
            Image.new("RGB", (16, 16), (number, 20, 30)).save(folder / label / f"{number}.png")


def write_objects(folder: Path) -> None:
    """Two pictures in COCO's layout, each with one object whose mask is drawn."""
    for split in ("train2017", "val2017"):
        (folder / split).mkdir(parents=True)
        Image.new("RGB", (32, 32)).save(folder / split / "1.jpg")
        drawn = {"bbox": [4, 4, 16, 16], "area": 128, "iscrowd": 0, "segmentation": [[4, 4, 20, 4, 20, 20]]}
        content = {
            "images": [{"id": 1, "file_name": "1.jpg", "height": 32, "width": 32}],
            "categories": [{"id": 1, "name": "thing"}],
            "annotations": [{"id": 1, "image_id": 1, "category_id": 1, **drawn}],
        }
        (folder / "annotations").mkdir(exist_ok=True)
        (folder / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))


@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDS)
def test_what_is_not_there_is_one_sentence_that_names_its_extra(name: str, bare: dict[str, Any]) -> None:
    code, _, err = bare[name]
    assert code == 2, err
    assert f"pip install 'paceline[{name}]'" in err
    assert len(err.strip().splitlines()) == 1
    assert "Traceback" not in err


@pytest.mark.slow
def test_environment_says_of_every_extra_why_it_is_not_there(bare: dict[str, Any]) -> None:
    code, out, _ = bare["environment"]
    assert code == 0
    extras = json.loads(out)["extras"]
    assert list(extras) == [extra.name for extra in EXTRAS]
    assert extras["vision"]["available"] is True
    for extra in EXTRAS:
        if extra.name == "vision":
            continue
        missing = [each for each in extra.libraries if each.module not in VISION]
        assert extras[extra.name]["available"] is False
        assert extras[extra.name]["install"] == f"pip install 'paceline[{extra.name}]'"
        assert all(library.distribution in extras[extra.name]["why_not"] for library in missing)
        assert f"{extras[extra.name]['why_not']}; {extra.install}" in bare["for people"][1]


@pytest.mark.slow
def test_the_core_alone_trains_and_names_what_it_lacks(tmp_path: Path) -> None:
    modules = sorted({library.module for extra in EXTRAS for library in extra.libraries})
    tiny = ("train.duration=1 steps", "batch.global_size=4", "parallel={device: cpu, threads: 1}")
    commands = {
        "masks": ["train", "shapes-segmentation", "--run-dir", "masks", *tiny],
        "weights": ["export", "masks", "--format", "safetensors", "--output", "weights.safetensors"],
        "digits": ["train", "digits", "--run-dir", "digits", *TINY],
        "names": ["train", "synthetic", "--run-dir", "named", *TINY[:1]],
        "optimizer": ["train", "docs-topics", "--run-dir", "topics", *tiny[:1]],
    }
    told = without(modules, commands, tmp_path)
    assert told["masks"][0] == told["weights"][0] == 0, told
    for name in ("digits", "names", "optimizer"):
        code, _, err = told[name]
        assert code == 2, err
        assert "pip install 'paceline[vision]'" in err
        assert len(err.strip().splitlines()) == 1
