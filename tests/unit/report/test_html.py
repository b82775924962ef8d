"""Does a report show what the records say, of every kind of run, and nothing else?"""

from __future__ import annotations

import html
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import RunDirectoryError
from paceline.records.run_directory import RunDirectory
from paceline.reports.html.page import report_at_the_end, write_report

HOSTILE = '</script><img src=x onerror="alert(1)">`&'


def complete(recorded_run: Any) -> Any:
    forecast = {"what": "forecast", "seconds": 1.0, "message": "expected", "expected_memory_bytes": 4 * 2**20}
    reported = recorded_run().start().tell("measurement", 0, **forecast)
    for step in range(1, 41):
        reported.record(step, loss=1 / step, noise_scale=10.0 * step)
        if step % 10 == 0:
            reported.evaluation(step, loss=2 / step, top1_accuracy=90 + step / 10)
            reported.evaluation(step, "ema", loss=3 / step, top1_accuracy=80 + step / 10)
    return reported.finish(40)


def page(*paths: Path, output: Path | None = None) -> str:
    text = write_report(paths, output).path.read_text(encoding="utf-8")
    assert "holds something unexpected" not in text
    return text


def texts(document: str) -> str:
    """What a page says, without its scripts and elements."""
    body = re.sub(r"(?s)<(script|style).*?</\1>", " ", document)
    return html.unescape(" ".join(re.sub(r"<[^>]*>", " ", body).split()))


def test_every_curve_is_its_events(tmp_path: Path, recorded_run: Any, write: Any, figures: Any, points: Any) -> None:
    reported = complete(recorded_run)
    found = figures(page(write(tmp_path / "run", reported)))
    steps = [each for each in reported.events if each["event"] == "step"]
    for title, name, key in (
        ("Loss", "training", "loss"),
        ("Learning rate", "learning rate", "lr"),
        ("Gradient norm", "gradient norm", "grad_norm"),
        ("Gradient noise scale", "gradient noise scale", "noise_scale"),
        ("Throughput", "throughput", "throughput_samples_per_second"),
        ("Waiting for data", "waiting for data", "data_wait_fraction"),
    ):
        assert points(found[title], name) == [(each["step"], each[key]) for each in steps], title
    for weights in ("model", "ema"):
        events = [each for each in reported.events if each.get("weights") == weights]
        for title, key in (("Loss", "loss"), ("Top-1 accuracy", "top1_accuracy")):
            assert points(found[title], f"held-out, {weights}") == [(each["step"], each[key]) for each in events]
    # A loss scale that is always 1 is none.
    assert "Loss scale" not in found


def test_each_held_out_set_has_its_own_curve(
    tmp_path: Path, recorded_run: Any, write: Any, figures: Any, points: Any
) -> None:
    reported = recorded_run().start()
    for step in (4, 8):
        reported.record(step)
        reported.evaluation(step, loss=1 / step).events[-1]["split"] = "photos"
        reported.evaluation(step, loss=9.0).events[-1]["split"] = "drawings"
    text = page(write(tmp_path / "run", reported.finish(8)))
    loss = figures(text)["Loss"]
    assert points(loss, "held-out, photos, model") == [(4, 1 / 4), (8, 1 / 8)]
    assert points(loss, "held-out, drawings, model") == [(4, 9.0), (8, 9.0)]
    assert "loss, drawings, model" in texts(text)


def test_phases_are_those_of_the_attribution(tmp_path: Path, recorded_run: Any, write: Any, figures: Any) -> None:
    found = figures(page(write(tmp_path / "run", complete(recorded_run))))["Where the time of a step goes"]
    milliseconds = {trace["name"]: trace["x"][0] for trace in found["data"]}
    assert milliseconds["data wait"] == pytest.approx(1)
    assert milliseconds["host"] == pytest.approx(9)
    assert len(milliseconds) == 9
    thin = recorded_run().start().record(1, logging_seconds=1e-6).finish(1)
    found = figures(page(write(tmp_path / "thin", thin)))["Where the time of a step goes"]
    assert "logging" not in {trace["name"] for trace in found["data"]}


def test_a_histogram_has_bins_for_its_records_or_is_none(
    tmp_path: Path, recorded_run: Any, write: Any, figures: Any
) -> None:
    counts = figures(page(write(tmp_path / "run", complete(recorded_run))))["How long steps took"]["data"][0]["y"]
    assert sum(counts) == 40
    assert len(counts) == 2 + 6  # closed by a zero at both ends
    few = recorded_run().start()
    for step in range(1, 9):
        few.record(step)
    assert "How long steps took" not in figures(page(write(tmp_path / "few", few.finish(8))))


