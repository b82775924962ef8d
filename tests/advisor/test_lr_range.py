"""A range test takes the run's own steps, and leaves nothing behind: not in the process, not on the disk."""

from __future__ import annotations

import json
import math
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import paceline
from paceline.errors import DataError, PacelineError, RecipeError, TrainingError
from paceline.host.system import STOP_SIGNALS
from paceline.pages.shown import write_result
from paceline.recipe.load import load_recipe
from paceline_advisor.commands import Sweep
from paceline_advisor.formulas.learning_rate import lowest_between, noise, pooled, suggest
from paceline_advisor.tuning.lr_range import as_tested, find_lr, sparkline

# Dropout, BatchNorm, augmentation, accumulation, an average, clipping: whatever could be disturbed.
SENSITIVE = {
    "model.options.dropout": 0.3,
    "data.augment.crop": "pad",
    "train.ema": 0.9,
    "train.precision": "bf16",
    "batch.micro_size": 8,
    "optimizer.clip_norm": 1.0,
}


@pytest.fixture
def find(
    tiny_recipe: Path, tiny_task: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """``find({"optimizer.lr": 1.0}, steps=30, on_loss=...)``; nothing is left in the place for temporary files."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def test(overrides: dict[str, Any] | None = None, **more: Any) -> Any:
        settings = {name: more.pop(name) for name in list(more) if name in Sweep.__dataclass_fields__}
        try:
            return paceline.find_lr(
                tiny_recipe,
                overrides=overrides or {},
                task=tiny_task(**more),
                quiet=True,
                **{"steps": 30, "seeds": 1, **settings},
            )
        finally:
            assert list(tmp_path.glob("paceline-*")) == []

    return test


def process() -> dict[str, Any]:
    """Everything of this process that a range test could have changed."""
    words = np.random.get_state()  # noqa: NPY002  # the global one, which may be the caller's
    return {
        "torch": torch.get_rng_state().tolist(),
        "python": random.getstate(),
        "numpy": (words[0], words[1].tolist(), *words[2:]),
        "environment": dict(os.environ),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "benchmark": torch.backends.cudnn.benchmark,
        "products": torch.get_float32_matmul_precision(),
        "gradients": torch.is_grad_enabled(),
        "handlers": [signal.getsignal(number) for number in STOP_SIGNALS],
        "cores": os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None,
    }


def disturb(*_: Any) -> None:
    """What a careless loss may do."""
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002  # the global one, which it must not touch
    torch.rand(3)
    os.environ["LEFT_BEHIND"] = "1"
    os.environ.pop("TO_BE_KEPT", None)


@pytest.fixture
def custom(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Settings and states that no run would choose."""
    monkeypatch.setenv("TO_BE_KEPT", "yes")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(77)
    torch.rand(5)
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("highest")


def fail_at(count: int, error: Callable[[], None]) -> Callable[..., None]:
    """Something for ``on_loss`` that disturbs, and at a step fails."""
    calls = []

    def on_loss(*_: Any) -> None:
        disturb()
        calls.append(1)
        if len(calls) == count:
            error()

    return on_loss


def a_broken_loader() -> None:
    raise DataError("the disk is gone")


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


class Bright(torch.nn.Module):
    """Tells the class of a tiny image by its brightness, so that something is learned from the first step on."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(20.0))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        levels = torch.tensor([-1.0, -0.3, 0.4])
        return -self.scale * (images.mean(dim=(1, 2, 3))[:, None] - levels) ** 2


def test_losses_are_those_of_a_run_with_such_a_schedule(
    find: Callable[..., Any], train_tiny: Callable[..., Any], events: Callable[..., Any]
) -> None:
    """A run whose recipe says an exponential rate has the same steps, bit for bit."""
    found = find({**SENSITIVE, "schedule.warmup": "2 steps"}, lowest=1e-4, highest=0.1, steps=30)
    schedule = {"schedule.name": "exponential", "schedule.end_lr": 0.1, "optimizer.lr": 1e-4}
    often = {"telemetry.log_every": "1 steps", "evaluate.every": "off", "train.duration": "29 steps"}
    records = events(train_tiny("beside", {**SENSITIVE, **schedule, **often}).run_dir, "step")
    assert [each["lr"] for each in records] == list(found.rates[:29])
    assert [each["loss"] for each in records] == list(found.losses[:29])


def test_rates_rise_as_asked(find: Callable[..., Any]) -> None:
    found = find(lowest=1e-3, highest=1e-1, steps=21)
    assert found.rates[0] == 1e-3
    assert found.rates[-1] == pytest.approx(0.1)
    assert found.rates[10] == pytest.approx(1e-2)
    straight = find(lowest=0.01, highest=0.05, steps=21, shape="linear")
    assert np.diff(straight.rates) == pytest.approx(0.002)


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_process_is_as_it_was(find: Callable[..., Any], custom: None, deterministic: bool) -> None:
    before = process()
    overrides = {**SENSITIVE, "train.deterministic": deterministic, "train.float32_matmul": "highest"}
    assert len(find(overrides, on_loss=disturb).rates) == 30
    assert process() == before


@pytest.mark.parametrize(
    ("error", "raised"), [(a_broken_loader, DataError), (interrupt, KeyboardInterrupt)], ids=["loader", "Ctrl-C"]
)
def test_it_is_also_after_an_error(
    find: Callable[..., Any], custom: None, error: Callable[[], None], raised: type[BaseException]
) -> None:
    before = process()
    with pytest.raises(raised):
        find(SENSITIVE, on_loss=fail_at(9, error))
    assert process() == before


def test_the_following_training_has_the_same_bits(find: Callable[..., Any], train_tiny: Callable[..., Any]) -> None:
    alone = train_tiny("alone", SENSITIVE).summary
    find(SENSITIVE, on_loss=disturb)
    after = train_tiny("after", SENSITIVE).summary
    with pytest.raises(DataError):
        find(SENSITIVE, on_loss=fail_at(9, a_broken_loader))
    for each in (after, train_tiny("after an error", SENSITIVE).summary):
        assert (each.weights_sha256, each.ema_sha256) == (alone.weights_sha256, alone.ema_sha256)


def test_a_suggestion_far_below_the_recipes_own_rate_is_told_of(find: Callable[..., Any]) -> None:
    """As of weights that were trained already: what falls are the first batches, which is no rate to train at."""

    def falls_immediately(batch: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss * 0 + (2 - batch.slice.step / 20 if batch.slice.step < 20 else 1.0)

    far = find(
        {"optimizer.lr": 10.0},
        make_network=Bright,
        on_loss=falls_immediately,
        steps=60,
        lowest=1e-7,
        highest=1e-1,
        smoothing=0.5,
    )
    near = find(
        {"optimizer.lr": 1e-5},
        make_network=Bright,
        on_loss=falls_immediately,
        steps=60,
        lowest=1e-7,
        highest=1e-1,
        smoothing=0.5,
    )
    assert far.suggestions["median"].lr == near.suggestions["median"].lr is not None
    assert any("times below the recipe's own rate" in note for note in far.notes)
    assert not any("times below" in note for note in near.notes)


@pytest.mark.parametrize(("rising", "reported"), [(True, False), (False, True)])
def test_rates_above_the_highest_are_spoken_of_only_where_the_loss_still_falls(
    find: Callable[..., Any], *, rising: bool, reported: bool
) -> None:
    """All steps may be taken although nothing better lies above: the loss rose, but not to four times its best."""

    def shaped(batch: Any, loss: torch.Tensor) -> torch.Tensor:
        step = batch.slice.step
        return loss * 0 + (1 + abs(step - 20) / 20 if rising else 2 - step / 40)

    found = find(make_network=Bright, on_loss=shaped, steps=40, smoothing=0.5)
    assert found.ending == "highest"
    assert any("above it" in note for note in found.notes) == reported


def test_it_ends_where_the_loss_diverges(find: Callable[..., Any]) -> None:
    def explode(batch: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss * 1000 if batch.slice.step >= 20 else loss

    found = find(on_loss=explode, steps=40, smoothing=0.5)
    assert (found.ending, len(found.rates)) == ("diverged", 21)
    assert found.to_json()["stop"] == {"reason": "diverged", "steps": 21, "lr": found.rates[20]}


@pytest.mark.parametrize("what", [math.nan, math.inf])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_ends_where_the_loss_is_no_number(find: Callable[..., Any], what: float, precision: str) -> None:
    def corrupt(batch: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss * what if batch.slice.step >= 20 else loss

    found = find({"train.precision": precision}, on_loss=corrupt, steps=40)
    assert (found.ending, len(found.rates)) == ("not_finite", 20)
    assert all(math.isfinite(each) for each in found.losses)


def test_a_first_loss_that_is_no_number_is_told(find: Callable[..., Any]) -> None:
    with pytest.raises(TrainingError, match="the first step"):
        find(on_loss=lambda _, loss: loss * math.nan)


def test_a_curve_that_says_nothing_gives_no_number(find: Callable[..., Any], tmp_path: Path) -> None:
    found = find(lowest=1e-12, highest=1e-10, steps=40)
    assert all(each.lr is None and each.why_not for each in found.suggestions.values())
    with pytest.raises(RecipeError, match="suggests no learning rate by 'median': the loss does not fall"):
        found.lr()
    assert not any("above it" in note for note in found.notes)
    assert any("stays the best guess" in note for note in found.notes)
    with pytest.raises(RecipeError, match=r"no suggestion 'steep'\. Did you mean 'steepest'"):
        found.lr("steep")


def test_tests_with_several_seeds_are_pooled(find: Callable[..., Any]) -> None:
    settings = {"steps": 60, "highest": 1.0, "lowest": 1e-5}
    found = find(seeds=3, **settings)
    alone = [find({"seed": seed}, **settings) for seed in range(3)]
    assert found.curves == tuple(each.losses for each in alone)
    assert found.losses == tuple(np.median(found.curves, axis=0))
    chosen, each = found.suggestions["median"], [one.suggestions["median"] for one in alone]
    assert (chosen.low, chosen.high) == (min(one.low for one in each), max(one.high for one in each))
    assert chosen.low < chosen.lr <= chosen.high
    assert f"{found.lr():g} ({chosen.low:.3g} to {chosen.high:.3g})" in str(found.__paceline__())


def test_nothing_is_suggested_where_nothing_was_learned(find: Callable[..., Any]) -> None:
    """The loss falls, but the answers are no better than without the images."""

    def blind(batch: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss * 0 + (2 - batch.slice.step / 40)

    found = find(on_loss=blind, steps=40, smoothing=0.5)
    assert all(each.lr is None for each in found.suggestions.values())
    assert found.suggestion().why_not.startswith("cannot tell, since nothing was learned: ")
    assert "by guessing at the lowest losses" in found.suggestion().why_not


@pytest.mark.parametrize(("spread", "seeds"), [(0.0, 3), (0.1, 9)])
def test_of_a_noisy_loss_there_are_more_tests(find: Callable[..., Any], spread: float, seeds: int) -> None:
    def shaped(batch: Any, loss: torch.Tensor) -> torch.Tensor:
        step = batch.slice.step
        return loss * 0 + (3 + abs(step - 25) / 20 + spread * (-1) ** step)

    found = find(make_network=Bright, on_loss=shaped, steps=40, seeds=None)
    assert len(found.curves) == found.to_json()["settings"]["seeds"] == seeds
    assert found.suggestion().lr is not None


def test_tests_that_tell_nothing_are_repeated_with_more_steps(find: Callable[..., Any]) -> None:
    assert len(find(steps=None, lowest=1e-12, highest=1e-10).losses) == 400


def test_from_trained_weights_higher_rates_are_trained(find: Callable[..., Any], tmp_path: Path) -> None:
    def shaped(batch: Any, loss: torch.Tensor) -> torch.Tensor:
        step = batch.slice.step
        runs.extend([1] * (step == 0))
        return loss * 0 + [3 + abs(step - 25) / 20, 2.0, 1.0, 1.5][len(runs) - 1]

    weights = tmp_path / "trained.safetensors"
    save_file({"scale": torch.tensor(20.0)}, weights)
    runs: list[int] = []
    settings = {"make_network": Bright, "on_loss": shaped, "steps": 40}
    from_start = find(**settings).suggestion()
    assert len(runs) == 1
    runs.clear()
    found = find({"model.initialize_from": str(weights)}, **settings).suggestion()
    assert len(runs) == 4
    # The lowest point of the parabola through the three trainings, the last of which was worse.
    assert found.lr == pytest.approx(from_start.lr * 3 ** (1 + 1 / 6))
    assert (found.low, found.high) == pytest.approx((found.lr / 3, found.lr * 3))
    assert "after trainings with 3 rates" in found.rule


def test_trainings_that_all_diverge_suggest_nothing(find: Callable[..., Any], tmp_path: Path) -> None:
    def diverging(batch: Any, loss: torch.Tensor) -> torch.Tensor:
        step = batch.slice.step
        runs.extend([1] * (step == 0))
        return loss * 0 + (math.inf if len(runs) > 1 and step == 9 else 3 + abs(step - 25) / 20)

    weights = tmp_path / "trained.safetensors"
    save_file({"scale": torch.tensor(20.0)}, weights)
    runs: list[int] = []
    settings = {"make_network": Bright, "on_loss": diverging, "steps": 40}
    found = find({"model.initialize_from": str(weights)}, **settings).suggestion()
    assert (found.lr, found.low, found.high) == (None, None, None)
    assert found.why_not.startswith("cannot tell, since the trainings with rates from ")


def test_progress_names_the_test(
    tiny_recipe: Path, tiny_task: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    paceline.find_lr(tiny_recipe, task=tiny_task(), steps=30, seeds=2)
    assert {line.partition(", step ")[0] for line in capsys.readouterr().out.splitlines()} == {
        "test 1 of 2",
        "test 2 of 2",
    }


def test_a_scaling_rule_is_divided_out(find: Callable[..., Any]) -> None:
    plain = find(steps=60, highest=1.0, lowest=1e-5)
    scaling = {"optimizer.lr_scaling": "linear", "optimizer.lr_reference_batch": 4}
    scaled = find(scaling, steps=60, highest=1.0, lowest=1e-5)
    assert scaled.losses == plain.losses
    for rule, each in plain.suggestions.items():
        assert each.lr is not None
        assert scaled.lr(rule) == pytest.approx(plain.lr(rule) / 4, rel=0.01)
    assert any("multiplied by 4" in note for note in scaled.notes)


def test_a_recipe_with_the_rate_says_so(find: Callable[..., Any], tmp_path: Path) -> None:
    found = find(steps=60, highest=1.0, lowest=1e-5)
    text = found.improved("steepest")
    assert text.startswith("# tiny, as suggested by `paceline find-lr`:\n#   optimizer.lr=")
    path = tmp_path / "better.yaml"
    path.write_text(text)
    better = load_recipe(path).recipe
    assert better.optimizer.lr == found.lr("steepest") != found.recipe.optimizer.lr
    assert better.schedule == found.recipe.schedule


def test_a_page_and_its_numbers(find: Callable[..., Any], tmp_path: Path) -> None:
    found = find(steps=60, highest=1.0, lowest=1e-5)
    document, page = write_result(tmp_path, "find-lr", found)
    reported = json.loads(document.read_text())
    assert reported["losses"] == list(found.losses)
    assert reported["suggestions"]["valley"]["lr"] == found.suggestions["valley"].lr
    text = page.read_text()
    assert "Range test of tiny" in text
    assert "smoothed" in text
    assert len(sparkline(found)) == 40


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lowest": 0.0}, "must go from a rate above 0"),
        ({"lowest": 1.0, "highest": 0.1}, "from 1 to 0.1 is not possible"),
        ({"highest": math.inf}, "from 1e-07 to inf"),
        ({"highest": math.nan}, "is not possible"),
        ({"steps": 19}, "19 steps is too short"),
        ({"seeds": -1}, "seeds=-1 is not a number of tests"),
        ({"shape": "cubic"}, "shape='cubic'"),
        ({"smoothing": 1.0}, r"not in \[0, 1\)"),
        ({"divergence": 1.0}, "a factor above 1"),
    ],
)
def test_settings_that_cannot_be_are_told(tiny_recipe: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(PacelineError, match=message):
        find_lr(tiny_recipe, quiet=True, **settings)


def test_what_comes_later_in_a_run_is_left_out() -> None:
    recipe = load_recipe(
        "digits",
        {
            "batch.growth": {2: 96},
            "schedule.name": "one_cycle",
            "schedule.warmup": "30%",
            "model.frozen": ["stem*"],
            "model.unfreeze": {"*": "3 epochs"},
            "telemetry.trackers": ["tensorboard"],
        },
    ).recipe
    of_test = as_tested(recipe, 50, world_size=1)
    # The largest micro-batch that 64 and 96 have in common: BatchNorm sees what it would see in the run.
    assert (of_test.batch.micro_size, of_test.batch.growth) == (32, {})
    assert (of_test.model.frozen, of_test.model.unfreeze) == (("stem*",), {})
    assert of_test.schedule.name == "constant"
    assert of_test.train.ema is None
    assert of_test.evaluate.every is None
    assert of_test.telemetry.trackers == ()


RATES = np.geomspace(1e-6, 10, 100).tolist()


def curve(lowest: float, *, spread: float = 0.0, seed: int = 0) -> list[float]:
    """Losses that fall over a decade to a trough at a rate, and rise above it."""
    distance = np.log10(np.array(RATES) / lowest)
    losses = 2 - np.clip(1 + distance, 0, 1) + np.clip(distance, 0, None)
    return list(losses + spread * np.random.default_rng(seed).normal(size=len(losses)))


def test_votes_are_on_the_fall_and_in_the_trough() -> None:
    found = suggest(RATES, [curve(0.1)], smoothing=0.5)["median"]
    assert found.low is not None
    assert found.lr is not None
    assert found.high is not None
    assert 0.03 < found.low < found.lr < found.high < 0.15


def test_a_vote_far_below_the_others_is_dropped() -> None:
    low = curve(1e-5)
    found = suggest(RATES, [curve(0.1), curve(0.1), low], smoothing=0.5)["median"]
    assert found.low is not None
    assert found.low > 0.03
    assert "without 3 of 9, a hundred times below the others" in found.rule


def test_a_wide_plateau_does_not_move_the_suggestion_to_its_end() -> None:
    ends = []
    for end in (0.1, 3.0):
        losses = np.array(curve(1e-3)).clip(max=2)
        losses[np.array(RATES) > 1e-3] = 1.01
        losses[np.abs(np.log(np.array(RATES) / end)) < 1] = 1.0
        ends.append(suggest(RATES, [losses.tolist()], smoothing=0.5)["median"].lr)
    assert ends[1] == ends[0]


@pytest.mark.parametrize(
    ("losses", "factor"),
    [
        ([3.0, 2.0, 3.0], 1.0),
        ([2.0, 1.0, 1.0], 3**0.5),
        ([2.0, 1.0, 2.5], 1.0),
        ([3.0, 1.0, math.inf], 1.0),
        ([math.inf, 1.0, 2.0], 1.0),
        ([1.0, 2.0], 1 / 3),
        ([3.0, 2.0], 1.0),
        ([1.0, 1.0, 1.0], 1 / 3),
    ],
)
def test_the_lowest_loss_is_between_rates(losses: list[float], factor: float) -> None:
    assert lowest_between([0.1, 0.3, 0.9][: len(losses)], losses) == pytest.approx(0.3 * factor)


def test_pooled_losses_end_with_most_tests() -> None:
    assert pooled([[3.0, 2.0, 9.0], [3.5, 1.0], [2.0, 1.5, 8.0, 7.0]]) == [3.0, 1.5, 9.0]
    assert pooled([[1.0, 2.0], [3.0]]) == [3.0]


def test_noise_is_a_share_of_the_fall() -> None:
    assert noise(curve(0.1), steps=100) < 0.02
    assert noise(curve(0.1, spread=0.3), steps=100) == pytest.approx(0.3 / 8**0.5, rel=0.5)


def test_noise_hardly_moves_the_suggestion() -> None:
    rates = [
        suggest(RATES, [curve(0.1, spread=0.05, seed=3 * seed + test) for test in range(3)], smoothing=0.98)[
            "median"
        ].lr
        for seed in range(5)
    ]
    assert None not in rates
    assert max(filter(None, rates)) / min(filter(None, rates)) < 1.5
