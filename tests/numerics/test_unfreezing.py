"""What is trained late, or for a while only, moves in its own steps and in no bit in others, resumed or not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import Call

from paceline.checkpoint.weights import read_weights
from paceline.errors import ModelError, RecipeError, RunDirectoryError

# The stage follows in the third step, the stem in the fifth. What could move a frozen weight by itself is on: decay,
# momentum from before, the average; what could move it in a resume too: AdamW's counts.
LATE = {
    "model.frozen": ["*", "!classifier.*"],
    "model.unfreeze": {"stages.*": "2 steps", "*": "50%"},
    "model.options.dropout": 0.3,
    "train.ema": 0.5,
    "optimizer.name": "adamw",
    "optimizer.lr": 1e-2,
    "optimizer.weight_decay": 0.1,
    "optimizer.clip_norm": 1.0,
    "batch.micro_size": 4,
    "checkpoint.every": "1 steps",
    "checkpoint.keep": 10,
    "telemetry.log_every": "1 steps",
}
PASSING = {
    **{key: value for key, value in LATE.items() if key not in ("model.frozen", "model.unfreeze")},
    "model.freeze_after": {"stem.*": "3 steps", "stages.*": "5 steps"},
}
STEPS = 8


def weights_after(run_dir: Path, step: int, which: str = "model") -> dict[str, torch.Tensor]:
    return read_weights(run_dir / "checkpoints" / f"step-{step:08d}", which).state


def moved(run_dir: Path, first: int, last: int, which: str = "model") -> set[str]:
    """Which parts changed between two checkpoints, in any bit; a norm's statistics are apart from its parameters."""
    before, after = weights_after(run_dir, first, which), weights_after(run_dir, last, which)
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    kind = {True: " statistics", False: ""}
    return {name.split(".")[0] + kind["running" in name or "tracked" in name] for name in changed}


LATE_START = {"model.frozen": LATE["model.frozen"]}
ALL_OF_THE_STAGE = {"classifier", "stages", "stages statistics"}


@pytest.mark.parametrize("exact", [False, True])
def test_frozen_weights_and_statistics_stay_until_their_step(train_tiny: Call, exact: bool) -> None:
    run = train_tiny("run", {**LATE, "parallel.exact": exact, **({"parallel.logical_ranks": 4} if exact else {})})
    for which in ("model", "ema"):
        assert moved(run.run_dir, 1, 2, which) == {"classifier"}
        assert moved(run.run_dir, 2, 3, which) == ALL_OF_THE_STAGE
        assert moved(run.run_dir, 3, 4, which) == ALL_OF_THE_STAGE
        assert moved(run.run_dir, 4, 5, which) == {*ALL_OF_THE_STAGE, "stem", "stem statistics"}


STEM_LAST = [{"classifier"}, {"classifier", "stages"}, {"classifier", "stages", "stem"}]


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        (LATE, [STEM_LAST[0]] * 2 + [STEM_LAST[1]] * 2 + [STEM_LAST[2]] * 4),
        (PASSING, [STEM_LAST[2]] * 3 + [STEM_LAST[1]] * 2 + [STEM_LAST[0]] * 3),
    ],
)
def test_a_weight_needs_a_gradient_in_the_steps_that_train_it_only(
    asked: dict[str, Any], wanted: list[set[str]], train_tiny: Call, tiny_task: Call
) -> None:
    from paceline.models.small_resnet import small_resnet

    networks, needed = list[Any](), list[set[str]]()

    def network() -> Any:
        networks.append(small_resnet(3, 1, width=4, stages=1))
        return networks[-1]

    def look(*_: Any) -> None:
        needed.append({name.split(".")[0] for name, each in networks[0].named_parameters() if each.requires_grad})

    overrides = {**asked, "batch.micro_size": "auto", "model.options": None}
    train_tiny("run", overrides, task=tiny_task(make_network=network, on_loss=look))
    assert needed == wanted


# The stage begins to move when the run goes on, moves already, the stem follows, all do. And the other way round: all
# move, the stem stays from then on, the stage does, both have stayed.
@pytest.mark.parametrize(("asked", "stops"), [(LATE, (2, 3, 4, 6)), (PASSING, (2, 3, 5, 6))])
def test_stopped_before_and_after_it_moves(
    train_tiny: Call, course: Call, asked: dict[str, Any], stops: Sequence[int]
) -> None:
    whole = train_tiny("whole", asked)
    for step in stops:
        train_tiny(f"stopped-{step}", {**asked, "train.until": f"{step} steps"})
        pieces = train_tiny(f"stopped-{step}", asked)
        assert pieces.summary.resumes == 1
        assert pieces.summary.weights_sha256 == whole.summary.weights_sha256
        assert pieces.summary.ema_sha256 == whole.summary.ema_sha256
        assert course(pieces.run_dir) == course(whole.run_dir)


