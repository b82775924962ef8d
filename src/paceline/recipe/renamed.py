"""Recipe keys with a new name: the old name is accepted until version 1.0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.errors import RecipeError

RENAMED = {
    "data.split_file": "data.saved_split",
    "data.augment.learned_on": "data.augment.policy_dataset",
    "data.boxes": "data.detection",
    "data.clicks": "data.recommendation",
}
"""Old dotted key or section: the new one, within the same section."""


def with_new_names(tree: Mapping[str, Any], notices: list[str] | None = None, path: str = "") -> dict[str, Any]:
    """A copy of a layer in which every key has its present name.

    Args:
        tree: Sections and keys, nested.
        notices: Receives one sentence for each old name.
        path: Where in the recipe the tree lies, with a dot at the end.

    Raises:
        RecipeError: If a key is given under both names.
    """
    found: dict[str, Any] = {}
    for key, value in tree.items():
        dotted = f"{path}{key}"
        new = RENAMED.get(dotted, dotted)
        name = key if new == dotted else new.rpartition(".")[2]
        if name != key and name in tree:
            raise RecipeError(f"found '{dotted}' and '{new}', the old and the new name of one key; remove '{dotted}'.")
        if name != key and notices is not None:
            notices.append(f"{dotted} is now called {new}; the old name works until version 1.0")
        holds_renamed = isinstance(value, Mapping) and any(old.startswith(f"{new}.") for old in RENAMED)
        found[name] = with_new_names(value, notices, f"{new}.") if holds_renamed else value
    return found
