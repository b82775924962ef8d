"""What people open shows names and does not obey them."""

from __future__ import annotations

import io

import pytest

from paceline.parsing.plain_text import csv_cell, one_line, printable, text_of_cell

HOSTILE = {
    "colour": "\x1b[31mred\x1b[0m",
    "title": "\x1b]0;title\x07",
    "link": "\x1b]8;;http://example.com\x1b\\click\x1b]8;;\x1b\\",
    "C1": "\x9b31mred\x9d0;title\x9c",
    "overwritten": "good\rbad\b\b",
    "reordered": "gnp.\u202egpj.exe\u2066",
    "invisible": "a\u200bb\ufeffc\U000e0041",
    "separators": "one\u2028two\u2029three",
    "no text": "\udcff.png",
}


@pytest.mark.parametrize("name", HOSTILE.values(), ids=list(HOSTILE))
def test_what_a_terminal_would_obey_is_shown(name: str) -> None:
    shown = printable(name)
    assert shown.isprintable()
    assert printable(shown) == shown


@pytest.mark.parametrize(
    "name", ["cat", "größe", "猫", "👩\u200d🚀", "می\u200cخواهم", "C:\\new", "a\u0301", "two\nlines\tof"]
)
def test_other_text_is_left_alone(name: str) -> None:
    assert printable(name) == name


def test_a_name_is_one_line() -> None:
    assert one_line("cat 99 %\nb.png\tdog") == "cat 99 %\\nb.png\\tdog"


@pytest.mark.parametrize("name", ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", "\r=1", "'=1", "''@x"])
def test_a_spreadsheet_does_not_compute_names(name: str) -> None:
    cell = csv_cell(name)
    assert cell == f"'{name}"
    assert text_of_cell(cell) == name


@pytest.mark.parametrize("value", [-1.5, 0, None, "cat", "-1", "+0.5e-3", "'quoted'", "a=b", ""])
def test_other_cells_are_left_alone(value: object) -> None:
    assert csv_cell(value) == value
    if isinstance(value, str):
        assert text_of_cell(value) == value


def test_consoles_escape_what_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.table import Table
    from rich.text import Text

    from paceline.cli.output import open_console

    terminal = io.StringIO()
    monkeypatch.setattr("sys.stdout", terminal)
    console = open_console(markup=False)
    console._force_terminal = True
    table = Table("[red]metric[/red]")
    table.add_row(Text("\x1b]0;title\x07", style="bold"))
    console.print(table)
    console.print("[red]\x9b31mname")
    shown = terminal.getvalue()
    assert "\x1b]0;" not in shown
    assert "\\x1b]0;title" in shown
    assert "[red]metric[/red]" in shown
    assert "[red]\\x9b31mname" in shown
