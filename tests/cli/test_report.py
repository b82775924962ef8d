"""`paceline report`, and the report that every training leaves behind."""

from __future__ import annotations

import json
from pathlib import Path

from calls import Call


def test_training_leaves_a_report_and_says_where(paceline_here: Call, tiny: tuple[str, ...], tmp_path: Path) -> None:
    done = paceline_here("train", "digits", *tiny, "--run-dir", "run").ended(0)
    assert "report            run/report.html" in done.out
    assert "Outcome" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    off = paceline_here("train", "digits", *tiny, "telemetry.report=off", "--run-dir", "off").ended(0)
    assert "report" not in off.out
    assert not (tmp_path / "off" / "report.html").exists()
    message = {name: json.loads((tmp_path / name / "summary.json").read_text()) for name in ("run", "off")}
    # P5: whoever looks on changes nothing.
    assert message["run"]["weights_sha256"] == message["off"]["weights_sha256"]
    assert message["run"]["ema_sha256"] == message["off"]["ema_sha256"]


def test_a_stopped_run_has_its_report(paceline_here: Call, tiny: tuple[str, ...], tmp_path: Path) -> None:
    paceline_here("train", "digits", *tiny, "--run-dir", "run", "--until", "4 steps").ended(75)
    assert "The run was stopped" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert paceline_here("train", "digits", *tiny, "--run-dir", "run").code == 0
    second = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "The run was stopped" not in second
    assert "resumed 1 time" in second


def test_a_failed_run_has_its_report(paceline_here: Call, tiny: tuple[str, ...], tmp_path: Path) -> None:
    wrong = (each for each in tiny if not each.startswith("optimizer="))
    paceline_here("train", "digits", *wrong, "optimizer={name: sgd, lr: 1.0e+30}", "--run-dir", "run").ended(1)
    text = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert 'class="bad"' in text
    assert "nonfinite_loss" in text


def test_a_report_that_cannot_be_written_is_a_notice(
    paceline_here: Call, tiny: tuple[str, ...], tmp_path: Path
) -> None:
    assert paceline_here("train", "digits", *tiny, "--run-dir", "run", "--until", "4 steps").code == 75
    # Where the page should be there is a folder, which no file replaces.
    (tmp_path / "run" / "report.html").unlink()
    (tmp_path / "run" / "report.html").mkdir()
    done = paceline_here("train", "digits", *tiny, "--run-dir", "run").ended(0)
    assert "note: the report could not be written" in done.out
    assert "Traceback" not in done.out + done.err
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "completed"


def test_reports_on_demand(paceline_here: Call, finished: Path, tmp_path: Path) -> None:
    reported = paceline_here("report", finished, "--output", "page.html", "--json").ended(0).document
    assert reported["report"] == "page.html"
    assert reported["size_bytes"] == (tmp_path / "page.html").stat().st_size < 6_000_000
    assert reported["runs"][0]["status"] == "completed"
    again = paceline_here("report", finished, finished, "--output", "again.html")
    assert again.out.startswith("again.html (")
    paceline_here("report", tmp_path).refused("holds no run")
    assert paceline_here("report").code == 2
