"""The batch law fitted to a table."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import RecipeError
from paceline_advisor.scaling.batches import fit_table

CRITICAL, FEWEST_EPOCHS, SAMPLES = 4000.0, 3.0, 50_000
BATCHES = (256, 512, 1024, 2048, 4096, 8192)


def table(folder: Path, unit: str, header: str = "batch") -> Path:
    epochs = {batch: FEWEST_EPOCHS * (1 + batch / CRITICAL) for batch in BATCHES}
    counts = {
        "epochs": epochs,
        "samples": {batch: SAMPLES * each for batch, each in epochs.items()},
        "steps": {batch: SAMPLES * each / batch for batch, each in epochs.items()},
    }
    path = folder / f"{unit}.csv"
    path.write_text(f"note,{header},{unit}\n" + "".join(f"x,{b},{c}\n" for b, c in counts[unit].items()))
    return path


@pytest.mark.parametrize("unit", ["epochs", "samples", "steps"])
def test_the_critical_batch_is_found_in_every_unit(tmp_path: Path, unit: str) -> None:
    found = fit_table(table(tmp_path, unit), (16_384,))
    assert found.law.critical_batch.middle == pytest.approx(CRITICAL, rel=1e-3)
    epochs = FEWEST_EPOCHS * (1 + 16_384 / CRITICAL)
    expected = {"epochs": epochs, "samples": SAMPLES * epochs, "steps": SAMPLES * epochs / 16_384}[unit]
    document = found.to_json()
    assert document["predicted"] == [{"batch": 16_384, unit: pytest.approx(expected, rel=1e-3)}]
    assert [row["predicted"] for row in document["rows"]] == pytest.approx([row["given"] for row in document["rows"]])


def test_the_interval_and_batches_outside_of_the_table_are_shown(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("Batch_Size,Epochs\n256,3.1\n512,3.3\n1024,3.9\n2048,4.4\n4096,6.2\n")
    shown = "\n".join(map(str, fit_table(path, (1024, 16_384)).__paceline__().blocks))
    assert "Critical batch: " in shown
    assert "95 % interval: " in shown
    assert "note: 16,384 is outside of the table's batches, 256 to 4,096." in shown


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "found the columns none; it needs the columns batch and epochs, steps or samples"),
        ("batch,loss\n1,2\n", "found the columns batch, loss; it needs"),
        ("batch,epochs,steps\n1,2,3\n", "found the columns batch, epochs, steps; it needs .*, one of each"),
        ("batch,epochs\n64,many\n", "row 2: epochs is 'many', but it must be a number above 0"),
        ("batch,epochs\n64\n", "row 2: epochs is '', but it must be"),
        ("batch,epochs\n64,nan\n", "row 2: epochs is 'nan'"),
        ("batch,epochs\n-1,3\n", "row 2: batch is '-1'"),
        ("batch,epochs\n64,3\n128,4\n", "the target was reached with 2 batch sizes, and a knee needs 3 or more"),
        ('batch,epochs\n64,"3\n', "cannot be read as CSV"),
    ],
)
def test_a_bad_table_is_refused_in_a_sentence(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "bad.csv").write_text(text)
    with pytest.raises(RecipeError, match=message):
        fit_table(tmp_path / "bad.csv", ())


def test_blank_lines_above_the_header_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "blank.csv").write_text("\n,\nbatch,epochs\n256,3.1\n512,3.3\n1024,3.9\n2048,4.4\n4096,-1\n")
    with pytest.raises(RecipeError, match="row 8: epochs is '-1'"):
        fit_table(tmp_path / "blank.csv", ())


def test_what_is_no_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="found no such file; give a CSV file"):
        fit_table(tmp_path / "none.csv", ())
    (tmp_path / "picture.csv").write_bytes(b"\xff\xfe\x00batch")
    with pytest.raises(RecipeError, match="cannot be read as CSV"):
        fit_table(tmp_path / "picture.csv", ())
    (tmp_path / "long.csv").write_text("batch,epochs\n" + "64,3\n" * 300_000)
    with pytest.raises(RecipeError, match="larger than 1 MiB"):
        fit_table(tmp_path / "long.csv", ())
