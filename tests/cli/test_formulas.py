"""`paceline formulas` and `paceline roofline`: what they print, as text and as JSON, and what they refuse."""

from __future__ import annotations

from calls import Call


def test_all_formulas_are_listed_with_their_sources(paceline_here: Call) -> None:
    listed = paceline_here("formulas", "--json").document
    assert len(listed) > 80
    assert all(each["summary"] and each["source"] for each in listed)
    text = paceline_here("formulas").out
    assert "\nnetwork\n" in text
    assert "  zero_bytes\n" in text


def test_one_is_computed(paceline_here: Call) -> None:
    arguments = ("formulas", "zero-bytes", "parameters=7.5e9", "stage=1", "devices=64")
    document = paceline_here(*arguments, "--json").document
    assert document["value"] == 31_406_250_000
    assert document["arguments"]["devices"] == 64
    assert paceline_here(*arguments).out.splitlines()[-1] == "  = 3.14062e+10"
    assert "must be given" in paceline_here("formulas", "zero_bytes").out


def test_a_roofline_is_one_document(paceline_here: Call) -> None:
    words = ("roofline", "synthetic", "model.name=resnet18", "batch.global_size=8", "--device", "v100")
    document = paceline_here(*words, "--json").document
    assert document["device"]["name"] == "v100-16gb"
    assert {each["bound"] for each in document["layers"]} == {"compute", "memory"}
    assert "least time" in paceline_here(*words, "--top", "2").out
