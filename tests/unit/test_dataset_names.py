"""Names of data sets, and the keys that each has, known without torch."""

from __future__ import annotations

import subprocess
import sys

from paceline.dataset_registry import DatasetNames, find_dataset


def test_keys_and_names() -> None:
    assert list(DatasetNames("split_column")) == ["chat", "csv", "mixture", "parquet", "text_table"]
    assert "torchvision:EMNIST" in DatasetNames("options")
    assert "digits" not in DatasetNames("path")
    assert find_dataset("nobody") is None
    assert find_dataset("docs") is None
    assert find_dataset("docs", "texts") != find_dataset("docs", "labelled texts")
    assert {"digits", "docs", "coco", "masks", "criteo"} <= set(DatasetNames())


def test_checking_a_recipe_loads_no_torch() -> None:
    code = (
        "import sys; from paceline.recipe.load import load_recipe; "
        "load_recipe('image_folder', ['data.dataset=csv', 'data.path=x', 'data.label_column=y']); "
        "assert 'paceline.data.image.sets.csv' in sys.modules; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
