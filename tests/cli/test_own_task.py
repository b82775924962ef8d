"""A task that another package adds in one folder trains, predicts, draws, exports and reports."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from calls import Call
from PIL import Image

from paceline.plugins.installed_packages import entry_points

PACKAGES = Path(__file__).parents[1] / "packages"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The package `keypoints`, as pip would install it."""
    metadata = tmp_path / "site" / "keypoints-1.0.dist-info"
    metadata.mkdir(parents=True)
    (tmp_path / "site" / "keypoints").symlink_to(PACKAGES / "keypoints")
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: keypoints\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[paceline.tasks]\nkeypoints = keypoints:Keypoints\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.chdir(tmp_path)
    entry_points.cache_clear()
    yield tmp_path
    entry_points.cache_clear()
    for name in [each for each in sys.modules if each.split(".")[0] == "keypoints"]:
        del sys.modules[name]


def picture_of(x: int, y: int) -> Image.Image:
    places = np.arange(16) + 0.5
    across, down = (np.exp(-((places - at) ** 2) / (0.005 * 256)) for at in (x, y))
    return Image.fromarray((255 * down[:, None] * across[None]).astype(np.uint8))


def test_every_command_knows_it(installed: Path, paceline_here: Call, tiny: tuple[str, ...]) -> None:
    asked = ("task=keypoints", "optimizer.lr=0.05", "optimizer.name=adam", "train.duration=60 steps")
    plain = ("batch.global_size=16", "schedule.name=constant", "telemetry.trackers=[]")
    paceline_here("train", "digits", *asked, *plain, "--run-dir", "run").ended(0)
    scored = paceline_here("evaluate", "run", "--predictions", "points.jsonl", "--json").ended(0).document
    assert scored["samples"] == 16
    assert scored["distance"] < 2
    assert len(Path("points.jsonl").read_text().splitlines()) == 16

    Path("new").mkdir()
    picture_of(4, 11).save("new/spot.png")
    Image.new("L", (9, 9)).save("new/small.png")
    told = paceline_here("predict", "run", "new", "--draw", "drawn", "--json").ended(1)
    found = told.document
    assert found[0] == {"path": "new/small.png", "x": 0.0, "y": 0.0, "error": "it must have 16x16 pixels"}
    assert (found[1]["x"], found[1]["y"]) == pytest.approx((4, 11), abs=2)
    assert Image.open("drawn/spot.png").convert("RGB").getextrema()[0][1] == 255

    paceline_here("predict", "run", "new", "--output", "points.csv").ended(1)
    header, small, _ = Path("points.csv").read_text().splitlines()
    assert (header, small) == ("path,x,y,error", "new/small.png,,,it must have 16x16 pixels")

    exported = paceline_here("export", "run", "--format", "torch-export", "--output", "points.pt2").ended(0)
    assert "matches the network" in exported.out
    program = torch.export.load("points.pt2").module()
    pixels = torch.from_numpy(np.array(picture_of(4, 11))) / 255
    assert program(pixels.float()[None, None])[0].tolist() == pytest.approx(
        [found[1]["x"] / 16, found[1]["y"] / 16], abs=1e-4
    )

    page = Path("run/report.html").read_text()
    assert "distance" in page
    assert page.count("data:image/png") > 4
    assert paceline_here("estimate", "digits", *asked, *plain, "--device", "cpu", "--json").ended(0).document
    assert "keypoints" in paceline_here("explain", "task").ended(0).out


def test_what_it_does_not_offer_is_said(installed: Path, paceline_here: Call, tiny: tuple[str, ...]) -> None:
    short = ("task=keypoints", "train.duration=2 steps", "batch.global_size=16", "telemetry.trackers=[]")
    paceline_here("train", "digits", *short, "--run-dir", "run").ended(0)
    paceline_here("predict", "run", "--prompt", "where?").refused("take no prompt")
    for split in ((), ("--on", "validation")):
        paceline_here("evaluate", "run", "--sizes", "8,16", *split).refused("prepares its own samples")
    paceline_here("evaluate", "run", "--on", "holdout").refused("holds no training samples out")
    paceline_here("train", "digits", "task=keypoint", "--plan-only").refused("mean 'keypoints'")
    paceline_here("train", "digits", *short, "data.image_size=8", "--plan-only").refused("pictures of spots are drawn")
