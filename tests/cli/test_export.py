"""`paceline export` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from calls import Call
from hub_server import HubServer

from paceline.models.build import build_model
from paceline.recipe.model import ModelSection


def test_what_is_written_is_said(paceline_here: Call, finished: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="needs onnxruntime")
    done = paceline_here("export", finished, "--format", "onnx", "--output", "a.onnx").ended(0)
    lines = done.out.splitlines()
    assert lines[0].startswith("a.onnx: ")
    assert "of the ema weights" in lines[0]
    assert lines[1].startswith("  ONNX Runtime matches the network: largest difference ")
    paceline_here("export", finished, "--format", "onnx", "--output", "a.onnx").refused(
        "already exists and is not overwritten"
    )
    for words, message in {
        ("nowhere", "--output", "new/weights.onnx"): "there is no run directory 'nowhere'",
        (finished, "--format", "timm", "--output", "new/hub"): "use --format safetensors, onnx or torch-export",
    }.items():
        paceline_here("export", *words).refused(message)
    assert [each.name for each in tmp_path.iterdir()] == ["a.onnx"]
    message = paceline_here(
        "export", finished, "--quantize", "bf16", "--output", "new/b.safetensors", "--json"
    ).document
    assert message["bytes"] == (tmp_path / "new" / "b.safetensors").stat().st_size
    assert message["format"] == "safetensors"


def test_the_digest_is_that_of_the_weights_alone(paceline_here: Call, tmp_path: Path, tiny: tuple[str, ...]) -> None:
    """Whatever the history of a run, of which the file's header tells."""
    train = ("train", "digits", *tiny, "train.duration=4 steps", "--run-dir")
    paceline_here(*train, "whole").ended(0)
    paceline_here(*train, "parts", "--until", "2 steps").ended(75)
    paceline_here(*train, "parts").ended(0)
    digests = []
    for run in ("whole", "parts"):
        document = paceline_here("export", run, "--output", f"{run}.safetensors", "--json").ended(0).document
        summary = json.loads((tmp_path / run / "summary.json").read_text())
        assert document["weights_sha256"] == summary[f"{document['weights'].replace('model', 'weights')}_sha256"]
        digests.append(document["weights_sha256"])
    assert digests[0] == digests[1]


@pytest.fixture
def of_timm(tmp_path: Path, paceline_here: Call, tiny: tuple[str, ...]) -> Path:
    """A run of one of timm's networks."""
    paceline_here("train", "digits", *tiny, "model.name=test_resnet", "model.options=null", "--run-dir", "run").ended(0)
    return tmp_path / "run"


def test_an_export_is_listed_and_then_pushed(
    hub: HubServer, of_timm: Path, paceline_here: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested = ("export", of_timm, "--format", "timm", "--push", "me/digits")
    paceline_here(*requested, "--yes").refused("in the environment variable HF_TOKEN")
    monkeypatch.setenv("HF_TOKEN", "hf_planted-token")
    done = paceline_here(*requested).ended(0)
    names = ["README.md", "config.json", "model.safetensors"]
    assert [line.split(": ")[0] for line in done.out.splitlines()[:3]] == names
    assert "Nothing was uploaded: add --yes" in done.out
    assert not hub.requests
    message = paceline_here(*requested, "--yes", "--json").document
    assert message["uploaded"]
    sent = hub.files["models/me/digits"]
    assert message["files"] == {name: len(content) for name, content in sent.items()}
    assert hub.private == {"me/digits": True}
    assert hub.tokens == {"Bearer hf_planted-token"}
    network = build_model(ModelSection(name="hf-hub:me/digits", pretrained=True), num_classes=10, in_channels=1)
    assert type(network).__name__ == "ResNet"
    again = paceline_here("export", "hf://me/digits", "--format", "timm", "--output", "again").ended(0)
    assert "timm matches the network" in again.out
    hub.close()
    failed = paceline_here(*requested, "--yes").refused("cannot upload to me/digits")
    assert "hf_planted-token" not in failed.err


def test_where_an_export_goes(finished: Path, paceline_here: Call) -> None:
    assert paceline_here("export", finished).ended(0).out.startswith("run.safetensors: ")
    for words in (("--yes",), ("--push", "a/b")):
        assert paceline_here("export", finished, "--output", "a.safetensors", *words).code == 2
