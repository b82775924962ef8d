"""Presets and command lines of NVIDIA's ConvNets trainer become recipes; the guide says what the code does."""

from __future__ import annotations

import csv
import re
from collections import Counter
from operator import attrgetter
from pathlib import Path

import pytest
from converted_recipes import check_keys, load, plan_of
from golden_sentences import check_sentence, raises

from paceline.errors import RecipeError
from paceline.recipe.load import load_recipe
from paceline_ops.imports.draft import Conversion, refusal
from paceline_ops.imports.nvidia import LAUNCH, PRESETS, convert_nvidia, read_nvidia

ROOT = Path(__file__).parents[3]
GUIDE = ROOT / "docs" / "migrate.md"
THEIR_TABLE = ROOT.parent / "shared" / "tables" / "nvidia_convnets_options.csv"
TRAINED = ("resnet50", "resnext101-32x4d", "se-resnext101-32x4d", "efficientnet-b0", "efficientnet-b4")
TRAINED_ON = [
    (model, platform, precision)
    for model in TRAINED
    for platform, precisions in PRESETS["sizes"][PRESETS["models"][model]["sizes"]].items()
    for precision in precisions
]


def convert(command: str, processes: int | None = None) -> Conversion:
    return convert_nvidia(*read_nvidia([command]), processes=processes, skipped=())


def launch(model: str, platform: str, precision: str, mode: str = "convergence", more: str = "") -> str:
    options = f"--model {model} --precision {precision} --mode {mode} --platform {platform}"
    return f"python ./multiproc.py --nproc_per_node 8 ./launch.py {options} /imagenet --raport-file raport.json {more}"


@pytest.mark.parametrize(("model", "platform", "precision"), TRAINED_ON)
def test_a_preset_converts_loads_and_plans(model: str, platform: str, precision: str, tmp_path: Path) -> None:
    conversion = convert(launch(model, platform, precision))
    assert conversion.refused == ()
    loaded = load(conversion, tmp_path)
    assert plan_of(loaded, 8).global_batch_size == loaded.recipe.batch.global_size
    assert loaded.recipe.train.precision == ("fp16" if precision == "AMP" else "fp32")
    assert str(loaded.recipe.train.duration) == ("250 epochs" if model.startswith(("res", "se-")) else "400 epochs")


@pytest.mark.parametrize("mode", PRESETS["modes"])
def test_a_mode_trains_or_is_refused(mode: str, tmp_path: Path) -> None:
    conversion = convert(launch("resnet50", "DGXA100", "AMP", mode))
    if mode in ("evaluate", "benchmark_inference"):
        assert [each.option for each in conversion.refused] == ["--evaluate"]
        check_sentence(refusal(conversion))
        return
    recipe = load(conversion, tmp_path).recipe
    benchmark = mode != "convergence"
    assert (recipe.evaluate.every is None, recipe.checkpoint.every is None) == (benchmark, benchmark)
    assert recipe.data.dataset == ("synthetic" if mode == "benchmark_training_short" else "image_folder")
    plan_of(load(conversion, tmp_path), 8)


def test_models_that_timm_does_not_have_are_refused() -> None:
    for model in set(PRESETS["models"]) - set(TRAINED):
        conversion = convert(launch(model, "DGXA100", "AMP"))
        assert [each.option for each in conversion.refused] == ["--arch"], model


@pytest.mark.parametrize(
    ("ours", "model", "precision", "more"),
    [
        ("resnet50", "resnet50", "AMP", "--epochs 90 --mixup 0.0"),
        ("resnet50_250", "resnet50", "TF32", ""),
        ("resnext101_32x4d", "resnext101-32x4d", "AMP", ""),
        ("seresnext101_32x4d", "se-resnext101-32x4d", "AMP", ""),
        ("efficientnet_b0", "efficientnet-b0", "AMP", ""),
        ("efficientnet_b4", "efficientnet-b4", "TF32", ""),
    ],
)
def test_a_preset_is_the_shipped_recipe_in_what_matters(
    ours: str, model: str, precision: str, more: str, tmp_path: Path
) -> None:
    theirs, shipped = load(convert(launch(model, "DGXA100", precision, more=more)), tmp_path), load_recipe(ours)
    mine, expected = theirs.recipe, shipped.recipe
    assert mine.model.name == expected.model.name
    assert mine.batch.global_size == expected.batch.global_size
    for key in ("data.image_size", "data.evaluation_crop", "data.interpolation", "data.augment", "data.mix.mixup"):
        assert attrgetter(key)(mine) == attrgetter(key)(expected), key
    assert (mine.optimizer, mine.schedule) == (expected.optimizer, expected.schedule)
    assert (mine.train.duration, mine.train.label_smoothing) == (
        expected.train.duration,
        expected.train.label_smoothing,
    )
    assert plan_of(theirs, 8).learning_rates == plan_of(shipped, 8).learning_rates


def test_a_command_of_main_py_with_its_defaults(tmp_path: Path) -> None:
    options = "--arch resnet50 -c fanin --label-smoothing 0.1 --amp --static-loss-scale 256 /imagenet"
    conversion = convert(f"python ./main.py {options}")
    recipe = load(conversion, tmp_path).recipe
    assert (recipe.batch.global_size, recipe.optimizer.lr, recipe.optimizer.weight_decay) == (256, 0.1, 1e-4)
    assert recipe.schedule.name == "step"
    assert [str(each) for each in recipe.schedule.milestones] == ["30 epochs", "60 epochs", "80 epochs"]
    assert (recipe.train.precision, recipe.train.grad_scaler.init_scale) == ("fp16", 256)
    assert recipe.model.options == {"zero_init_last": False}
    assert recipe.seed == 0
    assert plan_of(load(conversion, tmp_path), 1).total_steps == 90 * 5005


