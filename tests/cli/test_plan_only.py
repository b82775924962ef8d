"""What a run would refuse, its plan refuses too."""

from __future__ import annotations

import shutil
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from calls import Call


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["model.initialize_from=nosuch.safetensors"], "nosuch.safetensors"),
        (["model.initialize_from=w.pth"], "w.pth"),
        (["model.initialize_from=trained.safetensors", "data.only_classes=[1, 2, 3]"], "classifier"),
        (["model.initialize_from=trained.safetensors", "model.options.width=8"], "stem"),
        (["model.initialize_from=."], "."),
        (["task=distillation", "distillation.teacher=nosuch"], "nosuch"),
    ],
)
def test_weights_are_looked_at(
    overrides: list[str], named: str, finished: Path, tmp_path: Path, paceline_here: Call, tiny: tuple[str, ...]
) -> None:
    shutil.copy(next(finished.glob("checkpoints/step-*/model.safetensors")), tmp_path / "trained.safetensors")
    (tmp_path / "w.pth").write_bytes(b"PK\3\4")
    planned = paceline_here("train", "digits", *tiny, *overrides, "--plan-only").refused(named)
    ran = paceline_here("train", "digits", *tiny, *overrides, "--run-dir", "run")
    assert ran.err.splitlines()[-1] == planned.err.splitlines()[-1]


def test_weights_that_fit_are_accepted_and_a_run_that_goes_on_needs_none(
    finished: Path, tmp_path: Path, paceline_here: Call, tiny: tuple[str, ...]
) -> None:
    fits = f"model.initialize_from={finished}"
    assert paceline_here("train", "digits", *tiny, fits, "--plan-only").code == 0
    gone = "model.initialize_from=gone.safetensors"
    shutil.copytree(finished, tmp_path / "run")
    assert paceline_here("train", "digits", *tiny, gone, "--plan-only", "--run-dir", "run").code == 0


def test_without_checkpoints_one_is_saved_at_the_end_and_said(
    tmp_path: Path, paceline_here: Call, tiny: tuple[str, ...]
) -> None:
    requested = ("train", "digits", *tiny, "checkpoint.every=off", "checkpoint.keep_best=false")
    assert (
        "off: only at the end, on a stop request and for the best"
        in paceline_here(*requested, "--plan-only").ended(0).out
    )
    done = paceline_here(*requested, "--run-dir", "run").ended(0)
    [saved] = (tmp_path / "run" / "checkpoints").glob("step-*")
    assert f"of step {int(saved.name[5:])}, saved as the run ended (checkpoint.every=off)" in done.out


def test_a_back_end_that_is_not_here_is_refused(paceline_here: Call, tiny: tuple[str, ...]) -> None:
    requested = ("train", "digits", *tiny, "parallel.device=cpu", "parallel.backend=nccl")
    message = "has gloo for cpu; use one of them, or parallel.backend=auto"
    paceline_here(*requested, "--processes", "2", "--plan-only").refused(message)
    paceline_here(*requested, "--run-dir", "run").refused(message)


@pytest.mark.parametrize(
    ("recipe", "network"),
    [
        ("digits", "resnet18"),
        pytest.param("shapes-maskrcnn", "maskrcnn_resnet50_fpn", marks=pytest.mark.thorough),
        ("shapes-segmentation", "lraspp_mobilenet_v3_large"),
    ],
)
def test_weights_of_torchvision_are_looked_for_without_a_download(
    recipe: str, network: str, paceline_here: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def opened(request: Any, **_: Any) -> Any:
        asked.append((request.method, request.full_url.rpartition("/")[2]))
        return BytesIO()

    def downloaded(url: str, *_: Any, **__: Any) -> Any:
        raise OSError(f"downloads {url}")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr("paceline.models.build.urlopen", opened)
    monkeypatch.setattr("torch.hub.download_url_to_file", downloaded)
    name = ("model=null", f"model.name=torchvision:{network}", "model.pretrained=true", "parallel.device=cpu")
    more = ["data.channels=3", "data.image_size=96"] * (recipe == "digits")
    paceline_here("train", recipe, *name, *more, "--plan-only").ended(0)
    [(method, file)] = asked
    assert method == "HEAD"
    assert f"{file}); set model.pretrained=false" in paceline_here("train", recipe, *name, *more).ended(2).err
    # A file that is here is loaded by the plan too.
    (tmp_path / "hub" / "checkpoints" / file).write_bytes(b"damaged")
    assert "published weights" in paceline_here("train", recipe, *name, *more, "--plan-only").ended(2).err


def test_a_network_whose_head_cannot_be_replaced_is_refused_by_the_plan(
    paceline_here: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.models.build.urlopen", lambda *_, **__: BytesIO())
    name = ("model=null", "model.name=torchvision:squeezenet1_1", "model.pretrained=true", "data.image_size=96")
    paceline_here("train", "digits", *name, "data.channels=3", "--plan-only").refused("has no linear classifier")


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["model=null", "model.name=resnet18", "model.pretrained=true"], "published weights of resnet18"),
        (["telemetry.trackers=[wandb]"], "wandb"),
        (["checkpoint.mirror=s3://nosuch/run"], "s3"),
        (["model.initialize_from=s3://nosuch/model.safetensors"], "s3"),
        (
            ["model=null", "model.name=resnet18", "data.image_size=8", "batch.global_size=1"],
            "micro-batch of one sample",
        ),
    ],
)
def test_so_does_what_is_not_within_reach(
    overrides: list[str], named: str, paceline_here: Call, tiny: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setitem(sys.modules, "wandb", None)
    planned = paceline_here("train", "digits", *tiny, *overrides, "--plan-only").refused(named)
    ran = paceline_here("train", "digits", *tiny, *overrides, "--run-dir", "run")
    assert (ran.code, ran.err.splitlines()[-1]) == (planned.code, planned.err.splitlines()[-1])
