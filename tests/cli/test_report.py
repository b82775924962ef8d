"""`paceline report`, and the report that every training leaves behind."""

from __future__ import annotations

import json
from pathlib import Path

from calls import Call


def test_training_leaves_a_report_and_says_where(paceline_here: Call, tiny: tuple[str, ...], tmp_path: Path) -> None:
    done = paceline_here("train", "digits", *tiny, "--run-dir", "run")
    assert done.code == 0, done.err
    assert "report            run/report.html" in done.out
    assert "Outcome" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    off = paceline_here("train", "digits", *tiny, "telemetry.report=off", "--run-dir", "off")
    assert off.code == 0, off.err
    assert "report" not in off.out
    assert not (tmp_path / "off" / "report.html").exists()
    said = {name: json.loads((tmp_path / name / "summary.json").read_text()) for name in ("run", "off")}
    # P5: whoever looks on changes nothing.
    assert said["run"]["weights_sha256"] == said["off"]["weights_sha256"]
    assert said["run"]["ema_sha256"] == said["off"]["ema_sha256"]


def test_a_stopped_run_has_its_report(paceline_here: Call, tiny: tuple[str, ...], tmp_path: Path) -> None:
    done = paceline_here("train", "digits", *tiny, "--run-dir", "run", "--until", "4 steps")
    assert done.code == 75, done.err
    first = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "The run was stopped" in first
    assert paceline_here("train", "digits", *tiny, "--run-dir", "run").code == 0
    second = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "The run was stopped" not in second
    assert "resumed 1 time" in second


def test_a_failed_run_has_its_report(paceline_here: Call, tiny: tuple[str, ...], tmp_path: Path) -> None:
    wrong = (each for each in tiny if not each.startswith("optimizer="))
    done = paceline_here("train", "digits", *wrong, "optimizer={name: sgd, lr: 1.0e+30}", "--run-dir", "run")
    assert done.code == 1, done.out + done.err
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
    done = paceline_here("train", "digits", *tiny, "--run-dir", "run")
    assert done.code == 0, done.err
    assert "note: the report could not be written" in done.out
    assert "Traceback" not in done.out + done.err
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "completed"


def test_reports_on_demand(paceline_here: Call, finished: Path, tmp_path: Path) -> None:
    done = paceline_here("report", finished, "--output", "page.html", "--json")
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert told["report"] == "page.html"
    assert told["size_bytes"] == (tmp_path / "page.html").stat().st_size < 6_000_000
    assert told["runs"][0]["status"] == "completed"
    again = paceline_here("report", finished, finished, "--output", "again.html")
    assert again.out.startswith("again.html (")
    nothing = paceline_here("report", tmp_path)
    assert nothing.code == 2
    assert "holds no run" in nothing.err
    assert paceline_here("report").code == 2