def test_the_headline_is_the_summary_and_the_evaluations(tmp_path: Path, recorded_run: Any, write: Any) -> None:
    message = texts(page(write(tmp_path / "run", complete(recorded_run))))
    assert "status completed" in message
    assert "best top-1 accuracy 94.00 % model weights, after step 40" in message
    assert "last top-1 accuracy 84.00 % model 94.00 %, ema 84.00 %" in message
    assert "training time 4.0 s 5.5 s in all" in message
    assert "peak memory 3.0 MiB" in message
    assert "run 2 0 0 0 yes" in message


def test_the_best_is_told_only_where_the_records_say_which_way(tmp_path: Path, recorded_run: Any, write: Any) -> None:
    reported = recorded_run().start()
    for number, score in enumerate((0.2, 0.9, 0.8), start=1):
        reported.record(number).evaluation(number, loss=2.0 - score + 1e-4, f1=score, edits=score)
    reported.finish(3)
    ways = {"device": "cpu", "higher_is_better": {"loss": False, "f1": True, "edits": False}}
    message = texts(page(write(tmp_path / "run", reported, plan=ways)))
    assert "f1, model 0.8 0.9 2" in message
    assert "edits, model 0.8 0.2 1" in message
    old = texts(page(write(tmp_path / "old", reported)))
    assert "loss, model 1.2 1.1 2" in old
    assert "f1, model 0.8 edits, model 0.8" in " ".join(old.split())


def test_a_failed_run_says_why(tmp_path: Path, recorded_run: Any, write: Any) -> None:
    reported = (
        recorded_run().start().record(1).tell("incident", 1, incident="nonfinite_loss", message="it was no number")
    )
    reported.finish(1, "failed", message="the loss is no number")
    failed = {"status": "failed", "ledger": None}
    message = texts(page(write(tmp_path / "run", reported, summary=failed)))
    assert "Failed: the loss is no number" in message
    assert "nonfinite_loss: it was no number" in message
    assert "the ledger is counted when the run completes" in message


def test_a_resumed_run_shows_where(tmp_path: Path, recorded_run: Any, write: Any, figures: Any) -> None:
    reported = recorded_run().start().record(5).record(10)
    reported.time += 1000
    reported.tell("resume", 10, checkpoint="step-00000010", resumes=1, world_size=1).start(10).record(15).finish(15)
    found = figures(page(write(tmp_path / "run", reported)))
    assert [shape["x0"] for shape in found["Loss"]["layout"]["shapes"]] == [10]
    launches = found["The run over time"]["data"][0]
    assert len(launches["x"]) == 2
    assert launches["x"] == [3000, 4500]  # ms: what lies between them is no launch


def test_a_run_under_way_tells_what_there_is(tmp_path: Path, recorded_run: Any, write: Any) -> None:
    reported = recorded_run().start().record(5)
    message = texts(page(write(tmp_path / "run", reported, summary=None)))
    assert "No end is recorded" in message
    assert "not evaluated" in message
    # A summary of the launch before says nothing of this one.
    reported = recorded_run().start().record(5).finish(5, "stopped").start(5).record(10)
    message = texts(page(write(tmp_path / "resumed", reported)))
    assert "not finished" in message
    assert "peak memory" not in message
    message = texts(page(write(tmp_path / "new", None, summary=None)))
    assert "The run has not begun" in message


def test_gaps_are_gaps(tmp_path: Path, recorded_run: Any, write: Any, figures: Any, points: Any) -> None:
    reported = recorded_run().start().record(1, loss=3.0).record(2, loss=None).record(3, loss=2.0, grad_norm=None)
    folder = write(tmp_path / "run", reported, summary=None)
    # Not strict JSON.
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({**reported.events[-1], "step": 4, "loss": math.nan}) + "\n")
    assert points(figures(page(folder))["Loss"], "training") == [(1, 3.0), (2, None), (3, 2.0), (4, None)]


def test_damaged_and_missing_files_are_told(tmp_path: Path, recorded_run: Any, write: Any) -> None:
    folder = write(tmp_path / "run", complete(recorded_run))
    (folder / "summary.json").write_text("{")
    (folder / "plan.json").unlink()
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"event": "st')
    assert "summary.json' is damaged" in texts(page(folder))


