"""What each command prints and writes: the contract that people's scripts rely on."""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fork_server
import pytest
from calls import Call, command_names, strict_json
from PIL import Image
from safetensors import safe_open

import paceline as package
from paceline.cli.commands import ALIASES, OPEN_GROUPS, listing

SOURCE = str(Path(package.__file__).parents[1])
SUMMARY_KEYS = {
    "status", "step", "epoch", "samples", "world_size", "weights_sha256", "ema_sha256", "metrics", "train_seconds",
    "total_seconds", "throughput_samples_per_second", "data_wait_fraction", "peak_memory_bytes", "parameters", "ledger",
    "resumes",
}  # fmt: skip
STEP_KEYS = {
    "step", "epoch", "samples", "loss", "lr", "grad_norm", "grad_scale", "throughput_samples_per_second",
    "step_seconds", "data_wait_seconds", "forward_seconds", "backward_seconds", "optimizer_seconds", "h2d_seconds",
    "communication_seconds", "ema_seconds", "logging_seconds", "host_seconds",
}  # fmt: skip
EVALUATION_KEYS = {"split", "weights", "samples", "loss", "top1_accuracy", "top5_accuracy"}

IN_ORDER = {
    "Train": "train resume rewind fork watch launch",
    "Use": "evaluate predict export serve report record",
    "Data": "check-data review pack",
    "Before a run": "estimate plan scale",
    "Advise": "doctor find-lr find-batch tune",
    "Verify": "audit verify diff seen conform prove drill",
    "Study": "bench roofline noise-scale sweep-batch landscape formulas",
    "More": "recipes models explain import labs env mlperf completion",
}


