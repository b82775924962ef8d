"""Kinds of data that other packages add to `paceline pack`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paceline.cli.main import run
from paceline.plugins.installed_packages import entry_points

PACKER = """
from dataclasses import dataclass

@dataclass(frozen=True, kw_only=True)
class Sounds:
    '''SOURCE is sounds.'''

    {option}: int = 1
"""


@pytest.mark.parametrize("option", ["quality", "text"])
def test_an_option_of_the_command_or_of_another_packer_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    (tmp_path / "noise.py").write_text(PACKER.format(option=option))
    metadata = tmp_path / "noise-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: noise\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[paceline.packers]\nsounds = noise:Sounds\n")
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("paceline_data.pack", "noise"):  # it asks for packers when it is imported
        monkeypatch.delitem(sys.modules, module, raising=False)
    entry_points.cache_clear()
    assert run(["pack", "--help"]) == 2
    assert f"have the option '{option}'; rename one." in capsys.readouterr().err
    entry_points.cache_clear()
