"""What a recipe may say: every wrong key and value is refused in one clear sentence, and nothing is ignored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from golden_sentences import check_sentence
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data.image.datasets import open_dataset
from paceline.errors import DataError, RecipeError
from paceline.recipe import layers, load, other_trainers
from paceline.recipe.load import Overrides, differences, load_recipe, recipe_digest, stored_recipe, to_tree, to_yaml
from paceline.recipe.schema import Recipe


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def plain(overrides: Overrides = ()) -> Recipe:
    """A recipe that says nothing but its data set, and overrides."""
    return stored_recipe({"data": {"dataset": "digits"}}, "plain", overrides)


def refusal(*overrides: str, source: str | Path | None = None) -> RecipeError:
    """The error of a recipe, whose sentence is in the golden file."""
    with pytest.raises(RecipeError) as caught:
        plain(overrides) if source is None else load_recipe(source, overrides)
    check_sentence(caught.value)
    return caught.value


# ---------------------------------------------------------------------------------------------- keys


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("optimzer.lr=1", "optimzer"),
        ("optimizer.lrr=1", "optimizer.lrr"),
        ("data.augment.flp=1", "data.augment.flp"),
        ("nothing.like.it=1", "nothing"),
    ],
)
def test_an_unknown_key_is_refused_at_every_depth(override: str, key: str, tmp_path: Path) -> None:
    dotted, _, value = override.partition("=")
    error = refusal(override)
    assert (error.key, error.rule) == (key, "a known key")

    tree: Any = yaml.safe_load(value)
    for part in reversed(dotted.split(".")):
        tree = {part: tree}
    path = write(tmp_path, "mine.yaml", yaml.safe_dump(tree))
    again = refusal(source=path)
    assert (again.key, again.value, again.rule) == (key, error.value, "a known key")


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("epochs", "train.duration"),
        ("schedule.warmup_epochs", "schedule.warmup"),
        ("lr", "optimizer.lr"),
    ],
)
def test_what_other_trainers_call_a_key_is_understood(word: str, key: str) -> None:
    assert refusal(f"{word}=1").key == word
    assert layers.keys_for(word.rpartition(".")[2]) == [key]


@pytest.mark.parametrize("override", ["devices=2", "train.callbacks=a", "max_epochs=3", "train.EarlyStopping=3"])
def test_what_is_no_key_here_is_answered_with_what_to_use(override: str) -> None:
    assert refusal(override).rule == "a known key"


def test_every_word_of_other_trainers_names_a_key_and_is_none() -> None:
    for word, key in other_trainers._KEYS.items():
        assert key in set(_dotted(to_tree(Recipe()))) | NOT_ALWAYS_THERE, key
        assert other_trainers.our_key(f"--{word.replace('_', '-')}") == key
    assert other_trainers.our_key("nothing") is None
    assert not other_trainers._KEYS.keys() & other_trainers._WAY.keys()


NOT_ALWAYS_THERE = {
    "data.path",
    "schedule.milestones",
    "schedule.gamma",
    "data.backend",
    "optimizer.betas",
    "optimizer.eps",
}


def _dotted(tree: dict[str, Any], path: str = "") -> list[str]:
    found = []
    for key, value in tree.items():
        found += _dotted(value, f"{path}{key}.") if isinstance(value, dict) and value else [f"{path}{key}"]
    return found


def test_a_name_for_a_section_is_answered_with_its_name_key() -> None:
    for override in ("model=resnet18", "data=photos"):
        error = refusal(override)
        assert (f"{error.key}={error.value}", error.rule) == (override, "a section")


def test_a_folder_for_an_override_is_taken_for_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    error = refusal("photos")
    assert (error.value, error.rule) == ("photos", "KEY=VALUE")


@pytest.mark.parametrize("text", ["optimizer:", "optimizer: {lr: 0.1}\nschedule:\n", ""])
def test_an_empty_section_or_file_has_its_defaults(text: str, tmp_path: Path) -> None:
    assert load_recipe(write(tmp_path, "mine.yaml", text)).recipe.optimizer.lr == 0.1


@pytest.mark.parametrize(
    ("text", "key", "rule"),
    [
        *((text, "optimizer", "a section") for text in ("optimizer: 3", "optimizer: [lr]")),
        ("data: {augment: flip}", "data.augment", "a section"),
        *((text, None, "a mapping of sections") for text in ("- a\n- b", "just words", "3")),
        ("seed: 1\nseed: 2\n", None, "YAML"),
        ("optimizer:\n  lr: 1\n  lr: 2\n", None, "YAML"),
        ("data: {augment: {flip: 0.1, flip: 0.2}}", None, "YAML"),
        ("model: {options: {width: 4, width: 8}}", None, "YAML"),
    ],
)
def test_a_file_holds_sections_of_keys_that_stand_once(text: str, key: str, rule: str, tmp_path: Path) -> None:
    error = refusal(source=write(tmp_path, "mine.yaml", text))
    assert (error.key, error.rule) == (key, rule)


# -------------------------------------------------------------------------------------------- values


WRONG = [
    (["optimizer.lr=abc"], "a number"),
    (["optimizer.lr=0"], "greater than 0"),
    (["optimizer.lr=.nan"], "a number"),
    (["optimizer.name=adamw", "optimizer.betas=[0.9]"], "'auto' or a list with two numbers"),
    (["optimizer.nesterov=1"], "true or false"),
    (["seed=-1"], "greater than or equal to 0"),
    (["seed=1.5"], "a whole number"),
    ([f"seed={2**63}"], f"less than {2**63}"),
    (["train.duration=5"], "a duration is a number with a unit"),
    (["evaluate.every=on"], "a duration is a number with a unit"),
    (["train.precision=fp64"], "'auto', 'fp32', 'bf16', 'fp16' or 'fp8'"),
    (["evaluate.metric=true"], "a valid string"),
    (["data.channels=2"], "'auto' or 1 or 3"),
    (["data.mean=0.5"], "'auto' or a list"),
    (["data.augment.crop=random_resized", "data.augment.scale=[1.0, 0.5]"], ""),
    (["telemetry.trackers=[comet]"], "'tensorboard'"),
    (["train.precision=fp16", "train.grad_scaler.growth_factor=1"], "greater than 1"),
    (["model.options={drop_rate:0.5}"], "a name is letters, digits and underscores"),
]


@pytest.mark.parametrize(("overrides", "rule"), WRONG)
def test_a_wrong_value_is_refused_in_one_sentence(overrides: list[str], rule: str) -> None:
    error = refusal(*overrides)
    assert error.key == overrides[-1].partition("=")[0]
    assert error.rule is not None
    assert error.rule.startswith(rule)
    assert len(error.args) == 1


def test_several_wrong_values_are_all_named() -> None:
    error = refusal("optimizer.lr=0", "seed=-1")
    assert [line.split(":")[1].strip() for line in error.args] == ["seed", "optimizer.lr"]
    assert (error.key, error.value, error.rule) == ("seed", -1, "greater than or equal to 0")


@pytest.mark.parametrize("text", ["optimizer.lr", "=3", "optimizer", ""])
def test_an_override_is_key_equals_value(text: str) -> None:
    error = refusal(text)
    assert (error.value, error.rule) == (text, "KEY=VALUE")


def test_an_override_that_is_not_yaml_is_refused() -> None:
    error = refusal("optimizer.lr=[1")
    assert (error.key, error.value, error.rule) == ("optimizer.lr", "[1", "YAML")


@pytest.mark.parametrize("text", ["data.path=photos #1", "data.path=#1", "model.options={a: 1} # mine"])
def test_an_override_without_what_yaml_drops_is_refused(text: str) -> None:
    error = refusal(text)
    assert (f"{error.key}={error.value}", error.rule) == (text, "YAML")
    for whole in ("'photos #1'", "photos#1"):
        assert Path(load_recipe("image_folder", [f"data.path={whole}"]).recipe.data.path or "").name == whole.strip("'")


def test_overrides_are_told_as_they_are_typed() -> None:
    overrides = {"optimizer": {"name": "adamw", "betas": (0.8, 0.9)}, "data.path": "a: #1", "seed": None}
    overrides |= {"data.only_classes": ["07", 3], "data.saved_split": "off"}
    loaded = load_recipe("image_folder", overrides | {"train.duration": "3 epochs"})
    assert load_recipe("image_folder", loaded.overrides).recipe == loaded.recipe
    assert {"train.duration=3 epochs", "data.saved_split='off'"} <= set(loaded.overrides)
    assert not any(each.startswith("seed") for each in loaded.overrides)
    assert load_recipe("image_folder", {"batch.growth": {2: 512}}).overrides == ()


# ------------------------------------------------------------------------------------ off, auto, null


@pytest.mark.parametrize("written", ["off", "'off'", "false", "no"])
@pytest.mark.parametrize(
    "key", ["train.ema", "optimizer.clip_norm", "evaluate.every", "evaluate.patience", "checkpoint.every"]
)
def test_off(key: str, written: str) -> None:
    recipe = plain([f"{key}={written}"])
    section, name = key.split(".")
    assert getattr(getattr(recipe, section), name) is None
    assert to_tree(recipe)[section][name] == "off"


def test_null_takes_a_key_or_section_away(tmp_path: Path) -> None:
    path = write(tmp_path, "mine.yaml", "seed: 7\noptimizer: {lr: 3, momentum: 0.5}\ntrain: {ema: 0.5}\n")
    recipe = load_recipe(path, ["seed=null", "optimizer.lr=null", "train.ema=null"]).recipe
    assert (recipe.seed, recipe.optimizer.lr, recipe.optimizer.momentum) == (0, 0.1, 0.5)
    assert recipe.train.ema is None

    path = write(tmp_path, "mine.yaml", "train: {grad_scaler: {init_scale: 4}}\n")
    error = refusal(source=path)
    assert (error.key, error.rule) == ("train.grad_scaler", "with effect")
    assert load_recipe(path, ["train.grad_scaler=null"]).recipe.train.grad_scaler.init_scale == 65536.0


def test_options_of_ones_own_are_taken_as_they_are(tmp_path: Path) -> None:
    path = write(tmp_path, "mine.yaml", "model: {options: {width: 4, name: null, deep: {a: off, b: [1, x]}}}\n")
    loaded = load_recipe(path, ["model.options.stages=2"])
    assert loaded.recipe.model.options == {"width": 4, "name": None, "deep": {"a": False, "b": [1, "x"]}, "stages": 2}
    assert load_recipe(write(tmp_path, "again.yaml", to_yaml(loaded.recipe))).recipe == loaded.recipe


# ---------------------------------------------------------------------------------- no silent configuration


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["optimizer.betas=[0.9, 0.99]"], "optimizer.betas"),
        (["optimizer.name=adamw", "optimizer.nesterov=true"], "optimizer.nesterov"),
        (["data.path=x"], "data.path"),
        (["data.samples=4"], "data.samples"),
        (["data.augment.padding=2"], "data.augment.padding"),
        (["data.augment.scale=[0.5, 1]"], "data.augment.scale"),
        (["schedule.gamma=0.5"], "schedule.gamma"),
        (["schedule.anneal=linear"], "schedule.anneal"),
        (["train.grad_scaler.init_scale=4"], "train.grad_scaler"),
    ],
)
def test_a_key_without_effect_is_refused(overrides: list[str], key: str) -> None:
    error = refusal(*overrides)
    assert (error.key, error.rule) == (key, "with effect")


def test_a_tracker_is_named_once() -> None:
    error = refusal("telemetry.trackers=[csv, mlflow, csv]")
    assert (error.key, error.rule) == ("telemetry.trackers", "each tracker may be named only once")


def test_keys_of_a_misspelt_data_set_are_left_to_who_opens_it() -> None:
    loaded = load_recipe("digits", overrides=["data.dataset=imagefolder", "data.path=photos"])
    with pytest.raises(DataError, match=r"data.dataset is 'imagefolder'; .* Did you mean 'image_folder'"):
        open_dataset(loaded.recipe.data)
    assert refusal("data.dataset=digits", "data.samples=4").key == "data.samples"


def test_another_choice_drops_what_the_old_one_had_and_says_so(tmp_path: Path) -> None:
    text = "optimizer: {name: adamw, betas: [0.8, 0.9], eps: 1.0e-6}\ndata: {augment: {crop: pad, padding: 2}}\n"
    path = write(tmp_path, "mine.yaml", text)
    assert load_recipe(path, ["optimizer.name=sgd", "data.augment.crop=none"]).notices == (
        "optimizer.betas=[0.8, 0.9] of the recipe is not used with optimizer.name=sgd",
        "optimizer.eps=1.0e-6 of the recipe is not used with optimizer.name=sgd",
        "data.augment.padding=2 of the recipe is not used with data.augment.crop=none",
    )
    assert load_recipe(path, ["optimizer.name=adamw"]).recipe.optimizer.betas == (0.8, 0.9)


def test_another_model_has_the_options_of_its_own_layer_only(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", "model: {name: small_resnet, options: {width: 4, stages: 1}}\n")
    path = write(tmp_path, "mine.yaml", "base: base.yaml\nmodel: {name: resnet18, options: {drop_rate: 0.1}}\n")
    loaded = load_recipe(path, [])
    assert loaded.recipe.model.options == {"drop_rate": 0.1}
    assert loaded.notices == ()
    overridden = load_recipe(tmp_path / "base.yaml", ["model.name=resnet18", "model.options.drop_rate=0.2"])
    assert overridden.recipe.model.options == {"drop_rate": 0.2}
    assert load_recipe(tmp_path / "base.yaml", ["model.options.stages=null"]).recipe.model.options == {"width": 4}


def test_what_the_same_layer_says_is_not_dropped(tmp_path: Path) -> None:
    path = write(tmp_path, "mine.yaml", "optimizer: {name: adamw, betas: [0.8, 0.9]}\n")
    assert refusal("optimizer.name=sgd", "optimizer.betas=[0.8, 0.9]", source=path).key == "optimizer.betas"


UNUSED = {"parallel.bucket_cap_mb": "one process", "optimizer.decay_norm_and_bias": "nothing decays"}


def test_where_a_key_was_set_is_remembered(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", "seed: 3\nmodel: {options: {width: 4}}\ntrain: {ema: 0.5}\n")
    path = write(tmp_path, "mine.yaml", "base: base.yaml\noptimizer: {name: sgd, lr: 1}\n")
    loaded = load_recipe(path, ["optimizer.lr=2", "train.ema=null", "data={dataset: digits, augment: {crop: none}}"])
    overridden = ("optimizer.lr", "data.dataset", "data.augment.crop")
    assert loaded.origins == {
        **dict.fromkeys(("seed", "model.options", "optimizer.name"), "file"),
        **dict.fromkeys(overridden, "override"),
    }


@pytest.mark.parametrize("overrides", [["parallel.bucket_cap_mb=7"], {"parallel": {"bucket_cap_mb": 7}}])
def test_an_override_that_the_plan_does_not_use_is_refused(overrides: Overrides) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe("digits", overrides).checked(UNUSED)
    check_sentence(caught.value)
    assert (caught.value.key, caught.value.rule) == ("parallel.bucket_cap_mb", "with effect")


def test_an_unused_key_of_a_file_is_told(tmp_path: Path) -> None:
    text = "parallel: {bucket_cap_mb: 7}\noptimizer: {decay_norm_and_bias: true}\n"
    for path in (write(tmp_path, "a.yaml", text), write(tmp_path, "b.yaml", "base: a.yaml\n")):
        assert load_recipe(path).checked(UNUSED).notices == (
            "parallel.bucket_cap_mb=7 has no effect: one process",
            "optimizer.decay_norm_and_bias=true has no effect: nothing decays",
        )


def test_what_was_not_asked_for_is_not_told(tmp_path: Path) -> None:
    assert load_recipe("digits").checked(UNUSED).notices == ()
    stored = write(tmp_path, "stored.yaml", to_yaml(load_recipe("digits").recipe))  # names every key
    assert load_recipe(stored).checked(UNUSED).notices == ()


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("optimizer.lr=1", "optimizer.lr"),
        ("optimizer={name: adamw}", "optimizer.name"),
        ("train.duration=3 epochs", "train.duration"),
        ("parallel.bucket_cap_mb=3", "parallel.bucket_cap_mb"),
        ("batch.growth={2: 64}", "batch.growth"),
        ("data.holdout_fraction=0.3", "data.holdout_fraction"),
    ],
)
def test_saved_weights_are_scored_and_not_trained(override: str, key: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load.refuse_training_overrides([override])
    check_sentence(caught.value)
    assert (caught.value.key, caught.value.rule) == (key, "with effect")


def test_what_scoring_depends_on_may_be_overridden() -> None:
    load.refuse_training_overrides(
        [
            *("data.path=x", "data.workers=0", "data.augment=null", "evaluate.batch_size=7", "evaluate.top_k=3"),
            *("train.precision=fp32", "train.label_smoothing=0.1", "parallel.device=cpu", "parallel.threads=1"),
            *("model.channels_last=false", "model.initialize_from=null", "task=mine:Task", "train.float32_matmul=high"),
        ]
    )


# ---------------------------------------------------------------------------------------------- base


def test_base_is_another_recipe_with_changes(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", "seed: 3\noptimizer: {name: adamw, betas: [0.8, 0.9], lr: 0.5}\n")
    loaded = load_recipe(write(tmp_path, "mine.yaml", "base: base.yaml\noptimizer: {name: sgd}\n"))
    assert (loaded.recipe.seed, loaded.recipe.optimizer.lr, loaded.recipe.optimizer.name) == (3, 0.5, "sgd")
    assert loaded.notices == ("optimizer.betas=[0.8, 0.9] of the recipe is not used with optimizer.name=sgd",)
    assert loaded.name == "mine"


def test_base_may_be_a_shipped_recipe(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, "mine.yaml", "base: digits\nseed: 5\n")).recipe
    assert recipe == load_recipe("digits", {"seed": 5}).recipe


@pytest.mark.parametrize(
    ("base", "text", "key", "rule"),
    [
        ("base.yaml", "base: digits\n", "base", "one level"),
        ("base.yaml", "optimizr: {}\n", "optimizr", "a known key"),
        ("digit", "", "base", "a shipped recipe, a file or a run directory"),
    ],
)
def test_a_base_that_cannot_be(base: str, text: str, key: str, rule: str, tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", text)
    error = refusal(source=write(tmp_path, "mine.yaml", f"base: {base}\n"))
    assert (error.key, error.rule) == (key, rule)


# --------------------------------------------------------------------------------------------- finding


@pytest.mark.parametrize(
    "source",
    [
        *("./my.yaml", "./mien.yaml", "mien.yml", "digits.yaml"),
        *("runs/other", "runs/frist", "data.path=a/b", "digitz", "nothing"),
    ],
)
def test_a_path_that_leads_to_no_recipe(tmp_path: Path, monkeypatch: Any, source: str) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "mine.yaml", "seed: 1\n")
    (tmp_path / "runs" / "first").mkdir(parents=True)
    write(tmp_path / "runs" / "first", "recipe.yaml", "seed: 1\n")
    error = refusal(source=source)
    assert (error.path, error.rule) == (Path(source), "a shipped recipe, a file or a run directory")


@pytest.mark.parametrize("name", ["my-run", "~nobody-of-this-name"])
def test_a_run_directory_is_a_recipe(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = plain(["seed=9"])
    monkeypatch.chdir(tmp_path)
    run = tmp_path / name
    run.mkdir()
    write(run, "recipe.yaml", to_yaml(recipe))
    for source in (run, run / "recipe.yaml", name):
        loaded = load_recipe(source)
        assert (loaded.recipe, loaded.name) == (recipe, name)


# ------------------------------------------------------------------------------------------ round trip

DURATIONS = st.one_of(
    st.integers(1, 10**10).map(lambda n: f"{n} samples"),
    st.integers(1, 10**8).map(lambda n: f"{n} steps"),
    st.floats(0.001, 1e6).map(lambda x: f"{x!r} epochs"),
    st.floats(0.001, 100).map(lambda x: f"{x!r}%"),
)
OFF_OR_DURATION = st.one_of(st.just("off"), DURATIONS)
RATES = st.floats(1e-30, 1e30)
FREE = {
    "seed": st.integers(0, 2**63 - 1),
    "task": st.sampled_from(["image_classification", "my.tasks:Counting"]),
    "model.name": st.sampled_from(["small_resnet", "off", "null", "resnet50", "1e3", "yes", "ünïcode: #1"]),
    "model.channels_last": st.sampled_from(["auto", True, False]),
    "model.options": st.dictionaries(
        st.sampled_from(["a", "b", "off"]),
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5)),
        max_size=2,
    ),
    "batch.global_size": st.integers(1, 10**7),
    "optimizer.lr": RATES,
    "optimizer.clip_norm": st.one_of(st.just("off"), RATES),
    "train.duration": DURATIONS,
    "train.ema": st.one_of(st.just("off"), st.floats(0, 1, exclude_max=True)),
    "evaluate.every": OFF_OR_DURATION,
    "telemetry.trackers": st.sampled_from([[], ["tensorboard"]]),
}
CHOICES = st.sampled_from(
    [
        {},
        {"optimizer.name": "adamw", "optimizer.betas": [0.5, 0.75], "optimizer.eps": 1e-12},
        {"schedule.name": "step", "schedule.milestones": ["3 epochs", "50%", "1500000 samples"], "schedule.gamma": 0.3},
        {"train.precision": "fp16", "train.grad_scaler.growth_interval": 7},
        {"data.dataset": "image_folder", "data.path": "/a b/c"},
        {"data.dataset": "synthetic", "data.samples": 5, "data.classes": 3},
        {"data.augment.crop": "pad", "data.augment.padding_mode": "reflect"},
        {"data.augment.crop": "random_resized", "data.augment.scale": [0.1, 0.2]},
    ]
)


@settings(max_examples=60)
@given(overrides=st.fixed_dictionaries({}, optional=FREE), choice=CHOICES)
def test_what_is_written_is_what_is_read(overrides: dict[str, Any], choice: dict[str, Any]) -> None:
    recipe = plain({**overrides, **choice})
    again = stored_recipe(yaml.safe_load(to_yaml(recipe)), "stored")
    assert again == recipe
    assert recipe_digest(again) == recipe_digest(recipe)
    assert differences(recipe, again) == {}


def test_the_resolved_recipe_leaves_out_what_has_no_effect() -> None:
    tree = to_tree(plain(["train.duration=3 epochs"]))
    assert not {"betas", "path", "grad_scaler"} & {*tree["optimizer"], *tree["data"], *tree["train"]}
    assert tree["train"]["duration"] == "3 epochs"


def test_differences_are_dotted() -> None:
    old, new = plain(), plain(["optimizer.name=adamw", "seed=1"])
    found = differences(old, new)
    assert found["seed"] == (0, 1)
    assert found["optimizer.momentum"] == (0.9, None)
    assert found["optimizer.betas"] == (None, [0.9, 0.999])


def test_what_an_optimizer_takes_for_auto_is_as_if_it_had_been_said() -> None:
    message = plain(["optimizer.name=adamw", "optimizer.betas=[0.9, 0.999]", "optimizer.eps=1e-8"])
    assert differences(message, plain(["optimizer.name=adamw"])) == {}
    assert "optimizer.betas" in differences(message, plain(["optimizer.name=adamw", "optimizer.betas=[0.9, 0.99]"]))


def test_a_recipe_that_may_not_say_betas_is_compared_too() -> None:
    requested = ["optimizer.name=muon", "optimizer.rest=sgd"]
    assert differences(plain(requested), plain(requested)) == {}
    changed = plain([*requested, "optimizer.rest_lr_factor=2"])
    assert list(differences(plain(requested), changed)) == ["optimizer.rest_lr_factor"]


def test_the_order_of_patterns_is_a_difference() -> None:
    one = 'optimizer.groups={"fc.*": {lr_factor: 2}, "*.bias": {lr_factor: 3}}'
    other = 'optimizer.groups={"*.bias": {lr_factor: 3}, "fc.*": {lr_factor: 2}}'
    assert list(differences(plain([one]), plain([other]))) == ["optimizer.groups"]
    assert refusal('optimizer.groups={"fc.*": {lr: 10}}').key == "optimizer.groups"


def test_overrides_of_the_caller_stay_as_they_are() -> None:
    overrides = {"optimizer": {"name": "sgd", "lr": 0.1}, "optimizer.lr": 0.2}
    assert load_recipe("digits", overrides).recipe.optimizer.lr == 0.2
    assert overrides == {"optimizer": {"name": "sgd", "lr": 0.1}, "optimizer.lr": 0.2}


def test_every_path_of_a_recipe_may_begin_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for task, dataset, paths in (
        ("image_classification", "image_folder", ("data.path", "data.saved_split", "model.initialize_from")),
        ("language_modeling", "text_folder", ("data.text.tokenizer",)),
        ("recommendation", "criteo", ("data.recommendation.cache",)),
        ("distillation", "digits", ("distillation.teacher",)),
    ):
        tree = {"task": task, "data": {"dataset": dataset}}
        text = to_yaml(stored_recipe(tree, "r", [f"{key}=~/x" for key in paths]))
        assert (text.count(str(tmp_path / "x")), "~" in text) == (len(paths), False)


def test_pretrained_may_be_turned_off_with_initial_weights_of_ones_own() -> None:
    stored = {"model": {"pretrained": False, "initialize_from": "/weights.safetensors"}}
    assert stored_recipe(stored, "a recipe").model.initialize_from == "/weights.safetensors"
    with pytest.raises(RecipeError) as caught:
        stored_recipe({"model": {**stored["model"], "pretrained": True}}, "a recipe")
    check_sentence(caught.value)
    assert (caught.value.key, caught.value.rule) == ("model.pretrained", "with effect")


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("train.early_stopping=3", "evaluate.patience"),
        ("train.patience=3", "evaluate.patience"),
        ("train.seed=1", "seed"),
        ("train.gradient_accumulation_steps=4", "batch.micro_size"),
        ("batch.size=3", "batch.global_size"),
    ],
)
def test_a_key_of_another_section_or_trainer_is_recognised(written: str, meant: str) -> None:
    with pytest.raises(RecipeError, match=f"Did you mean '{meant}'"):
        load_recipe("digits", [written])