def test_runs_are_compared(tmp_path: Path, recorded_run: Any, write: Any, figures: Any, points: Any) -> None:
    one = write(tmp_path / "x" / "run", complete(recorded_run))
    recipe = {"task": "image_classification", "seed": 0, "model": {"name": "other"}, "optimizer": {"lr": 0.2}}
    twice = {"throughput_samples_per_second": 300.0, "world_size": 2}
    other = write(tmp_path / "y" / "run", complete(lambda: recorded_run(2)), recipe=recipe, summary=twice)
    text = page(one, other, one, output=tmp_path / "report.html")
    found = figures(text)
    assert [trace["name"] for trace in found["Training loss"]["data"]] == ["x/run", "y/run"]
    assert len(points(found["Training loss"], "y/run")) == 40
    assert len(found["Top-1 accuracy"]["data"]) == 4
    assert points(found["Throughput by number of processes"], "measured") == [(1, 160.0), (2, 300.0)]
    message = texts(text)
    assert "optimizer.lr 0.1 0.2" in message.partition("Where the recipes differ")[2].partition("The whole recipe")[0]
    assert "seed" not in message.partition("Where the recipes differ")[2].partition("The whole recipe")[0]
    assert "93.8%" in message  # 300 / (2 × 160)
    # A column for each run, so that it fits however much is told of one.
    assert message.partition("Outcome of each run")[2].startswith(
        " outcome x/run y/run status completed completed best"
    )
    colours = [trace["line"]["color"] for trace in found["Training loss"]["data"]]
    for trace in found["Top-1 accuracy"]["data"]:
        assert trace["line"]["color"] == colours[trace["name"].startswith("y/run")]
    assert len({(trace["line"]["color"], trace["line"]["dash"]) for trace in found["Top-1 accuracy"]["data"]}) == 4
    assert "<mark>0.2</mark>" in text


def test_forks_are_compared_with_their_parents_from_the_common_step(
    tmp_path: Path, recorded_run: Any, write: Any, figures: Any, points: Any
) -> None:
    paths = []
    for seed, gain in enumerate((1.0, 2.0, 6.0)):
        for name, more, parent in (("parent", 0.0, None), ("fork", gain, {"run_id": f"parent-{seed}", "step": 10})):
            story = recorded_run().start()
            for step in (10, 20, 30):
                score = 80 + seed + (more * step / 30 if step > 10 else 0)
                story.record(step, loss=1.0).evaluation(step, loss=0.5, top1_accuracy=score)
            recipe = {"task": "image_classification", "seed": seed, "optimizer": {"lr": 0.2 if parent else 0.1}}
            paths.append(write(tmp_path / f"{name}-{seed}", story.finish(30), recipe=recipe))
            identity = {"id": f"{name}-{seed}", "has_checkpoint": True, "parent": parent}
            (paths[-1] / "run.json").write_text(json.dumps(identity))
    text = page(*paths, output=tmp_path / "report.html")
    chart = figures(text)["Difference in top-1 accuracy, model (optimizer.lr=0.2)"]
    assert points(chart, "mean") == [(20, 2.0), (30, 3.0)]
    # Student's t of 1, 2 and 6: 3 ± 4.303 · 2.646 / √3.
    assert points(chart, "95 %, low")[-1][1] == pytest.approx(3 - 6.5724, abs=1e-3)
    assert "top-1 accuracy, model 3 30 +3 -3.572 to +9.572" in texts(text)
    alone = page(*paths[:2], output=tmp_path / "alone.html")
    assert points(figures(alone)["Difference in top-1 accuracy, model (optimizer.lr=0.2)"], "difference")[0][0] == 20
    assert "Forks minus" not in texts(page(*paths[::2], output=tmp_path / "parents.html"))


@pytest.fixture
def answered(tmp_path: Path, recorded_run: Any, write: Any) -> Callable[..., Path]:
    """``answered(**changes)``: a run directory whose last evaluation left a matrix, with changes, and examples."""

    def make(**changes: Any) -> Path:
        folder: Path = write(tmp_path / "run", complete(recorded_run))
        (folder / "evaluation").mkdir()
        head = {"classes": ["cat", HOSTILE, "owl"], "split": "validation", "weights": "ema", "step": 40}
        confusion = {**head, "matrix": [[3, 1, 0], [0, 0, 0], [0, 0, 4]], **changes}
        (folder / "evaluation" / "confusion.json").write_text(json.dumps(confusion))
        image = "data:image/png;base64,iVBORw0KGgo="
        wrong = {"image": image, "label": 0, "predicted": 1, "probability": 0.75, "sample": 7, "name": "val/cat/7.png"}
        right = {**wrong, "label": 1, "image": 'x" onerror="alert(1)'}
        unsure = {**wrong, "predicted": -1, "probability": None}
        (folder / "evaluation" / "examples.json").write_text(json.dumps({**head, "examples": [wrong, unsure, right]}))
        return folder

    return make


