"""Published command lines of timm's train.py become recipes; every option of it is in one class."""

from __future__ import annotations

import random
from operator import attrgetter
from pathlib import Path

import pytest
import yaml
from converted_recipes import check_keys, load, plan_of
from golden_sentences import check_sentence, raises

from paceline.errors import RecipeError
from paceline.optimizers import RULES, optimizers_with
from paceline.recipe.load import load_recipe
from paceline_ops.imports.draft import Conversion, refusal
from paceline_ops.imports.timm import TIMM, InputSettings, convert_timm, read_timm

HERE = Path(__file__).parent
# Every option of train.py as of August 2026 (huggingface/pytorch-image-models, aa4b5850), and of those before timm 1.0.
OPTIONS = (HERE / "timm-options.txt").read_text().split()
PUBLISHED: dict[str, str] = yaml.safe_load((HERE / "timm-published.yaml").read_text())
REFUSED = {"resnet50_jsd": {"--aug-splits", "--resplit", "--split-bn", "--jsd-loss"}}
# What timm says of the images of these networks, where it is not what it says of most.
A_RECENT_RESNET = InputSettings(crop=0.95)


def convert(command: str, settings: InputSettings = A_RECENT_RESNET, **rest: object) -> Conversion:
    source, given = read_timm([command])
    return convert_timm(source, given, settings, **rest)  # type: ignore[arg-type]  # as it is called below


def test_every_option_of_train_py_is_in_exactly_one_class() -> None:
    names = [name for option in TIMM.options.values() for name in option.names]
    assert sorted(names) == sorted(set(OPTIONS))
    assert all(option.target for option in TIMM.options.values())


def test_the_table_has_every_built_in_optimizer_of_timm() -> None:
    names = {name for name, rule in RULES.items() if rule.reference.startswith("timm.")}
    assert names <= set(TIMM.options["opt"].values or ())
    assert TIMM.options["momentum"].needs == "|".join(f"optimizer.name={each}" for each in optimizers_with("momentum"))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_command_line_converts_loads_and_plans(name: str, tmp_path: Path) -> None:
    conversion = convert(PUBLISHED[name])
    refused = {each.option for each in conversion.refused}
    assert refused == REFUSED.get(name, set())
    if refused:
        check_sentence(refusal(conversion))
        conversion = convert(PUBLISHED[name], skipped=refused)
        assert set(conversion.left_out) == refused
    words = [word for word in PUBLISHED[name].replace("=", " ").split() if word.startswith("-")]
    launch = sum(word in ("-u", "-m", "--nproc_per_node", "--nnodes", "--node_rank") for word in words)
    # One entry for each option, and for the folder where it is not one.
    positional = "--data-dir" not in words
    assert len(conversion.entries) + len(refused) == len(words) - launch + positional
    loaded = load(conversion, tmp_path)
    assert loaded.notices == ()
    assert loaded.recipe.batch.global_size % loaded.recipe.batch.micro_size == 0  # type: ignore[operator]  # a number
    assert plan_of(loaded, conversion.processes).global_batch_size == loaded.recipe.batch.global_size


THE_SAME = {
    "model": "name",
    "data": "image_size evaluation_crop interpolation augment mix.mixup mix.cutmix",
    "batch": "global_size",
    "optimizer": "name lr weight_decay decay_norm_and_bias moment_decay denominator_eps clip_norm",
    "schedule": "name end_lr",
    "train": "duration loss target_threshold label_smoothing",
}


