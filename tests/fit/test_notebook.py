"""`paceline.fit` in a notebook: a bar below the cell, and processes that get what a cell defines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

CELLS = (
    """
import torch, torch.nn.functional as F
from torch import nn
import paceline

x = torch.randn(200, 5)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 1)

    def forward(self, x):
        return self.layer(x).squeeze(1)

class Notes:
    def on_evaluation(self, step, results):
        print("evaluated after step", step)

data = {"train_set": (x, x.sum(dim=1)), "held_out": (x, x.sum(dim=1)), "loss": F.mse_loss, "batch_size": 50}
paceline.fit(Net, **data, epochs=2, run_dir="runs/one")
""",
    'paceline.fit(Net, **data, epochs=1, run_dir="runs/two", processes=2, callbacks=[Notes()])',
    "import tqdm.auto",
)


def outputs(cell: Any) -> tuple[str, list[str]]:
    text = "".join(each.get("text", "") for each in cell.outputs)
    pages = [each["data"]["text/html"] for each in cell.outputs if "text/html" in each.get("data", {})]
    return text, pages


def test_a_cell_shows_a_bar_and_carries_what_it_defines(tmp_path: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(each) for each in CELLS])
    client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    first, second, _ = map(outputs, notebook.cells)
    assert "IProgress" not in str(notebook.cells)  # the warning of tqdm without ipywidgets
    assert any('<progress value="8" max="8">' in page for page in first[1])
    assert "evaluated after step 4" in second[0]
    assert any('<progress value="4" max="4">' in page for page in second[1])
    assert "<progress" not in second[0]
    assert (tmp_path / "runs" / "two" / "report.html").is_file()
