"""Reference points, and what passes beside them, are those of MLPerf's own checker."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest

from paceline.formulas.convergence import RESNET_EPOCHS, compare, pruned, reference_points

MESSAGES = {
    "RCP found": "found",
    "RCP Interpolation": "interpolated",
    "RCP not found but slower convergence on smaller batch size": "slower than the smallest",
}


@pytest.fixture(scope="module")
def theirs() -> Any:
    return pytest.importorskip(
        "mlperf_logging.rcp_checker.rcp_checker", reason="needs MLPerf's checker: pip install mlperf-logging"
    )


def write_logs(folder: Path, batch: int, epochs: tuple[float, ...]) -> None:
    """The few lines that the checker of reference points reads."""
    for number, each in enumerate(epochs):
        status = "aborted" if math.isinf(each) else "success"
        lines = [
            {"key": "global_batch_size", "value": batch, "metadata": {}},
            {"key": "submission_benchmark", "value": "resnet", "metadata": {}},
            {"key": "eval_accuracy", "value": 0.76, "metadata": {"epoch_num": 1 if math.isinf(each) else each}},
            {"key": "run_stop", "value": None, "metadata": {"status": status}},
        ]
        text = "".join(f":::MLLOG {json.dumps(line)}\n" for line in lines)
        (folder / f"result_{number}.txt").write_text(text)


def test_the_table_and_what_it_lets_pass_are_theirs(theirs: Any) -> None:
    checker = theirs.RCP_Checker("training", "4.0.0", "resnet", verbose=False)
    ours = reference_points(RESNET_EPOCHS)
    for points, published in ((ours, checker.rcp_data), (pruned(ours), checker.pruned_rcp_data)):
        assert [each.global_batch_size for each in points] == [each["BS"] for each in published.values()]
        for point, each in zip(points, published.values(), strict=True):
            assert sorted(RESNET_EPOCHS[each["BS"]]) == each["Epochs to converge"]
            assert point.mean_epochs == pytest.approx(each["RCP Mean"], abs=1e-12)
            assert point.deviation == pytest.approx(each["RCP Stdev"], abs=1e-12)
            assert point.least_epochs() == pytest.approx(each["Min Epochs"], abs=2e-4)  # they search to 1e-4


SPREADS = ((0, 0, 0, 0, 0), (-2, -1, 0, 1, 2), (-1, 0, 0, 0, math.inf), (0, 0, 0, math.inf, math.inf))


@pytest.mark.parametrize("batch", [512, 1632, 3264, 6000, 32768, 60000, 67840, 100000])
def test_runs_pass_and_fail_as_they_do_there(theirs: Any, tmp_path: Path, batch: int) -> None:
    points, seen = pruned(reference_points(RESNET_EPOCHS)), set()
    for middle, spread in itertools.product((33, 34, 35, 41, 56, 84, 86), SPREADS):
        epochs = tuple(middle + each for each in spread)
        write_logs(tmp_path, batch, epochs)
        passed, message, scaling = theirs.check_directory(
            str(tmp_path), "training", "4.0.0", verbose=False, bert_train_samples=False, rcp_pass="pruned_rcps"
        )
        found = compare(points, batch, epochs)
        seen.add(found.passed)
        assert found.passed == passed, (epochs, message)
        if math.isfinite(found.mean_epochs):
            assert found.outcome == MESSAGES.get(message, "missing")
            assert found.scaling == pytest.approx(scaling, rel=1e-9)
        else:
            assert (found.outcome, message) == ("too few arrived", "Insufficient convergence")
    assert seen == ({False} if batch > 67840 else {False, True})