@pytest.mark.parametrize("name", ["a1", "a2", "a3"])
def test_the_strikes_back_recipes_are_ours_in_what_matters(name: str, tmp_path: Path) -> None:
    theirs = load(convert(PUBLISHED[f"rsb_{name}"]), tmp_path).recipe
    ours = load_recipe(f"resnet50_{name}").recipe
    assert theirs.model.options.get("drop_path_rate", 0.0) == ours.model.options["drop_path_rate"]
    for section, keys in THE_SAME.items():
        for key in keys.split():
            assert attrgetter(key)(getattr(theirs, section)) == attrgetter(key)(getattr(ours, section)), key
    expected = plan_of(load_recipe(f"resnet50_{name}"), 4)
    plan = plan_of(load(convert(PUBLISHED[f"rsb_{name}"]), tmp_path), 4)
    assert (plan.total_steps, plan.peak_lr) == (expected.total_steps, ours.optimizer.lr)
    assert abs(plan.warmup_steps - expected.warmup_steps) <= 1


def test_what_train_py_does_by_default_is_written_out(tmp_path: Path) -> None:
    conversion = convert("train.py --data-dir images")
    recipe = load(conversion, tmp_path).recipe
    assert (recipe.seed, recipe.batch.global_size, recipe.train.precision) == (42, 128, "fp32")
    # 0.1 for 256 samples, linear in the batch for SGD.
    assert (recipe.optimizer.name, recipe.optimizer.lr, recipe.optimizer.nesterov) == ("sgd", 0.05, True)
    assert (recipe.optimizer.weight_decay, recipe.optimizer.decay_norm_and_bias) == (2e-5, False)
    schedule = recipe.schedule
    assert (schedule.name, str(schedule.warmup), schedule.warmup_from) == ("cosine", "5 epochs", 2e-4)
    assert (str(recipe.train.duration), recipe.train.label_smoothing, recipe.train.ema) == ("300 epochs", 0.1, None)
    jitter = recipe.data.augment.jitter
    assert (jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue) == (0.4, 0.4, 0.4, 0.0)
    assert (recipe.data.augment.flip, recipe.data.augment.erase, recipe.data.mix.mixup) == (0.5, 0.0, 0.0)
    assert recipe.model.options == {"drop_rate": 0.0}
    assert {option for option, _ in conversion.differences} >= {"--train-interpolation", "--sched-on-updates", "--amp"}


def test_the_rate_follows_the_batch_as_train_py_has_it(tmp_path: Path) -> None:
    linear = load(convert("./distributed_train.sh 4 /d -b 256 --grad-accum-steps 2 --lr-base 0.1"), tmp_path).recipe
    assert (linear.batch.global_size, linear.batch.micro_size, linear.optimizer.lr) == (2048, 256, 0.8)
    root = load(convert("./distributed_train.sh 4 /d -b 256 --opt lamb --lr-base 0.004"), tmp_path).recipe
    assert root.optimizer.lr == 0.008
    given = load(convert("./distributed_train.sh 4 /d -b 256 --lr 0.3 --lr-base 0.1"), tmp_path).recipe
    assert given.optimizer.lr == 0.3


def test_an_arguments_file_says_what_differs_from_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "args.yaml"
    path.write_text(
        "batch_size: 64\nlr: null\namp: true\namp_dtype: bfloat16\nopt_betas:\n- 0.9\n- 0.95\nopt: adamw\n"
        "data_dir: /images\npin_mem: true\nworld_size: 2\nprefetcher: true\ncolor_jitter: 0.4\n"
    )
    conversion = convert(str(path))
    recipe = load(conversion, tmp_path).recipe
    assert (recipe.train.precision, recipe.optimizer.betas, recipe.batch.global_size) == ("bf16", (0.9, 0.95), 128)
    assert [each.option for each in conversion.entries if each.outcome == "listed"] == ["--pin-mem"]
    assert "--color-jitter" not in {each.option for each in conversion.entries}
    assert conversion.notices == []


