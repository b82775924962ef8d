"""`package.module:name` finds the object, also in the current directory, and says what is missing."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.errors import ModelError
from paceline.plugins.references import is_reference, is_same_class, load_reference


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current directory of its own, and no trace of what was imported from it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


REFERENCES = {"module:attribute", "package.module:factory", "_a.b1:c_2"}
OTHERS = {"resnet50", "package.module", "module:", ":name", "a b:c", "a-b:c", "a..b:c", "a:b.c"}
OTHERS |= {"torchvision:resnet18", "transformers:gpt2"}


def test_references_and_other_names() -> None:
    assert set(filter(is_reference, REFERENCES | OTHERS)) == REFERENCES


@pytest.mark.parametrize(
    ("other", "is_same"),
    [
        ("paceline.tasks.old:Tagging", True),
        ("paceline_words:Tagging", True),
        ("paceline.tasks.old:Counting", False),
        ("mine:Tagging", False),
    ],
)
def test_a_class_of_ours_that_moved_is_the_same(other: str, is_same: bool) -> None:
    assert is_same_class("paceline_text.tagging:Tagging", other) == is_same
    assert is_same_class("mine:Tagging", "mine:Tagging")
    assert not is_same_class("mine:Tagging", "yours:Tagging")


def test_modules_that_are_installed_or_lie_in_the_current_directory(here: Path) -> None:
    assert load_reference("math:sqrt", ModelError) is math.sqrt
    (here / "mine_of_this_test.py").write_text("answer = 42\n")
    assert load_reference("mine_of_this_test:answer", ModelError) == 42
    (here / "pack_of_this_test").mkdir()
    (here / "pack_of_this_test" / "__init__.py").touch()
    (here / "pack_of_this_test" / "part.py").write_text("answer = 43\n")
    assert load_reference("pack_of_this_test.part:answer", ModelError) == 43
    for missing, message in {
        "pack_of_this_test.other:answer": r"no module 'pack_of_this_test\.other'",
        "nowhere_at_all:x": f"no module 'nowhere_at_all'.*{here}",
        "math:sqtr": r"'math' has no 'sqtr'\. Did you mean 'sqrt'",
    }.items():
        with pytest.raises(ModelError, match=message):
            load_reference(missing, ModelError)


def test_what_a_module_itself_lacks_is_not_blamed_on_the_reference(here: Path) -> None:
    """The file is there; the import inside it fails, and its own traceback is what helps."""
    (here / "needy_of_this_test.py").write_text("import not_installed_anywhere\n")
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        load_reference("needy_of_this_test:x", ModelError)


def test_a_file_named_like_an_installed_module_is_told_of(here: Path) -> None:
    """The installed one is taken, whatever lies in the current directory, and the user learns why his is not."""
    (here / "colorsys.py").write_text("answer = 44\n")
    assert load_reference("colorsys:rgb_to_hls", ModelError)
    with pytest.raises(ModelError, match=r"colorsys\.py; rename"):
        load_reference("colorsys:answer", ModelError)
