"""A file that is no recipe is named for what it is, with the commands that take it."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import RecipeError
from paceline.recipe.load import load_recipe


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("notes.txt", b"a line\nand another\n", "is text, not a recipe: train on its folder"),
        ("notes.txt", b'a: b: c\n"', "is text, not a recipe: train on its folder"),
        ("net.pt", b"PK\x03\x04", "is a file of torch.save, not a recipe, and no command reads it"),
        ("net.onnx", b"\x08\x07\x12\x00", "is an ONNX model, not a recipe: `paceline predict` takes it."),
        ("net.safetensors", b"\x02" + bytes(7) + b"{}", "is weights, not a recipe: `paceline predict`, `evaluate` and"),
    ],
)
def test_another_file_is_named_for_what_it_is(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RecipeError) as raised:
        load_recipe(tmp_path / name)
    assert f"{name} {said}" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_ending_of_a_recipe_is_free(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("seed: 7\ndata: {dataset: digits}\n")
    assert load_recipe(tmp_path / "mine.txt").recipe.seed == 7