def test_a_file_with_every_option_at_its_default_sets_none() -> None:
    tree = {option.key: option.default for option in TIMM.options.values()}
    tree |= {"color_jitter": 0.4, "data_dir": "/images", "prefetcher": True}
    assert TIMM.read_tree(tree, ["prefetcher"]) == {"data_dir": "/images"}


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("--epochs 0", "--epochs"),
        ("-b 0", "-b/--batch-size"),
        ("--lr-base-size 0", "--lr-base-size"),
        ("--grad-accum-steps 0", "--grad-accum-steps"),
        ("--warmup-epochs -1", "--warmup-epochs"),
    ],
)
def test_numbers_that_others_are_worked_out_from_have_a_least(words: str, key: str) -> None:
    with raises(RecipeError, key=key):
        convert(f"train.py /d {words}")


def test_how_many_processes_is_assumed_only_with_a_word(tmp_path: Path) -> None:
    path = tmp_path / "args.yaml"
    path.write_text("data_dir: /images\nlr_base: 0.1\n")
    assert "one is assumed" in convert(str(path)).notices[0]
    message = convert(str(path), processes=8)
    assert (message.notices, message.tree["batch"]["global_size"]) == ([], 1024)


def test_a_config_lies_below_the_command(tmp_path: Path) -> None:
    path = tmp_path / "base.yaml"
    path.write_text("opt: adamw\nlr: 0.001\nepochs: 10\n")
    tree = convert(f"train.py /d -c {path} --epochs 20").tree
    found = (tree["optimizer"]["name"], tree["optimizer"]["lr"], tree["train"]["duration"])
    assert found == ("adamw", 0.001, "20 epochs")


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ("--sched tanh", "--sched"),
        ("--sched plateau", "--sched"),
        ("--opt adabelief", "--opt"),
        ("--opt adam", "--opt"),
        ("--cooldown-epochs 10", "--cooldown-epochs"),
        ("--lr-cycle-limit 3", "--lr-cycle-limit"),
        ("--mixup 0.2 --mixup-mode elem", "--mixup-mode"),
        ("--train-crop-mode rkrc", "--train-crop-mode"),
        ("--dataset tfds/imagenet2012", "--dataset"),
        ("--resume last.pth.tar", "--resume"),
        ("--sync-bn", "--sync-bn"),
        ("--kd-model-name resnet152", "--kd-model-name"),
        ("--input-size 3 224 192", "--input-size"),
        ("--in-chans 4", "--in-chans"),
        ("--val-split minival", "--val-split"),
        ("--lr 1e-6", "--warmup-epochs"),
        ("--opt lars --opt-eps 1e-6", "--opt-eps"),
    ],
)
def test_a_value_that_nothing_here_does_is_refused_by_name(words: str, refused: str) -> None:
    conversion = convert(f"train.py /d {words}" + (" --warmup-epochs 4" if refused == "--warmup-epochs" else ""))
    assert [each.option for each in conversion.refused] == [refused]
    check_sentence(error := refusal(conversion))
    assert error.key == refused
    skipped = [refused.lstrip("-"), *(["lr"] * ("1e-6" in words))]
    assert convert(f"train.py /d {words}", skipped=skipped).refused == ()


def test_every_refused_option_is_refused_where_it_is_given_and_is_none_at_its_default() -> None:
    samples = {"switch": "", "int": "7", "float": "0.7", "text": "x", "ints": "7 8", "floats": "0.1 0.9"}
    for option in TIMM.options.values():
        if option.fate == "unsupported":
            conversion = convert(f"train.py /d --reprob 0.5 {option.display_name} {samples[option.kind]}")
            assert option.display_name in {each.option for each in conversion.refused}, option.display_name
    conversion = convert("train.py /d --reprob 0.5 --recount 1 --aug-splits 0 --tta 0 --lr-k-decay 1")
    assert conversion.refused == ()
    assert len(conversion.entries) == 6


