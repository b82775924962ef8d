"""What `paceline conform` finds in a plain program: nothing in correct ones, and each planted fault by its name."""

from __future__ import annotations

import json
import os
import resource
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.utils.data import DataLoader, IterableDataset

import paceline.conform
from paceline.errors import PacelineError
from paceline_advisor.commands import Conform
from paceline_advisor.conform.checks import NotAskedError, ProgramEvidence, values_after_resume, weights_after_resume
from paceline_advisor.conform.description import Description, DescriptionError, read_description
from paceline_advisor.conform.runs import Kill, LaunchedRun, Program
from paceline_advisor.conform.study import ConformReport, conform
from paceline_advisor.conform.trace import Trace, read_trace

HERE = Path(__file__).parent


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ConformReport]:
    """``asked(planted, processes, **description)``: the report on the plain program."""

    def ask(planted: str, processes: int = 1, **keys: Any) -> ConformReport:
        monkeypatch.setenv("PLANTED", planted)
        command = "{python} {here}/plain.py"
        if processes > 1:
            command = "{python} {here}/launch.py {processes} {here}/plain.py"
        lines = {
            "start": command.replace("{here}", str(HERE)),
            "resume": f"{command} --resume".replace("{here}", str(HERE)),
            "epochs": 3,
            "checkpoints": "out/ck*.json",
            "weights": "final.safetensors",
            **keys,
        }
        file = tmp_path / "conform.yaml"
        file.write_text("\n".join(f"{name}: {each!r}" for name, each in lines.items()).replace("True", "true"))
        return conform(Conform(program=file, processes=(processes,)), lambda _: None)

    return ask


def failed(report: ConformReport) -> dict[str, str]:
    """Return the checks that failed, with their evidence."""
    return {check.name: check.evidence for check in report.checks if check.verdict == "failed"}


def test_a_correct_program_passes_everything_it_can_be_asked(asked: Callable[..., ConformReport]) -> None:
    report = asked("", 2, random=True)
    assert failed(report) == {}
    assert {check.verdict for check in report.checks} == {"passed"}


def test_a_kill_in_mid_epoch_names_the_samples_that_are_repeated(asked: Callable[..., ConformReport]) -> None:
    report = asked("restarts-epoch")
    evidence = failed(report)["samples_after_resume"]
    assert "resumed after 5 batches: in epoch 0, 20 repeated (1, 3, 12, 17" in evidence
    (check,) = (check for check in report.checks if check.name == "samples_after_resume")
    assert (check.repeated, check.missing) == (20, 0)
    assert "PACELINE_CONFORM_STOP=" in check.repeat
    assert report.to_json()["checks"][-1].keys() >= {"name", "processes", "verdict", "evidence"}


PLANTED = [
    ("skips-rest", "samples_after_resume"),
    ("skips-batch", "samples_after_resume"),
    ("repeats-batch", "samples_after_resume"),
    ("reshuffled", "samples_after_resume"),
    ("unseeded", "samples_after_resume"),
    ("begins-again", "samples_after_resume"),
    ("one-more-epoch", "samples_after_resume"),
    ("one-epoch-less", "samples_after_resume"),
    ("later-epochs", "order_after_resume"),
    ("no-weights", "weights_after_resume"),
    ("no-momentum", "weights_after_resume"),
    ("no-average", "weights_after_resume"),
    ("rate-restarts", "values_after_resume"),
    ("rate-off-by-one", "values_after_resume"),
    ("in-place", "kill_during_save"),
    ("removes-first", "kill_during_save"),
    ("cannot-resume", "resumes"),
    ("drops", "epoch_samples"),
    ("pads", "epoch_samples"),
    ("replacement", "epoch_samples"),
    ("last-sample", "epoch_samples"),
    ("random-restarts", "random_state"),
    ("same-each-epoch", "random_state"),
    ("loader-process", "random_state"),
    ("fixed-augmentation", "random_state"),
    ("unsharded", "same_batch_on_ranks"),
    ("rank-repeats", "samples_after_resume"),
    ("evaluation-pads", "evaluation_samples"),
    ("evaluation-drops", "evaluation_samples"),
    ("same-on-ranks", "random_state"),
]
SEVERAL = {"unsharded", "rank-repeats", "evaluation-pads", "evaluation-drops", "same-on-ranks"}


@pytest.mark.thorough
@pytest.mark.parametrize(("planted", "check"), PLANTED, ids=[planted for planted, _ in PLANTED])
def test_a_planted_fault_is_named(planted: str, check: str, asked: Callable[..., ConformReport]) -> None:
    found = failed(asked(planted, 2 if planted in SEVERAL else 1, random=planted == "fixed-augmentation"))
    assert check in found
    follows = {"order_after_resume", "weights_after_resume", "values_after_resume"}
    assert found.keys() - follows <= {check}, found


