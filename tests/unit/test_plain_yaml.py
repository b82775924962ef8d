"""A recipe's scalars mean what is written, in a file and on the command line, and hostile YAML and JSON are refused."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from paceline.errors import RecipeError
from paceline.parsing.plain_text import load_json
from paceline.parsing.plain_yaml import load_plain, yaml_line
from paceline.recipe.load import load_recipe, stored_recipe, to_yaml
from paceline.recipe.schema import Recipe

NUMBERLIKE = st.one_of(
    st.from_regex(r"[-+]?[0-9_]{1,6}", fullmatch=True),
    st.from_regex(r"[-+]?[0-9]{0,3}\.[0-9]{0,3}([eE][-+]?[0-9]{1,3})?", fullmatch=True),
    st.from_regex(r"[0-9]{1,3}(:[0-9]{1,2}){1,2}", fullmatch=True),
    st.from_regex(r"[-+]?0[xob][0-9a-f_]{1,4}", fullmatch=True),
    st.from_regex(r"20[0-9]{2}-0[1-9]-1[0-9]", fullmatch=True),
    st.sampled_from(["on", "Off", "YES", "no", "y", "nan", ".nan", ".inf", "-.INF", "=", "1e3", "1e400", "<<", "٣"]),
)


def recipe(folder: Path, text: str, *overrides: str) -> Recipe:
    path = folder / "r.yaml"
    path.write_text(f"data: {{dataset: digits}}\n{text}\n", encoding="utf-8")
    return load_recipe(path, overrides).recipe


def message(folder: Path, text: str, *overrides: str) -> list[object]:
    """What some numbers of a recipe are; nothing where it is refused."""
    try:
        read = recipe(folder, text, *overrides)
    except RecipeError:
        return []
    return [read.batch.global_size, read.optimizer.lr, read.train.label_smoothing]


def as_number(text: str) -> object:
    """What anybody takes a scalar for: None where programs disagree, or it is no number."""
    if re.fullmatch(r"[-+]?0[0-9_]+", text):
        return None
    for read in (lambda: int(text, 0), lambda: float(text)):
        try:
            return read()
        except ValueError:
            continue
    return None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recipes")


@example(written="-_0")
@example(written="0_.1")
@example(written="1_000.5")
@given(written=NUMBERLIKE)
def test_a_number_is_the_one_that_is_written_or_refused(folder: Path, written: str) -> None:
    keys = (("batch", "global_size"), ("optimizer", "lr"), ("train", "label_smoothing"))
    for place, (section, key) in enumerate(keys):
        numbers = message(folder, f"{section}: {{{key}: {written}}}")
        assert numbers == message(folder, "", f"{section}.{key}={written}")
        assert not numbers or numbers[place] == as_number(written)


@given(written=NUMBERLIKE.filter(lambda text: text != "<<"))
def test_a_name_is_the_text_that_is_written(folder: Path, written: str) -> None:
    overrides = [f"data.only_classes=[{written}]", f"model.frozen=[{written}]"]
    for read in (
        recipe(folder, f"model: {{frozen: [{written}]}}", overrides[0]),
        stored_recipe({"data": {"dataset": "digits"}}, "r", overrides),
    ):
        assert list(map(str, read.data.only_classes or ())) == list(read.model.frozen) == [written]
    groups = recipe(folder, f"optimizer: {{groups: {{{written}: {{lr_factor: 2}}}}}}").optimizer.groups
    assert list(groups) == [written]


ODD_BREAKS = ["\r", "\x85", "\u2028", "\u2029", "\ufeff", "\x00", "\x1b", "\x7f", "\x9f", "\xa0", "\u3000"]
TEXT = st.text(st.sampled_from([*"aé:#-0.~ \n", *ODD_BREAKS]), max_size=6)


@given(value=st.one_of(NUMBERLIKE, TEXT, st.floats(allow_nan=False), st.integers(), st.booleans()))
def test_a_stored_recipe_is_read_back_as_it_was_by_any_program(value: object) -> None:
    stored = stored_recipe({"model": {"options": {"value": value, "deep": [{"value": value}]}}}, "r")
    text = to_yaml(stored)
    for tree in (load_plain(text), yaml.safe_load(text)):
        assert stored_recipe(tree, "r") == stored


@pytest.mark.parametrize("odd", ODD_BREAKS)
def test_line_breaks_of_other_programs_and_control_characters_are_kept(odd: str) -> None:
    values = [odd, f"a{odd}b", f" {odd}", f"a{odd}", f"a\n{odd}: b", f"{'word ' * 40}{odd}"]
    for value in (*values, {each: each for each in values}):
        stored = stored_recipe({"model": {"options": {"value": value}}}, "r")
        assert stored.model.options == {"value": value}
        for text in (to_yaml(stored), yaml_line({"model": {"options": {"value": value}}})):
            assert not {"\x85", "\u2028", "\u2029"} & {*text}, "these break lines in YAML 1.1, and not in 1.2"
            assert load_plain(text)["model"]["options"] == yaml.safe_load(text)["model"]["options"] == {"value": value}
        if isinstance(value, str):
            assert stored_recipe({}, "r", [f"model.options.value={yaml_line(value)}"]).model.options["value"] == value


@pytest.mark.parametrize("written", ["on", "yes", "True", "true"])
def test_switches_may_be_written_in_all_ways(tmp_path: Path, written: str) -> None:
    read = recipe(tmp_path, f"model: {{compile: {written}, compile_mode: max-autotune, options: {{a: {written}}}}}")
    assert read.model.compile is True
    assert read.model.options == {"a": True}
    assert recipe(tmp_path, "train: {ema: 0.9}", "train.ema=no").train.ema is None


def test_options_are_numbers_where_every_program_agrees(tmp_path: Path) -> None:
    options = "{a: 1e3, b: !!float 1e-3, c: '010', d: 0x1F, e: 1_000, f: 2001-01-01, g: =, h: {1: .inf, 01: !!str 5}}"
    read = recipe(tmp_path, f"model: {{options: {options}}}").model.options
    assert read.pop("h") == {1: float("inf"), "01": "5"}
    assert read == {"a": 1e3, "b": 1e-3, "c": "010", "d": 31, "e": 1000, "f": "2001-01-01", "g": "="}
    for doubtful in ("010", "12:30", "1:30.5", ".nan", "1e400"):
        with pytest.raises(RecipeError, match=re.escape(doubtful)):
            recipe(tmp_path, f"model: {{options: {{a: {doubtful}}}}}")


def test_merge_keys_lay_mappings_under_the_keys_that_are_written(tmp_path: Path) -> None:
    one = "checkpoint: &one {keep: 3, every: 2 steps}\n"
    read = recipe(tmp_path, f"{one}train: {{duration: 5 steps}}\nmodel: {{options: {{<<: *one, keep: 4}}}}")
    assert read.model.options == {"keep": 4, "every": "2 steps"}
    several = "model:\n  options:\n    a: &a {x: 1}\n    b: &b {<<: *a, x: 2, y: 3}\n    c: {<<: [*a, *b], z: 4}"
    assert recipe(tmp_path, several).model.options["c"] == {"x": 1, "y": 3, "z": 4}
    for wrong in ("<<: 3", "<<: [1]", "<<: {a: 1}\n    <<: {b: 2}"):
        with pytest.raises(RecipeError, match="<<"):
            recipe(tmp_path, f"model:\n  options:\n    {wrong}")


def _billion_laughs(levels: int) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels)]
    return "model:\n  options:\n" + "".join(f"    {line}\n" for line in lines)


HOSTILE = {
    "100,000 values": _billion_laughs(9),
    "50 levels": "model:\n  options:\n    a0: &a0 [x]\n"
    + "".join(f"    a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 900)),
    "50 deep": f"model: {{options: {{a: {'[' * 5000}{']' * 5000}}}}}",
    "a list or mapping as a key": "? [1, 2]\n: 3",
    "contains itself": "model: {options: &o {a: *o}}",
    "5,000 digits": f"seed: {'9' * 5000}",
    "characters": "#" * 2_000_000,
    "!!python/name:os.system": "seed: !!python/name:os.system ''",
    "!!set": "seed: !!set {a, b}",
    "position": "seed: \0",
    "line 3": "batch:\n\tglobal_size: 3",
    "another document": "seed: 1\n---\nseed: 2",
    "undefined alias": "seed: *nothing",
}


@pytest.mark.parametrize("message", HOSTILE)
def test_hostile_yaml_is_refused_at_once_in_a_short_sentence(message: str, tmp_path: Path) -> None:
    began = time.process_time()
    with pytest.raises(RecipeError) as refusal:
        recipe(tmp_path, HOSTILE[message])
    assert time.process_time() - began < 15  # half a second here
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 300 + len(str(tmp_path))


def test_a_recipe_is_a_text_file(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes("model: {name: caf\xe9}".encode("latin-1"))
    (tmp_path / "marked.yaml").write_bytes(b"\xef\xbb\xbfdata: {dataset: digits}")
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "folder.yaml").mkdir()
    for name in ("latin.yaml", "pipe.yaml", "folder.yaml"):
        with pytest.raises(RecipeError, match=name):
            load_recipe(tmp_path / name)
    assert load_recipe(tmp_path / "marked.yaml").recipe.data.dataset == "digits"


def test_an_override_is_held_to_the_same_limits(tmp_path: Path) -> None:
    deep = (f"model.options.a={'[' * 5000}", f"model.options{'.a' * 5000}=1")
    for override in (*deep, f"seed={'9' * 5000}", "seed=&a [*a]"):
        with pytest.raises(RecipeError) as refusal:
            recipe(tmp_path, "", override)
        assert len(str(refusal.value)) < 300


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, b"[" * 100_000, b"\xff\xfe{", "", "{"])
def test_what_cannot_be_read_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 — of whichever kind
        load_json(text)


def test_documents_are_read_with_the_options_of_json() -> None:
    assert load_json(b'{"a": [1, NaN]}', parse_constant=str) == {"a": [1, "NaN"]}