def test_it_is_as_if_the_run_had_been_frozen_and_then_not(train_tiny: Call) -> None:
    """With a rule without state, the first steps are those of a frozen run and the rest those of one that is not."""
    rule = {"optimizer.momentum": 0, "train.ema": "off", "checkpoint.every": "1 steps", "checkpoint.keep": 10}
    frozen = {**rule, "model.frozen": ["stem.*"]}
    late = train_tiny("late", {**frozen, "model.unfreeze": {"*": "4 steps"}})
    before = train_tiny("before", frozen)
    for step in range(1, 5):
        theirs, ours = weights_after(before.run_dir, step), weights_after(late.run_dir, step)
        assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    fifth = weights_after(late.run_dir, 5)
    assert not torch.equal(fifth["stem.conv.weight"], weights_after(before.run_dir, 5)["stem.conv.weight"])


def test_a_longer_run_does_not_freeze_again_what_it_trains(train_tiny: Call) -> None:
    share = {"model.frozen": ["stem.*"], "model.unfreeze": {"stem.*": "50%"}, "checkpoint.every": "1 steps"}
    train_tiny("share", {**share, "train.until": "6 steps"})
    with pytest.raises(RunDirectoryError, match=r"unfreeze_steps=\{'stem\.\*': 4\}, but here .*: 10\}.*percent"):
        train_tiny("share", {**share, "train.duration": "20 steps"})
    fixed = {**share, "model.unfreeze": {"stem.*": "4 steps"}}
    train_tiny("fixed", {**fixed, "train.until": "6 steps"})
    train_tiny("fixed", {**fixed, "train.duration": "10 steps"})


# The stem is trained for three steps, the stage for five; decay, momentum and the average go on meanwhile.
@pytest.mark.parametrize("exact", [False, True])
def test_what_is_trained_for_a_while_stays_afterwards(train_tiny: Call, exact: bool) -> None:
    run = train_tiny("run", {**PASSING, "parallel.exact": exact, **({"parallel.logical_ranks": 4} if exact else {})})
    everything = {*ALL_OF_THE_STAGE, "stem", "stem statistics"}
    assert [moved(run.run_dir, step, step + 1) for step in range(1, STEPS)] == [
        *[everything] * 2,
        *[ALL_OF_THE_STAGE] * 2,
        *[{"classifier"}] * 3,
    ]
    # The average still comes nearer to what the weights stay at.
    assert moved(run.run_dir, 3, 4, "ema") == everything


def test_of_several_patterns_the_latest_counts(train_tiny: Call) -> None:
    run = train_tiny("run", {**PASSING, "model.freeze_after": {"stem.*": "6 steps", "st*": "2 steps"}})
    assert moved(run.run_dir, 2, 3) == {"classifier", "stem", "stem statistics"}


@pytest.mark.parametrize(
    ("asked", "error", "said"),
    [
        ({**LATE_START, "model.unfreeze": {"stages.*": "8 steps"}}, RecipeError, "more than none and fewer than all"),
        ({**LATE_START, "model.unfreeze": {"stages.*": "0 steps"}}, RecipeError, "more than none and fewer than all"),
        ({**LATE_START, "model.unfreeze": {"classifier.*": "2 steps"}}, ModelError, "no frozen parameter"),
        ({**LATE_START, "model.unfreeze": {"*": "2 steps"}, "model.frozen": []}, ModelError, "no frozen parameter"),
        (
            {**LATE_START, "model.unfreeze": {"*": "2 steps"}, "model.frozen": ["*"]},
            ModelError,
            "nothing to train until",
        ),
        ({"model.freeze_after": {"stages.*": "8 steps"}}, RecipeError, "is trained for '8 steps', which is 8 of"),
        ({"model.freeze_after": {"stages.*": "0 steps"}}, RecipeError, "more than none and fewer than all"),
        ({"model.freeze_after": {"steam.*": "2 steps"}}, ModelError, "no trained parameter's name matches 'steam"),
        ({"model.freeze_after": {"*": "2 steps"}}, ModelError, "leaves nothing to train until the end"),
        ({"model.freeze_after": {"stem.*": "2 steps"}, "model.frozen": ["stem.*"]}, ModelError, "no trained param"),
        (
            {"model.freeze_after": {"stem.*": "2 steps"}, "model.compile": True},
            RecipeError,
            "does not work with model.c",
        ),
        (
            {"model.freeze_after": {"st*": "5 steps"}, "model.frozen": ["stem.*"], "model.unfreeze": {"*": "2 steps"}},
            ModelError,
            "model.freeze_after and model.unfreeze both mean stem",
        ),
    ],
)
def test_what_cannot_end_so_is_refused(
    asked: dict[str, Any], error: type[Exception], said: str, train_tiny: Call, runs: Path
) -> None:
    with pytest.raises(error, match=said):
        train_tiny("run", asked)
    assert not (runs / "run").exists()