def test_predictions_come_second_and_mistakes_first(answered: Callable[..., Path]) -> None:
    text = page(answered())
    assert re.findall(r"<h2[^>]*>(.*?)</h2>", text)[:3] == ["Outcome", "Predictions", "Training"]
    assert text.count("<img ") == 2
    message = texts(text).partition("Most confident mistakes")[2]
    assert message.startswith(": actual → predicted, confidence (ema weights, after step 40)")
    assert f"cat → {HOSTILE}, 75% cat → no answer" in message.partition("1 right answers")[0]
    assert "val/cat/7.png: actual cat, predicted" in html.unescape(text)


def test_a_matrix_has_named_axes_and_its_classes_the_worst_first(answered: Any, figures: Any) -> None:
    found = figures(page(answered()))
    matrix = found["Confusion matrix"]
    assert matrix["data"][0]["z"] == [[0.75, 0.25, 0], [None, None, None], [0, 0, 1]]
    assert [[cell[2] for cell in row] for row in matrix["data"][0]["customdata"]] == [[3, 1, 0], [0, 0, 0], [0, 0, 4]]
    titles = [matrix["layout"][axis]["title"]["text"] for axis in ("xaxis", "yaxis")]
    assert titles == ["predicted", "actual"]
    precision, recall = found["Precision and recall by class"]["data"]
    assert [html.unescape(each) for each in precision["customdata"]] == [HOSTILE, "cat", "owl"]
    assert (precision["x"], recall["x"]) == ([0, 100, 100], [0, 75, 100])
    assert "Reliability" not in found


def test_reliability_is_the_bins_of_the_evaluation(answered: Any, figures: Any) -> None:
    bins: list[dict[str, Any]] = [{"samples": 0, "right": 0, "probability": None}] * 8
    bins += [{"samples": 3, "right": 1, "probability": 0.85}, {"samples": 1, "right": 1, "probability": 0.95}]
    text = page(answered(reliability=bins))
    _, answers = figures(text)["Reliability"]["data"]
    assert (answers["x"], answers["y"]) == ([85, 95], [pytest.approx(100 / 3), 100])
    # (3 × (85 - 33.33) + 1 × (100 - 95)) / 4
    assert "Expected calibration error: 40.0 %." in texts(text)


def test_many_classes_are_told_by_their_worst(answered: Any, figures: Any) -> None:
    classes = [f"class {number}" for number in range(101)]
    sparse = {"classes": classes, "matrix": None, "triples": [[at, at, 5] for at in range(100)] + [[0, 100, 3]]}
    text = page(answered(**sparse))
    assert "class 0 class 100 3 37.5%" in texts(text).partition("Most frequent confusions")[2]
    found = figures(text)
    assert "Confusion matrix" not in found
    assert found["Precision and recall by class"]["data"][0]["customdata"][:3] == ["class 100", "class 0", "class 1"]
    assert "The 20 worst of 101 classes" in texts(text)


@pytest.mark.parametrize(
    "changes",
    [
        {"classes": ["a"], "matrix": None, "triples": [[0, 7, 1]]},
        {"classes": ["a"], "matrix": [[1, 2]]},
        {"classes": 3, "matrix": None},
        {"reliability": [{}]},
    ],
)
def test_a_damaged_matrix_is_told(changes: dict[str, Any], answered: Any, figures: Any) -> None:
    text = write_report([answered(**changes)]).path.read_text()
    assert "holds something unexpected" in text
    assert "Confusion matrix" not in figures(text)


def test_runs_without_answers_have_no_such_section(tmp_path: Path, recorded_run: Any, write: Any) -> None:
    assert ">Predictions</h2>" not in page(write(tmp_path / "old", complete(recorded_run)))
    recipe = {"task": "image_classification", "evaluate": {"keep_examples": 0}}
    assert "evaluate.keep_examples=0" in texts(page(write(tmp_path / "off", complete(recorded_run), recipe=recipe)))


