"""`paceline explain`: every key and section of the schema, and names that are near one."""

from __future__ import annotations

from typing import Any

import pytest
from calls import Call

from paceline.recipe.layers import field_types, subsection
from paceline.recipe.reference import keys
from paceline.recipe.schema import Recipe


def all_keys(section: type[Any] = Recipe, path: str = "") -> list[str]:
    found = []
    for name in field_types(section):
        inner = subsection(section, name)
        found += all_keys(inner, f"{path}{name}.") if inner else [f"{path}{name}"]
    return found


def test_the_reference_knows_the_keys_of_the_schema() -> None:
    def known(section: type[Any] = Recipe, path: str = "") -> list[str]:
        return [
            name
            for each in keys(section, path)
            for name in (known(each.section, f"{each.key}.") if each.section else [each.key])
        ]

    assert known() == all_keys()


def test_a_key(paceline_here: Call) -> None:
    assert "schedule.name = cosine" in paceline_here("explain", "schedule.period_factor").ended(0).out
    found = paceline_here("explain", "optimizer.momentum", "--json").document
    assert (found["key"], found["default"], found["value"]) == ("optimizer.momentum", "0.9", "number ≥ 0 and < 1")
    assert "sgd" in found["used_with"]
    assert found["example"].startswith("optimizer.momentum=")
    assert "optimizer.name" in found["related"]
    assert paceline_here("explain", "data.split_file", "--json").document["key"] == "data.saved_split"


@pytest.mark.parametrize(
    ("name", "inside"), [("", "model"), ("model", "model.name"), ("data.augment", "data.augment.flip")]
)
def test_a_section_lists_its_keys(paceline_here: Call, name: str, inside: str) -> None:
    done = paceline_here("explain", *[name] * bool(name)).ended(0)
    assert inside in done.out
    assert max(map(len, done.out.splitlines())) <= 120
    found = paceline_here("explain", *[name] * bool(name), "--json").document
    assert found["section"] == name
    assert inside in [each["key"] for each in found["keys"]]
