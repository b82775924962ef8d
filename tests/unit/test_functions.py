"""Functions of the commands' names: arguments, refusals and results are the command's."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from annotated_types import Ge
from PIL import Image

import paceline
from paceline.cli.main import run
from paceline.command import Log, Output, Overrides, Shape, command
from paceline.errors import DataError, PacelineError, RecipeError
from paceline.functions import CommandResult, function_of
from paceline.pages.page import Page, Table
from paceline.pages.shown import Document, Shown

OVERRIDES = {"train.duration": "12 steps", "model.options": {"width": 4}}


@command("add-up")
@dataclass(frozen=True, kw_only=True)
class AddUp:
    """Add numbers, or with --scale multiples of them.

    Exits with 1 if there is none.

    Examples:
      paceline add-up x --sizes 1,2
    """

    name: str
    overrides: Overrides = ()
    sizes: Annotated[tuple[int, ...], Ge(1), "Numbers to add."] = ()
    scale: Annotated[float | None, "Multiplies them."] = None
    each: Annotated[bool, Shape(name="--every", only="scale"), "Scale each; needs --scale."] = False
    how: Annotated[Literal["sum", "mean"], "What to compute."] = "sum"
    output: Output = None

    def __post_init__(self) -> None:
        if self.name == "wrong":
            raise RecipeError("a name is wrong; choose another with --how, or leave out --scale.")

    def run(self, log: Log) -> Document:
        log("adding")
        document = {"total": sum(self.sizes), "given": self.overrides, "at": Path("here"), "scale": self.scale}
        table = Table(columns=("total",), rows=[(sum(self.sizes),)])
        return Document(document=document, shown=Shown(title="Sum", blocks=[table], ok=bool(self.sizes) or "no number"))


add_up = function_of(AddUp)


def test_a_function_has_the_commands_arguments() -> None:
    signature = inspect.signature(add_up)
    assert [*signature.parameters] == ["name", "overrides", "sizes", "scale", "every", "how", "output"]
    kinds = {name: each.kind.name for name, each in signature.parameters.items()}
    assert kinds["overrides"] == "POSITIONAL_OR_KEYWORD"
    assert kinds["sizes"] == "KEYWORD_ONLY"
    assert signature.parameters["how"].annotation == Literal["sum", "mean"]
    assert signature.parameters["output"].annotation == str | Path | None
    assert add_up.__name__ == "add_up"
    text = str(add_up.__doc__)
    assert text.startswith("Add numbers, or with scale multiples of them.\n\n``passed`` is false if there is none.\n")
    assert "    every: Scale each; needs scale.\n" in text
    assert "paceline add-up" not in text


def test_what_is_given_means_the_same_as_on_the_command_line(tmp_path: Path) -> None:
    found = add_up("x", {"data.path": Path("a b"), "seed": None}, sizes=[1, 2], scale=1e-5, output=tmp_path / "out")
    assert found.to_json() == {"total": 3, "given": ["data.path=a b", "seed=null"], "at": "here", "scale": 1e-5}
    assert (found.total, found.passed, found.at) == (3, True, "here")
    assert repr(found) == "add_up(total=3, at='here', scale=1e-05)"
    assert json.loads((tmp_path / "out" / "add-up.json").read_text()) == found.to_json()
    assert "<iframe" in str(found._repr_html_())
    assert {"total", "given", "to_json"} <= set(dir(found))
    none = add_up("x", ["a=1"])
    assert (none.given, none.passed, none.problem) == (["a=1"], False, "no number")
    with pytest.raises(AttributeError, match=r"no 'totl'. Did you mean 'total'\?"):
        none.totl  # noqa: B018  # the access is the test


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sizes": (0,)}, "Invalid value for 'sizes': 0 is not in the range x>=1."),
        ({"how": "most"}, "Invalid value for 'how': 'most' is not one of 'sum', 'mean'."),
        ({"every": True}, "every=True has no effect here: it is used only with scale. Leave it out."),
        ({"every": "yes"}, "every='yes' is not True or False."),
        ({"name": "wrong"}, "a name is wrong; choose another with how, or leave out scale."),
    ],
)
def test_mistakes_are_refused_in_terms_of_arguments(options: dict[str, Any], said: str) -> None:
    with pytest.raises(PacelineError) as caught:
        add_up(**{"name": "x"} | options)
    assert str(caught.value) == said


def test_an_argument_that_is_missing_or_unknown() -> None:
    with pytest.raises(TypeError, match=r"add_up\(\): missing a required argument: 'name'"):
        add_up()
    with pytest.raises(TypeError, match=r"add_up\(\): got an unexpected keyword argument 'size'"):
        add_up("x", size=1)


# ------------------------------------------------------------------------------------------- of a run


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> paceline.TrainResult:
    folder = tmp_path_factory.mktemp("runs")
    return paceline.train("digits", overrides=OVERRIDES, run_dir=folder / "a", quiet=True)


@pytest.fixture
def picture() -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).integers(0, 256, (8, 8), dtype=np.uint8)


def as_json(words: list[str], capsys: pytest.CaptureFixture[str]) -> Any:
    capsys.readouterr()
    assert run([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_functions_return_what_the_commands_print(
    result: paceline.TrainResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = str(result.run_dir)
    scored = paceline.evaluate(target, best=True)
    assert scored.to_json() == as_json(["evaluate", target, "--best"], capsys)
    assert scored.metrics["loss"] == scored.loss == result.evaluate().metrics["loss"]
    assert paceline.audit(target).to_json() == as_json(["audit", target], capsys)
    written = paceline.export(result.run_dir, format="safetensors", output=tmp_path / "a.safetensors")
    assert (written.format, (tmp_path / "a.safetensors").stat().st_size) == ("safetensors", written.bytes)
    assert paceline.report(target, output=tmp_path / "a.html") == tmp_path / "a.html"
    assert paceline.report([target], timing=True).steps > 0
    assert paceline.estimate("digits", OVERRIDES, device="cpu").to_json()["recipe"]
    assert paceline.check_data("digits", limit=4).to_json()


def test_inputs_in_memory_are_predicted_as_files(
    result: paceline.TrainResult, picture: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.fromarray(picture).save(tmp_path / "x.png")
    file = str(tmp_path / "x.png")
    rows = paceline.predict(result.run_dir, [picture, file, Image.fromarray(picture)], best=True, batch_size=1)
    assert isinstance(rows, list)
    assert [row["path"] for row in rows] == ["inputs[0]", file, "inputs[2]"]
    assert rows[1] == as_json(["predict", str(result.run_dir), file, "--best", "--batch-size", "1"], capsys)[0]
    assert rows[0] | {"path": file} == rows[2] | {"path": file} == rows[1]
    assert result.predict([picture, file, Image.fromarray(picture)], batch_size=1) == rows
    stored = paceline.predict(result.run_dir, tmp_path, output=tmp_path / "rows.jsonl")
    assert isinstance(stored, CommandResult)
    assert stored.images == len((tmp_path / "rows.jsonl").read_text().splitlines()) == 1
    for wrong, said in {
        "float": (picture / 255, r"inputs\[0\] is float64 \[8, 8\]; give a path"),
        "file": (tmp_path / "y.png", "does not exist; give image files"),
    }.values():
        with pytest.raises(DataError, match=said):
            paceline.predict(result.run_dir, wrong)


def test_several_processes_score_as_one(result: paceline.TrainResult) -> None:
    one, two = (paceline.evaluate(result.run_dir, processes=count) for count in (1, 2))
    assert one.to_json() == two.to_json()
    with pytest.raises(PacelineError, match="nowhere"):
        paceline.evaluate(result.run_dir / "nowhere", processes=2)


def test_resume_goes_on_as_train_does(result: paceline.TrainResult, tmp_path: Path) -> None:
    first = paceline.train(
        "digits", overrides=OVERRIDES | {"train.until": "5 steps"}, run_dir=tmp_path / "b", quiet=True
    )
    assert first.status == "stopped"
    resumed = paceline.resume(tmp_path / "b")
    assert isinstance(resumed, paceline.TrainResult)
    assert resumed.summary.weights_sha256 == result.summary.weights_sha256


# ------------------------------------------------------------------------------------------- results


def test_a_result_shows_its_mistakes(result: paceline.TrainResult, tmp_path: Path) -> None:
    kept, every = result.mistakes(), result.mistakes(every=True)
    assert 0 < len(kept) <= len(every)
    assert {*every[0]} == {"sample", "name", "label", "predicted", "probability"}
    assert [each["probability"] for each in every] == sorted((each["probability"] for each in every), reverse=True)
    matrix = result.confusion()
    assert [*matrix.classes] == [str(digit) for digit in range(10)]
    right = sum(matrix.counts[at][at] for at in range(10))
    assert sum(map(sum, matrix.counts)) - right >= len(kept)
    assert matrix.to_json()["counts"] == matrix.counts
    assert "<table>" in matrix._repr_html_()
    page = kept._repr_html_()
    assert page.count("<img ") == len(kept)
    assert f"<figcaption>{kept[0]['label']} → {kept[0]['predicted']} {kept[0]['probability']:.0%}<" in page
    assert f"<caption>{len(every)} mistakes" in every._repr_html_()


def test_a_result_shows_its_curves(result: paceline.TrainResult, tmp_path: Path) -> None:
    page = result.plot()
    assert isinstance(page, Page)
    assert "<iframe" in page._repr_html_()
    text = page.save(tmp_path / "curves.html").read_text()
    assert "held-out, model" in text
    assert "training" in text
    assert repr(result).startswith("TrainResult(completed, step 12, loss ")
    assert repr(result).endswith(f" %, {result.run_dir})")


def test_a_result_has_its_network(result: paceline.TrainResult) -> None:
    import torch

    assert not result.model.training
    assert result.model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    assert result.model is result.model


def test_a_result_of_a_task_that_cannot_be_imported(tmp_path: Path, picture: Any) -> None:
    class Halved(paceline.ImageClassification):
        def loss(self, model: Any, batch: Any) -> Any:
            return super().loss(model, batch) / 2

    result = paceline.train("digits", overrides=OVERRIDES, run_dir=tmp_path / "run", task=Halved, quiet=True)
    assert len(result.predict(picture)) == 1
    assert result.evaluate().samples == sum(map(sum, result.confusion().counts))
    assert result.model


def test_what_a_result_cannot_answer_is_one_sentence(tmp_path: Path) -> None:
    alone: Mapping[str, Any] = {"data.validation_fraction": 0, "train.duration": "1 step"}
    result = paceline.train("digits", overrides=OVERRIDES | alone, run_dir=tmp_path / "run", quiet=True)
    for ask in (result.mistakes, result.confusion):
        with pytest.raises(DataError, match=r"has no mistakes or confusion matrix: no samples are held out; set "):
            ask()
    assert result.plot()._repr_html_()
