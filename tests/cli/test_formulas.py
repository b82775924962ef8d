"""`paceline formulas` and `paceline roofline`: what they print, as text and as JSON, and what they refuse."""

from __future__ import annotations

import json

import pytest
from calls import Call


def test_all_formulas_are_listed_with_their_sources(paceline_here: Call) -> None:
    listed = json.loads(paceline_here("formulas", "--json").out)
    assert len(listed) > 80
    assert all(each["summary"] and each["source"] for each in listed)
    text = paceline_here("formulas").out
    assert "\nnetwork\n" in text
    assert "  zero_bytes\n" in text


def test_one_is_computed(paceline_here: Call) -> None:
    arguments = ("formulas", "zero-bytes", "parameters=7.5e9", "stage=1", "devices=64")
    document = json.loads(paceline_here(*arguments, "--json").out)
    assert document["value"] == 31_406_250_000
    assert document["arguments"]["devices"] == 64
    assert paceline_here(*arguments).out.splitlines()[-1] == "  = 3.14062e+10"
    assert "must be given" in paceline_here("formulas", "zero_bytes").out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("formulas", "zero_byte"), "Did you mean 'zero_bytes'"),
        (("formulas", "zero_bytes", "stage=1"), "zero_bytes needs parameters"),
        (("formulas", "zero_bytes", "parameters=nan", "stage=1"), "parameters=nan: 'nan' is no finite number"),
        (("formulas", "zero_bytes", "parameters=1e400", "stage=1"), "'1e400' is no finite number"),
        (("formulas", "olympic_mean", "values=1,inf,3"), "'inf' is no finite number"),
        (("formulas", "zero_bytes", "parameters=1e308", "stage=1"), "the result is too large"),
        (("formulas", "zero_bytes", "parameters=-1", "stage=1"), "parameters=-1: give a number of at least 0"),
        (("formulas", "zero_bytes", "parameters=1", "stage=1", "devices=0"), "devices=0: give a whole number of at"),
        (("formulas", "minutes", "seconds=-3"), "seconds=-3: give a number of at least 0"),
        (("roofline", "synthetic", "--device", "a10"), "device: 'a10' is not known"),
    ],
)
def test_mistakes_are_one_sentence(paceline_here: Call, arguments: tuple[str, ...], said: str) -> None:
    done = paceline_here(*arguments)
    assert done.code == 2
    assert said in done.err
    assert "Traceback" not in done.err
    assert not done.out


def test_a_roofline_is_one_document(paceline_here: Call) -> None:
    words = ("roofline", "synthetic", "model.name=resnet18", "batch.global_size=8", "--device", "v100")
    document = json.loads(paceline_here(*words, "--json").out)
    assert document["device"]["name"] == "v100-16gb"
    assert {each["bound"] for each in document["layers"]} == {"compute", "memory"}
    assert "least ms" in paceline_here(*words, "--top", "2").out