def test_what_other_commands_left_is_shown(tmp_path: Path, recorded_run: Any, write: Any, figures: Any) -> None:
    folder = write(tmp_path / "run", complete(recorded_run))
    before = texts(page(folder))
    assert f"paceline doctor {folder} --json" in before
    assert "3.0 MiB 4.0 MiB" in before  # predicted by the run itself
    finding = {"name": "tiny_batch", "severity": "slows", "evidence": HOSTILE, "advice": {"words": "more"}}
    (folder / "doctor.json").write_text(json.dumps({"findings": [finding]}))
    estimate = {"needed_bytes": 5 * 2**20, "peak": {"causes": {"weights": 2**20, "activations": 2**22}}}
    (folder / "estimate.json").write_text(json.dumps(estimate))
    rows = [{"devices": 8, "strategy": "ddp", "samples_per_second": 1234.5, "efficiency": 0.9}]
    (folder / "scale.json").write_text(json.dumps({"rows": rows}))
    text = page(folder)
    message = texts(text)
    assert "tiny_batch slows" in message
    assert "3.0 MiB 5.0 MiB" in message
    assert "1,234.5" in message
    bars = next(figure for title, figure in figures(text).items() if title.startswith("Estimated memory"))
    assert bars["data"][0]["x"] == [1, 4]


def test_a_file_of_another_shape_spoils_its_own_section_only(tmp_path: Path, recorded_run: Any, write: Any) -> None:
    folder = write(tmp_path / "run", complete(recorded_run))
    (folder / "estimate.json").write_text('{"needed_bytes": "many", "peak": {"causes": {"weights": "some"}}}')
    (folder / "doctor.json").write_text('{"findings": 3}')
    (folder / "scale.json").write_text('{"rows": [1, {"efficiency": "good"}]}')
    (folder / "first_batch.json").write_text('{"examples": [{"image": null, "caption": 3, "name": "a"}]}')
    message = texts(write_report([folder]).path.read_text())
    assert message.count("holds something unexpected") == 2
    assert "best top-1 accuracy 94.00 %" in message


def test_no_name_becomes_an_element(tmp_path: Path, recorded_run: Any, write: Any) -> None:
    reported = recorded_run().start().record(1).tell("incident", 1, incident=HOSTILE, message=HOSTILE)
    reported.finish(1, "failed", message=HOSTILE)
    recipe = {"task": HOSTILE, HOSTILE: {"deep": [HOSTILE]}, "model": {"name": HOSTILE}}
    plan = {"device_name": HOSTILE, "reasons": {HOSTILE: HOSTILE}}
    folder = write(tmp_path / "a <b>&c", reported, recipe=recipe, plan=plan)
    (folder / "environment.json").write_text(json.dumps({"host": HOSTILE}))
    other = write(tmp_path / "other", complete(recorded_run))
    for text in (page(folder), page(folder, other, output=tmp_path / "report.html")):
        assert [element for element in ("<img", "<b>") if element in text] == []


def test_many_records_stay_small_and_keep_their_spikes(
    tmp_path: Path, recorded_run: Any, write: Any, figures: Any, points: Any
) -> None:
    reported = recorded_run().start()
    for step in range(1, 20_001):
        reported.record(step, loss=99.0 if step == 12_345 else 1 / step)
    report = write_report([write(tmp_path / "run", reported.finish(20_000))])
    assert report.path.stat().st_size < 3_000_000
    shown = points(figures(report.path.read_text())["Loss"], "training")
    assert (12_345, 99.0) in shown
    assert len(shown) < 4100
    assert all(loss == (99.0 if step == 12_345 else 1 / step) for step, loss in shown)


def test_the_report_at_the_end_does_not_keep_a_hurried_run(tmp_path: Path, recorded_run: Any, write: Any) -> None:
    hurried = {"status": "stopped", "details": {"ending": "signal"}}
    folder = write(tmp_path / "run", recorded_run().start().record(1).finish(1, "stopped"), summary=hurried)
    report_at_the_end(RunDirectory(folder))
    assert (folder / "report.html").is_file()
    (folder / "report.html").unlink()
    with (folder / "events.jsonl").open("a") as file:
        file.write((json.dumps({"event": "x", "step": 1, "time": 0, "more": "x" * 1000}) + "\n") * 9000)
    with pytest.raises(RunDirectoryError, match="paceline report"):
        report_at_the_end(RunDirectory(folder))
    assert not (folder / "report.html").exists()


def test_neither_torch_nor_plotlys_python_is_loaded(tmp_path: Path, recorded_run: Any, write: Any) -> None:
    folder = write(tmp_path / "run", complete(recorded_run))
    program = (
        "import sys; from pathlib import Path; from paceline.reports.html.page import write_report; "
        f"write_report([Path({str(folder)!r})]); assert not {{'torch', 'plotly'}} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
