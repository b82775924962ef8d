"""A command declared as a dataclass: options from its fields, text, JSON and page from its result."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge, Gt, Le
from click.testing import CliRunner
from click.testing import Result as Called

from paceline.cli.derive import click_command
from paceline.command import Log, Output, Shape, command
from paceline.errors import RecipeError
from paceline.pages.page import Table
from paceline.pages.shown import Shown
from paceline.parsing.units import Duration
from paceline_advisor.commands import FindLr


@dataclass(frozen=True)
class Sum:
    value: float
    sizes: tuple[int, ...]
    until: Duration | None
    reached: bool

    def to_json(self) -> Mapping[str, Any]:
        return {"value": self.value, "sizes": list(self.sizes)}

    def __paceline__(self) -> Shown:
        table = Table(columns=("size",), rows=[(size,) for size in self.sizes], caption="Sizes")
        folded = Table(columns=("size",), rows=[("hidden",)], caption="More", folded=True)
        return Shown(
            title="Sum",
            subtitle=f"to {self.until}",
            blocks=[table, folded, {"value": self.value}],
            ok=self.reached or "the target was not reached; give larger --sizes.",
        )


@command("sum", runs=f"{__name__}:add_up")
@dataclass(frozen=True, kw_only=True)
class SumUp:
    """Add sizes.

    Further lines.

    Examples:
      paceline sum mean
      paceline sum median
    """

    kind: Literal["mean", "sum"]
    sizes: Annotated[tuple[int, ...], Ge(1), "Sizes to add."] = (1, 2)
    factor: Annotated[float, Gt(0), Le(10), "Scale."] = 1.0
    until: Duration | None = None
    target: Annotated[int, Shape(required=True, name="--to", metavar="VALUE")]
    quiet: Annotated[bool, "Log nothing."] = False
    output: Output = None


def add_up(requested: SumUp, log: Log) -> Sum:
    print("printed by a user's code")
    if not requested.quiet:
        log("adding")
    value = requested.factor * sum(requested.sizes)
    return Sum(value=value, sizes=requested.sizes, until=requested.until, reached=value >= requested.target)


def call(*words: str) -> Called:
    return CliRunner().invoke(click_command(SumUp), list(words), standalone_mode=False)


def test_help_comes_from_annotations_and_docstring() -> None:
    shown = call("--help").output
    assert "{mean|sum}" in shown
    assert "  paceline sum mean\n    paceline sum median\n" in shown
    for part in ("--sizes", "Sizes to add.", "1,2", "--to VALUE", "0<x<=10", "--json", "required"):
        assert part in shown
    assert click_command(SumUp).get_short_help_str() == "Add sizes."


def test_text_and_notes_go_to_their_streams() -> None:
    done = call("sum", "--to", "5", "--sizes", "4, 3", "--until", "2 epochs")
    assert done.return_value == 0
    assert done.stdout == "Sum: to 2 epochs\n\nSizes\n  size\n  4\n  3\n  value  7.0\n"
    assert done.stderr == "printed by a user's code\nadding\n"


def test_json_is_one_document_and_a_missed_target_is_exit_code_1() -> None:
    done = call("sum", "--to", "9", "--quiet", "--json")
    assert json.loads(done.stdout) == {"value": 3.0, "sizes": [1, 2]}
    assert done.return_value == 1
    assert done.stderr.endswith("paceline: the target was not reached; give larger --sizes.\n")


def test_output_holds_json_and_page(tmp_path: Path) -> None:
    done = call("sum", "--to", "1", "--output", str(tmp_path / "new"))
    assert json.loads((tmp_path / "new" / "sum.json").read_text())["value"] == 3
    assert "hidden" in (tmp_path / "new" / "sum.html").read_text()
    assert done.stdout.endswith(f"written: {tmp_path / 'new' / 'sum.html'}\n")


def test_other_ranks_write_and_refuse_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    for name, value in {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}.items():
        monkeypatch.setenv(name, str(value))
    assert call("sum", "--to", "1", "--output", str(tmp_path / "new")).return_value == 0
    assert not (tmp_path / "new").exists()
    FindLr(recipe="digits", apply=tmp_path)  # on another host it may lie elsewhere
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(RecipeError, match="already"):
        FindLr(recipe="digits", apply=tmp_path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("mode", "--to", "1"), "'mode' is not one of"),
        (("sum",), "target"),
        (("sum", "--to", "1", "--sizes", "2,2"), "names 2 twice"),
        (("sum", "--to", "1", "--sizes", "2,0"), "0 is not in the range x>=1"),
        (("sum", "--to", "1", "--factor", "0"), "0.0 is not in the range"),
        (("sum", "--to", "1", "--factor", "nan"), "nan"),
        (("sum", "--to", "1", "--until", "3 fortnights"), "fortnights"),
    ],
)
def test_wrong_values_are_named(words: tuple[str, ...], message: str) -> None:
    assert message in str(call(*words).exception)
