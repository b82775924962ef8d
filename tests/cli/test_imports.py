"""`paceline import timm` and `import nvidia`: what they write is trained, and what they refuse is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from calls import Call
from click.testing import CliRunner

from paceline.cli.commands import command_of
from paceline.cli.main import run
from paceline.recipe.load import load_recipe

A3 = (
    "./distributed_train.sh 4 /imagenet -b 512 --model resnet50 --img-size 160 --epochs 100 --opt lamb --lr 8e-3 "
    "--sched cosine --weight-decay 0.02 --warmup-epochs 5 --smoothing 0.0 --bce-loss --bce-target-thresh 0.2 "
    "--aa rand-m6-mstd0.5-inc1 --mixup 0.1 --cutmix 1.0 --amp"
)


def test_a_command_line_becomes_a_file_and_an_account(tmp_path: Path) -> None:
    output = tmp_path / "recipe.yaml"
    done = CliRunner().invoke(command_of("import"), ["timm", "--output", str(output), "--", *A3.split()])
    assert done.exit_code == 0, done.output
    assert "Mapped: 17" in done.stdout
    assert "--opt lamb" in done.stdout
    assert "Not identical:" in done.stdout
    recipe = load_recipe(output).recipe
    # timm's own settings for this network.
    assert (recipe.data.evaluation_crop, recipe.data.interpolation) == (0.95, "bicubic")
    assert load_recipe("resnet50_a3").recipe.optimizer.lr == recipe.optimizer.lr


def test_without_output_standard_output_is_the_recipe_alone(tmp_path: Path) -> None:
    done = CliRunner().invoke(command_of("import"), ["timm", A3])
    assert yaml.safe_load(done.stdout)["optimizer"]["name"] == "lamb"
    assert "Mapped: 17" in done.stderr


def test_json_is_one_document_with_everything() -> None:
    document = json.loads(CliRunner().invoke(command_of("import"), ["timm", "--json", A3]).stdout)
    assert document["recipe"]["batch"] == {"global_size": 2048, "micro_size": 512}
    assert document["processes"] == 4
    assert {each["option"] for each in document["mapped"]} >= {"--opt", "--lr", "--aa", "data"}
    assert document["refused"] == []
    assert document["origins"]["optimizer.lr"] == "--lr 0.008"


def test_what_is_refused_ends_with_two_and_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "recipe.yaml"
    words = ["import-timm", "--output", str(output), "--", *A3.split(), "--sync-bn", "--cooldown-epochs", "3"]
    assert run(words) == 2
    message = capsys.readouterr().err
    assert "--cooldown-epochs 3: schedules have no cooldown" in message
    assert "--sync-bn true: BatchNorm normalises" in message
    assert "--skip sync-bn --skip cooldown-epochs" in message
    assert not output.exists()
    assert run([*words[:3], "--skip", "sync-bn", "--skip", "cooldown-epochs", *words[3:]]) == 0
    assert "# Left out: --cooldown-epochs" in output.read_text()


def test_a_file_is_not_written_over_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "recipe.yaml"
    output.write_text("mine")
    assert run(["import", "timm", "--output", str(output), A3]) == 2
    assert "exists already" in capsys.readouterr().err
    assert output.read_text() == "mine"
    assert run(["import-timm", "--output", str(output), "--overwrite", A3]) == 0
    assert load_recipe(output).recipe.model.name == "resnet50"


def test_an_arguments_file_of_a_network_that_timm_does_not_have(tmp_path: Path) -> None:
    path = tmp_path / "args.yaml"
    path.write_text("model: my_own_net\ndata_dir: /images\nbatch_size: 32\n")
    done = CliRunner().invoke(command_of("import"), ["timm", str(path), "--processes", "2"])
    assert "has no network my_own_net" in done.stderr
    assert yaml.safe_load(done.stdout)["batch"]["global_size"] == 64


def test_a_preset_becomes_a_recipe(tmp_path: Path) -> None:
    script = tmp_path / "DGXA100_resnet50_AMP_90E.sh"
    script.write_text(
        "#!/bin/bash\npython ./multiproc.py --nproc_per_node 8 ./launch.py --model resnet50 --precision AMP \\\n"
        "  --mode convergence --platform DGXA100 /imagenet --epochs 90 --mixup 0.0 --workspace ${1:-./}\n"
    )
    output = tmp_path / "recipe.yaml"
    done = CliRunner().invoke(command_of("import"), ["nvidia", str(script), "--output", str(output)])
    assert done.exit_code == 0, done.output
    assert load_recipe(output).recipe.optimizer == load_recipe("resnet50").recipe.optimizer
    assert run(["import-nvidia", "--", "python", "main.py", "/d", "--evaluate"]) == 2


@pytest.mark.slow
def test_a_converted_command_is_trained(paceline: Call, tmp_path: Path) -> None:
    """The whole way: timm's command, our recipe, a run of it, on files."""
    import numpy as np
    from PIL import Image

    noise = np.random.default_rng(0).integers(0, 256, (24, 40, 40, 3), dtype=np.uint8)
    for number, image in enumerate(noise):
        folder = tmp_path / "images" / ("train" if number < 16 else "val") / ("a" if number % 2 else "b")
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{number}.png")
    command = (
        f"train.py --data-dir {tmp_path / 'images'} --model resnet10t --img-size 32 -b 8 --epochs 2 --warmup-epochs 1 "
        "--opt lamb --lr 1e-3 --mixup 0.2 --cutmix 1.0 --bce-loss --reprob 0.25 --aa rand-m5-mstd0.5 --drop-path 0.1 "
        "--model-ema -j 0 --num-classes 2 --device cpu --val-split val"
    )
    recipe, run_dir = tmp_path / "recipe.yaml", tmp_path / "run"
    assert run(["import", "timm", "--output", str(recipe), command]) == 0
    paceline("train", recipe, "--run-dir", run_dir, "parallel.threads=1").ended(0)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["status"], summary["step"]) == ("completed", 4)
