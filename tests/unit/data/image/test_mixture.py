"""Mixtures of data sets: exact ratios, as a pure function of (seed, epoch, position); one sentence for each mistake."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import fork_server
import numpy as np
import pytest
from golden_sentences import raises
from PIL import Image

import paceline
from paceline.checkpoint.weights import read_weights
from paceline.data.class_sampling import ClassDraws, counts_by_ratio, sampled_order
from paceline.data.image.datasets import content_of, open_dataset
from paceline.data.image.source import encoded_source, files_of, part_numbers, prefetch, sample_names
from paceline.data.order import StepGeometry
from paceline.errors import DataError, PacelineError, RecipeError
from paceline.host.world import World
from paceline.plan import Plan
from paceline.recipe.data import Data
from paceline.recipe.load import load_recipe
from paceline.reports.audit import audit_run
from paceline.trainer.subject import Subject
from paceline_data.inspect.check import check_data

SETS = np.random.default_rng(0).permutation(np.repeat([0, 1, 2], [200, 70, 7]))
DRAWS = ClassDraws(classes=SETS, counts=counts_by_ratio({"a": 3, "b": 1.5, "c": 0.7}, SETS))
RECIPE = """
seed: 3
model: {name: small_resnet, options: {width: 4, stages: 2}}
data: {dataset: mixture, path: sets, mixture: {photos: 3, more: 1}, image_size: 16, backend: pytorch}
batch: {global_size: 8, micro_size: 2}
optimizer: {lr: 0.05}
train: {duration: 2 epochs, precision: fp32}
evaluate: {every: off}
checkpoint: {every: 3 steps}
parallel: {device: cpu, threads: 1, exact: true}
telemetry: {log_every: 1 steps, trackers: [], report: off}
"""


def draw(folder: Path, count: int, *, mode: str = "RGB") -> None:
    folder.mkdir(parents=True)
    generator = np.random.default_rng(list("/".join(folder.parts[-3:]).encode()))
    for number in range(count):
        pixels = generator.integers(0, 256, (20, 20, 3)).astype(np.uint8)
        Image.fromarray(pixels).convert(mode).save(folder / f"{number:02}.png")


@pytest.fixture
def sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """40 cats and dogs, ten dogs and owls in grey, a folder with one class, and one with a split of its own."""
    for name in ("cat", "dog"):
        draw(tmp_path / "sets" / "photos" / name, 20)
    for name in ("dog", "owl"):
        draw(tmp_path / "sets" / "more" / name, 5, mode="L")
        draw(tmp_path / "sets" / "split" / "train" / name, 6)
        draw(tmp_path / "sets" / "split" / "val" / name, 2)
    draw(tmp_path / "sets" / "owls" / "owl", 5)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "sets"


def data(sets: Path, mixture: dict[str, float], **keys: Any) -> Data:
    return Data(dataset="mixture", path=str(sets), mixture=mixture, **keys)


def test_every_epoch_holds_the_ratios_and_every_prefix_to_one_sample() -> None:
    assert DRAWS.counts == (160, 80, 37)  # 159.8, 79.9 and 37.3 of 277
    for seed, epoch in ((7, 0), (7, 1), (8, 40)):
        chosen = SETS[sampled_order(seed, epoch, DRAWS) % len(SETS)]
        for number, count in enumerate(DRAWS.counts):
            so_far = np.cumsum(chosen == number)
            assert so_far[-1] == count
            assert np.abs(so_far - np.arange(1, 278) * count / 277).max() <= (1 + count / 277) / 2


def test_a_set_is_used_up_before_a_sample_comes_again() -> None:
    epochs = [sampled_order(7, epoch, DRAWS) % len(SETS) for epoch in range(6)]
    for number in range(3):
        turns = np.concatenate([ids[SETS[ids] == number] for ids in epochs])
        members = np.flatnonzero(number == SETS)
        passes = [turns[at : at + len(members)] for at in range(0, len(turns) - len(members), len(members))]
        assert len(passes) > 2
        assert all(np.array_equal(np.sort(each), members) for each in passes)
        assert len({each.tobytes() for each in passes}) == len(passes)


def test_the_order_is_that_of_every_earlier_version() -> None:
    draws = ClassDraws(classes=np.array([0, 1, 0, 0, 1, 0, 0, 0]), counts=(4, 4))
    assert [sampled_order(3, epoch, draws).tolist() for epoch in (0, 1)] == [
        [7, 1, 0, 4, 2, 9, 3, 12],
        [5, 1, 6, 4, 2, 9, 3, 12],
    ]


@pytest.mark.parametrize("repeats", [1, 2])
def test_any_number_of_processes_takes_the_same_samples(repeats: int) -> None:
    samples = len(SETS) * repeats
    steps = StepGeometry(seed=7, samples=samples, global_batch_size=24, logical_ranks=12, draws=DRAWS, repeats=repeats)
    for step in (0, 11, 12, 30):
        alone = np.concatenate([part.ids for part in steps.slices(step, World())])
        for size in (2, 3, 4):
            parts = [part for rank in range(size) for part in steps.slices(step, World(rank=rank, world_size=size))]
            assert np.array_equal(np.concatenate([part.ids for part in parts]), alone)
    keys = [part.keys for step in range(steps.epochs.first_step(1)) for part in steps.slices(step, World())]
    assert len(set(np.concatenate(keys).tolist())) == samples


def test_sets_are_joined_by_the_names_of_their_classes(sets: Path) -> None:
    found = open_dataset(data(sets, {"photos": 3, "more": 1, "owls": 1}))
    assert found.classes == ("cat", "dog", "owl")
    assert found.channels == 3
    assert (len(found.train), len(found.validation)) == (32 + 8 + 4, 8 + 2 + 1)
    assert found.train.read(39).shape == found.train.read(0).shape == (20, 20, 3)
    for sample in range(len(found.train)):
        assert found.classes[found.train.labels[sample]] == Path(found.train.path(sample)).parent.name
    numbers = part_numbers(found.train)
    assert numbers is not None
    assert np.bincount(numbers).tolist() == [8, 4, 32]
    names = [each.decode() for each in sample_names(found.train)]
    assert all(str(sets / name) == found.train.path(sample) for sample, name in enumerate(names))
    files = encoded_source(found.train)
    assert files is not None
    assert files.encoded(10) == Path(found.train.path(10)).read_bytes()
    every = np.arange(len(found.train))
    assert sorted(files_of(found.train, every) or ()) == sorted(map(found.train.path, every))
    prefetch(found.train, every)
    assert content_of(found)[0] is not None


def test_names_of_classes_that_differ_by_case_only_are_told(sets: Path) -> None:
    draw(sets / "other" / "Cat", 4)
    mixed = open_dataset(data(sets, {"photos": 3, "other": 1}))
    assert mixed.reasons["classes"] == "the classes 'Cat' and 'cat' differ by case, space or invisible characters only"
    assert "classes" not in open_dataset(data(sets, {"photos": 3, "more": 1})).reasons


def test_a_set_with_a_split_of_its_own_keeps_it(sets: Path) -> None:
    found = open_dataset(data(sets, {"photos": 3, "split": 1}, validation_fraction=0.5))
    assert (len(found.train), len(found.validation)) == (20 + 12, 20 + 4)
    held_out = {Path(found.validation.path(sample)).relative_to(sets).parts[:2] for sample in range(24)}
    assert held_out == {("photos", "cat"), ("photos", "dog"), ("split", "val")}
    assert "held out: the folder val/" in found.reasons["path"]


def test_the_digest_covers_sets_and_ratios(sets: Path) -> None:
    def digest(mixture: dict[str, float]) -> str:
        return open_dataset(data(sets, mixture)).digest

    first = digest({"photos": 3, "more": 1})
    assert first == digest({"photos": 6, "more": 2})
    assert first != digest({"photos": 2, "more": 1})
    assert first != digest({"photos": 3, "owls": 1})
    (sets / "more" / "owl" / "00.png").unlink()
    assert first != digest({"photos": 3, "more": 1})


def test_what_is_taken_of_the_data_is_taken_of_the_union(sets: Path) -> None:
    mixture = {"photos": 3.0, "more": 1.0}
    for keys, sizes in (
        ({"only_classes": ["dog", "owl"]}, [16, 8]),
        ({"holdout_fraction": 0.25}, [24, 6]),
        ({"split_by": "name"}, [32, 8]),
        ({"saved_split": str(sets / "split.txt")}, [32, 8]),
    ):
        numbers = part_numbers(open_dataset(data(sets, mixture, **keys)).train)
        assert numbers is not None
        assert (len(numbers), sum(sizes)) == (sum(sizes), len(numbers)), keys
    few = part_numbers(open_dataset(data(sets, mixture, subset=10)).train)
    assert few is not None
    assert sum(counts_by_ratio(mixture, few)) == 10


@pytest.mark.parametrize(
    ("mixture", "message"),
    [
        ({}, "data.mixture names no set: give two sets or more"),
        ({"photos": 1}, "data.mixture names 'photos' only: give two sets or more"),
        ({"photos": 1, "mroe": 1}, "data.mixture names 'mroe', but .* Did you mean 'more'"),
        ({"photos": 1, "photos/cat/00.png": 1}, "no folder of class folders and no table"),
        ({"owls": 1, "owls/../owls": 1}, "one class in all, 'owl'"),
        ({"photos": 1, "empty": 1}, "contains no folders"),
    ],
)
def test_a_mixture_that_cannot_be_opened_is_refused(sets: Path, mixture: dict[str, float], message: str) -> None:
    (sets / "empty").mkdir()
    with pytest.raises((DataError, RecipeError), match=message):
        open_dataset(data(sets, mixture))


def test_images_of_several_labels_are_refused(sets: Path) -> None:
    with raises(RecipeError, key="data.dataset", value="mixture"):
        open_dataset(data(sets, {"photos": 1, "more": 1}), several_labels=True)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.mixture={photos: 0, more: 1}"], "data.mixture: found 0, but it must be greater than 0"),
        (["data.mixture={photos: .inf, more: 1}"], "data.mixture: found .inf"),
        (["data.mixture={photos: .nan, more: 1}"], "data.mixture: found .nan"),
        (["data.mixture={photos: 3000, more: 1}"], "'more' the ratio 1, which is less than one of the 40 samples"),
        (["data.mixture={owls: 1}", "data.only_classes=[cat,dog]"], "'owls', which has no training images"),
        (["data.sampling=balanced"], "data.sampling draws samples by class, but data.dataset=mixture"),
        (["data.mixture={split: 1}", "data.split_by=name"], "data.split_by=name' has no effect"),
        (["data.dataset=image_folder", "data.path=sets/photos", "data.mixture.more=1"], "data.mixture' has no effect"),
    ],
)
@pytest.mark.usefixtures("sets")
def test_a_mixture_that_cannot_be_drawn_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        _plan(*overrides)


def test_the_plan_says_what_an_epoch_has_whatever_the_order_of_keys(sets: Path) -> None:
    first = _plan("data.mixture={split: 0.5}")
    assert first.mixture == (11, 35, 6)  # 11.56, 34.67 and 5.78 of 52
    (sets.parent / "recipe.yaml").write_text(RECIPE.replace("{photos: 3, more: 1}", "{split: 0.5, photos: 3, more: 1}"))
    assert _plan() == first


def _plan(*overrides: str) -> Plan:
    loaded = load_recipe("recipe.yaml", overrides)
    plan = Subject.open(loaded.recipe, World(), "plan").plan
    loaded.checked(plan.unused)
    return plan


def test_the_data_check_looks_at_every_set(sets: Path) -> None:
    (sets / "more" / "owl" / "broken.jpg").write_bytes(b"junk")
    copied = open_dataset(data(sets, {"photos": 1, "split": 1})).train.path(0)
    (sets / "split" / "val" / "owl" / "copy.png").write_bytes(Path(copied).read_bytes())
    report = check_data("recipe.yaml", ("data.mixture={split: 1}",), workers=1)
    found = {each.kind.name: [entry.name for entry in each.entries] for each in report.findings}
    assert found["not_an_image"] == [str(sets / "more" / "owl" / "broken.jpg")]
    assert found["leak"] == [str(sets / "split" / "val" / "owl" / "copy.png")]
    assert {name: each["samples"] for name, each in report.splits.items()} == {"train": 53, "validation": 15}


def train(name: str, **overrides: Any) -> Path:
    done = paceline.train("recipe.yaml", overrides=overrides, run_dir=Path(name), quiet=True)
    assert done.status in ("completed", "stopped")
    return Path(name)


def bits(run_dir: Path) -> dict[str, bytes]:
    return {name: each.numpy().tobytes() for name, each in read_weights(run_dir, "model").state.items()}


def ledger(run_dir: Path) -> bytes:
    return (run_dir / "ledger" / "rank-00000.ids").read_bytes()


def test_a_stopped_run_ends_as_if_it_had_not_stopped(sets: Path) -> None:
    whole = train("whole", **{"data.workers": 0})
    for until in ("4 steps", "off"):
        train("stopped", **{"data.workers": 0, "train.until": until})
    assert ledger(Path("stopped")) == ledger(whole)
    assert bits(Path("stopped")) == bits(whole)
    found = audit_run(whole)
    assert found.passed
    assert [(each.used, each.duplicates, each.missing) for each in found.epochs] == [(40, 0, 0)] * 2
    with raises(PacelineError, path="whole"):
        train("whole", **{"data.workers": 0, "data.mixture": {"photos": 2, "more": 1}, "train.duration": "4 epochs"})
    plan = (whole / "plan.json").read_text()
    (whole / "plan.json").write_text(plan.replace('"mixture": [\n    10,\n    30', '"mixture": [\n    11,\n    29'))
    assert (whole / "plan.json").read_text() != plan
    assert "out of order" in " ".join(audit_run(whole).objections)


@pytest.mark.thorough
@pytest.mark.usefixtures("sets")
def test_processes_and_workers_train_what_one_process_does() -> None:
    whole = train("whole", **{"data.workers": 0})
    for workers in (1, 4):
        again = train(f"workers-{workers}", **{"data.workers": workers})
        assert (bits(again), ledger(again)) == (bits(whole), ledger(whole))
    for processes in (2, 4):
        name = f"processes-{processes}"
        words = ["-m", "paceline", "train", "recipe.yaml", "--processes", str(processes), "--run-dir", name]
        done = fork_server.run([sys.executable, *words], capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stdout + done.stderr
        assert bits(Path(name)) == bits(whole)
        assert audit_run(Path(name)).passed