def test_whatever_is_given_ends_in_a_recipe_or_in_a_sentence(tmp_path: Path) -> None:
    draws = random.Random(0)
    values = {
        "int": ("0", "1", "3", "7", "-1", "1e3"),
        "float": ("0", "1", "0.5", "-1", "1e-9", "2.4"),
        "text": ("x", "", "cosine", "none", "adamw"),
        "pair": ("a=1", "eps=3", "betas=(0.8,0.9)", "max_grad_norm=None"),
    }
    converted, messages = 0, list[str]()
    for _ in range(60):
        words = ["train.py"]
        for option in draws.sample([each for each in TIMM.options.values() if each.key not in ("config", "data")], 3):
            kind = option.kind.partition("_")[0].removesuffix("s")
            words += [option.display_name] + ([] if option.kind == "switch" else [draws.choice(values[kind])])
        try:
            source, given = read_timm(words)
            conversion = convert_timm(source, given, InputSettings())
            assert len(conversion.entries) == len(given)
            if not conversion.refused:
                load(conversion, tmp_path)
                converted += 1
        except RecipeError as error:
            messages.append(str(error))
    assert converted > 10
    assert all("found" in each for each in messages), messages


def test_a_run_that_ends_in_its_warm_up_is_told() -> None:
    conversion = convert("train.py /d --epochs 2 --warmup-epochs 5")
    message = "the run ends after 2 epochs, while it warms up for 5 epochs, and never reaches its peak rate"
    assert message in " ".join(conversion.notices)
    assert not any("peak rate" in each for each in convert("train.py /d --epochs 9 --warmup-epochs 5").notices)


@pytest.mark.parametrize(("words", "is_told"), [("", True), ("--sched-on-updates", False), ("--sched step", False)])
def test_a_rate_that_moves_with_every_step_is_told_without_a_warm_up_too(words: str, is_told: bool) -> None:
    conversion = convert(f"train.py /d --warmup-epochs 0 {words}")
    assert ("--sched-on-updates" in {option for option, _ in conversion.differences}) == is_told


