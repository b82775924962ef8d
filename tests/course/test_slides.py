"""Make slides from cells: each Markdown cell begins one, and outputs of code are put on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import LabError

pytest.importorskip("nbformat", reason="needs nbformat")

from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from paceline_course.slides import find_marp, slides_of, to_html

PICTURE = "iVBORw0KGgo=\n"
ON = {"tags": ["slide"]}


def test_markdown_begins_a_slide_and_outputs_follow() -> None:
    outputs = [
        new_output("stream", name="stdout", text="\x1b[31ma line\x1b[0m\n" * 40),
        new_output("stream", name="stderr", text="a warning\n"),
        new_output("display_data", {"image/png": PICTURE, "text/plain": "<Figure>"}),
        new_output("display_data", {"text/markdown": "**bold**", "text/plain": "<Markdown>"}),
        new_output("execute_result", {"text/plain": "``` 7 ```"}, execution_count=1),
    ]
    cells = [
        new_code_cell("before = 'the first slide'", metadata=ON, outputs=[new_output("stream", text="lost\n")]),
        new_markdown_cell("# One\n\nword " * 3, metadata=ON),
        new_markdown_cell("only in the notebook"),
        new_code_cell("draw()", metadata=ON, outputs=outputs),
        new_code_cell("other()", outputs=outputs),
        new_markdown_cell("# Two", metadata=ON),
    ]
    text = slides_of(new_notebook(cells=cells), 'A "title": here')
    _, head, first, second = text.split("---\n", 3)
    assert 'title: "A \\"title\\": here"' in head
    assert first.startswith("# One")
    assert "](data:image/png;base64,iVBORw0KGgo=)" in first
    assert first.count("a line") == 11
    assert "…" in first
    assert "**bold**" in first
    assert "~~~~text\n``` 7 ```\n~~~~" in first
    assert not any(word in text for word in ("lost", "\x1b", "a warning", "draw()", "only in", "<Figure>"))
    assert second == "\n# Two\n"


def test_wrapped_lines_are_joined() -> None:
    text = "# One\nwords that\ngo *on*\n\n- an item\n  that too\n- another\n1. first\n\n"
    source = f"{text}| a | b |\n|---|---|\n| 1 | 2 |\n\n```\nx = 1\ny = 2\n```\nend"
    joined = source.replace("that\ngo", "that go").replace("item\n  that", "item that")
    assert joined != source
    assert slides_of(new_notebook(cells=[new_markdown_cell(source, metadata=ON)]), "X").endswith(f"\n{joined}\n")


def test_lab_without_slides() -> None:
    with pytest.raises(LabError, match="no cell of 'X' has the tag slide"):
        slides_of(new_notebook(cells=[new_markdown_cell("# X")]), "X")


def test_missing_marp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LabError, match=r"no program 'marp'; install it with `npm install"):
        find_marp(None)
    with pytest.raises(LabError, match="no program '/nowhere/marp'"):
        find_marp(Path("/nowhere/marp"))


def test_program_that_is_not_marp(tmp_path: Path) -> None:
    program = tmp_path / "marp"
    program.write_text("#!/bin/sh\necho 'what is --config-file?' >&2\nexit 3\n")
    program.chmod(0o755)
    with pytest.raises(LabError, match=r"made no slides \(what is --config-file\?\)"):
        to_html("# One", find_marp(program))