def events_of(run_dir: Path) -> list[dict[str, Any]]:
    return [strict_json(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]


def sha256_of_file(path: Path) -> str:
    """The digest that interface.md defines, from the file alone: sorted keys, key bytes, tensor bytes."""
    digest = hashlib.sha256()
    with safe_open(path, framework="numpy") as tensors:
        for key in sorted(tensors.keys()):
            digest.update(key.encode())
            digest.update(tensors.get_tensor(key).tobytes())
    return digest.hexdigest()


# ------------------------------------------------------------------------------------------------------- help


@pytest.mark.parametrize("words", [("noise-scale", "digits"), ("find-batch", "digits", "--processes", "1")])
def test_what_starts_its_ranks_itself_says_so(
    paceline_here: Call, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    said = " ".join(paceline_here(words[0], "--help").out.split())
    assert "not under torchrun" in said
    assert "Leave it out under torchrun" not in said
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert "run it alone, with --processes N" in " ".join(paceline_here(*words).refused().err.split())


@pytest.mark.parametrize(
    "name",
    [
        *sorted({*command_names()} - {"launch", "labs"}),
        *("launch slurm", "launch torchrun", "launch kubernetes"),
        *("labs list", "labs start", "labs check", "labs slides", "labs grade"),
    ],
)
def test_every_command_speaks_json(paceline_here: Call, name: str) -> None:
    assert "--json" in paceline_here(*name.split(), "--help").out


def test_help_lists_the_groups_and_help_all_every_command(paceline_here: Call) -> None:
    short, everything = (" ".join(paceline_here(*words).out.split()) for words in (("--help",), ("help", "all")))
    listed = listing()
    assert {heading: " ".join(commands) for heading, commands in listed.items()} == IN_ORDER
    assert list(listed) == list(IN_ORDER)
    for group, commands in listed.items():
        for name, line in commands.items():
            assert f"{name} {line}" in everything
            assert (f"{name} {line}" in short) == (group in OPEN_GROUPS)
        assert group in OPEN_GROUPS or f"{group} {', '.join(commands)}" in short
    assert paceline_here("help").out == paceline_here("--help").out


@pytest.mark.parametrize(("old", "new"), ALIASES.items())
def test_old_names_work_and_are_not_listed(paceline_here: Call, old: str, new: tuple[str, ...]) -> None:
    assert paceline_here(old, "--help").out == paceline_here(*new, "--help").out
    assert paceline_here("help", old).out.startswith(f"Usage: paceline {new[0]}")
    assert f" {old} " not in paceline_here("help", "all").out


def test_version(paceline_here: Call) -> None:
    assert paceline_here("--version").out == f"paceline, version {package.__version__}\n"


@pytest.mark.real_processes
@pytest.mark.everyday
def test_help_loads_no_torch_and_is_there_at_once(paceline: Call) -> None:
    def used_seconds(do: Callable[[], Any]) -> float:
        # Of the processor: the clock on the wall also counts what else the machine does.
        started = resource.getrusage(resource.RUSAGE_CHILDREN)
        do()
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        return ended.ru_utime + ended.ru_stime - started.ru_utime - started.ru_stime

    bare, seconds = [], []
    for _ in range(5):
        bare.append(used_seconds(lambda: subprocess.run([sys.executable, "-c", "pass"], check=True)))
        seconds.append(used_seconds(lambda: paceline("--help")))
    assert paceline("--help").code == 0
    traced = paceline("--help", interpreter=("-X", "importtime"))
    imported = {line.rpartition("|")[2].strip() for line in traced.err.splitlines()}
    assert "paceline.cli.main" in imported
    assert not imported & {"torch", "numpy", "pydantic", "timm", "torchvision", "rich"}
    # Of a machine as it is just now; torch alone would be a hundred times a bare interpreter.
    assert min(seconds) < max(0.2, 12 * min(bare))


@pytest.mark.everyday
@pytest.mark.parametrize("arguments", [("recipes", "show", "digits"), ("audit", "nowhere"), ("report", "nowhere")])
def test_what_needs_no_torch_loads_none(paceline: Call, arguments: tuple[str, ...]) -> None:
    traced = paceline(*arguments, interpreter=("-X", "importtime"))
    assert not re.search(r"\|\s+torch$", traced.err, re.MULTILINE)


# --------------------------------------------------------------------------------------------- what is there


def test_recipes(paceline_here: Call) -> None:
    reported, as_json = paceline_here("recipes"), paceline_here("recipes", "--json")
    rows = as_json.document
    assert {"name", "task", "description"} == set(rows[0])
    assert {"digits", "image_folder"} <= {row["name"] for row in rows}
    for row in rows:
        assert row["name"] in reported.out
        assert row["description"]


def test_a_recipe_shown_can_be_saved_and_trained(paceline_here: Call, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(paceline_here("recipes", "show", "digits").out)
    resolved = paceline_here("recipes", "show", "digits", "--json").document
    assert paceline_here("train", "mine.yaml", "--plan-only", "--json").document["recipe"] == resolved
    assert resolved["data"]["dataset"] == "digits"


def test_models(paceline_here: Call) -> None:
    names = paceline_here("models", "resnet5*", "--json").document
    assert "resnet50" in names
    assert all(name.startswith("resnet5") for name in names)
    assert paceline_here("models", "resnet5*").out.split() == names
    everything = paceline_here("models").out.split()
    assert {"small_resnet", "vit_base_patch16_224", "torchvision:resnet18"} <= set(everything)


def test_environment(paceline_here: Call) -> None:
    document = paceline_here("env", "--json").document
    assert document["versions"]["torch"]
    assert set(document["devices"]) == {"cpu", "cuda", "mps", "xpu"}
    assert all(document["devices"].values())  # what is not there says why
    assert document["jpeg_decoder"].startswith("compiled, with ") or "is not available (" in document["jpeg_decoder"]
    assert document["backends"]["pytorch"] == "available"
    assert document["backends"]["dali"] == "available" or "pip install" in document["backends"]["dali"]
    assert "devices" in paceline_here("env").ended(0).out


# ----------------------------------------------------------------------------------------------- what a run is


def test_the_run_directory_holds_what_is_promised(finished: Path) -> None:
    names = {path.name for path in finished.iterdir()}
    promised = ("recipe.yaml", "plan.json", "environment.json", "events.jsonl", "checkpoints", "summary.json", "ledger")
    assert names >= set(promised)
    assert not [name for name in names if name.endswith(".tmp")]
    assert (finished / "checkpoints" / "step-00000006" / "manifest.json").is_file()
    best = strict_json((finished / "checkpoints" / "best.json").read_text())
    assert (finished / "checkpoints" / f"step-{best['step']:08d}").is_dir()


def test_summary(finished: Path) -> None:
    summary = strict_json((finished / "summary.json").read_text())
    assert summary.keys() >= SUMMARY_KEYS
    assert (summary["status"], summary["step"], summary["epoch"], summary["samples"]) == ("completed", 6, 1, 768)
    assert summary["ledger"] == {"epochs_complete": 0, "duplicates": 0, "missing": 0, "broken": 0}
    assert summary["metrics"].keys() >= {"top1_accuracy", "loss", "best", "last"}
    assert summary["metrics"]["last"].keys() == {"model", "ema"}
    assert 0 <= summary["metrics"]["top1_accuracy"] <= 100
    assert summary["peak_memory_bytes"] > 10_000_000
    assert summary["total_seconds"] > summary["train_seconds"] > 0


def test_plan(finished: Path) -> None:
    plan = strict_json((finished / "plan.json").read_text())
    assert (plan["global_batch_size"], plan["steps_per_epoch"], plan["total_steps"]) == (128, 12, 6)
    assert plan["steps_per_epoch"] == -(-plan["train_samples"] // 128)
    assert (plan["evaluate_every_steps"], plan["checkpoint_every_steps"], plan["log_every_steps"]) == (3, 2, 2)
    assert plan["parameters"] == strict_json((finished / "summary.json").read_text())["parameters"]
    assert plan["learning_rates"][0].keys() == {"step", "learning_rate", "phase"}
    for name in ("data.backend", "batch.micro_size", "evaluate.batch_size"):
        assert plan["reasons"][name]


def test_events(finished: Path) -> None:
    events = events_of(finished)
    steps = [event for event in events if event["event"] == "step"]
    assert [event["step"] for event in steps] == [2, 4, 6]
    assert [event["samples"] for event in steps] == [256, 512, 768]
    for event in steps:
        assert event.keys() >= STEP_KEYS
    evaluations = [event for event in events if event["event"] == "evaluation"]
    assert [(event["step"], event["weights"]) for event in evaluations] == [
        (3, "model"),
        (3, "ema"),
        (6, "model"),
        (6, "ema"),
    ]
    for event in evaluations:
        assert event.keys() >= EVALUATION_KEYS
        assert (event["split"], event["samples"]) == ("validation", 359)
    assert [event["step"] for event in events if event["event"] == "checkpoint"][-1] == 6
    assert (events[0]["event"], events[-1]["event"]) == ("start", "finish")
    assert [event["step"] for event in events] == sorted(event["step"] for event in events)


@pytest.mark.parametrize("weights", ["model", "ema"])
def test_the_digest_can_be_recomputed_by_anyone(finished: Path, weights: str) -> None:
    summary = strict_json((finished / "summary.json").read_text())
    digest = sha256_of_file(finished / "checkpoints" / "step-00000006" / f"{weights}.safetensors")
    assert digest == summary["weights_sha256" if weights == "model" else "ema_sha256"]


def test_environment_of_a_run(finished: Path) -> None:
    facts = strict_json((finished / "environment.json").read_text())
    assert facts.keys() >= {"versions", "python", "host", "cpu", "git", "command", "torch", "device", "world_size"}
    assert "train digits" in facts["command"]


# ---------------------------------------------------------------------------------------------------- commands


@pytest.mark.real_processes
@pytest.mark.everyday
def test_train_says_what_it_did(paceline: Call, tiny: tuple[str, ...], finished: Path, tmp_path: Path) -> None:
    """Not on a terminal: plain lines on standard output, warnings on standard error; the run directory is made."""
    done = paceline("train", "digits", *tiny)
    assert done.code == 0
    assert re.fullmatch(r"paceline: warning: No better than chance .* the run is short \(6 steps\); .*\n", done.err)
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert run_dir.name.startswith("digits-")
    assert "Completed after 6 steps" in done.out
    metrics = summary_of(run_dir)["metrics"]
    assert re.search(rf"held-out loss +{metrics['loss']:.4g} \({metrics['weights']} weights\)\n", done.out)
    assert f"paceline evaluate {run_dir.relative_to(tmp_path)}" in done.out
    assert "\x1b" not in done.out
    assert summary_of(run_dir)["weights_sha256"] == summary_of(finished)["weights_sha256"]


def summary_of(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = strict_json((run_dir / "summary.json").read_text())
    return found


def test_what_comes_next_is_no_evaluation_of_nothing(paceline_here: Call, tiny: tuple[str, ...]) -> None:
    words = (*tiny, "data.validation_fraction=0.0", "train.duration=1 steps", "evaluate=null")
    done = paceline_here("train", "digits", *words, "--run-dir", "run").ended(0)
    assert "paceline audit run" in done.out
    assert "paceline evaluate" not in done.out


def test_train_as_json(
    paceline: Call, paceline_here: Call, tiny: tuple[str, ...], finished: Path, tmp_path: Path
) -> None:
    """Progress goes to standard error, so that standard output is one document."""
    done = paceline("train", "digits", *tiny, "--run-dir", "run", "--json")
    document = done.document
    assert done.code == 0
    assert document.keys() == {"run_dir", *summary_of(tmp_path / "run")}
    assert document["run_dir"] == "run"
    assert document["weights_sha256"] == summary_of(finished)["weights_sha256"]
    again = paceline_here("train", "digits", *tiny, "--run-dir", "run", "--json")
    assert (again.code, again.document["weights_sha256"]) == (0, document["weights_sha256"])


def test_the_plan_for_a_cluster_needs_no_cluster(paceline_here: Call, tmp_path: Path) -> None:
    arguments = ("train", "digits", "batch.global_size=640", "--plan-only", "--processes", "64")
    reported, as_json = paceline_here(*arguments), paceline_here(*arguments, "--json")
    plan = as_json.document["plan"]
    assert (plan["world_size"], plan["micro_batch_size"], plan["logical_ranks"]) == (64, 10, 64)
    assert plan["strategy"] == "ddp"
    assert (reported.code, reported.err) == (0, "")
    assert "640 = 64 processes x 1 micro-batch x 10 samples" in reported.out
    assert list(tmp_path.iterdir()) == []


def test_evaluate(paceline_here: Call, finished: Path, tmp_path: Path) -> None:
    answer = paceline_here("evaluate", finished, "--json").document
    last = summary_of(finished)["metrics"]["last"]
    assert (answer["weights"], answer["samples"]) == ("ema", 359)
    assert answer["top1_accuracy"] == last["ema"]["top1_accuracy"]
    assert answer["top1_correct"] == round(answer["top1_accuracy"] * 359 / 100)
    model = paceline_here("evaluate", finished, "--json", "--weights", "model").document
    assert model["top1_accuracy"] == last["model"]["top1_accuracy"]
    checkpoint = finished / "checkpoints" / "step-00000006"
    for target in (checkpoint, checkpoint / "ema.safetensors"):
        assert paceline_here("evaluate", target, "--json").document == answer
    reported = paceline_here("evaluate", finished)
    assert (reported.code, reported.err) == (0, "")
    assert f"{answer['top1_accuracy']:.2f} %" in reported.out


def test_evaluate_by_class(paceline_here: Call, finished: Path) -> None:
    answer = paceline_here("evaluate", finished, "--per-class", "--json").document
    classes = answer["per_class"]
    assert sum(each["count"] for each in classes) == 359
    right = sum(each["recall"] * each["count"] / 100 for each in classes)
    assert round(right) == answer["top1_correct"]
    assert answer["mean"]["f1"] == pytest.approx(sum(each["f1"] for each in classes) / len(classes))
    reported = paceline_here("evaluate", finished, "--per-class")
    assert (reported.code, reported.err) == (0, "")
    first = [line.split()[0] for line in reported.out.splitlines() if line.strip()]
    rows = [each for each in first if each in {known["class"] for known in classes}]
    assert rows == [each["class"] for each in classes]
    assert f" {classes[0]['f1']:.0f} %" in reported.out  # of few samples


def test_evaluate_of_few_samples_has_no_decimals(paceline_here: Call, finished: Path) -> None:
    few = ("evaluate", finished, "data.validation_fraction=0.05")
    answer = paceline_here(*few, "--json").document
    assert answer["samples"] < 100
    assert f"  {answer['top1_accuracy']:.0f} %" in paceline_here(*few).out


def test_evaluate_the_best(paceline_here: Call, finished: Path) -> None:
    best = strict_json((finished / "checkpoints" / "best.json").read_text())
    done = paceline_here("evaluate", finished, "--best", "--weights", best["weights"], "--json")
    assert done.document[best["metric"]] == best["value"]


def test_evaluate_at_several_sizes(paceline_here: Call, finished: Path, tiny: tuple[str, ...], tmp_path: Path) -> None:
    assert paceline_here("train", "digits", *tiny, "data.holdout_fraction=0.1", "--run-dir", "run").code == 0
    reported = paceline_here("evaluate", "run", "--sizes", "8,12,16")
    assert (reported.code, reported.err) == (0, "")
    assert "on 143 training images that were held out" in reported.out
    document = paceline_here("evaluate", "run", "--sizes", "8,12,16", "--json").document
    assert [row["size"] for row in document["sizes"]] == [8, 12, 16]
    assert f"best by top1_accuracy: data.evaluation_size={document['best_size']}" in reported.out
    for row in document["sizes"]:
        assert f"{row['top1_accuracy']:.2f} %" in reported.out
    on_validation = paceline_here("evaluate", finished, "--sizes", "8,12", "--on", "validation")
    assert "on 359 validation images" in on_validation.out
    assert "note: a size chosen on the validation images is fitted to them" in on_validation.out


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_predictions_file(paceline_here: Call, finished: Path, tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"predictions.{suffix}"
    file.write_text("before")
    os.link(file, tmp_path / "before")
    answer = paceline_here("evaluate", finished, "--json", "--predictions", file).document
    lines = file.read_text().splitlines()
    if suffix == "csv":
        assert lines.pop(0) == "id,sample,prediction,probability,target,prediction_class,target_class"
        pairs = [line.split(",")[2:5:2] for line in lines]
    else:
        rows = [strict_json(line) for line in lines]
        names = {"prediction_class", "target_class"}
        assert rows[0].keys() == {"id", "sample", "prediction", "probability", "target", *names}
        assert all(str(row["target"]) == row["target_class"] for row in rows)  # the classes of digits
        pairs = [[row["prediction"], row["target"]] for row in rows]
    assert len(pairs) == 359
    assert (tmp_path / "before").read_text() == "before", "a file appears when it is complete"
    assert sum(remaining == right for remaining, right in pairs) == answer["top1_correct"]


def test_predict(paceline_here: Call, finished: Path, tmp_path: Path, write_images: Call) -> None:
    write_images(tmp_path / "photos", 3)
    rows = paceline_here("predict", finished, "photos", "--json").document
    assert [row["path"] for row in rows] == [f"photos/{number}.png" for number in range(3)]
    for row in rows:
        assert len(row["labels"]) == len(row["probabilities"]) == 3
        assert row["probabilities"] == sorted(row["probabilities"], reverse=True)
        assert set(row["labels"]) <= {str(digit) for digit in range(10)}
    everything = paceline_here("predict", finished, "photos/1.png", "--top-k", "99", "--json").document
    assert sum(everything[0]["probabilities"]) == pytest.approx(1)
    reported = paceline_here("predict", finished, "photos")
    assert (reported.code, reported.err, len(reported.out.splitlines())) == (0, "", 3)


def test_predict_reports_what_it_leaves_out(
    paceline_here: Call, finished: Path, tmp_path: Path, write_images: Call
) -> None:
    photos = write_images(tmp_path / "photos", 2)
    (photos / "1.png").rename(os.fsdecode(os.fsencode(photos) + b"/caf\xe9.png"))
    (photos / "notes.md").touch()
    done = paceline_here("predict", finished, "photos", "--output", "answers.csv", "--json")
    assert (done.code, done.err.count("\n")) == (0, 1)
    assert "1 left out ('photos/notes.md')" in done.err
    assert done.document["left_out"] == [done.err.removeprefix("note: ").rstrip()]
    assert "\nphotos/caf\\udce9.png,1," in (tmp_path / "answers.csv").read_text(encoding="utf-8")
    reported = paceline_here("predict", finished, "photos")
    assert (reported.code, reported.err) == (0, done.err)
    os.mkfifo(tmp_path / "pipe.png")
    refused = paceline_here("predict", finished, "pipe.png")
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert "'pipe.png' is a named pipe" in refused.err


def test_a_run_in_parts(paceline_here: Call, tmp_path: Path, tiny: tuple[str, ...], finished: Path) -> None:
    command = ("train", "digits", *tiny, "--run-dir", "run")
    part = paceline_here(*command, "--until", "3 steps").ended(75)
    assert "Stopped after 3 steps" in part.out
    assert "To resume: paceline resume run\n" in part.out
    stopped = strict_json((tmp_path / "run" / "summary.json").read_text())
    assert (stopped["status"], stopped["step"], stopped["details"]["ending"]) == ("stopped", 3, "until")
    assert paceline_here(*command, "--until", "3 steps").code == 75  # there already
    complete = paceline_here(*command)
    assert complete.code == 0
    assert "the run is short (6 steps)" in complete.err
    ended, undisturbed = (strict_json((each / "summary.json").read_text()) for each in (tmp_path / "run", finished))
    assert ended["weights_sha256"] == undisturbed["weights_sha256"]
    message = "train.until: found 3, but a duration is a number with a unit"
    assert paceline_here(*command, "--until", "3").refused(message).err.count("\n") == 1


def test_what_comes_next_works_for_code_of_ones_own(paceline: Call, tmp_path: Path, tiny: tuple[str, ...]) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n\n"
        "def net(num_classes, in_channels):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64 * in_channels, num_classes))\n"
    )
    done = paceline("train", "digits", *tiny[1:], "model={name: mine:net}", "--run-dir", "run").ended(0)
    Image.new("L", (8, 8)).save(tmp_path / "photo.jpg")
    commands = [line for line in done.out[done.out.index("Next:\n") :].splitlines() if "paceline " in line]
    assert [line.split()[1] for line in commands] == ["predict", "evaluate", "export", "audit"]
    for command in commands:
        assert paceline(*command.partition("paceline ")[2].split()).code == 0, command


def _left(*arguments: str, folder: Path, lines: int = 0) -> tuple[int, str, str]:
    """Exit code and standard error of `paceline … | head -LINES`, and what is read; 0: gone before the first word."""
    reader, writer = os.pipe()
    if not lines:
        os.close(reader)
    with fork_server.Popen(
        [sys.executable, "-m", "paceline", *arguments],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={"PYTHONPATH": SOURCE, "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
    ) as process:
        os.close(writer)
        read = ""
        if lines:
            with os.fdopen(reader, buffering=1) as output:
                read = "".join(output.readline() for _ in range(lines))
        _, reported = process.communicate(timeout=120)
    return process.returncode, reported, read


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    assert _left("models", folder=tmp_path, lines=1) == (0, "", "small_resnet\n")
    assert _left("doctor", "digits", folder=tmp_path)[0] == 0


def test_a_verdict_that_nobody_reads_is_no_other(finished: Path, tmp_path: Path) -> None:
    """`paceline audit … | true` ends with what was found, as a gate under `pipefail` relies on."""
    shutil.copytree(finished, tmp_path / "run")
    [ledger] = tmp_path.glob("run/ledger/*.ids")
    for content, code in ((ledger.read_bytes(), 0), (ledger.read_bytes()[:8] * 2 + ledger.read_bytes()[16:], 1)):
        ledger.write_bytes(content)
        assert _left("audit", "run", folder=tmp_path) == (code, "", "")


@pytest.mark.everyday
def test_a_run_goes_on_when_its_reader_leaves(tiny: tuple[str, ...], tmp_path: Path) -> None:
    """`paceline train … | true` trains to its end, and ends with the exit code that it would have had."""
    command = ("train", "digits", *tiny, "train.until=2 steps", "--run-dir", "run")
    code, reported, _ = _left(*command, folder=tmp_path)
    assert code == 75, reported
    assert reported == "paceline: progress is no longer shown (Broken pipe); the run continues.\n"
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "stopped"


# ------------------------------------------------------------------------------------------------------ Python


def test_public_names_can_be_had() -> None:
    for name in dir(package):
        assert getattr(package, name) is not None
    assert package.__all__ == dir(package)
    with pytest.raises(AttributeError, match="no_such_name"):
        package.no_such_name  # noqa: B018  # the access is the test


def test_importing_costs_no_torch() -> None:
    program = "import sys, paceline; assert paceline.PacelineError; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, env={"PYTHONPATH": SOURCE})


def test_training_from_python_is_the_command(finished: Path, tiny: tuple[str, ...], tmp_path: Path) -> None:
    program = f"""
import paceline
result = paceline.train("digits", overrides={list(tiny)!r}, run_dir="runs/mine", quiet=True)
print(result.status, result.summary.weights_sha256, result.metrics["top1_accuracy"], result.run_dir)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={"PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    expected = summary_of(finished)
    words = ["completed", expected["weights_sha256"], str(expected["metrics"]["top1_accuracy"]), "runs/mine"]
    assert done.stdout.split() == words


def test_a_plan_names_the_optimizer_and_what_moves_with_the_step(paceline_here: Call) -> None:
    requested = ("optimizer.clip_norm=1", "schedule.momentum.name=linear", "schedule.momentum.end=0.5")
    plan = paceline_here("train", "digits", "--plan-only", *requested).out
    said = next(line for line in plan.splitlines() if line.strip().startswith("optimizer "))
    assert said.split(maxsplit=1)[1] == (
        "sgd, momentum 0.9 to 0.5 (linear), weight decay 0.0005, gradient's norm at most 1"
    )