CORRECT: dict[str, dict[str, Any]] = {
    "own-seed": {},
    "saved-random": {},
    "saved-order": {},
    "drops-as-described": {"epoch": "drop"},
    "pads-as-described": {"epoch": "pad"},
    "replacement-as-described": {"epoch": "drawn"},
    "stream": {},
    "reads-only": {},
    "reads-skipped": {},
    "in-thread": {"checkpoints": "out/ck-{step}.json", "steps": 48},
    "step-names": {"checkpoints": "out/ck-{step}.json", "steps": 48},
    "epoch-saves": {},
}


@pytest.mark.thorough
@pytest.mark.parametrize("planted", CORRECT)
def test_nothing_is_found_in_a_correct_variant(planted: str, asked: Callable[..., ConformReport]) -> None:
    report = asked(planted, **CORRECT[planted])
    assert failed(report) == {}
    assert sum(check.verdict == "passed" for check in report.checks) >= 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stat": "x"}, "unknown key 'stat'. Did you mean 'start'?"),
        ({"epochs": 0}, "epochs: 0 must be a whole number of at least 1"),
        ({"epoch": "twice"}, "epoch: 'twice' must be once, drop, pad or drawn"),
        ({"checkpoints": "ck-{step}.pt"}, "so steps is needed"),
        ({"checkpoints": "../ck.pt"}, "must be relative to the working directory"),
        ({"resume": "{python} x --nproc {processes}"}, "{processes} must be in both start and resume"),
        ({"start": "python 'x"}, "is not a command"),
    ],
)
def test_a_wrong_description_is_refused_in_one_sentence(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    keys = {"start": "{python} x", "resume": "{python} x", "epochs": 3, "checkpoints": "ck.pt", **change}
    file = tmp_path / "program.py"
    file.write_text(f"raise SystemExit('not run')\nCONFORM = {keys!r}\n")
    with pytest.raises(DescriptionError) as error:
        read_description(file)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", ["dict(start='x')", "{'start': f'{x}'}", "{[]: 1}"])
def test_a_computed_description_is_refused(value: str, tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(f"CONFORM = {value}\n")
    with pytest.raises(DescriptionError, match="is computed, and no code of it is run; write a dict"):
        read_description(file)


def test_a_description_may_have_an_annotation_and_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    keys = {"start": "x", "resume": "x", "epochs": 1, "checkpoints": "ck.pt"}
    file.write_text(f"CONFORM: dict[str, object] = {keys!r}\n", encoding="utf-8-sig")
    assert read_description(file)[0].checkpoints == "ck.pt"


def test_numbers_that_are_not_finite_in_both_runs_are_the_same() -> None:
    first, other = Trace(), Trace()
    first.values["loss"], other.values["loss"] = ({1: 1.0, 2: number} for number in (float("nan"), float("nan")))
    runs = [LaunchedRun(code=0, message="", trace=trace, folder=HERE, shown="") for trace in (first, other)]
    evidence = ProgramEvidence(
        description=Description(start="x", resume="x", epochs=1, checkpoints="ck"),
        processes=1,
        first=runs[0],
        second=runs[1],
        kills=(Kill(moment="", before=runs[0], resumed=runs[1]),),
        weights=lambda run: {"w": np.array([float("nan")])},
    )
    assert values_after_resume(evidence).verdict == "passed"
    with pytest.raises(NotAskedError, match="not finite numbers"):
        weights_after_resume(evidence)
    other.values["loss"][1] = float("nan")
    assert values_after_resume(evidence).verdict == "failed"


def test_reads_of_another_rank_while_a_save_is_unseen_do_not_count_as_before_it(tmp_path: Path) -> None:
    lines = {"0-1": ("used", "saved"), "1-2": ("read",)}
    times = {"used": 1, "read": 2, "saved": 3}
    for name, kinds in lines.items():
        entries = [
            {"t": times[kind], "e": kind, "role": "train", "ids": [0], "digest": "", "draws": {}, "worker": False}
            for kind in kinds
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
    trace = read_trace(tmp_path)
    assert trace.save_times[0] < trace.training_reads[0].t


def test_a_program_that_fails_undisturbed_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(
        "CONFORM = {'start': '{python} -c 1/0', 'resume': '{python} -c 1', 'epochs': 1, 'checkpoints': 'ck.pt'}\n"
    )
    with pytest.raises(PacelineError, match=r"fails undisturbed .*ZeroDivisionError") as error:
        conform(Conform(program=file), lambda _: None)
    assert error.value.exit_code == 2


@pytest.mark.parametrize(("code", "message"), [("exit(3)", "no error output"), ("exit('x'*9999)", "x" * 300)])
def test_the_error_of_a_program_is_short(code: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    keys = {"start": shlex.join(["{python}", "-c", code]), "resume": "x", "epochs": 1, "checkpoints": "ck"}
    file.write_text(f"CONFORM = {keys!r}\n")
    with pytest.raises(PacelineError, match=rf"fails undisturbed \(exit code \d\): {message}$"):
        conform(Conform(program=file), lambda _: None)


def test_a_program_that_reports_nothing_cannot_be_asked(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(
        "CONFORM = {'start': '{python} -c 1', 'resume': '{python} -c 1', 'epochs': 1, 'checkpoints': 'ck.pt'}\n"
    )
    report = conform(Conform(program=file), lambda _: None)
    assert {check.verdict for check in report.checks} == {"not_applicable"}
    assert getattr(report.__paceline__().ok, "exit_code", None) == 3


def test_a_literal_that_python_cannot_make_is_refused_in_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text("CONFORM = {[]: 1}\n")
    with pytest.raises(DescriptionError, match="is computed, and no code of it is run"):
        read_description(file)


class SizedStream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))

    def __len__(self) -> int:
        return 5


def test_a_stream_with_a_length_stays_a_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paceline.conform, "_LOG", paceline.conform._Log(str(tmp_path)))
    stream = paceline.conform.watched(SizedStream())
    assert len(stream) == 5
    assert [each.tolist() for each in DataLoader(stream, batch_size=2)] == [[0, 1], [2, 3], [4]]


@pytest.fixture
def program(tmp_path: Path) -> Callable[..., tuple[Program, LaunchedRun]]:
    """``program(weights, python)`` and a run of it, of which only the folder exists."""

    def make(weights: str | None = None, python: Path | None = None) -> tuple[Program, LaunchedRun]:
        keys = {
            "start": "x",
            "resume": "x",
            "epochs": 1,
            "checkpoints": "x",
            **({"weights": weights} if weights else {}),
        }
        (tmp_path / "program.py").write_text(f"CONFORM = {keys!r}\n")
        description, here = read_description(tmp_path / "program.py")
        run = LaunchedRun(code=0, message="", trace=Trace(), folder=tmp_path, shown="")
        python = python or Path(sys.executable)
        return Program(description=description, here=here, python=python, scratch=tmp_path), run

    return make


def test_weights_of_any_precision_are_read(program: Callable[..., Any], tmp_path: Path) -> None:
    half = torch.nn.Parameter(torch.full((3,), 1.5, dtype=torch.bfloat16))
    save_file({"w": half.detach()}, tmp_path / "w.safetensors")
    torch.save({"model": {"w": half, "b": torch.ones(1, dtype=torch.float64)}}, tmp_path / "w.pt")
    made, run = program("w.safetensors")
    assert made.weights(run)["w"].tolist() == [1.5] * 3
    made, run = program("w.pt")
    weights = made.weights(run)
    assert weights["model.w"].tolist() == [1.5] * 3
    assert weights["model.b"].dtype.name == "float64"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"path": Path("x")}, "w.pt cannot be read"),
        ([torch.ones(1)], "w.pt has no tensors by name"),
        ({}, "no tensors"),
    ],
)
def test_weights_that_cannot_be_compared_say_why(
    content: Any, message: str, program: Callable[..., Any], tmp_path: Path
) -> None:
    torch.save(content, tmp_path / "w.pt")
    made, run = program("w.pt")
    with pytest.raises(ValueError, match=message):
        made.weights(run)


def test_paceline_is_not_lent_to_an_environment_that_has_it(program: Callable[..., Any], tmp_path: Path) -> None:
    for name, options in (("with", ""), ("without", "-I -S")):
        wrapper = tmp_path / name
        wrapper.write_text(f'#!/bin/sh\nexec {sys.executable} {options} "$@"\n')
        wrapper.chmod(0o755)
    assert program(python=tmp_path / "with")[0]._lent() == {}
    assert str(tmp_path / "lent") in program(python=tmp_path / "without")[0]._lent()["PYTHONPATH"]


def test_a_torn_save_keeps_a_limit_that_the_user_set(tmp_path: Path) -> None:
    code = "from paceline.conform import used\nused([1])\nopen('file', 'wb').write(bytes(100))"
    stop = '{"kind": "used", "at": 1, "tear": 50}'
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PACELINE_CONFORM": str(tmp_path / "told"), "PACELINE_CONFORM_STOP": stop},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, 10**6)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    assert (tmp_path / "file").stat().st_size == 50
