"""The programs of docs/other-trainers.md lose no sample and no bit when they are killed and started again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import resume_of_hosts

PAGE = Path(__file__).parents[2] / "docs" / "other-trainers.md"


def needs(host: str) -> list[pytest.MarkDecorator]:
    package = {"fabric": "lightning", "trainer": "transformers"}.get(host, host)
    needed = [] if host == "plain" else [pytest.mark.needs("accelerate" if host == "trainer" else package, package)]
    return [*needed, pytest.mark.slow, *([] if host == "plain" else [pytest.mark.thorough])]


def test_recipes_change_few_lines() -> None:
    assert sum(line.endswith("# +") for line in PAGE.read_text(encoding="utf-8").splitlines()) <= 40


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=[pytest.mark.thorough, pytest.mark.world_size(2)])])
@pytest.mark.parametrize("host", [pytest.param(host, marks=needs(host)) for host in resume_of_hosts.PAGE])
@pytest.mark.usefixtures("forked_commands")
def test_a_killed_program_resumes_exactly(tmp_path: Path, host: str, processes: int) -> None:
    found: dict[str, Any] = resume_of_hosts.resume(
        tmp_path, host, resume_of_hosts.program_of_page(host), processes=processes, workers=2
    )
    assert found.pop("resumed_at") in ((14, 21) if host == "plain" else (21,))
    assert found == {"repeated": 0, "never_seen": 0, "order_equal": True, "weights_equal": True}
    if host == "plain":
        from paceline.reports.audit import audit_run

        audit = audit_run(tmp_path / "killed" / "ledger")
        assert (audit.passed, audit.steps) == (True, resume_of_hosts.STEPS)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.world_size(2)
@pytest.mark.needs("accelerate")
def test_batches_that_accelerate_would_share_again_are_refused(tmp_path: Path) -> None:
    program = resume_of_hosts.program_of_page("accelerate")
    wrong = "loader = accelerator.prepare(loader)"
    program = "\n".join(wrong if "prepare_data_loader(" in line else line for line in program.splitlines())
    assert wrong in program
    (tmp_path / "mine.py").write_text(resume_of_hosts.MINE)
    (tmp_path / "program.py").write_text(program)
    with pytest.raises(RuntimeError, match="BatchOrder has already shared its batches among 2 ranks"):
        resume_of_hosts.start(tmp_path, "accelerate", "log", processes=2, workers=0)
