"""Are all formulas offered by name, each with its source, and is what was typed read as meant?"""

from __future__ import annotations

import inspect
from importlib import resources
from types import ModuleType

import pytest

from paceline.errors import PacelineError
from paceline_advisor.formulas.catalogue import _formulas_of, find_formula, formulas, modules, published

# Of the others, most functions belong to a study and are not published formulas.
PUBLISHED = {"critical_batch", "network", "roofline", "scaling"}


@pytest.mark.parametrize(
    "module",
    [each for each in modules() if each.__name__.rpartition(".")[2] in PUBLISHED],
    ids=lambda each: each.__name__,
)
def test_every_public_function_names_its_source(module: ModuleType) -> None:
    names = [
        name
        for name, each in vars(module).items()
        if inspect.isfunction(each) and each.__module__ == module.__name__ and not name.startswith("_")
    ]
    assert names
    assert [name for name in names if "Source:" not in (inspect.getdoc(getattr(module, name)) or "")] == []
    offered = {each.name for each in formulas().values() if each.topic == module.__name__.rpartition(".")[2]}
    assert set(names) <= offered


def test_no_two_formulas_have_one_name() -> None:
    of_modules = [each.name for module in modules() for each in _formulas_of(module)]
    assert sorted([*of_modules, *(each.name for each in published())]) == sorted(formulas())


def test_every_row_of_the_tables_is_offered() -> None:
    text = resources.files("paceline_advisor.formulas").joinpath("published.md").read_text(encoding="utf-8")
    assert text.count("\n| `") == len(published()) > 60
    assert {each.topic for each in published()} == PUBLISHED
    assert all(each.summary and each.source for each in published())


def test_words_become_numbers() -> None:
    assert find_formula("zero_bytes").compute(["parameters=7.5e9", "stage=1", "devices=64"])[1] == 31_406_250_000
    assert find_formula("network.tile-count").compute(["m=1_792", "n=1792", "tile_m=256"]) == (
        {"m": 1792, "n": 1792, "tile_m": 256, "tile_n": 128},
        98,
    )
    assert find_formula("olympic_mean").compute(["values=1,2,6"])[1] == 2
    assert find_formula("linear_as_gemm").compute(["batch=8", "inputs=3", "outputs=5", "phase=wgrad"])[1] == [3, 5, 8]
    kept = find_formula("layer_activation_bytes").compute(
        ["sequence=8", "micro_batch=1", "hidden=4", "heads=1", "tensor_parallel=2", "sequence_parallel=yes"]
    )
    assert kept[1] == 32 * (34 + 10) / 2
    assert find_formula("best_tiling").compute(["m=256", "n=128", "k=8", "multiprocessors=1"])[1]["waves"] == 1


@pytest.mark.parametrize(
    ("name", "typed", "message"),
    [
        ("zero_byte", [], "Did you mean 'zero_bytes'"),
        ("roofline.zero_bytes", [], "there is no formula 'roofline.zero_bytes'"),
        ("zero_bytes", ["parameters=1"], "needs stage: paceline formulas zero_bytes parameters=… stage=…"),
        ("zero_bytes", ["parameter=1", "stage=1"], "has no argument 'parameter'. Did you mean"),
        ("zero_bytes", ["parameters=many", "stage=1"], "parameters=many: 'many' is not a number"),
        ("zero_bytes", ["parameters=1", "stage=1.5"], "stage=1.5: give a whole number"),
        ("zero_bytes", ["parameters=1", "stage=inf"], "stage=inf: 'inf' is not a finite number; give a whole number"),
        ("zero_bytes", ["parameters=1", "stage=7"], "has no value for .*ZeRO has the stages 0, 1, 2 and 3"),
        ("zero_bytes", ["parameters=1", "stage=1", "stage=2"], "stage is given twice"),
        ("zero_bytes", ["7.5e9"], "arguments are written NAME=VALUE"),
        ("intensity", ["flops=1", "bytes_moved=0"], "has no value for flops=1.0, bytes_moved=0.0"),
        ("linear_as_gemm", ["batch=1", "inputs=1", "outputs=1", "phase=back"], "give forward, dgrad or wgrad"),
        ("olympic_mean", ["values=1,x"], "'x' is not a number"),
        (
            "training_days",
            ["parameters=1", "tokens=1", "devices=1", "flops_per_second=1", "recompute=2"],
            "true or false",
        ),
    ],
)
def test_what_is_typed_wrong_is_said_in_a_sentence(name: str, typed: list[str], message: str) -> None:
    with pytest.raises(PacelineError, match=message):
        find_formula(name).compute(typed)
