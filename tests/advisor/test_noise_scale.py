"""The noise scale at given weights: of a fresh recipe, and of each checkpoint of a run that stays as it is."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest
import torch

from paceline.checkpoint.store import checkpoint_name
from paceline.errors import RecipeError, RunDirectoryError
from paceline.metrics.gradient_noise import NoiseAverages, NoiseEstimate
from paceline.pages.page import Chart, Table
from paceline.recipe.load import load_recipe
from paceline.telemetry.display import Display
from paceline.trainer.run_views import ProbedRun
from paceline.trainer.train import Options, opened_run, train_recipe
from paceline_advisor.commands import NoiseScale
from paceline_advisor.tuning.noise_scale import NoisePoint, NoiseReport, in_words, measure_noise

SMALL = ("model.options.width=4", "model.options.stages=1", "batch.global_size=32", "parallel.device=cpu")


def gradients(run: ProbedRun, images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """By hand: of the mean loss of some samples, flat."""
    loss = torch.nn.functional.cross_entropy(run.network(images), targets)
    found = torch.autograd.grad(loss, list(run.network.parameters()))
    return torch.cat([each.reshape(-1) for each in found])


def test_it_is_what_gradients_computed_by_hand_say(tmp_path: Path) -> None:
    plain = (*SMALL, "batch.micro_size=8", "train.label_smoothing=0", "train.precision=fp32")
    report = measure_noise(NoiseScale(target="digits", overrides=plain, steps=3), print)
    (point,) = report.points
    assert (report.global_batch_size, report.micro_batch_size, point.steps) == (32, 8, 3)

    variances, squares = [], []
    with opened_run(load_recipe("digits", plain), Options(run_dir=tmp_path / "run", display=Display())) as run:
        stream = run.train_batches()
        for _ in range(3):
            parts = [next(stream) for _ in range(4)]
            each = [gradients(run, part.inputs, part.targets) for part in parts]
            small = sum(float(one @ one) for one in each) / 4
            mean = torch.stack(each).mean(0)
            large = float(mean @ mean)
            variances.append((small - large) / (1 / 8 - 1 / 32))
            squares.append((32 * large - 8 * small) / 24)
    assert point.averages.mean_variance == pytest.approx(sum(variances) / 3, rel=1e-3)
    assert point.averages.mean_square == pytest.approx(sum(squares) / 3, rel=1e-3)


def digest(folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return hashlib.sha256(b"".join(path.name.encode() + path.read_bytes() for path in files)).hexdigest()


def test_a_run_is_measured_at_each_checkpoint_and_stays_as_it_is(tmp_path: Path) -> None:
    run = tmp_path / "run"
    changes = ("checkpoint.every=4 steps", "checkpoint.keep=3", "train.duration=8 steps", "train.ema=0.5")
    train_recipe(load_recipe("digits", (*SMALL, *changes)), Options(run_dir=run))
    before = digest(run)
    reported: list[str] = []
    report = measure_noise(NoiseScale(target=str(run), steps=5), reported.append)
    assert digest(run) == before
    assert [point.step for point in report.points] == [4, 8]
    assert len(reported) == 2
    one, other = (point.averages.mean_variance for point in report.points)
    assert one != other
    # The batch is cut for itself: one process, one micro-batch in the recipe.
    assert report.micro_batch_size == 8
    # A run that still trains removes checkpoints meanwhile.

    def removing(line: str) -> None:
        reported.append(line)
        shutil.rmtree(run / "checkpoints" / checkpoint_name(8), ignore_errors=True)

    report = measure_noise(NoiseScale(target=str(run), steps=2), removing)
    assert [point.step for point in report.points] == [4]
    assert reported[-1].startswith("step 8: left out: ")


def test_an_open_interval_and_a_missing_value_are_shown_apart() -> None:
    measured = {
        0: [NoiseEstimate(8.0, 1.0), NoiseEstimate(8.1, 1.01), NoiseEstimate(7.9, 0.99)],
        4: [NoiseEstimate(8.0, 2.0), NoiseEstimate(8.0, -1.0), NoiseEstimate(8.0, 1.0)],
        8: [NoiseEstimate(8.0, -1.0), NoiseEstimate(8.0, 0.5)],
    }
    points = [
        NoisePoint(step=step, averages=NoiseAverages.of(found), steps=len(found)) for step, found in measured.items()
    ]
    sizes = {"global_batch_size": 64, "micro_batch_size": 8, "batch_weight": 64.0}
    shown = NoiseReport(name="digits", processes=1, points=points, **sizes).__paceline__()
    table, missing, *_ = shown.blocks
    chart = shown.on_page[0]
    assert isinstance(table, Table)
    assert isinstance(chart, Chart)
    assert chart.traces[0]["marker"] == {"symbol": ["circle", "arrow-up"]}
    assert [str(row[2]).startswith("above") for row in table.rows] == [False, True]
    assert missing == "At 1 of 3 points the noise hides the gradient."
    assert shown.ok is True


def test_the_steps_to_give_are_printed_as_the_option_reads_them() -> None:
    found = [NoiseEstimate(8.0 + 0.01 * step, 0.02 * (-1) ** step + 0.001) for step in range(50)]
    points = [NoisePoint(step=0, averages=NoiseAverages.of(found), steps=len(found))]
    report = NoiseReport(
        name="digits", processes=1, points=points, global_batch_size=64, micro_batch_size=8, batch_weight=64.0
    )
    needed = points[0].steps_needed
    assert needed is not None
    assert needed > 1000
    assert any(f"--steps {needed} should" in str(block) for block in report.__paceline__().blocks)


def test_a_run_without_a_checkpoint_is_not_measured_as_if_it_were_fresh(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_recipe(load_recipe("digits", (*SMALL, "train.duration=2 steps")), Options(run_dir=run))
    for each in (run / "checkpoints").iterdir():
        shutil.rmtree(each) if each.is_dir() else each.unlink()
    with pytest.raises(RunDirectoryError, match=r"holds no checkpoint.*recipe.yaml to measure it at fresh"):
        measure_noise(NoiseScale(target=str(run)), print)


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(RecipeError, match="larger one"):
        measure_noise(NoiseScale(target="digits", overrides=(*SMALL[:2], "batch.global_size=1"), steps=2), print)


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        (("batch.micro_size=32",), r"batch\.micro_size=auto"),
        (("parallel.logical_ranks=1", "parallel.exact=true"), r"parallel\.logical_ranks=auto"),
    ],
)
def test_one_micro_batch_is_refused_with_what_to_change(given: tuple[str, ...], advice: str) -> None:
    with pytest.raises(RecipeError, match=f"one micro-batch .*{advice}"):
        measure_noise(NoiseScale(target="digits", overrides=(*SMALL, *given), steps=2), print)


def test_batch_norms_groups_fit_the_parts() -> None:
    ghosts = (*SMALL, "model.ghost_batch_norm=16")
    assert measure_noise(NoiseScale(target="digits", overrides=ghosts, steps=2), print).micro_batch_size == 8


def test_the_first_batch_size_is_measured() -> None:
    grown = (*SMALL, "batch.growth.2=36")
    report = measure_noise(NoiseScale(target="digits", overrides=grown, steps=2), print)
    assert (report.global_batch_size, report.micro_batch_size) == (32, 8)


def test_a_gradient_lost_in_noise_is_said_to_be() -> None:
    report = measure_noise(NoiseScale(target="digits", overrides=(*SMALL, "batch.global_size=2"), steps=2), print)
    assert report.points[0].step == 0
    assert in_words(report.points[0])
    assert report.to_json()["points"][0]["steps_measured"] == 2


def test_a_shipped_name_means_the_recipe_and_not_a_run_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    train_recipe(load_recipe("digits", (*SMALL, "train.duration=2 steps")), Options(run_dir=Path("digits")))
    # The run's network is another one.
    report = measure_noise(NoiseScale(target="digits", overrides=("model.options.width=8",), steps=2), print)
    assert [point.step for point in report.points] == [0]