def test_beginnings_of_options_are_read_as_their_scripts_have_them(tmp_path: Path) -> None:
    command = (
        "python ./multiproc.py --nproc_per_node 8 ./main.py /imagenet -j5 -p 100 --data-backend pytorch --lr 1.024 "
        "--batch-size 128 --optimizer-batch-size 1024 --static-loss-scale 128 --warmup 8 --arch resnext101-32x4d "
        "-c fanin --label-smoothing 0.1 --lr-schedule cosine --mom 0.875 --wd 6.103515625e-05 --workspace /results "
        "--epochs 90 --run-epochs 30 --checkpoint c.tar"
    )
    recipe = load(convert(command), tmp_path).recipe
    assert (recipe.optimizer.momentum, recipe.data.workers, str(recipe.train.until)) == (0.875, 5, "30 epochs")
    with raises(RecipeError, value="$FLAGS", rule="values"):
        convert(f"{command} $FLAGS")


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        ("--use-ema 0.999 --optimizer-batch-size 1024", {"train.ema": 0.996005996001, "batch.global_size": 1024}),
        ("--optimizer rmsprop --rmsprop-eps 0.01", {"optimizer.name": "rmsprop", "optimizer.eps": 0.01}),
        ("--bn-weight-decay --nesterov", {"optimizer.decay_norm_and_bias": True, "optimizer.nesterov": True}),
        ("--data-backend dali-gpu", {"data.backend": "dali", "data.decode_on": "gpu"}),
        ("--gpu-affinity socket_unique_interleaved", {"parallel.affinity": "interleaved"}),
        ("--prof 50 --training-only", {"train.until": "50 steps", "evaluate.every": "off"}),
        ("--arch efficientnet-b0 --survival_prob 0.9", {"model.options.drop_path_rate": 0.1, "data.image_size": 224}),
        ("--memory-format nhwc --seed 7", {"model.channels_last": True, "seed": 7}),
        ("--early-stopping-patience 3 --topk 3", {"evaluate.patience": 3, "evaluate.top_k": 3}),
        ("--last_bn_0_init True --pretrained", {"model.options.zero_init_last": True, "model.pretrained": True}),
    ],
)
def test_an_option_becomes_keys(words: str, keys: dict[str, object], tmp_path: Path) -> None:
    check_keys(convert(f"python main.py /d {words}"), keys, tmp_path)


@pytest.mark.parametrize(
    ("command", "key", "value"),
    [
        ("python classify.py --image a.jpg", None, "classify.py"),
        ("python quant_main.py /d --arch efficientnet-quant-b0", None, "quant_main.py"),
        ("python launch.py --model resnet50 /d", "--platform", None),
        (launch("resnet5", "DGXA100", "AMP"), "--model", "resnet5"),
        (launch("resnet50", "DGXA100", "FP32"), "--precision", "FP32"),
        (launch("resnet50", "DGXA100", "AMP", "convergance"), "--mode", "convergance"),
    ],
)
def test_what_cannot_be_converted_says_why(command: str, key: str | None, value: str | None) -> None:
    with raises(RecipeError, key=key, value=value):
        convert(command)


def test_how_many_processes_is_assumed_only_with_a_word() -> None:
    assert convert("python main.py /d").notices == []
    unknown = "torchrun --nproc_per_node=gpu main.py /d"
    assert "one is assumed" in convert(unknown).notices[0]
    assert convert(unknown, processes=4).tree["batch"]["global_size"] == 1024


def guide_rows() -> list[tuple[str, str, str]]:
    """File, option and what is said of it, of every row of the tables in the guide's section on NVIDIA."""
    rows, columns = [], 0
    section = GUIDE.read_text(encoding="utf-8").partition("\n## NVIDIA's ConvNets\n")[2].partition("\n## ")[0]
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if re.match(r"\| (option|file) \|", line):
            columns = 1 if cells[0] == "option" else 2
        elif line.startswith("| "):
            file, option, message = ["main.py", *cells[:2]] if columns == 1 else cells[:3]
            rows.append((file, option.strip("`"), message))
    return rows


READ = ("main.py", "resnet.py", "efficientnet.py", "model.py", "launch.py")
OLDER = "--model-config"


def test_the_guide_names_what_the_code_maps() -> None:
    """The guide has a row for every option, and the keys that the table sets are in it."""
    documented: dict[str, str] = {}
    for file, names, here in guide_rows():
        if file in READ:
            option = LAUNCH.find(names.split()[-1])
            assert option is not None, names
            documented[option.key] = documented.get(option.key, "") + here
    assert documented.keys() == LAUNCH.options.keys() - {OLDER.lstrip("-").replace("-", "_")}
    for option in LAUNCH.options.values():
        if option.fate in ("key", "if_changed", "if_given") and option.display_name != OLDER:
            key = option.target.removeprefix("model.options.").removesuffix(".init_scale")
            assert key in documented[option.key] or key.rpartition(".")[2] in documented[option.key], (
                option.display_name
            )


@pytest.mark.skipif(not THEIR_TABLE.is_file(), reason="the table of their options is not on this machine")
def test_the_guides_rows_are_those_of_their_programs() -> None:
    with THEIR_TABLE.open(encoding="utf-8") as lines:
        theirs = [(Path(line["file"]).name, line["flags"]) for line in csv.DictReader(lines)]
    assert Counter(theirs) == Counter((file, names) for file, names, _ in guide_rows())
