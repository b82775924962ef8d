"""What `paceline conform` finds in a plain program: nothing in correct ones, and each planted fault by its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline_advisor.commands import Conform
from paceline_advisor.conform.study import ConformReport, conform

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
        return conform(Conform(program=file, processes=tuple({1, processes})), lambda _: None)

    return ask


def failed(report: ConformReport) -> dict[str, str]:
    """Return the checks that failed, with their evidence."""
    return {check.name: check.evidence for check in report.checks if check.verdict == "failed"}


def test_a_correct_program_passes_everything_it_can_be_asked(asked: Callable[..., ConformReport]) -> None:
    report = asked("", 2, random=True)
    assert failed(report) == {}
    assert {check.name for check in report.checks if check.verdict == "not_applicable"} == {"same_batch_on_ranks"}