def test_where_a_script_sends_its_output_is_no_option(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    for end in ("2>&1 | tee log.txt", ">> log.txt &", "&& echo done"):
        script.write_text(f"export A=1 && python train.py /d --model resnet18 --epochs 9 {end}\n")
        read, given = read_timm([str(script)])
        assert (read.title, given["epochs"]) == ("train.py /d --model resnet18 --epochs 9", 9)


def test_what_is_left_out_must_be_an_option() -> None:
    with raises(RecipeError, key="--skip", value="nosuch"):
        convert("train.py /d", skipped=["nosuch"])


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        ("--no-aug", {"data.augment.crop": "none", "data.augment.flip": 0.0}),
        ("--aug-repeats 3 --mixup 0.1 --mixup-off-epoch 270", {"train.duration": "100 epochs", "data.mix.epochs": 90}),
        ("--hflip 0 --vflip 0.5", {"data.augment.flip": 0.0, "data.augment.vertical_flip": 0.5}),
        ("--aa 3a", {"data.augment.policy": "timm", "data.augment.policy_options": {"config": "3a"}}),
        ("--reprob 0.2 --recount 3", {"data.augment.erase_with": "noise", "data.augment.erase_count": 3}),
        ("--reprob 0.2 --remode const", {"data.augment.erase_with": "mean", "data.augment.erase_count": 1}),
        ("--color-jitter 0", {"data.augment.jitter.brightness": None}),
        # train.py passes these on to no such optimizer, and to no schedule.
        ("--opt sgd --opt-eps 1e-8 --opt-betas 0.9 0.99", {"optimizer.eps": None, "optimizer.betas": None}),
        (
            "--epochs 450 --lr-noise 0.42 0.9 --lr-noise-std 0.5 --aug-repeats 3",
            {
                "schedule.noise.begin": "63 epochs",
                "schedule.noise.end": "135 epochs",
                "schedule.noise.std": 0.5,
                "schedule.noise.limit": 0.67,
            },
        ),
        ("--lr-noise 0.4", {"schedule.noise.begin": "120 epochs", "schedule.noise.end": None}),
        ("--lr-noise 1", {"schedule.noise": None}),
        ("--sched none", {"schedule.name": "constant", "schedule.warmup": None, "train.duration": "300 epochs"}),
        ("--sched step --epochs 30", {"schedule.name": "constant", "schedule.gamma": None}),
        ("--bce-loss --smoothing 0", {"train.loss": "cross_entropy"}),
        ("--bce-loss", {"train.loss": "bce", "train.label_smoothing": 0.1}),
        ("--amp --amp-dtype bfloat16", {"train.precision": "bf16"}),
        ("--native-amp", {"train.precision": "fp16"}),
        ("--opt rmsproptf", {"optimizer.name": "rmsprop", "optimizer.eps_inside_sqrt": True, "optimizer.eps": 1e-10}),
        ("--opt momentum", {"optimizer.name": "sgd", "optimizer.nesterov": False}),
        ("--opt lamb --clip-grad 0.5", {"optimizer.clip_norm": 0.5}),
        ("--opt lamb --clip-grad 2", {"optimizer.clip_norm": 1.0}),
        ("--clip-grad 0.01 --clip-mode agc", {"optimizer.clip_adaptive": 0.01}),
        (
            "--opt adamw --opt-kwargs betas=(0.9,0.95) amsgrad=True",
            {"optimizer.betas": [0.9, 0.95], "optimizer.options": {"amsgrad": True}},
        ),
        ("--model-ema --model-ema-decay 0.999", {"train.ema": 0.999}),
        (
            "--model-kwargs act_layer=relu --drop-block 0.1 --gp max",
            {"model.options": {"act_layer": "relu", "drop_block_rate": 0.1, "global_pool": "max", "drop_rate": 0.0}},
        ),
        (
            "--torchcompile --grad-checkpointing",
            {"model.compile": True, "model.compile_backend": "inductor", "model.activation_checkpointing": "full"},
        ),
        ("--dataset torch/cifar10", {"data.dataset": "cifar10"}),
        ("--dataset hfds/user/set --target-key fine", {"data.dataset": "huggingface", "data.label_column": "fine"}),
        ("--val-split ''", {"evaluate.every": "off"}),
        ("--input-size 1 32 32", {"data.channels": 1, "data.image_size": 32}),
        ("--device cpu", {"parallel.device": "cpu"}),
        ("--log-interval 100 --grad-accum-steps 4", {"telemetry.log_every": "25 steps"}),
        ("--mean 0.5 --std 0.5", {"data.mean": [0.5, 0.5, 0.5], "data.std": [0.5, 0.5, 0.5]}),
        (
            "--dr 0.5 --sched multistep --decay-milestones 30 60 --warmup-epochs 0",
            {"schedule.milestones": ["29 epochs", "59 epochs"], "schedule.gamma": 0.5},
        ),
    ],
)
def test_an_option_becomes_keys(words: str, keys: dict[str, object], tmp_path: Path) -> None:
    check_keys(convert(f"train.py /d {words}"), keys, tmp_path)


@pytest.mark.parametrize("path", ["a b", "a\nseed: 3", "a: # b", "'a", "*a", "null", "1e3", "ä"])
def test_any_folder_is_written_so_that_it_is_read_back(path: str, tmp_path: Path) -> None:
    source, given = read_timm(["train.py", "--data-dir", path])
    recipe = load(convert_timm(source, given, InputSettings()), tmp_path).recipe
    assert recipe.data.path is not None
    assert recipe.data.path.endswith(path)
    assert recipe.seed == 42


def test_the_file_says_where_each_value_came_from() -> None:
    text = convert("train.py /d --opt adamw --lr 0.001 --aa rand-m9-mstd0.5").to_yaml()
    lines = {line.split(":")[0].strip(): line for line in text.splitlines() if not line.startswith("#")}
    assert lines["lr"].endswith("# --lr 0.001")
    assert lines["weight_decay"].endswith("# --weight-decay 2e-05 (default)")
    assert "27 " not in lines["seed"]
    assert "# Differs: --train-interpolation:" in text
    assert text.startswith("# Converted from: train.py /d --opt adamw")
